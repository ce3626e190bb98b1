"""Talking-heads attention: base heads score, and the heads that attend mix their logits.

    base[n]   = q[n] k[n]                                       btnd,bsnd -> bnts
    logits[h] = sum_n logits_mixing[h, n] base[n] + content[h]  hn,bnts -> bhts

The logits projection P_l. The weights projection P_w, after the softmax, belongs to the value side
of every form (:mod:`collabify.attention.base`). Base logits are made once, n d products for each
pair of tokens, and then mixed, h n. That is faster than torch's sdpa on heads of width n d, which
give the same logits, but for many narrow base heads on long inputs
(``benchmarks/talking_heads/mixed_logits.json``, on a CPU):

    query[h] = (logits_mixing[h, n] q[n], ...)                  hn,btnd -> bhtw

so ``sdpa`` and ``eager`` are computed here; where P_l is alone, other kernels get those heads.

For training, P_l may have terms that depend on the target (x2l) and the source (m2l).

Axes: b batch, t target, s source, h head, n base head, d channel of a base head, r shared channel
(n d), m row of the shared key (r + h), w column of a head.
Reference: Shazeer et al. 2020, Talking-Heads Attention, sections 3 and 8.
"""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from collabify.attention.base import SharedAttention
from collabify.attention.ops import mix
from collabify.decompose.factors import BlockFactors, Factors


class TalkingHeadsAttention(SharedAttention):
    """Projections of base heads, and the weights with which heads mix their logits.

    ``logits_mixing`` is ``[h, n]``, or ``None`` where the base heads are the heads; ``x2l`` and
    ``m2l`` are ``[h, n, i]`` or ``None``.
    """

    heads: int
    logits_mixing: nn.Parameter | None
    x2l: nn.Parameter | None
    m2l: nn.Parameter | None

    @classmethod
    def _form(cls) -> type[SharedAttention]:
        return TalkingHeadsAttention

    def set_factors(self, factors: Factors) -> None:
        """Take the logits projection, and what it has on top."""
        if not isinstance(factors, BlockFactors):
            raise TypeError(f"{type(factors).__name__} is not BlockFactors.")
        self.heads = factors.heads
        self._register("logits_mixing", factors.mixing)
        self._register("x2l", factors.x2l)
        self._register("m2l", factors.m2l)

    def factors(self) -> BlockFactors:
        """Projections of the base heads, and P_l."""
        return BlockFactors(*self._projected, self.logits_mixing, self.heads, self.x2l, self.m2l)

    @property
    def needs_logits(self) -> bool:
        """With P_w, with terms of the tokens, and under ``eager`` and ``sdpa``."""
        fused = self.config._attn_implementation not in ("eager", "sdpa")
        return super().needs_logits or self.x2l is not None or not fused

    def logits(
        self, x: Float[Tensor, "b t i"], q: Float[Tensor, "b t r"], k: Float[Tensor, "b t m"]
    ) -> Float[Tensor, "b h t s"]:
        """Base logits, mixed, and the content bias."""
        base = self.heads if self.logits_mixing is None else self.logits_mixing.shape[1]
        k, content = k[..., : -self.heads], k[..., -self.heads :]
        query, key = (part.reshape(*part.shape[:-1], base, -1).transpose(1, 2) for part in (q, k))
        logits: Tensor = query @ key.mT
        if self.logits_mixing is not None:
            logits = mix(logits, self.logits_mixing, x, self.x2l, self.m2l)
        return logits + content.mT[:, :, None]

    def scores(
        self, q: Float[Tensor, "b t r"], k: Float[Tensor, "b s m"]
    ) -> tuple[Float[Tensor, "b h t w"], Float[Tensor, "b h s w"]]:
        """``(logits_mixing[h] q, onehot[h])`` against the shared key, which is not copied."""
        own = torch.eye(self.heads, dtype=q.dtype, device=q.device)
        mixing = own if self.logits_mixing is None else self.logits_mixing
        weights = mixing.repeat_interleave(q.shape[-1] // mixing.shape[1], dim=1)
        weights = torch.cat([weights, own], dim=1)
        query = nn.functional.pad(q, (0, self.heads), value=1.0)[:, None] * weights[:, None]
        return query, k[:, None].expand(-1, self.heads, -1, -1)
