"""One layer at a time: its heads, and its values, in shared form.

site -> forms -> whitened -> factors -> un-whitened, with what the means add to the content bias
"""

import time
from dataclasses import asdict, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from collabify.config import LayerConfig
from collabify.decompose import (
    Decomposition,
    Factors,
    ValueFactors,
    fit_block_term,
    fit_cp,
    fit_head_svd,
    fit_own_heads,
    fit_tucker,
    fit_values,
)
from collabify.decompose.mixed_values import fit_mixed_values
from collabify.forms import HeadForms
from collabify.models import AttentionSite
from collabify.planning import Request
from collabify.results import LayerReport
from collabify.spaces import Spaces, place, read
from collabify.talking import drawn


def planned(site: AttentionSite, layer: LayerConfig) -> LayerReport:
    """What is known of a layer before anything is fitted."""
    named = {name: value for name, value in asdict(layer).items() if name not in ("form", "index")}
    return LayerReport(site.index, site.name, **named)


def share(
    site: AttentionSite,
    layer: LayerConfig,
    spaces: Spaces,
    request: Request,
    seed: int,
    device: torch.device | str | None,
) -> tuple[Factors, Float[Tensor, "h j"], LayerReport]:
    """One layer's heads in shared form, with the content bias that goes with it."""
    start = time.perf_counter()
    forms, whitened = read(site, device), spaces.whitened(site, device)
    energy = float(whitened.squared_norms().sum() * whitened.scale**2)
    space = spaces.inputs.get(site.index)
    if request.is_exact(site, layer.rank):
        # Nothing is lost in any space, and less is rounded in this one.
        space, whitened = None, forms
    found = _decompose(whitened, layer, request, seed)
    factors, content = found.factors, forms.content
    if space is not None:
        factors = factors.transformed(space.inverse.to(content.dtype).to(content.device))
        mean = space.mean.to(content.dtype).to(content.device)
        content = content + forms.key_term(mean) - factors.key_term(mean)
    report = replace(
        planned(site, layer),
        energy=energy,
        relative_error=factors.relative_error(forms),
        calibrated_error=None if space is None else found.relative_error,
        sweeps=found.sweeps,
        converged=found.converged,
        seconds=time.perf_counter() - start,
    )
    return drawn(factors, layer, seed), content, report


def share_values(
    site: AttentionSite,
    layer: LayerConfig,
    spaces: Spaces,
    request: Request,
    seed: int,
    device: torch.device | str | None,
    report: LayerReport,
) -> tuple[ValueFactors | None, LayerReport]:
    """One layer's values and outputs in fewer channels, or ``None`` where they stay."""
    if layer.values is None:
        return None, report
    start = time.perf_counter()
    forms = site.read_values(device=place(site, device))
    has_bias = site.value.bias is not None
    if layer.value_heads is None:
        seen = spaces.contexts.get(site.index)
        factors, error = fit_values(
            forms, seen, layer.values, has_bias=has_bias, columns=site.value_width(layer)
        )
    else:
        factors, error = fit_mixed_values(
            forms,
            spaces.attended.get(site.index),
            layer.value_heads,
            layer.values // layer.value_heads,
            has_bias=has_bias,
            iterations=request.iterations,
            tolerance=request.tolerance,
        )
    seconds = (report.seconds or 0.0) + time.perf_counter() - start
    return drawn(factors, layer, seed), replace(report, value_error=error, seconds=seconds)


def _decompose(forms: HeadForms, layer: LayerConfig, request: Request, seed: int) -> Decomposition:
    """One layer's heads by the solver asked for."""
    stop: dict[str, Any] = {"iterations": request.iterations, "tolerance": request.tolerance}
    if request.solver == "tensorly":
        from collabify.decompose.oracle import fit_cp_tensorly, fit_tucker_tensorly

        if request.method == "cp":
            return fit_cp_tensorly(forms, layer.rank, seed=seed, **stop)
        return fit_tucker_tensorly(forms, layer.rank, head_rank=layer.head_rank, seed=seed, **stop)
    if request.method == "cp":
        return fit_cp(forms, layer.rank, channels=layer.channels, **stop)
    if request.method == "talking-heads":
        return _talking_heads(forms, layer, stop)
    if request.method == "tucker":
        return fit_tucker(forms, layer.rank, head_rank=layer.head_rank, **stop)
    return fit_head_svd(forms, layer.rank, channels=layer.channels)


def _talking_heads(forms: HeadForms, layer: LayerConfig, stop: dict[str, Any]) -> Decomposition:
    """Base heads; where there is no P_l, each head's own strongest triplets."""
    if layer.base_heads is not None:
        width = layer.rank // layer.base_heads
        return fit_block_term(forms, layer.base_heads, width, **stop)
    return fit_own_heads(forms, layer.rank // forms.num_heads)
