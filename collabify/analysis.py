"""How much a model's heads repeat one another: every layer's spectra, and a rank to begin with."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from collabify.errors import OptionError
from collabify.models import find_attention
from collabify.planning import check_finite, select
from collabify.spaces import Progress, calibrate, load, read
from collabify.spectra import AnalysisReport, LayerSpectra, directions
from collabify.spectrum import layer_spectra

SUGGESTION_ENERGY = 0.95  # relative error of the head-SVD, the floor of every method: 0.22


def analyze(
    model: nn.Module,
    *,
    layers: Sequence[int] | None = None,
    levels: Sequence[float] = (0.9, 0.95, 0.99),
    calibration: object = "synthetic",
    samples: int = 256,
    max_length: int = 128,
    processor: object = None,
    seed: int = 0,
    device: torch.device | str | None = None,
    progress: Progress | None = None,
) -> AnalysisReport:
    """Measure how much a model's heads repeat one another.

    Parameters
    ----------
    model
        A transformers model of a supported architecture, not converted.
    layers
        Positions of the layers to look at, from 0; by default all.
    levels
        Shares of energy at which directions are counted, each in (0, 1].
    calibration, samples, max_length, processor, seed
        As for :func:`collabify.convert`; without ``none``, the spectra in the calibrated space
        stand beside those of the weights, and the suggestion follows them.
    device
        Where to compute; by default where the weights are.
    progress
        As for :func:`collabify.convert`.

    Raises
    ------
    CollabifyError
        Of the kind that says what is wrong.
    """
    for level in levels:
        if not 0 < level <= 1:
            raise OptionError(
                f"energy={level} must be above 0 and at most 1: it is a share. Write 0.95 for 95 %."
            )
    sites = select(find_attention(model), layers)
    check_finite(model)
    data = load(model, calibration, samples, max_length, seed, processor)
    spaces = calibrate(model, sites, data, progress)
    raw: list[LayerSpectra] = []
    calibrated: list[LayerSpectra] = []
    for done, site in enumerate(sites, start=1):
        named: dict[str, Any] = {"index": site.index, "name": site.name}
        raw.append(layer_spectra(read(site, device), **named))
        if site.index in spaces.inputs:
            calibrated.append(layer_spectra(spaces.whitened(site, device), **named))
        if progress is not None:
            progress("Analyzing", done, len(sites), site.name)
    full_rank = max(site.full_rank for site in sites)
    return AnalysisReport(
        tuple(raw),
        tuple(levels),
        full_rank,
        _suggest(calibrated or raw, full_rank),
        SUGGESTION_ENERGY,
        calibrated=tuple(calibrated),
        calibration=None if data is None else data.description,
    )


def _suggest(spectra: Sequence[LayerSpectra], full_rank: int) -> int:
    """The rank at which pooled triplets keep ``SUGGESTION_ENERGY``, on average over layers."""
    curves = [layer.triplets.energy for layer in spectra]
    shortest = min(len(curve) for curve in curves)
    mean = [sum(curve[n] for curve in curves) / len(curves) for n in range(shortest)]
    needed = directions(mean, SUGGESTION_ENERGY)
    return min(-(-needed // 8) * 8, full_rank)
