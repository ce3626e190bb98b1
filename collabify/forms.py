"""A layer's heads as a stack of bilinear forms, kept factored.

    forms[h] = w_q[h]^T w_k[h]                                  hdi,hdj -> hij

Each form has rank ``d`` at most, so the stack is never built: norms and products come from
``d x d`` and ``r x r`` matrices.

Axes: h head, d channel within a head, i query-side input, j key-side input.
Reference: Shazeer et al. 2020 (general bilinear attention), Cordonnier et al. 2020, section 3.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True, eq=False)
class HeadForms:
    """The heads of one attention layer, as a stack of bilinear forms.

    A head scores a target token ``x`` against a source token ``y`` by

        logit[h] = (w_q[h] x + b_q[h]) . (w_k[h] y + b_k[h]) * scale.

    Softmax over the sources cancels everything that does not depend on ``y``, so ``b_k`` drops out
    exactly and ``b_q`` becomes a term of the keys alone, the content bias ``content[h] = w_k[h]^T
    b_q[h]``.

    Parameters
    ----------
    w_q, w_k
        Projections of the heads, ``[h, d, i]`` and ``[h, d, j]``.
    content
        Content bias, ``[h, j]``; zero where the model has no query bias.
    scale
        What the trained model multiplies its logits by (``1/sqrt(d)`` in all supported models). It
        belongs to the model and never follows a rank.
    """

    w_q: Float[Tensor, "h d i"]
    w_k: Float[Tensor, "h d j"]
    content: Float[Tensor, "h j"]
    scale: float

    @classmethod
    def from_projections(
        cls,
        query: Float[Tensor, "hd i"],
        key: Float[Tensor, "hd j"],
        query_bias: Float[Tensor, "hd"] | None,
        *,
        num_heads: int,
        scale: float,
    ) -> "HeadForms":
        """Read a layer's projections, as ``torch.nn.Linear`` stores them (output first)."""
        w_q, w_k = (w.reshape(num_heads, -1, w.shape[1]) for w in (query, key))
        b_q = (
            torch.zeros_like(w_q[..., 0]) if query_bias is None else query_bias.view(num_heads, -1)
        )
        return cls(w_q, w_k, torch.einsum("hd,hdj->hj", b_q, w_k), scale)

    @property
    def num_heads(self) -> int:
        """Number of heads, h."""
        return self.w_q.shape[0]

    @property
    def head_dim(self) -> int:
        """Channels of a head, d."""
        return self.w_q.shape[1]

    @property
    def full_rank(self) -> int:
        """Shared rank at which every method that can be exact is: h * d."""
        return self.num_heads * self.head_dim

    def to(self, target: torch.dtype | torch.device) -> "HeadForms":
        """The same heads in another dtype or on another device."""
        w_q, w_k, content = (part.to(target) for part in (self.w_q, self.w_k, self.content))
        return HeadForms(w_q, w_k, content, self.scale)

    def dense(self) -> Float[Tensor, "h i j"]:
        """The stack itself: h * i * j numbers, for the tensorly solvers and for tests."""
        return torch.einsum("hdi,hdj->hij", self.w_q, self.w_k)

    def key_term(self, x: Float[Tensor, "i"]) -> Float[Tensor, "h j"]:
        """``forms[h]^T x``: what a target adds to a head's logits, as a term of the keys alone."""
        return torch.einsum("hdj,hd->hj", self.w_k, self.w_q @ x)

    def squared_norms(self) -> Float[Tensor, "h"]:
        """Squared Frobenius norm of each head's form, from ``d x d`` Gram matrices."""
        gram_q = torch.einsum("hdi,hei->hde", self.w_q, self.w_q)
        gram_k = torch.einsum("hdj,hej->hde", self.w_k, self.w_k)
        return torch.einsum("hde,hde->h", gram_q, gram_k)

    def query_gram(self) -> Float[Tensor, "i i"]:
        """``sum_h P_h P_h^T``: the Gram matrix of the query-side unfolding [P_1 | ... | P_H]."""
        gram_k = torch.einsum("hdj,hej->hde", self.w_k, self.w_k)
        return torch.einsum("hdi,hde->hei", self.w_q, gram_k).flatten(0, 1).T @ self.w_q.flatten(
            0, 1
        )

    def key_gram(self) -> Float[Tensor, "j j"]:
        """``sum_h P_h^T P_h``: the Gram matrix of the key-side unfolding."""
        return self.transposed().query_gram()

    def transposed(self) -> "HeadForms":
        """The same heads with queries and keys exchanged (without a content bias)."""
        return HeadForms(self.w_k, self.w_q, torch.zeros_like(self.w_q[:, 0]), self.scale)
