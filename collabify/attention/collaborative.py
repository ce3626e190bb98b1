"""Collaborative attention: all heads score in the same channels, each with its own weights.

    logits[h] = sum_r mixing[h, r] q[r] k[r] + content[h]       btr,hr,bsr -> bhts

With a few channels a head, the head gathers those and is then ordinary attention on them. A column
for the content bias, which the query reads as one, and as many empty ones as it takes make it as
wide as the head's values, so that fused kernels and flash attention apply:

    query[h] = (mixing[h] * q[channels[h]], 1, 0 ...)           hk,bthk -> bhtw
    key[h]   = (k[channels[h]], content[h], ...)

Axes: b batch, t target, s source, h head, r shared channel, k channel that a head keeps,
m row of the shared key (r + h), w column of a head.
Reference: Cordonnier et al. 2020, Multi-Head Attention: Collaborate Instead of Concatenate, eq. 6.
"""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from collabify.attention.base import SharedAttention, parameter
from collabify.attention.ops import gather
from collabify.decompose.factors import CPFactors, Factors


class CollaborativeAttention(SharedAttention):
    """Shared query and key projections and the heads' weights of their channels.

    ``mixing`` is ``[h, r]``, or ``[h, k]`` beside the buffer ``channels``, ``[h, w]``: the row of
    the shared key that every column of a head reads. The first k are the channels that it keeps,
    the others its content bias. One-hot for a head-SVD.
    """

    mixing: nn.Parameter
    channels: Tensor | None

    @classmethod
    def _form(cls) -> type[SharedAttention]:
        return CollaborativeAttention

    def set_factors(self, factors: Factors) -> None:
        """Take the mixing matrix and the channels that each head keeps."""
        if not isinstance(factors, CPFactors):
            raise TypeError(f"{type(factors).__name__} is not CPFactors.")
        self.mixing = parameter(factors.mixing)
        self.register_buffer("channels", factors.channels)
        if factors.channels is not None:
            heads, kept = factors.channels.shape
            rank = len(factors.query)
            width = max(kept + 1, self.value_width(heads))
            own = torch.arange(rank, rank + heads, device=factors.channels.device)[:, None]
            self.channels = torch.cat([factors.channels, own.expand(-1, width - kept)], dim=1)

    def indices(self) -> dict[str, tuple[Tensor, int]]:
        """With the rows of the shared key that the heads read."""
        found = super().indices()
        if self.channels is not None:
            rows = int(getattr(self, self.layout.key).out_features)
            found["channels"] = self.channels, rows
        return found

    def factors(self) -> CPFactors:
        """Projections, mixing, and the channels that each head keeps."""
        kept = None if self.channels is None else self.channels[:, : self.mixing.shape[1]]
        return CPFactors(*self._projected, self.mixing, kept)

    def scores(
        self, q: Float[Tensor, "b t r"], k: Float[Tensor, "b s m"]
    ) -> tuple[Float[Tensor, "b h t w"], Float[Tensor, "b h s w"]]:
        """Every head's own channels, or all of them, and its content bias."""
        if self.channels is None:
            return self._dense_scores(q, k)
        (heads, width), kept = self.channels.shape, self.mixing.shape[1]
        read = self.channels.flatten()
        weights = nn.functional.pad(self.mixing, (0, width - kept)).flatten()
        # Columns beside the kept channels have no weight in the query: any channel will do there.
        query = gather(q, read.clamp(max=q.shape[-1] - 1)) * weights
        query, key = (
            x.view(*x.shape[:-1], heads, width).transpose(1, 2) for x in (query, gather(k, read))
        )
        query[..., kept] = 1
        return query, key

    def _dense_scores(
        self, q: Float[Tensor, "b t r"], k: Float[Tensor, "b s m"]
    ) -> tuple[Float[Tensor, "b h t w"], Float[Tensor, "b h s w"]]:
        """``(q, 1) * (mixing[h], onehot[h])`` against the shared key, which is not copied."""
        heads = self.mixing.shape[0]
        own = torch.eye(heads, dtype=q.dtype, device=q.device)
        weights = torch.cat([self.mixing, own], dim=1)
        query = nn.functional.pad(q, (0, heads), value=1.0)[:, None] * weights[:, None]
        return query, k[:, None].expand(-1, heads, -1, -1)
