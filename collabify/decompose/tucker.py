"""Tucker by HOSVD and HOOI on the factored stack: shared subspaces, and cores.

    forms[h] ~ query^T core[h] key,  core[h] = query forms[h] key^T,  query and key orthonormal
    with a compressed head mode: core[h] = sum_a mixing[h, a] core[a],  mixing orthonormal

Orthonormal factors make the error a matter of captured energy, ``|forms|^2 - |core|^2``, and each
factor the leading eigenvectors of one Gram matrix. With ``S = mixing mixing^T`` (the identity for a
core per head), spread over channels,

    query-side Gram = w_q^T ((k k^T) * S) w_q,  k = w_k key^T

where k stacks all heads' channels, and likewise on the key side, so that nothing larger than a
square of the layer's width is built.

Axes: h head, d channel within a head, i query-side input, j key-side input, r and c shared rank,
a rank of the head mode.
References: De Lathauwer et al. 2000 (HOSVD, HOOI); Kolda & Bader 2009, section 4.2.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from collabify.decompose.factors import Decomposition, TuckerFactors, project, rounding_floor
from collabify.forms import HeadForms


def fit_tucker(
    forms: HeadForms,
    rank: int,
    *,
    head_rank: int | None = None,
    iterations: int = 100,
    tolerance: float = 1e-4,
) -> Decomposition:
    """Fit subspaces of ``rank`` channels that all heads share, on both sides.

    Parameters
    ----------
    forms
        The heads.
    rank
        Channels of both subspaces, between 1 and the smaller of ``forms.full_rank`` and the layer's
        width; exact at the latter, with a core per head.
    head_rank
        Cores that the heads mix, between 1 and the number of heads; ``None``: a core per head.
    iterations
        Sweeps of HOOI at most.
    tolerance
        Stop when a sweep lowers the relative error by less than this share of it.
    """
    truth = forms.squared_norms().sum()
    query = _leading(forms.query_gram(), rank)
    key = _leading(forms.key_gram(), rank)
    mixing = None if head_rank is None else _leading_heads(project(forms, query, key), head_rank)
    errors = [_error(forms, truth, query, key, mixing)]
    converged = errors[0] <= rounding_floor(forms)
    while not converged and len(errors) <= iterations:
        query = _leading(_query_gram(forms, key, mixing), rank)
        key = _leading(_query_gram(forms.transposed(), query, mixing), rank)
        if head_rank is not None:
            mixing = _leading_heads(project(forms, query, key), head_rank)
        errors.append(_error(forms, truth, query, key, mixing))
        small = errors[-2] - errors[-1] <= tolerance * errors[-2]
        converged = small or errors[-1] <= rounding_floor(forms)
    core = project(forms, query, key)
    if mixing is not None:
        core = torch.einsum("ha,hrc->arc", mixing, core)
    return Decomposition(TuckerFactors(query, key, core, mixing), tuple(errors), converged)


def _query_gram(
    forms: HeadForms, key: Float[Tensor, "c j"], mixing: Float[Tensor, "h a"] | None
) -> Float[Tensor, "i i"]:
    """Gram matrix of the query-side unfolding after projecting the keys and the heads."""
    k = torch.einsum("hdj,cj->hdc", forms.w_k, key)
    if mixing is None:
        gram_k = torch.einsum("hdc,hec->hde", k, k)
        inner = torch.einsum("hde,hei->hdi", gram_k, forms.w_q)
        return inner.flatten(0, 1).T @ forms.w_q.flatten(0, 1)
    spread = (mixing @ mixing.T).repeat_interleave(forms.head_dim, 0)
    spread = spread.repeat_interleave(forms.head_dim, 1)
    k, w_q = k.flatten(0, 1), forms.w_q.flatten(0, 1)
    return w_q.T @ (((k @ k.T) * spread) @ w_q)


def _leading(gram: Float[Tensor, "i i"], rank: int) -> Float[Tensor, "r i"]:
    """The ``rank`` leading eigenvectors of a symmetric matrix, as rows, strongest first."""
    vectors: Tensor = torch.linalg.eigh((gram + gram.T) / 2).eigenvectors
    return vectors[:, -rank:].flip(1).T.contiguous()


def _leading_heads(core: Float[Tensor, "h r c"], head_rank: int) -> Float[Tensor, "h a"]:
    """The leading directions of the head mode, as columns."""
    flat = core.flatten(1)
    return _leading(flat @ flat.T, head_rank).T


def _error(
    forms: HeadForms,
    truth: Float[Tensor, ""],
    query: Float[Tensor, "r i"],
    key: Float[Tensor, "c j"],
    mixing: Float[Tensor, "h a"] | None,
) -> float:
    """Relative error of the best cores for orthonormal factors."""
    core = project(forms, query, key)
    if mixing is not None:
        core = torch.einsum("ha,hrc->arc", mixing, core)
    lost = (truth - core.square().sum()).clamp(min=0)
    return 0.0 if truth == 0 else float((lost / truth).sqrt())
