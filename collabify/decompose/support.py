"""Which shared channels a head keeps: backward elimination with refitted weights.

    cost[h, r] = mixing[h, r]^2 / inverse(gram)[r, r],    gram = query query^T * key key^T

is what the head's squared error rises by if it drops channel ``r`` and refits the weights of those
that it still has. Channels are not orthogonal, so the size of a weight says less: what a large
weight does another channel may do as well.

Axes: h head, i query-side input, j key-side input, r shared channel, k channel that a head keeps.
Reference: Hassibi & Stork 1993, Optimal Brain Surgeon (here the loss is a quadratic, so it is exact
for one channel).
"""

import torch
from jaxtyping import Float
from torch import Tensor

from collabify.decompose.factors import CPFactors
from collabify.forms import HeadForms

STEP = 0.1  # share of a head's channels that go at once


def eliminate(factors: CPFactors, forms: HeadForms, channels: int) -> CPFactors:
    """Keep the ``channels`` of every head that are hardest to do without, with weights refitted.

    Parameters
    ----------
    factors
        All heads with all channels.
    forms
        The heads.
    channels
        How many each is to keep, below the rank.
    """
    query, key = factors.query, factors.key
    gram = (query @ query.T) * (key @ key.T)
    matched = ((forms.w_q @ query.T) * (forms.w_k @ key.T)).sum(1)
    heads, rank = matched.shape
    kept = torch.arange(rank, device=gram.device).expand(heads, rank)
    weights, inverse = _refit(gram, matched, kept)
    while kept.shape[1] > channels:
        left = max(channels, kept.shape[1] - max(1, int(STEP * kept.shape[1])))
        cost = weights.square() / inverse.diagonal(dim1=1, dim2=2)
        kept = kept.gather(1, cost.topk(left, dim=1).indices.sort(dim=1).values)
        weights, inverse = _refit(gram, matched, kept)
    return CPFactors(query, key, weights, kept)


def _refit(
    gram: Float[Tensor, "r r"], matched: Float[Tensor, "h r"], kept: Tensor
) -> tuple[Float[Tensor, "h k"], Float[Tensor, "h k k"]]:
    """Weights that fit best on the channels kept, and the inverses of those channels' Grams."""
    own = gram[kept[:, :, None], kept[:, None, :]]
    size = own.shape[-1]
    floor = size * torch.finfo(gram.dtype).eps * gram.diagonal().max()
    floored = own + floor * torch.eye(size, dtype=gram.dtype, device=gram.device)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(floored))
    return (inverse @ matched.gather(1, kept)[..., None])[..., 0], inverse
