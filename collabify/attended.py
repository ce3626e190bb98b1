"""What heads attend to: means and a covariance of the attended inputs.

    a[h, t] = sum_s probs[h, t, s] x[s]                          bhts,bsi -> bhti

Axes: b batch, t target, s source, h head, i input channel.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from collabify.calibration import evaluate, on_device


@dataclass(frozen=True, eq=False)
class Attended:
    """Moments of the attended inputs.

    Parameters
    ----------
    means
        Of every head, ``[h, i]``, float64.
    covariance
        About a head's own mean, mean over heads, ``[i, i]``, float64.
    """

    means: Float[Tensor, "h i"]
    covariance: Float[Tensor, "i i"]


class _Sum:
    """Streaming; about the first targets' means, so that nothing large cancels."""

    def __init__(self, first: Float[Tensor, "h n i"]) -> None:
        self.dtype = torch.float32 if first.device.type == "mps" else torch.float64
        self.count = 0
        self.shift = first.to(self.dtype).mean(1)
        self.total = torch.zeros_like(self.shift)
        self.products = self.shift.new_zeros(self.shift.shape[1], self.shift.shape[1])

    def add(self, attended: Float[Tensor, "h n i"]) -> None:
        for head, targets in enumerate(attended):  # in double precision one head at a time
            shifted = targets.to(self.dtype) - self.shift[head]
            self.total[head] += shifted.sum(0)
            self.products += shifted.T @ shifted
        self.count += attended.shape[1]

    def moments(self) -> Attended:
        offset = self.total.cpu().double() / self.count
        products = self.products.cpu().double() / self.count - offset.T @ offset
        return Attended(self.shift.cpu().double() + offset, products / len(offset))


def collect_attended(
    model: nn.Module,
    layers: Mapping[str, nn.Module],
    batches: Sequence[Mapping[str, Any]],
    *,
    progress: Callable[[int], None] | None = None,
) -> dict[str, Attended]:
    """Moments of what the heads of some layers attend to, in one pass over the batches.

    Parameters
    ----------
    model
        The whole model, with an attention implementation that returns probabilities (``eager``).
    layers, batches, progress
        As for :func:`collabify.calibration.collect_moments`.
    """
    sums: dict[str, _Sum] = {}
    real: list[Bool[Tensor, "b s"] | None] = [None]

    def watch(name: str) -> Callable[..., None]:
        def hook(
            module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
        ) -> None:
            states = args[0] if args else kwargs["hidden_states"]
            attended = (output[1] @ states[:, None]).transpose(0, 1)  # h b t i
            rows = attended.flatten(1, 2) if real[0] is None else attended[:, real[0]]
            if rows.shape[1]:
                sums.setdefault(name, _Sum(rows)).add(rows)

        return hook

    with ExitStack() as stack, torch.inference_mode():
        for name, module in layers.items():
            stack.callback(module.register_forward_hook(watch(name), with_kwargs=True).remove)
        for done, batch in enumerate(on_device(batches, model), start=1):
            mask = batch.get("attention_mask")
            real[0] = None if mask is None else mask.bool()
            evaluate(model, batch)
            if progress is not None:
                progress(done)
    return {name: total.moments() for name, total in sums.items()}
