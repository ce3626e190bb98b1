"""CP by alternating least squares on the factored stack: collaborative attention.

    minimise sum_h |w_q[h]^T w_k[h] - query^T diag(mixing[h]) key|^2

With ``channels``, a head mixes that many of the shared channels only: half of the sweeps are dense,
then each head drops the channels that it misses least (:mod:`collabify.decompose.support`), and
everything is refitted on those that are left. Only there can the error rise once. The start is the
heads' own triplets, each distinct one once, and the result is never worse than a head-SVD of the
same width.

Most sweeps run in float32, where they take less than half the time; the last ones, and the errors
reported for start and end, in float64, because the error is a difference of Gram matrices that
float32 cannot see below 3e-3. Forms in float32 stay there.

Axes: h head, d channel within a head, i query-side input, j key-side input, r shared rank,
k channel that a head keeps.
The sweeps are those of :mod:`collabify.decompose.als`.
Reference: Cordonnier et al. 2020, section 4.
"""

from collections.abc import Iterator
from typing import cast

import torch
from jaxtyping import Float, Int
from torch import Tensor

from collabify.decompose.als import Search, balance_by, scales_of, solve
from collabify.decompose.factors import CPFactors, Decomposition, rounding_floor
from collabify.decompose.head_svd import fit_head_svd, head_triplets
from collabify.decompose.support import eliminate
from collabify.forms import HeadForms

LAST = 0.1  # share of the sweeps that runs in float64
TORN = 1.2  # more than this from dense sweeps to few channels, and other starts are tried


def fit_cp(
    forms: HeadForms,
    rank: int,
    *,
    channels: int | None = None,
    iterations: int = 200,
    tolerance: float = 1e-4,
) -> Decomposition:
    """Fit ``rank`` channels that all heads share.

    Parameters
    ----------
    forms
        The heads.
    rank
        Shared channels, between 1 and ``forms.full_rank``; exact at the latter.
    channels
        Shared channels that each head mixes, at least 1 and enough for ``rank``; ``None``: all.
    iterations
        Sweeps at most.
    tolerance
        Stop when sweeps lower the relative error by less than this share of it on average.
    """
    start = fit_head_svd(forms, rank, channels=channels)
    if start.relative_error <= rounding_floor(forms):
        return start
    assert isinstance(start.factors, CPFactors)  # noqa: S101 (narrows the type)
    fewer = channels if channels is not None and channels < rank else None
    distinct = distinct_start(forms, rank)
    found = _descend(forms, distinct, fewer, iterations, tolerance)
    if fewer is not None and found.relative_error > TORN * min(found.errors):
        # The dense sweeps led where few channels cannot follow: refit those of the starts as well.
        others = (
            _descend(forms, factors, fewer, iterations, tolerance, dense=False)
            for factors in (distinct, start.factors)
        )
        found = min((found, *others), key=lambda candidate: candidate.relative_error)
    if found.relative_error >= start.relative_error:
        return start
    factors = found.factors
    if channels is not None and isinstance(factors, CPFactors) and factors.channels is None:
        factors = factors.keep(rank)
    return Decomposition(factors, (start.relative_error, *found.errors), found.converged)


def _descend(
    forms: HeadForms,
    factors: CPFactors,
    channels: int | None,
    iterations: int,
    tolerance: float,
    *,
    dense: bool = True,
) -> Decomposition:
    """Sweep through all phases from one start; errors after each sweep."""
    errors: list[float] = []
    converged = False
    for dtype, kept, sweeps in _phases(forms.w_q.dtype, channels, iterations, dense=dense):
        left = iterations - len(errors) if sweeps is None else sweeps
        narrow, factors = forms.to(dtype), cast(CPFactors, factors.to(dtype))
        if kept is not None and factors.channels is None:
            factors = eliminate(factors, narrow, kept)
        whole = factors.head_mixing()
        search = Search(narrow, factors.query, factors.key, whole, support=factors.channels)
        if sweeps is not None and factors.to(forms.w_q.dtype).relative_error(forms) <= search.floor:
            continue  # below what this dtype sees
        found, converged = search.run(left, tolerance)
        query, key, mixing, _ = search.state
        if factors.channels is not None:
            mixing = mixing.gather(1, factors.channels)
        factors, errors = CPFactors(query, key, mixing, factors.channels), errors + found
    return Decomposition(factors, tuple(errors), converged)


def distinct_start(forms: HeadForms, rank: int) -> CPFactors:
    """The triplets that say most beyond those chosen before, with the mixing that fits best.

    Heads that repeat one another have the same triplets; a head-SVD takes them once for each, and
    least squares from there stays where it is. A pivoted Cholesky factorisation of the triplets'
    Gram matrix takes them once.

    Parameters
    ----------
    forms
        The heads.
    rank
        Triplets taken.
    """
    values, left, right = (part.flatten(0, 1) for part in head_triplets(forms))
    gram = (left @ left.T) * (right @ right.T) * torch.outer(values, values)
    chosen = _pivots(gram, rank)
    root = values[chosen].sqrt()[:, None]
    query, key = root * left[chosen], root * right[chosen]
    q, k = forms.w_q @ query.T, forms.w_k @ key.T
    matched = (q * k).sum(1)
    products = (query @ query.T) * (key @ key.T)
    mixing = solve(products, matched.T, torch.zeros_like(matched.T)).T
    return balance(CPFactors(query, key, mixing))


def _pivots(gram: Float[Tensor, "n n"], count: int) -> Int[Tensor, "m"]:
    """Indices in the order in which a pivoted Cholesky factorisation takes them."""
    left = gram.diagonal().clone()
    rows = torch.zeros(count, len(gram), dtype=gram.dtype, device=gram.device)
    chosen = torch.zeros(count, dtype=torch.int64, device=gram.device)
    tiny = torch.finfo(gram.dtype).eps * left.max()
    for n in range(count):
        pivot = left.argmax()
        chosen[n] = pivot
        scale = left[pivot].clamp(min=tiny).sqrt()
        rows[n] = (gram[pivot] - rows[:n, pivot] @ rows[:n]) / scale
        left = (left - rows[n].square()).clamp(min=0)
        left[pivot] = -1  # never again
    return chosen


def _phases(
    dtype: torch.dtype, channels: int | None, iterations: int, *, dense: bool
) -> Iterator[tuple[torch.dtype, int | None, int | None]]:
    """Dtype, channels a head keeps, and sweeps (``None``: what is left) of each phase."""
    fast = torch.float32
    first = iterations - max(1, round(LAST * iterations)) if dtype == torch.float64 else iterations
    if channels is not None and dense:
        yield fast, None, first // 2
        first -= first // 2
    yield fast, channels, first if dtype == torch.float64 else None
    if dtype == torch.float64:
        yield dtype, channels, None


def balance(factors: CPFactors) -> CPFactors:
    """The same stack, query and key channels equally long and mixing columns of length one."""
    query, key, mixing = factors.query, factors.key, factors.head_mixing()
    query, key, mixing = balance_by(scales_of(query, key, mixing), query, key, mixing)
    return CPFactors(query, key, mixing)
