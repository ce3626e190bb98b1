"""The whole method: find the heads, share what they have in common, put them back.

    model -> sites -> forms -> factors -> model

:func:`analyze` says how much there is to share; :func:`convert` shares it, in place.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any, Literal, cast, get_args

import torch
from torch import nn

from collabify.config import ConversionConfig, Form, LayerConfig
from collabify.decompose import Decomposition, fit_cp, fit_head_svd, fit_tucker
from collabify.errors import (
    AlreadyConvertedError,
    LayerError,
    NonFiniteError,
    OptionError,
    RankError,
)
from collabify.forms import HeadForms
from collabify.models import AttentionSite, find_attention
from collabify.results import (
    AnalysisReport,
    ConversionReport,
    LayerReport,
    LayerSpectra,
    ParameterCount,
    directions,
)
from collabify.spectrum import layer_spectra

Method = Literal["cp", "tucker", "head-svd"]
Solver = Literal["factored", "tensorly"]
FORM_OF: dict[str, Form] = {"cp": "collaborative", "tucker": "tucker", "head-svd": "collaborative"}
SUGGESTION_ENERGY = (
    0.9  # relative error of the head-SVD, the floor of every method: sqrt(1 - 0.9) = 0.32
)


def convert(
    model: nn.Module,
    *,
    dk: int,
    method: Method = "cp",
    head_rank: int | None = None,
    solver: Solver = "factored",
    iterations: int = 100,
    tolerance: float = 1e-5,
    layers: Sequence[int] | None = None,
    seed: int = 0,
    device: torch.device | str | None = None,
    dry_run: bool = False,
    progress: Callable[[LayerReport], None] | None = None,
) -> ConversionReport:
    """Rewrite a model's attention so that heads share query and key projections, in place.

    Everything is validated and decomposed before the first layer is touched.

    Parameters
    ----------
    model
        A transformers model of a supported architecture, with or without a head.
    dk
        Shared channels of queries and keys, D̃k, between 1 and the number of heads times their
        width; exact at the latter.
    method
        ``cp`` (collaborative attention), ``tucker`` (a core per head) or ``head-svd`` (heads kept
        apart).
    head_rank
        For ``tucker``: cores that the heads mix, between 1 and the number of heads. By default
        every head has its own.
    solver
        ``factored``, or ``tensorly`` for ``parafac`` and ``tucker`` on the dense stack.
    iterations, tolerance
        Stop after so many sweeps, or when one lowers the relative error by less than this share of
        it.
    layers
        Positions of the layers to convert, from 0; by default all.
    seed
        For solvers that start at random (tensorly's ``parafac``).
    device
        Where to decompose; by default where the weights are. In float64, except where the device
        has none (mps).
    dry_run
        Only say what would be done: nothing is decomposed, the model is left alone.
    progress
        Called with every layer's report when its decomposition is done.

    Returns
    -------
    ConversionReport
        Errors, parameters before and after, and what was asked for.

    Raises
    ------
    UnsupportedModelError, AlreadyConvertedError, NonFiniteError, LayerError, RankError, OptionError
        Before the model is touched.

    Examples
    --------
    >>> report = collabify.convert(model, dk=256)  # doctest: +SKIP
    >>> report.query_key.kept  # doctest: +SKIP
    """
    _check_options(method, head_rank, solver, iterations, tolerance)
    sites = _select(find_attention(model), layers)
    plan = _plan(sites, dk, method, head_rank)
    _check_finite(model)

    reports, decompositions = [], []
    for site, layer in zip(sites, plan.layers, strict=True):
        report = LayerReport(site.index, site.name, layer.rank, layer.head_rank)
        if not dry_run:
            start = time.perf_counter()
            forms = site.read(
                dtype=_solver_dtype(device or site.query.weight.device), device=device
            )
            found = _decompose(forms, layer, method, solver, iterations, tolerance, seed)
            decompositions.append((site, found, forms.content))
            report = LayerReport(
                site.index,
                site.name,
                layer.rank,
                layer.head_rank,
                found.relative_error,
                found.sweeps,
                found.converged,
                time.perf_counter() - start,
            )
        reports.append(report)
        if progress is not None:
            progress(report)

    counts = _count(model, sites, plan)
    for site, found, content in decompositions:
        site.install(found.factors, content)
    if not dry_run:
        cast(Any, model).config.quantization_config = plan.to_dict()
    options: dict[str, Any] = {
        "dk": dk,
        "head_rank": head_rank,
        "iterations": iterations,
        "tolerance": tolerance,
    }
    options |= {"layers": [site.index for site in sites], "seed": seed}
    return ConversionReport(method, solver, tuple(reports), *counts, dry_run, options)


def analyze(
    model: nn.Module,
    *,
    layers: Sequence[int] | None = None,
    levels: Sequence[float] = (0.9, 0.95, 0.99),
    device: torch.device | str | None = None,
    progress: Callable[[LayerSpectra], None] | None = None,
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
    device
        Where to compute; by default where the weights are.
    progress
        Called with every layer's spectra.

    Raises
    ------
    UnsupportedModelError, AlreadyConvertedError, NonFiniteError, LayerError, OptionError
    """
    for level in levels:
        if not 0 < level <= 1:
            raise OptionError(
                f"energy={level} must be above 0 and at most 1: it is a share. Write 0.95 for 95 %."
            )
    sites = _select(find_attention(model), layers)
    _check_finite(model)
    spectra = []
    for site in sites:
        forms = site.read(dtype=_solver_dtype(device or site.query.weight.device), device=device)
        spectra.append(layer_spectra(forms, index=site.index, name=site.name))
        if progress is not None:
            progress(spectra[-1])
    full_rank = max(site.full_rank for site in sites)
    suggestion = _suggest(spectra, full_rank)
    return AnalysisReport(tuple(spectra), tuple(levels), full_rank, suggestion, SUGGESTION_ENERGY)


def _decompose(
    forms: HeadForms,
    layer: LayerConfig,
    method: str,
    solver: str,
    iterations: int,
    tolerance: float,
    seed: int,
) -> Decomposition:
    """One layer's heads in shared form."""
    stop: dict[str, Any] = {"iterations": iterations, "tolerance": tolerance}
    if solver == "tensorly":
        from collabify.decompose.oracle import fit_cp_tensorly, fit_tucker_tensorly

        if method == "cp":
            return fit_cp_tensorly(forms, layer.rank, seed=seed, **stop)
        return fit_tucker_tensorly(forms, layer.rank, head_rank=layer.head_rank, seed=seed, **stop)
    if method == "cp":
        return fit_cp(forms, layer.rank, **stop)
    if method == "tucker":
        return fit_tucker(forms, layer.rank, head_rank=layer.head_rank, **stop)
    return fit_head_svd(forms, layer.rank)


def _plan(
    sites: Sequence[AttentionSite], dk: int, method: str, head_rank: int | None
) -> ConversionConfig:
    """Every layer's form and sizes, checked against its heads."""
    plan = []
    for site in sites:
        if site.converted:
            raise AlreadyConvertedError(
                f"{site.name!r} was converted before. Take the original model instead."
            )
        heads, width = site.num_heads, site.full_rank
        largest = min(width, site.width) if method == "tucker" else width
        if not 1 <= dk <= largest:
            raise RankError(
                f"dk={dk} must be between 1 and {largest} for {site.name!r} "
                f"({heads} heads of {site.head_dim}). {'Lower' if dk > largest else 'Raise'} --dk."
            )
        if head_rank is not None and not 1 <= head_rank <= heads:
            raise RankError(
                f"head_rank={head_rank} must be between 1 and {heads}, the heads of {site.name!r}. "
                "Change --head-rank, or leave it out for a core per head."
            )
        plan.append(LayerConfig(site.index, FORM_OF[method], dk, head_rank))
    return ConversionConfig(tuple(plan))


def _select(
    sites: Sequence[AttentionSite], layers: Sequence[int] | None
) -> tuple[AttentionSite, ...]:
    """The layers asked for, in the model's order."""
    if layers is None:
        return tuple(sites)
    for index in layers:
        if not 0 <= index < len(sites):
            raise LayerError(
                f"layer={index} must be between 0 and {len(sites) - 1}: "
                f"the model has {len(sites)} distinct attention layers. Change --layer."
            )
    return tuple(site for site in sites if site.index in set(layers))


def _check_options(
    method: str, head_rank: int | None, solver: str, iterations: int, tolerance: float
) -> None:
    """Refuse what no model could accept."""
    if method not in FORM_OF:
        raise OptionError(
            f"method={method!r} must be one of {', '.join(get_args(Method))}. Change --method."
        )
    if solver not in get_args(Solver):
        raise OptionError(
            f"solver={solver!r} must be one of {', '.join(get_args(Solver))}. Change --solver."
        )
    if head_rank is not None and method != "tucker":
        raise OptionError(
            f"head_rank={head_rank} goes with method='tucker' only, not {method!r}. "
            "Leave out --head-rank or use --method tucker."
        )
    if solver == "tensorly" and method == "head-svd":
        raise OptionError(
            "solver='tensorly' has no method 'head-svd', which needs none. Leave out --solver."
        )
    if iterations < 1:
        raise OptionError(f"iterations={iterations} must be at least 1. Raise --iterations.")
    if not 0 <= tolerance < 1:
        raise OptionError(
            f"tolerance={tolerance} must be at least 0 and below 1: it is a share of the error. "
            "Change --tol."
        )


def _check_finite(model: nn.Module) -> None:
    """Refuse a model with NaN or infinite weights, and name the first."""
    for name, parameter in model.named_parameters():
        bad = int((~torch.isfinite(parameter)).sum())
        if bad:
            raise NonFiniteError(
                f"{bad} of the {parameter.numel()} numbers of {name!r} are NaN or infinite; "
                "all must be finite. "
                "Take a checkpoint from before training diverged."
            )


def _count(
    model: nn.Module, sites: Sequence[AttentionSite], plan: ConversionConfig
) -> tuple[ParameterCount, ParameterCount, ParameterCount]:
    """Parameters of query-key, attention and the whole model before the conversion and after it."""
    everything = find_attention(model)
    query_key = sum(site.query_key_parameters for site in everything)
    value_output = sum(site.value_output_parameters for site in everything)
    whole = sum(parameter.numel() for parameter in model.parameters())
    change = 0
    for site, layer in zip(sites, plan.layers, strict=True):
        after = site.empty_factors(layer).num_parameters + site.num_heads * site.width
        change += after - site.query_key_parameters
    return (
        ParameterCount(query_key, query_key + change),
        ParameterCount(query_key + value_output, query_key + value_output + change),
        ParameterCount(whole, whole + change),
    )


def _solver_dtype(device: torch.device | str) -> torch.dtype:
    """float64 where there is one, for the reason given in :mod:`collabify.decompose.cp`."""
    return torch.float32 if torch.device(device).type == "mps" else torch.float64


def _suggest(spectra: Sequence[LayerSpectra], full_rank: int) -> int:
    """The rank at which the pooled triplets keep ``SUGGESTION_ENERGY``, on average over layers."""
    curves = [layer.triplets.energy for layer in spectra]
    shortest = min(len(curve) for curve in curves)
    mean = [sum(curve[n] for curve in curves) / len(curves) for n in range(shortest)]
    needed = directions(mean, SUGGESTION_ENERGY)
    return min(-(-needed // 8) * 8, full_rank)
