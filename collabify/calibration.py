"""Where tokens really move: means and covariances of a layer's inputs, and the space they span.

    mean = E[x],  covariance = E[(x - mean)(x - mean)^T],  root = covariance^(1/2)

An error of the forms matters by the logits it makes. With targets ``x`` and sources ``y`` of one
covariance, and the row and column means of the logits left out,

    E[(x - mean)^T E_h (y - mean)]^2 = |root E_h root|^2,

so forms are fitted whitened, ``w_q root`` and ``w_k root``, and their factors un-whitened. What the
means contribute is exact and free: the key mean shifts all logits of a target alike, which softmax
cancels, and the query mean is a term of the keys alone, ``(P_h - P~_h)^T mean``, which the content
bias takes up.

Axes: n token, i = j input channel, h head, r shared rank.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from collabify.errors import NonFiniteError
from collabify.forms import HeadForms

# Share of the largest eigenvalue that every direction counts at least. Anything from 1e-3 to 1e-10
# gives the same within 0.001 of the cosine, with many tokens and with fewer than channels
# (benchmarks/quality/calibration.json).
EIGENVALUE_FLOOR = 1e-6


@dataclass(frozen=True, eq=False)
class Moments:
    """Mean and centred covariance of a layer's inputs, or of what its heads attend to.

    Parameters
    ----------
    count
        Tokens seen.
    mean
        ``[i]``, or every head's ``[h, i]``; float64.
    covariance
        ``[i, i]``, float64; of heads about their own means, the mean over heads.
    """

    count: int
    mean: Float[Tensor, "*heads i"]
    covariance: Float[Tensor, "i i"]


class MomentSum:
    """Streaming moments: memory O(i * i), however many tokens and heads.

    Sums are taken about the first tokens' mean, so that a mean much larger than the spread cancels
    nothing.
    """

    def __init__(self, first: Float[Tensor, "*heads n i"]) -> None:
        self.count = 0
        self.dtype = torch.float32 if first.device.type == "mps" else torch.float64
        self.shift = first.to(self.dtype).mean(-2)
        self.total = torch.zeros_like(self.shift)
        self.products = self.shift.new_zeros(first.shape[-1], first.shape[-1])

    def add(self, tokens: Float[Tensor, "*heads n i"]) -> None:
        """Take in some tokens."""
        self.count += tokens.shape[-2]
        for head in product(*map(range, tokens.shape[:-2])):  # in double precision one at a time
            shifted = tokens[head].to(self.dtype) - self.shift[head]
            self.total[head] += shifted.sum(0)
            self.products += shifted.T @ shifted

    def moments(self) -> Moments:
        """What the tokens so far amount to, on the CPU."""
        offset = self.total.cpu().double() / self.count
        means = offset.reshape(-1, offset.shape[-1])
        covariance = self.products.cpu().double() / self.count - means.T @ means
        return Moments(self.count, self.shift.cpu().double() + offset, covariance / len(means))


@dataclass(frozen=True, eq=False)
class Whitening:
    """The space in which forms are fitted.

    Parameters
    ----------
    mean
        Of the layer's inputs, ``[i]``.
    root, inverse
        Symmetric square root of the floored covariance and its inverse, ``[i, i]``.
    """

    mean: Float[Tensor, "i"]
    root: Float[Tensor, "i i"]
    inverse: Float[Tensor, "i i"]

    @classmethod
    def of(cls, moments: Moments, *, floor: float = EIGENVALUE_FLOOR) -> "Whitening":
        """From moments, by ``eigh`` with a floor; singular and dead directions are no trouble.

        Parameters
        ----------
        moments
            Of the layer's inputs.
        floor
            Share of the largest eigenvalue that every direction counts at least.
        """
        values, vectors = torch.linalg.eigh(moments.covariance)
        largest = values[-1] if values[-1] > 0 else torch.ones_like(values[-1])
        roots = values.clamp(min=floor * largest).sqrt()
        return cls(moments.mean, (vectors * roots) @ vectors.T, (vectors / roots) @ vectors.T)

    def to(self, target: torch.dtype | torch.device) -> "Whitening":
        """The same in another dtype or on another device."""
        return Whitening(self.mean.to(target), self.root.to(target), self.inverse.to(target))

    def whiten(self, forms: HeadForms) -> HeadForms:
        """The heads as the tokens see them: ``root P_h root``."""
        return HeadForms(
            forms.w_q @ self.root, forms.w_k @ self.root, forms.content @ self.root, forms.scale
        )


def collect_moments(
    model: nn.Module,
    layers: Mapping[str, nn.Module],
    batches: Sequence[Mapping[str, Any]],
    *,
    progress: Callable[[int], None] | None = None,
) -> dict[str, Moments]:
    """Moments of what flows into some layers, in one pass over the batches.

    Parameters
    ----------
    model
        The whole model; its mode and gradients are left as they were.
    layers
        Attention modules by name. A module that runs several times takes in all its inputs.
    batches
        Keyword arguments of the model. What an ``attention_mask`` masks does not count.
    progress
        Called with the number of batches done.

    Returns
    -------
    moments
        By name.

    Raises
    ------
    NonFiniteError
        Where an input is NaN or infinite; the layer is named.
    """

    def tokens(name: str, states: Tensor, output: Any, real: Bool[Tensor, "b s"] | None) -> Tensor:
        found = states.flatten(0, -2) if real is None else states[real]
        if not torch.isfinite(found).all():
            raise NonFiniteError(
                f"The input of {name!r} is NaN or infinite on the calibration data; it must be "
                "finite. Convert in float32, or give other data."
            )
        return found

    return _collect(model, layers, batches, tokens, progress)


def collect_attended(
    model: nn.Module,
    layers: Mapping[str, nn.Module],
    batches: Sequence[Mapping[str, Any]],
    *,
    progress: Callable[[int], None] | None = None,
) -> dict[str, Moments]:
    """Moments, head by head, of what the heads of some layers attend to: ``probs[h] x``.

    Parameters
    ----------
    model
        The whole model, with an attention implementation that returns probabilities (``eager``).
    layers, batches, progress
        As for :func:`collect_moments`.

    Returns
    -------
    moments
        By name, of the targets that no ``attention_mask`` masks.
    """

    def targets(name: str, states: Tensor, output: Any, real: Bool[Tensor, "b s"] | None) -> Tensor:
        found: Tensor = (output[1] @ states[:, None]).transpose(0, 1)  # h b t i
        return found.flatten(1, 2) if real is None else found[:, real]

    return _collect(model, layers, batches, targets, progress)


def _collect(
    model: nn.Module,
    layers: Mapping[str, nn.Module],
    batches: Sequence[Mapping[str, Any]],
    rows: Callable[[str, Tensor, Any, Bool[Tensor, "b s"] | None], Float[Tensor, "*heads n i"]],
    progress: Callable[[int], None] | None,
) -> dict[str, Moments]:
    """Moments of ``rows(name, input, output, mask)`` of some layers, in one pass."""
    sums: dict[str, MomentSum] = {}
    real: list[Bool[Tensor, "b s"] | None] = [None]

    def watch(name: str) -> Callable[..., None]:
        def hook(
            module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
        ) -> None:
            found = rows(name, args[0] if args else kwargs["hidden_states"], output, real[0])
            if found.shape[-2]:
                sums.setdefault(name, MomentSum(found)).add(found)

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


def on_device(batches: Iterable[Mapping[str, Any]], model: nn.Module) -> Iterable[dict[str, Any]]:
    """The batches where the model is; floating point ones in the model's dtype."""
    weight = next(model.parameters())
    for batch in batches:
        yield {
            name: value.to(weight.device, weight.dtype if value.is_floating_point() else None)
            if isinstance(value, Tensor)
            else value
            for name, value in batch.items()
        }


def evaluate(model: nn.Module, batch: Mapping[str, Any], **options: Any) -> Any:
    """One forward pass without dropout; the model's mode is left as it was."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        return model(**batch, return_dict=True, **options)
    finally:
        for module, training in modes.items():
            module.training = training
