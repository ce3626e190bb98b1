"""Tucker attention: shared query and key subspaces, one core per head or a few that heads mix.

    logits[h] = q core[h] k^T + content[h]                      btr,hrc,bsc -> bhts
    core[h]   = sum_a mixing[h, a] core[a]                      ha,arc -> hrc

Axes: b batch, t target, s source, h head, r and c shared channel of queries and keys, a core,
m row of the shared key (c + h), w column of a head.
Reference: Cordonnier et al. 2020, section 4 (Tucker as the general form of sharing).
"""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from collabify.attention.base import SharedAttention, parameter
from collabify.decompose.factors import Factors, TuckerFactors


class TuckerAttention(SharedAttention):
    """Shared query and key projections and cores.

    ``core`` is ``[h, r, c]``, or ``[a, r, c]`` with ``mixing`` ``[h, a]``.
    """

    core: nn.Parameter
    mixing: nn.Parameter | None

    @classmethod
    def _form(cls) -> type[SharedAttention]:
        return TuckerAttention

    def set_factors(self, factors: Factors) -> None:
        """Take the cores and, where heads mix them, the mixing matrix."""
        if not isinstance(factors, TuckerFactors):
            raise TypeError(f"{type(factors).__name__} is not TuckerFactors.")
        self.core = parameter(factors.core)
        self._register("mixing", factors.mixing)

    def factors(self) -> TuckerFactors:
        """Projections, cores and mixing."""
        return TuckerFactors(*self._projected, self.core, self.mixing)

    def scores(
        self, q: Float[Tensor, "b t r"], k: Float[Tensor, "b s m"]
    ) -> tuple[Float[Tensor, "b h t w"], Float[Tensor, "b h s w"]]:
        """``(q core[h], onehot[h])`` against the shared key."""
        core: Tensor = self.core
        if self.mixing is not None:
            core = torch.einsum("ha,arc->hrc", self.mixing, core)
        heads = core.shape[0]
        own = torch.eye(heads, dtype=q.dtype, device=q.device)
        own = own[:, None].expand(q.shape[0], heads, q.shape[1], heads)
        return torch.cat([q[:, None] @ core, own], dim=-1), k[:, None].expand(-1, heads, -1, -1)
