"""How much a layer's logits matter to the result: each layer cut down alone, and looked at.

    sensitivity[l] = |h - h~_l|^2  /  lost[l]

``h~_l`` are the last hidden states where only layer ``l`` is a head-SVD of a third of its rank, and
``lost[l]`` the squared logits that this drops. Layers differ by more than ten times (measured on
three models, ``benchmarks/quality/budget.json``).

Axes: l layer.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from collabify.calibration import Whitening, evaluate, on_device
from collabify.decompose import fit_head_svd
from collabify.drift import base_model, shadow
from collabify.models import AttentionSite, find_attention

BATCHES = 2
SMALLEST = 1e-4  # of the largest: no layer is taken to matter less


def sensitivities(
    model: nn.Module,
    sites: Sequence[AttentionSite],
    spaces: Mapping[int, Whitening],
    batches: Sequence[Mapping[str, Any]],
    progress: Callable[[int], None] | None = None,
) -> list[float]:
    """The layers' sensitivities, the largest being one.

    Parameters
    ----------
    model
        The original, which is left alone.
    sites
        Its layers.
    spaces
        The space of each layer's inputs, by index.
    batches
        Keyword arguments of the model; two of them are read.
    progress
        Called with the number of layers done.
    """
    probes = list(on_device(batches[:: max(1, len(batches) // BATCHES)][:BATCHES], model))
    reference = _states(model, probes)
    found = []
    for done, site in enumerate(sites, start=1):
        cut = shadow(model)
        lost = _cut(find_attention(cut)[site.index], spaces[site.index])
        moved = _states(cut, probes)
        distance = sum(
            float((h.double() - g.double()).square().sum())
            for h, g in zip(reference, moved, strict=True)
        )
        found.append(distance / lost if lost > 0 else 0.0)
        if progress is not None:
            progress(done)
    largest = max(found)
    return [max(value / largest, SMALLEST) if largest > 0 else 1.0 for value in found]


def _cut(site: AttentionSite, space: Whitening) -> float:
    """Install a head-SVD of a third of the rank; the squared logits that it drops."""
    forms = site.read(device=space.mean.device)
    whitened = space.to(forms.w_q.dtype).whiten(forms)
    found = fit_head_svd(whitened, max(1, site.full_rank // 3))
    factors = found.factors.transformed(space.inverse)
    content = forms.content + forms.key_term(space.mean) - factors.key_term(space.mean)
    site.install(factors, content)
    return found.relative_error**2 * float(whitened.squared_norms().sum()) * whitened.scale**2


def _states(model: nn.Module, batches: Sequence[Mapping[str, Any]]) -> list[Tensor]:
    """The last hidden states of real tokens, a batch at a time."""
    states = []
    with torch.inference_mode():
        for batch in batches:
            last = evaluate(base_model(model), batch).last_hidden_state
            mask = batch.get("attention_mask")
            states.append(last.flatten(0, 1) if mask is None else last[mask.bool()])
    return states
