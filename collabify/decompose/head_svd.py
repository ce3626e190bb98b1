"""Head-SVD: the strongest singular triplets over all heads, heads kept apart.

    forms[h] = sum_d s[h, d] u[h, d] v[h, d]^T                  hd,hdi,hdj -> hij

The top ``R`` of all ``h * d`` triplets make a CP with a one-hot mixing matrix: ordinary attention
with a width of its own for each head. It is exact at ``R = h * d``, and the start of
:mod:`collabify.decompose.cp`.

Axes: h head, d triplet of a head, i query-side input, j key-side input, r shared rank.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from collabify.decompose.factors import CPFactors, Decomposition
from collabify.forms import HeadForms


def head_triplets(
    forms: HeadForms,
) -> tuple[Float[Tensor, "h d"], Float[Tensor, "h d i"], Float[Tensor, "h d j"]]:
    """Singular triplets of every head, from two QRs and a ``d x d`` SVD.

    Returns
    -------
    values, left, right
        Descending in ``d`` within each head.
    """
    basis_q, upper_q = torch.linalg.qr(forms.w_q.mT)  # i x d, d x d
    basis_k, upper_k = torch.linalg.qr(forms.w_k.mT)
    u, values, v_t = torch.linalg.svd(upper_q @ upper_k.mT)
    return values, (basis_q @ u).mT, v_t @ basis_k.mT


def fit_head_svd(forms: HeadForms, rank: int, *, channels: int | None = None) -> Decomposition:
    """Keep the ``rank`` strongest triplets over all heads.

    Parameters
    ----------
    forms
        The heads.
    rank
        Triplets kept, between 1 and ``forms.full_rank``.
    channels
        Triplets that one head has at most, at least ``rank / h``; ``None``: any number.
    """
    values, left, right = (part[:, :channels] for part in head_triplets(forms))
    strongest = (
        values.flatten().topk(rank).indices.sort().values
    )  # sorted: a head's channels stay together
    root = values.flatten()[strongest].sqrt()[:, None]
    mixing = torch.zeros(forms.num_heads, rank, dtype=values.dtype, device=values.device)
    mixing[strongest // values.shape[1], torch.arange(rank, device=values.device)] = 1
    factors = CPFactors(
        root * left.flatten(0, 1)[strongest], root * right.flatten(0, 1)[strongest], mixing
    )
    if channels is not None:
        factors = factors.keep(min(channels, rank))
    return Decomposition(factors, (factors.relative_error(forms),), converged=True)
