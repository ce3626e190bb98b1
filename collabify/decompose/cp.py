"""CP by alternating least squares on the factored stack: collaborative attention.

    minimise sum_h |w_q[h]^T w_k[h] - query^T diag(mixing[h]) key|^2

Each factor in turn solves its normal equations. Their right-hand sides need only ``w_q query^T``
and ``w_k key^T``:

    query  (key key^T * mixing^T mixing) query = sum_h (mixing[h] * w_k[h] key^T)^T w_q[h]
    mixing (query query^T * key key^T) mixing[h]^T = sum_d (w_q[h] query^T * w_k[h] key^T)[d]

A step that is proximal by a rounding error's worth, ``+ lambda |new - old|^2``, keeps singular
systems (dead or repeated channels) solvable and every sweep monotone. The start is the head-SVD, so
that the result is never worse.

The fit runs in the dtype of the forms. Conversion gives it float64: the error is a difference of
Gram matrices, which float32 cannot see below 3e-4.

Axes: h head, d channel within a head, i query-side input, j key-side input, r shared rank.
References: Kolda & Bader 2009, section 3.4; Cordonnier et al. 2020, section 4.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from collabify.decompose.factors import CPFactors, Decomposition, relative_error, rounding_floor
from collabify.decompose.head_svd import fit_head_svd
from collabify.forms import HeadForms


def fit_cp(
    forms: HeadForms, rank: int, *, iterations: int = 100, tolerance: float = 1e-5
) -> Decomposition:
    """Fit ``rank`` channels that all heads share.

    Parameters
    ----------
    forms
        The heads.
    rank
        Shared channels, between 1 and ``forms.full_rank``; exact at the latter.
    iterations
        Sweeps at most.
    tolerance
        Stop when a sweep lowers the relative error by less than this share of it.
    """
    start = fit_head_svd(forms, rank)
    if start.relative_error <= rounding_floor(forms):
        return start
    assert isinstance(start.factors, CPFactors)  # noqa: S101 (narrows the type)
    factors, errors = start.factors, list(start.errors)
    truth = forms.squared_norms().sum()
    for _ in range(iterations):
        factors, error = _sweep(forms, truth, factors)
        errors.append(error)
        if errors[-2] - error <= tolerance * errors[-2] or error <= rounding_floor(forms):
            return Decomposition(factors, tuple(errors), converged=True)
    return Decomposition(factors, tuple(errors), converged=False)


def _sweep(
    forms: HeadForms, truth: Float[Tensor, ""], factors: CPFactors
) -> tuple[CPFactors, float]:
    """One least-squares step for query, key and mixing each, and the error after them."""
    query, key, mixing = factors.query, factors.key, factors.mixing
    w_q, w_k = forms.w_q.flatten(0, 1), forms.w_k.flatten(0, 1)
    per_channel = mixing.repeat_interleave(forms.head_dim, dim=0)  # (h d) r

    mixing_gram = mixing.T @ mixing
    query = _solve((key @ key.T) * mixing_gram, (w_k @ key.T * per_channel).T @ w_q, query)
    q = w_q @ query.T
    key = _solve((query @ query.T) * mixing_gram, (q * per_channel).T @ w_k, key)
    k = w_k @ key.T
    gram = (query @ query.T) * (key @ key.T)
    matched = (q * k).view(forms.num_heads, forms.head_dim, -1).sum(1)  # h r
    mixing = _solve(gram, matched.T, mixing.T).T

    error = relative_error(truth, (matched * mixing).sum(), (gram * (mixing.T @ mixing)).sum())
    return balance(CPFactors(query, key, mixing)), error


def _solve(
    gram: Float[Tensor, "r r"], target: Float[Tensor, "r n"], old: Float[Tensor, "r n"]
) -> Float[Tensor, "r n"]:
    """The factor nearest to ``old``: ``(gram + lambda) new = target + lambda old``."""
    floor = gram.shape[0] * torch.finfo(gram.dtype).eps * gram.diagonal().max()
    gram = gram + floor * torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    return torch.cholesky_solve(target + floor * old, torch.linalg.cholesky(gram))


def balance(factors: CPFactors) -> CPFactors:
    """The same stack, query and key channels equally long and mixing columns of length one."""
    tiny = torch.finfo(factors.query.dtype).tiny
    query, key = factors.query.norm(dim=1), factors.key.norm(dim=1)
    mixing = factors.mixing.norm(dim=0)
    common = (query * key * mixing).sqrt()
    return CPFactors(
        factors.query * (common / query.clamp(min=tiny))[:, None],
        factors.key * (common / key.clamp(min=tiny))[:, None],
        factors.mixing / mixing.clamp(min=tiny),
    )
