"""What attention does where no fused kernel can: mix heads' maps, and take their softmax.

Axes: b batch, t target, s source, h head, g head that reads mixed maps, i input, r and w channel.
"""

import torch
from jaxtyping import Float
from torch import Tensor, nn


def mix(
    maps: Float[Tensor, "b h t s"],
    mixing: Float[Tensor, "g h"],
    x: Float[Tensor, "b t i"],
    of_target: Float[Tensor, "g h i"] | None,
    of_source: Float[Tensor, "g h i"] | None,
) -> Float[Tensor, "b g t s"]:
    """Heads' maps mixed into others', by weights that are fixed and by such as tokens make.

    ``gh,bhts -> bgts``, ``ghi,bti,bhts -> bgts``, ``ghi,bsi,bhts -> bgts``
    """
    # Not len(maps), which torch.export would take for a constant.
    mixed = (mixing @ maps.flatten(2)).view(maps.shape[0], mixing.shape[0], *maps.shape[2:])
    if of_target is not None:
        weights = torch.einsum("ghi,bti->btgh", of_target, x)
        mixed = mixed + (weights @ maps.permute(0, 2, 1, 3)).transpose(1, 2)
    if of_source is not None:
        weights = torch.einsum("ghi,bsi->bsgh", of_source, x)
        mixed = mixed + (weights @ maps.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
    return mixed


def gather(x: Float[Tensor, "b t r"], read: Tensor) -> Float[Tensor, "b t w"]:
    """The channels ``read`` of every token; ``gather`` is what is fastest on the CPU."""
    return x.gather(-1, read.expand(*x.shape[:-1], -1))


def probabilities(logits: Float[Tensor, "b h t s"], mask: object) -> Float[Tensor, "b h t s"]:
    """Softmax over sources that are not masked, in float32 at least.

    Raises
    ------
    NotImplementedError
        Where the attention implementation's mask is not one of ``[b, 1, t, s]``.
    """
    if mask is not None:
        if not isinstance(mask, Tensor) or mask.ndim != logits.ndim:
            raise NotImplementedError(
                "Talking heads mix logits or probabilities, which fused kernels do not give. "
                "Use the attention implementation 'sdpa' or 'eager'."
            )
        lowest = torch.finfo(logits.dtype).min
        logits = logits + mask if mask.is_floating_point() else logits.masked_fill(~mask, lowest)
    wide = torch.promote_types(logits.dtype, torch.float32)
    return nn.functional.softmax(logits, dim=-1, dtype=wide).to(logits.dtype)
