"""The whole method: find the heads, share what they have in common, put them back.

model -> sites -> forms -> (whitened by what the layers see) -> factors -> model
"""

from collections.abc import Sequence
from typing import Any, Literal, cast

import torch
from torch import nn

from collabify.decompose import value_strengths
from collabify.drift import measure_drift, shadow
from collabify.errors import OptionError
from collabify.healing import heal as heal_model
from collabify.installing import install, undone_on_failure
from collabify.models import find_attention
from collabify.planning import (
    Method,
    Projections,
    Request,
    Solver,
    ValueRequest,
    check_finite,
    count,
    select,
)
from collabify.results import ConversionReport, LayerReport
from collabify.sensitivity import sensitivities
from collabify.sharing import planned, share, share_values
from collabify.spaces import Progress, Spaces, calibrate, load, place
from collabify.storage import carry


def convert(
    model: nn.Module,
    *,
    dk: int | None = None,
    kept: float | None = None,
    error: float | None = None,
    method: Method = "cp",
    head_rank: int | None = None,
    channels: int | Literal["all"] | None = None,
    base_heads: int | None = None,
    base_width: int | None = None,
    projections: Projections | None = None,
    dynamic: bool = False,
    dv: int | None = None,
    kept_values: float | None = None,
    value_heads: int | None = None,
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
        ``cp`` (collaborative attention), ``tucker`` (a core per head), ``head-svd`` (heads kept
        apart) or ``talking-heads`` (heads mix the logits of base heads). The last takes no size
        too: then nothing is lost, and the heads can talk once they are trained.
    head_rank
        For ``tucker``: cores that the heads mix, between 1 and the number of heads. By default
        every head has its own.
    channels
        Shared channels that each head keeps, or ``all``. By default one less than the head was wide
        (its content bias takes one column), so that it is as fast as it was.
    base_heads, base_width
        For ``talking-heads``: how many base heads the heads mix, and how wide each is. By default
        as many as heads, of the width that ``dk`` leaves.
    projections
        For ``talking-heads``: ``logits`` (P_l), ``weights`` (P_w) or ``both``. By default P_l, and
        P_w where ``value_heads`` says so or no size is given at all.
    dynamic
        For ``talking-heads``: whether these projections have terms that depend on the tokens, drawn
        small by ``seed``, for training. They change outputs a little, which errors leave out and
        drift shows.
    dv
        Channels of all heads' values, between 1 and the number of heads times their width; exact at
        the latter. By default values and outputs stay as they are.
    kept_values
        Instead of ``dv``: share of the parameters of values and outputs to keep, in (0, 1];
        channels are chosen across layers.
    value_heads
        Value heads, equally wide, that read mixed attention probabilities (P_w).
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
        Base heads and value heads take three at least.
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
    sizes = (dk, kept, error, dv, kept_values, base_heads, base_width, value_heads, projections)
    silent = all(size is None for size in sizes)
    mixes = projections in ("weights", "both") or (method == "talking-heads" and silent)
    of_values = ValueRequest(dv, kept_values, value_heads, mixes, dynamic, multiple)
    request = Request(
        dk,
        kept,
        error,
        method,
        head_rank,
        channels,
        solver,
        iterations,
        tolerance,
        multiple,
        base_heads,
        base_width,
        projections,
        dynamic,
        value_heads,
        of_values.asked,
    )
    _check_data(heal, calibration, sequential=sequential)
    sites = select(find_attention(model), layers)
    check_finite(model)
    request.check(sites)
    of_values.check(sites)
    data = load(
        model, calibration, samples, max_length, seed, processor, batch_size=32 if heal else 16
    )
    needed = not dry_run or request.chooses or kept_values is not None
    wanted = {"attended": of_values.mixes, "contexts": of_values.asked and not of_values.mixes}
    spaces = calibrate(model, sites, data, progress, **wanted) if needed else Spaces()
    heads = {s.index: spaces.whitened(s, device) for s in sites} if request.chooses else None
    weights = None
    if kept is not None and data is not None:
        weights = sensitivities(
            model,
            sites,
            spaces.inputs,
            data.batches,
            None if progress is None else lambda n: progress("Weighing", n, len(sites), ""),
        )
    strengths = {
        site.index: value_strengths(
            site.read_values(device=place(site, device)), spaces.contexts.get(site.index)
        )
        for site in sites
        if kept_values is not None
    }
    plan = of_values.plan(sites, request.plan(sites, heads, weights), strengths)

    counts = count(model, sites, plan)
    reports, found = [], []
    working = shadow(model) if sequential else None
    for site, layer in zip(sites, plan.layers, strict=True):
        report = planned(site, layer)
        if not dry_run:
            follower = None if working is None else find_attention(working)[site.index]
            if follower is not None:
                followed = cast(nn.Module, working)
                spaces = calibrate(followed, [follower], data, None, **wanted)
            factors, content, report = share(site, layer, spaces, request, seed, device)
            values, report = share_values(site, layer, spaces, request, seed, device, report)
            found.append((site, factors, content, values))
            if follower is not None:
                follower.install(factors, content, values)
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
    given = calibration
    if not isinstance(calibration, str | None):
        given = f"a {type(calibration).__name__} given in Python"
    options: dict[str, Any]
    options = {"dk": dk, "kept": kept, "error": error, "head_rank": head_rank, "heal": heal}
    options |= {"channels": channels, "iterations": iterations, "tolerance": tolerance}
    options |= {"calibration": given, "samples": samples, "max_length": max_length}
    options |= {"layers": [site.index for site in sites], "seed": seed, "multiple": multiple}
    options |= {"sequential": sequential, "base_heads": base_heads, "base_width": base_width}
    options |= {"projections": projections, "dynamic": dynamic}
    options |= {"dv": dv, "kept_values": kept_values, "value_heads": value_heads}
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


def _error(report: LayerReport) -> float:
    """The error that the solver saw, for a progress bar."""
    return report.calibrated_error or report.relative_error or 0.0
