"""Value heads that several softmax heads read: block terms of the value side, with P_w.

    value[h]^T output[h] ~ sum_v mixing[v, h] value[v]^T output[v]

fitted where attended inputs really move, in one space for all heads, by
:func:`collabify.decompose.block_term.fit_block_term`. What the means and the values' biases
contribute is a constant of the layer, which the output's bias takes up exactly.

Axes: h head, e value channel of a head, i input, o output, v value head, n value channel (v e).
"""

from dataclasses import replace

import torch

from collabify.calibration import Moments, Whitening
from collabify.decompose.block_term import fit_block_term
from collabify.decompose.factors import BlockFactors
from collabify.decompose.values import ValueFactors, ValueForms
from collabify.forms import HeadForms


def fit_mixed_values(
    forms: ValueForms,
    attended: Moments | None,
    value_heads: int,
    width: int,
    *,
    has_bias: bool,
    iterations: int = 200,
    tolerance: float = 1e-4,
) -> tuple[ValueFactors, float]:
    """Fit value heads that the heads' probabilities are mixed for.

    Parameters
    ----------
    forms
        Values and outputs, the latter with a bias.
    attended
        Moments of the attended inputs; ``None``: the weights alone.
    value_heads, width
        How many there are to be, and their channels; exact with as many and as wide as the heads.
    has_bias
        Whether the values have a bias; the new one is zero, to be trained.
    iterations, tolerance
        As for :func:`fit_block_term`.

    Returns
    -------
    factors, error
        The error is that of the stack of forms where attended inputs move, relative.
    """
    heads, own, inputs = forms.value.shape
    value, output = forms.value, forms.output
    if (value_heads, width) == (heads, own):
        factors = ValueFactors(
            value.flatten(0, 1),
            forms.bias.flatten() if has_bias else None,
            output.flatten(0, 1).T,
            forms.output_bias,
            mixing=torch.eye(heads, dtype=value.dtype, device=value.device),
        )
        return factors, 0.0
    assert forms.output_bias is not None  # noqa: S101 (the caller has refused it)
    means = value.new_zeros(heads, inputs)
    root = inverse = torch.eye(inputs, dtype=value.dtype, device=value.device)
    if attended is not None:
        one = replace(attended, mean=attended.mean.mean(0))
        space = Whitening.of(one).to(value.dtype).to(value.device)
        means, root, inverse = attended.mean.to(means), space.root, space.inverse
    content = output.new_zeros(heads, output.shape[2])
    stack = HeadForms(value @ root, output, content, 1.0)
    found = fit_block_term(stack, value_heads, width, iterations=iterations, tolerance=tolerance)
    blocks = found.factors
    assert isinstance(blocks, BlockFactors) and blocks.mixing is not None  # noqa: S101, PT018
    new_value, mixing = blocks.query @ inverse, blocks.mixing.T
    # constants of the layer before and after, with every head's mean
    seen = torch.einsum("hei,hi->he", value, means) + forms.bias
    before = torch.einsum("he,heo->o", seen, output)
    read = (mixing @ means).repeat_interleave(width, dim=0)
    after = (new_value * read).sum(1) @ blocks.key
    factors = ValueFactors(
        new_value,
        new_value.new_zeros(len(new_value)) if has_bias else None,
        blocks.key.T,
        forms.output_bias + before - after,
        mixing=mixing,
    )
    return factors.balanced(), found.relative_error
