"""Collaborative attention: all heads score in the same channels, each with its own weights.

    logits[h] = sum_r mixing[h, r] q[r] k[r] + content[h]       btr,hr,bsr -> bhts

Axes: b batch, t target, s source, h head, r shared channel.
Reference: Cordonnier et al. 2020, Multi-Head Attention: Collaborate Instead of Concatenate, eq. 6.
"""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from collabify.attention.base import SharedAttention
from collabify.decompose.factors import CPFactors, Factors


class CollaborativeAttention(SharedAttention):
    """Shared query and key projections and a mixing matrix ``[h, r]``, one-hot for a head-SVD."""

    mixing: nn.Parameter

    @classmethod
    def _form(cls) -> type[SharedAttention]:
        return CollaborativeAttention

    def set_factors(self, factors: Factors) -> None:
        """Take the mixing matrix."""
        if not isinstance(factors, CPFactors):
            raise TypeError(f"{type(factors).__name__} is not CPFactors.")
        self.mixing = nn.Parameter(factors.mixing.contiguous())

    def scores(
        self, q: Float[Tensor, "b t r"], k: Float[Tensor, "b s r+h"]
    ) -> tuple[Float[Tensor, "b h t r+h"], Float[Tensor, "b h s r+h"]]:
        """``(q, 1) * (mixing[h], onehot[h])`` against the shared key."""
        heads = self.mixing.shape[0]
        own = torch.eye(heads, dtype=q.dtype, device=q.device)
        weights = torch.cat([self.mixing, own], dim=1)
        query = nn.functional.pad(q, (0, heads), value=1.0)[:, None] * weights[:, None]
        return query, k[:, None].expand(-1, heads, -1, -1)
