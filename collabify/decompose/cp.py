"""CP by accelerated alternating least squares on the factored stack: collaborative attention.

    minimise sum_h |w_q[h]^T w_k[h] - query^T diag(mixing[h]) key|^2

Each factor in turn solves its normal equations. Their right-hand sides need only ``w_q query^T``
and ``w_k key^T``:

    query  (key key^T * mixing^T mixing) query = sum_h (mixing[h] * w_k[h] key^T)^T w_q[h]
    mixing (query query^T * key key^T) mixing[h]^T = sum_d (w_q[h] query^T * w_k[h] key^T)[d]

A step that is proximal by a rounding error's worth, ``+ lambda |new - old|^2``, keeps singular
systems (dead or repeated channels) solvable. Sweeps are extrapolated with Nesterov's momentum; one
that raises the error is dropped and the momentum starts again, so the error never rises.

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
References: Kolda & Bader 2009, section 3.4; Cordonnier et al. 2020, section 4; Mitchell, Ye & De
Sterck 2020, Nesterov acceleration of alternating least squares for CP.
"""

from collections.abc import Iterator
from typing import NamedTuple, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor

from collabify.decompose.factors import CPFactors, Decomposition, relative_error, rounding_floor
from collabify.decompose.head_svd import fit_head_svd, head_triplets
from collabify.decompose.support import eliminate
from collabify.forms import HeadForms

MOMENTUM = 0.95  # at most
LAST = 0.1  # share of the sweeps that runs in float64
TORN = 1.2  # more than this from dense sweeps to few channels, and other starts are tried
WINDOW = 5  # sweeps over which the improvement is averaged


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
        search = _Search(forms.to(dtype), factors, kept)
        if sweeps is not None and factors.to(forms.w_q.dtype).relative_error(forms) <= search.floor:
            continue  # below what this dtype sees
        found, converged = search.run(left, tolerance)
        factors, errors = search.best, errors + found
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
    mixing = _solve(products, matched.T, torch.zeros_like(matched.T)).T
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


class _State(NamedTuple):
    """Factors, and the products ``w_k key^T`` that the next sweep begins with."""

    query: Tensor
    key: Tensor
    mixing: Tensor
    k: Tensor


class _Search:
    """Factors on their way down."""

    def __init__(self, forms: HeadForms, factors: CPFactors, channels: int | None) -> None:
        self.heads, self.head_dim = forms.num_heads, forms.head_dim
        self.w_q, self.w_k = forms.w_q.flatten(0, 1), forms.w_k.flatten(0, 1)
        self.truth = forms.squared_norms().sum().double()
        self.floor = rounding_floor(forms)
        if channels is not None and factors.channels is None:
            factors = eliminate(cast(CPFactors, factors.to(self.w_k.dtype)), forms, channels)
        self.support = None if channels is None else factors.channels
        query, key, mixing = (
            part.to(self.w_k.dtype) for part in (factors.query, factors.key, factors.head_mixing())
        )
        self.state = _State(query, key, mixing, self.w_k @ key.T)

    @property
    def best(self) -> CPFactors:
        """The factors of the lowest error so far."""
        query, key, mixing, _ = self.state
        if self.support is None:
            return CPFactors(query, key, mixing)
        return CPFactors(query, key, mixing.gather(1, self.support), self.support)

    def run(self, sweeps: int, tolerance: float) -> tuple[list[float], bool]:
        """Sweep until it no longer pays; the lowest error after each, and whether it stopped."""
        errors: list[float] = []
        point, streak = self.state, 0
        for _ in range(sweeps):
            new, error = self._sweep(*point)
            if errors and error > errors[-1]:
                point, streak, error = self.state, 0, errors[-1]
            else:
                weight = min(MOMENTUM, streak / (streak + 3))
                pairs = zip(new, self.state, strict=True)
                point = _State(*(now + weight * (now - before) for now, before in pairs))
                self.state, streak = new, streak + 1
            errors.append(error)
            before = errors[-WINDOW - 1] if len(errors) > WINDOW else float("inf")
            if before - error <= WINDOW * tolerance * error or error <= self.floor:
                return errors, True
        return errors, False

    def _sweep(
        self,
        query: Float[Tensor, "r i"],
        key: Float[Tensor, "r j"],
        mixing: Float[Tensor, "h r"],
        k: Float[Tensor, "hd r"],
    ) -> tuple["_State", float]:
        """One least-squares step for query, key and mixing each, and the error after them."""
        per_channel = mixing.repeat_interleave(self.head_dim, dim=0)  # (h d) r
        mixing_gram = mixing.T @ mixing
        query = _solve((key @ key.T) * mixing_gram, (k * per_channel).T @ self.w_q, query)
        q, query_gram = self.w_q @ query.T, query @ query.T
        key = _solve(query_gram * mixing_gram, (q * per_channel).T @ self.w_k, key)
        k, gram = self.w_k @ key.T, query_gram * (key @ key.T)
        matched = (q * k).view(self.heads, self.head_dim, -1).sum(1)  # h r
        mixing = self._mix(gram, matched, mixing)
        inner = (matched.double() * mixing).sum()
        error = relative_error(self.truth, inner, ((mixing @ gram).double() * mixing).sum())
        scales = _scales(query, key, mixing)
        query, key, mixing = balance_by(scales, query, key, mixing)
        return _State(query, key, mixing, k * scales[1]), error

    def _mix(
        self, gram: Float[Tensor, "r r"], matched: Float[Tensor, "h r"], old: Float[Tensor, "h r"]
    ) -> Float[Tensor, "h r"]:
        """The mixing that fits best, on each head's own channels where it has some."""
        if self.support is None:
            return _solve(gram, matched.T, old.T).T
        rows, columns = self.support[:, :, None], self.support[:, None, :]
        target, own = (x.gather(1, self.support)[..., None] for x in (matched, old))
        return torch.zeros_like(old).scatter(
            1, self.support, _solve(gram[rows, columns], target, own)[..., 0]
        )


def _solve(
    gram: Float[Tensor, "*h r r"], target: Float[Tensor, "*h r n"], old: Float[Tensor, "*h r n"]
) -> Float[Tensor, "*h r n"]:
    """The factor nearest to ``old``: ``(gram + lambda) new = target + lambda old``.

    By the inverse, which is a third of the time of two triangular solves in float32.
    """
    size = gram.shape[-1]
    floor = size * torch.finfo(gram.dtype).eps * gram.diagonal(dim1=-2, dim2=-1).max()
    floored = gram + floor * torch.eye(size, dtype=gram.dtype, device=gram.device)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(floored))
    return inverse @ (target + floor * old)


def balance(factors: CPFactors) -> CPFactors:
    """The same stack, query and key channels equally long and mixing columns of length one."""
    query, key, mixing = factors.query, factors.key, factors.head_mixing()
    query, key, mixing = balance_by(_scales(query, key, mixing), query, key, mixing)
    return CPFactors(query, key, mixing)


def _scales(
    query: Float[Tensor, "r i"], key: Float[Tensor, "r j"], mixing: Float[Tensor, "h r"]
) -> tuple[Float[Tensor, "r"], Float[Tensor, "r"], Float[Tensor, "r"]]:
    """What each channel of query, key and mixing is multiplied by to be balanced."""
    tiny = torch.finfo(query.dtype).tiny
    lengths = query.norm(dim=1), key.norm(dim=1), mixing.norm(dim=0)
    common = (lengths[0] * lengths[1] * lengths[2]).sqrt()
    floored = [length.clamp(min=tiny) for length in lengths]
    return common / floored[0], common / floored[1], 1 / floored[2]


def balance_by(
    scales: tuple[Tensor, Tensor, Tensor],
    query: Float[Tensor, "r i"],
    key: Float[Tensor, "r j"],
    mixing: Float[Tensor, "h r"],
) -> tuple[Float[Tensor, "r i"], Float[Tensor, "r j"], Float[Tensor, "h r"]]:
    """Multiply every channel by its scales."""
    return query * scales[0][:, None], key * scales[1][:, None], mixing * scales[2]
