"""The whole method: find the heads, share what they have in common, put them back.

    model -> sites -> forms -> (whitened by what the layers see) -> factors -> model

:func:`analyze` says how much there is to share; :func:`convert` shares it, in place.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from collabify.calibration import Moments, Whitening, collect_moments
from collabify.config import LayerConfig
from collabify.data import CalibrationData, load_calibration
from collabify.decompose import Decomposition, Factors, fit_cp, fit_head_svd, fit_tucker
from collabify.drift import base_model, measure_drift, shadow
from collabify.errors import OptionError
from collabify.forms import HeadForms
from collabify.healing import heal as heal_model
from collabify.installing import install, undone_on_failure
from collabify.models import AttentionSite, find_attention
from collabify.planning import Method, Request, Solver, check_finite, count, select
from collabify.results import (
    AnalysisReport,
    ConversionReport,
    LayerReport,
    LayerSpectra,
    directions,
)
from collabify.sensitivity import sensitivities
from collabify.spectrum import layer_spectra
from collabify.storage import carry

SUGGESTION_ENERGY = 0.95  # relative error of the head-SVD, the floor of every method: 0.22

Progress = Callable[[str, int, int, str], None]


def convert(
    model: nn.Module,
    *,
    dk: int | None = None,
    kept: float | None = None,
    error: float | None = None,
    method: Method = "cp",
    head_rank: int | None = None,
    channels: int | Literal["all"] | None = None,
    calibration: object = "synthetic",
    samples: int = 256,
    max_length: int = 128,
    processor: object = None,
    solver: Solver = "factored",
    iterations: int = 200,
    tolerance: float = 1e-4,
    multiple: int = 8,
    layers: Sequence[int] | None = None,
    seed: int = 0,
    device: torch.device | str | None = None,
    sequential: bool = False,
    heal: int | None = None,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> ConversionReport:
    """Rewrite a model's attention so that heads share query and key projections, in place.

    Everything is validated and decomposed before the first layer is touched, and whatever fails
    afterwards leaves the model as it was.

    Parameters
    ----------
    model
        A transformers model of a supported architecture, with or without a head.
    dk
        Shared channels of queries and keys, D̃k, between 1 and the number of heads times their
        width; exact at the latter.
    kept
        Instead of ``dk``: share of the converted layers' query-key parameters to keep, in (0, 1];
        ranks are chosen across layers, with data by how much each layer's logits matter.
    error
        Instead of ``dk``: relative error allowed over all layers, in (0, 1), as a head-SVD would
        make it; ranks are chosen across layers.
    method
        ``cp`` (collaborative attention), ``tucker`` (a core per head) or ``head-svd`` (heads kept
        apart).
    head_rank
        For ``tucker``: cores that the heads mix, between 1 and the number of heads. By default
        every head has its own.
    channels
        Shared channels that each head keeps, or ``all``. By default one less than the head was wide
        (its content bias takes one column), so that it is as fast as it was.
    calibration
        What the layers see, so that errors are measured where tokens really move: ``synthetic``
        (no data needed), ``none`` (the weights alone, as published), or real data as
        :func:`collabify.data.load_calibration` takes it: a file, a folder, a data set, an iterable.
    samples, max_length
        How many calibration samples to take, and tokens of a text at most.
    processor
        Tokenizer or image processor for real data; by default from where the model was loaded.
    solver
        ``factored``, or ``tensorly`` for ``parafac`` and ``tucker`` on the dense stack.
    iterations, tolerance
        Stop after so many sweeps, or when they lower the relative error by less than this share.
    multiple
        Ranks chosen for ``kept`` or ``error`` are multiples of this.
    layers
        Positions of the layers to convert, from 0; by default all.
    seed
        For calibration samples, and for solvers that start at random (tensorly's ``parafac``).
    device
        Where to decompose; by default where the weights are. On mps, which has no float64, the CPU
        does it.
    sequential
        Calibrate every layer on what the layers converted before it give, at one pass over the data
        for each; worth it at small ranks (``benchmarks/quality/calibration.json``).
    heal
        Steps of healing on the calibration data afterwards, as :func:`collabify.heal` takes them;
        by default none.
    dry_run
        Only say what would be done: no factors are fitted, the model is left alone. With ``dk``
        nothing is calibrated either.
    progress
        Called with a stage, what is done of it, out of how much, and a few words.

    Returns
    -------
    ConversionReport
        Errors, drift, parameters before and after, and what was asked for.

    Raises
    ------
    CollabifyError
        Of the kind that says what is wrong; the model is then what it was.

    Examples
    --------
    >>> report = collabify.convert(model, dk=256)  # doctest: +SKIP
    >>> report.query_key.kept  # doctest: +SKIP
    """
    request = Request(
        dk, kept, error, method, head_rank, channels, solver, iterations, tolerance, multiple
    )
    _check_data(heal, calibration, sequential=sequential)
    sites = select(find_attention(model), layers)
    check_finite(model)
    request.check(sites)
    data = load(
        model, calibration, samples, max_length, seed, processor, batch_size=32 if heal else 16
    )
    needed = not (dry_run and dk is not None)
    spaces = whitenings(model, sites, data, progress) if needed else {}
    heads = {site.index: _whitened(site, spaces, device) for site in sites} if dk is None else None
    weights = None
    if kept is not None and data is not None:
        weights = sensitivities(
            model,
            sites,
            spaces,
            data.batches,
            None if progress is None else lambda n: progress("Weighing", n, len(sites), ""),
        )
    plan = request.plan(sites, heads, weights)

    counts = count(model, sites, plan)
    reports, found = [], []
    working = shadow(model) if sequential else None
    for site, layer in zip(sites, plan.layers, strict=True):
        report = LayerReport(
            site.index, site.name, layer.rank, head_rank=layer.head_rank, channels=layer.channels
        )
        if not dry_run:
            follower = None if working is None else find_attention(working)[site.index]
            if follower is not None:
                spaces = spaces | whitenings(cast(nn.Module, working), [follower], data, None)
            factors, content, report = share(site, layer, spaces, request, seed, device)
            found.append((site, factors, content))
            if follower is not None:
                follower.install(factors, content)
        reports.append(report)
        if progress is not None:
            progress("Converting", len(reports), len(sites), f"error {_error(report):.4f}")
    drift = healing = None
    if not dry_run:
        original = shadow(model)
        with undone_on_failure(model, sites):
            install(model, found, plan)
            if data is not None and data.held_out:
                drift = measure_drift(original, model, data.held_out)
            if heal is not None:
                healing = heal_model(
                    model, original, calibration=data, steps=heal, seed=seed, progress=progress
                )
                drift = healing.drift_after
    given = calibration if isinstance(calibration, str | None) else type(calibration).__name__
    options: dict[str, Any]
    options = {"dk": dk, "kept": kept, "error": error, "head_rank": head_rank, "heal": heal}
    options |= {"channels": channels, "iterations": iterations, "tolerance": tolerance}
    options |= {"calibration": given, "samples": samples, "max_length": max_length}
    options |= {"layers": [site.index for site in sites], "seed": seed, "multiple": multiple}
    options |= {"sequential": sequential}
    done = ConversionReport(
        method,
        solver,
        tuple(reports),
        *counts,
        dry_run,
        options,
        calibration=None if data is None else data.description,
        drift=drift,
        healing=healing,
    )
    if not dry_run:
        carry(model, done.to_dict())
    return done


def _check_data(steps: int | None, calibration: object, *, sequential: bool) -> None:
    """Refuse what needs data where there are none."""
    none = calibration is None or calibration == "none"
    if sequential and none:
        raise OptionError(
            f"sequential needs data, and calibration={calibration!r} has none. "
            "Leave out --calibration for 'synthetic', or give a file."
        )
    if steps is None:
        return
    if steps < 1:
        raise OptionError(f"heal={steps} must be at least 1 step. Raise --heal.")
    if none:
        raise OptionError(
            f"heal={steps} needs data, and calibration={calibration!r} has none. "
            "Leave out --calibration for 'synthetic', or give a file."
        )


def share(
    site: AttentionSite,
    layer: LayerConfig,
    spaces: Mapping[int, Whitening],
    request: Request,
    seed: int,
    device: torch.device | str | None,
) -> tuple[Factors, Float[Tensor, "h j"], LayerReport]:
    """One layer's heads in shared form, with the content bias that goes with it."""
    start = time.perf_counter()
    forms, whitened = _read(site, device), _whitened(site, spaces, device)
    energy = float(whitened.squared_norms().sum() * whitened.scale**2)
    if request.is_exact(site, layer.rank):
        # Nothing is lost in any space, and less is rounded in this one.
        spaces, whitened = {}, forms
    found = _decompose(whitened, layer, request, seed)
    factors, content = found.factors, forms.content
    space = spaces.get(site.index)
    if space is not None:
        factors = factors.transformed(space.inverse.to(content.dtype).to(content.device))
        mean = space.mean.to(content.dtype).to(content.device)
        content = content + forms.key_term(mean) - factors.key_term(mean)
    report = LayerReport(
        site.index,
        site.name,
        layer.rank,
        head_rank=layer.head_rank,
        channels=layer.channels,
        energy=energy,
        relative_error=factors.relative_error(forms),
        calibrated_error=None if space is None else found.relative_error,
        sweeps=found.sweeps,
        converged=found.converged,
        seconds=time.perf_counter() - start,
    )
    return factors, content, report


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
    if request.method == "tucker":
        return fit_tucker(forms, layer.rank, head_rank=layer.head_rank, **stop)
    return fit_head_svd(forms, layer.rank, channels=layer.channels)


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
        As for :func:`convert`; without ``none``, the spectra in the calibrated space stand beside
        those of the weights, and the suggestion follows them.
    device
        Where to compute; by default where the weights are.
    progress
        As for :func:`convert`.

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
    spaces = whitenings(model, sites, data, progress)
    raw: list[LayerSpectra] = []
    calibrated: list[LayerSpectra] = []
    for done, site in enumerate(sites, start=1):
        named: dict[str, Any] = {"index": site.index, "name": site.name}
        raw.append(layer_spectra(_read(site, device), **named))
        if site.index in spaces:
            calibrated.append(layer_spectra(_whitened(site, spaces, device), **named))
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


def whitenings(
    model: nn.Module,
    sites: Sequence[AttentionSite],
    data: CalibrationData | None,
    progress: Progress | None,
) -> dict[int, Whitening]:
    """The space of each layer's inputs, by index; none without data."""
    if data is None:
        return {}
    total = len(data.batches)
    moments: dict[str, Moments] = collect_moments(
        base_model(model),
        {site.name: site.module for site in sites},
        data.batches,
        progress=None if progress is None else lambda n: progress("Calibrating", n, total, ""),
    )
    return {site.index: Whitening.of(moments[site.name]) for site in sites}


def _read(site: AttentionSite, device: torch.device | str | None) -> HeadForms:
    """A layer's heads in float64, for the reason given in :mod:`collabify.decompose.cp`."""
    where = torch.device(device or site.query.weight.device)
    return site.read(device="cpu" if where.type == "mps" else where)


def _whitened(
    site: AttentionSite, spaces: Mapping[int, Whitening], device: torch.device | str | None
) -> HeadForms:
    """A layer's heads in the space of its inputs, or as they are."""
    forms = _read(site, device)
    if site.index not in spaces:
        return forms
    return spaces[site.index].to(forms.w_q.dtype).to(forms.w_q.device).whiten(forms)


def _error(report: LayerReport) -> float:
    """The error that the solver saw, for a progress bar."""
    return report.calibrated_error or report.relative_error or 0.0


def _suggest(spectra: Sequence[LayerSpectra], full_rank: int) -> int:
    """The rank at which pooled triplets keep ``SUGGESTION_ENERGY``, on average over layers."""
    curves = [layer.triplets.energy for layer in spectra]
    shortest = min(len(curve) for curve in curves)
    mean = [sum(curve[n] for curve in curves) / len(curves) for n in range(shortest)]
    needed = directions(mean, SUGGESTION_ENERGY)
    return min(-(-needed // 8) * 8, full_rank)
