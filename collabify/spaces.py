"""Where a model's layers are looked at: data, and the spaces of what flows through each layer.

data -> one pass -> inputs of every layer, contexts of its heads; one more -> what they attend to
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import nn

from collabify.calibration import Moments, Whitening, collect_attended, collect_moments
from collabify.data import CalibrationData, load_calibration
from collabify.drift import base_model, eager
from collabify.forms import HeadForms
from collabify.models import AttentionSite

Progress = Callable[[str, int, int, str], None]


@dataclass(frozen=True)
class Spaces:
    """What calibration saw of each layer, by index; empty without data.

    Parameters
    ----------
    inputs
        The space of the layer's inputs.
    contexts
        Moments of what its heads hand on, all heads one after the other.
    attended
        Moments of what its heads attend to.
    """

    inputs: Mapping[int, Whitening] = field(default_factory=dict)
    contexts: Mapping[int, Moments] = field(default_factory=dict)
    attended: Mapping[int, Moments] = field(default_factory=dict)

    def whitened(self, site: AttentionSite, device: torch.device | str | None = None) -> HeadForms:
        """A layer's heads in the space of its inputs, or as they are."""
        forms = read(site, device)
        if site.index not in self.inputs:
            return forms
        return self.inputs[site.index].to(forms.w_q.dtype).to(forms.w_q.device).whiten(forms)


def load(
    model: nn.Module,
    calibration: object,
    samples: int,
    max_length: int,
    seed: int,
    processor: object,
    *,
    batch_size: int = 16,
) -> CalibrationData | None:
    """Calibration data for a model; ``None`` for ``none``."""
    if calibration is None or calibration == "none":
        return None
    return load_calibration(
        calibration,
        cast(Any, model).config,
        samples=samples,
        max_length=max_length,
        batch_size=batch_size,
        seed=seed,
        processor=processor,
    )


def calibrate(
    model: nn.Module,
    sites: Sequence[AttentionSite],
    data: CalibrationData | None,
    progress: Progress | None,
    *,
    contexts: bool = False,
    attended: bool = False,
) -> Spaces:
    """What flows through some layers, in one pass over the data, and one more for ``attended``.

    Parameters
    ----------
    model, sites
        The whole model and some of its layers.
    data
        Calibration data; ``None``: nothing is looked at.
    progress
        As for :func:`collabify.convert`.
    contexts, attended
        Whether those are wanted too.
    """
    if data is None:
        return Spaces()
    total = len(data.batches)
    shown = None if progress is None else lambda n: progress("Calibrating", n, total, "")
    watched = {site.name: site.module for site in sites}
    if contexts:
        watched |= {site.output_name: cast(nn.Module, site.output) for site in sites}
    moments = collect_moments(base_model(model), watched, data.batches, progress=shown)
    seen: dict[str, Moments] = {}
    if attended:
        with eager(model):
            modules = {site.name: site.module for site in sites}
            seen = collect_attended(base_model(model), modules, data.batches, progress=shown)
    return Spaces(
        {site.index: Whitening.of(moments[site.name]) for site in sites},
        {site.index: moments[site.output_name] for site in sites if contexts},
        {site.index: seen[site.name] for site in sites if attended},
    )


def read(site: AttentionSite, device: torch.device | str | None) -> HeadForms:
    """A layer's heads in float64, for the reason given in :mod:`collabify.decompose.cp`."""
    return site.read(device=place(site, device))


def place(site: AttentionSite, device: torch.device | str | None) -> torch.device:
    """Where to decompose a layer: mps has no float64, and the CPU does it."""
    where = torch.device(device or site.query.weight.device)
    return torch.device("cpu") if where.type == "mps" else where
