"""General bilinear multihead attention: every head a full form, which all others factorise.

    logits[h] = x forms[h] x^T + content[h] x^T                 bti,hij,bsj -> bhts
    probs     = softmax(logits * scale + mask)
    output    = sum_h probs[h] x values[h] + bias               bhts,bsi,hio -> bto

H I J numbers where a trained layer has 2 D I: for study, as the reference that other forms are
tested against, and as the start of others, since every solver takes what :meth:`head_forms` gives.

Axes: b batch, t target, s source, h head, i input (query side), j input (key side), o output.
Reference: Shazeer et al. 2020, Talking-Heads Attention, section 7.
"""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from collabify.decompose.factors import Factors
from collabify.decompose.values import ValueFactors, ValueForms
from collabify.forms import HeadForms


class GeneralBilinearAttention(nn.Module):
    """Attention with a form and a value map for every head.

    Parameters
    ----------
    forms, content
        ``[h, i, j]`` and ``[h, j]``.
    values, bias
        ``[h, i, o]`` and ``[o]``.
    scale
        What logits are multiplied by.
    """

    def __init__(
        self,
        forms: Float[Tensor, "h i j"],
        content: Float[Tensor, "h j"],
        values: Float[Tensor, "h i o"],
        bias: Float[Tensor, "o"],
        scale: float,
    ) -> None:
        super().__init__()
        self.forms, self.content = nn.Parameter(forms), nn.Parameter(content)
        self.values, self.bias = nn.Parameter(values), nn.Parameter(bias)
        self.scale = scale

    @classmethod
    def of(cls, heads: HeadForms, values: ValueForms) -> "GeneralBilinearAttention":
        """A trained layer, exactly."""
        maps = torch.einsum("hei,heo->hio", values.value, values.output)
        bias = torch.einsum("he,heo->o", values.bias, values.output)
        if values.output_bias is not None:
            bias = bias + values.output_bias
        return cls(heads.dense(), heads.content, maps, bias, heads.scale)

    @classmethod
    def of_factors(
        cls, factors: Factors, content: Float[Tensor, "h j"], values: ValueFactors, scale: float
    ) -> "GeneralBilinearAttention":
        """A converted layer, exactly; without what its mixing has on top for tokens."""
        maps, bias = values.dense(len(content))
        return cls(factors.dense(), content, maps, bias, scale)

    def head_forms(self) -> HeadForms:
        """The heads as every solver takes them, each of full width."""
        heads, size, _ = self.forms.shape
        eye = torch.eye(size, dtype=self.forms.dtype, device=self.forms.device)
        forms, content = self.forms.detach(), self.content.detach()
        return HeadForms(eye.expand(heads, -1, -1), forms, content, self.scale)

    def forward(
        self, x: Float[Tensor, "b t i"], mask: Float[Tensor, "b 1 #t t"] | None = None
    ) -> tuple[Float[Tensor, "b t o"], Float[Tensor, "b h t t"]]:
        """Attend within ``x``; ``mask`` is added to the logits. Output and probabilities."""
        logits = torch.einsum("bti,hij,bsj->bhts", x, self.forms, x)
        logits = logits + torch.einsum("hj,bsj->bhs", self.content, x)[:, :, None]
        probs = (logits * self.scale + (0 if mask is None else mask)).softmax(-1)
        output = torch.einsum("bhts,bsi,hio->bto", probs, x, self.values) + self.bias
        return output, probs
