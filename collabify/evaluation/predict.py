"""One pass of a model over many examples: sorted by length, padded batch by batch.

features[n] -> longest first -> batches of B -> collate -> model -> logits -> order of the features

Axes: n example, l label.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from collabify.calibration import on_device
from collabify.errors import NonFiniteError, OptionError

Progress = Callable[[str, int, int, str], None]
Collate = Callable[[list[Any]], Mapping[str, Tensor]]


def predict(
    model: Any,
    features: Sequence[Any],
    collate: Collate,
    *,
    batch_size: int = 32,
    stage: str = "predictions",
    progress: Progress | None = None,
) -> Float[Tensor, "n l"]:
    """The logits of a model with a head on every example, in the order of the examples.

    Parameters
    ----------
    model
        In any mode; it is left as it was.
    features
        What ``collate`` takes; those with ``input_ids`` are sorted by their number, so that little
        is padded.
    collate
        Makes a batch of keyword arguments for the model; ``labels`` are left out.
    batch_size
        Examples at once.
    stage
        For ``progress``.
    progress
        ``(stage, done, total, note)``, after every batch, in examples.

    Returns
    -------
    logits
        On the CPU, in float32.

    Raises
    ------
    OptionError
        Where ``batch_size`` is below 1.
    NonFiniteError
        Where the model's output is NaN or infinite.
    """
    if batch_size < 1:
        raise OptionError(f"batch_size={batch_size} must be at least 1. Raise --batch-size.")
    order = sorted(range(len(features)), key=lambda row: -_length(features[row]))
    found: list[Tensor] = []
    with in_eval_mode(model), torch.inference_mode():
        for start in range(0, len(order), batch_size):
            rows = order[start : start + batch_size]
            batch = collate([features[row] for row in rows])
            inputs = {name: value for name, value in batch.items() if name != "labels"}
            (moved,) = on_device([inputs], model)
            logits = model(**moved).logits
            found.append(_checked(logits.float().cpu(), rows))
            if progress is not None:
                progress(stage, start + len(rows), len(order), "")
    sorted_logits = torch.cat(found)
    restored = torch.empty_like(sorted_logits)
    restored[torch.tensor(order)] = sorted_logits
    return restored


def _length(feature: Any) -> int:
    return len(feature["input_ids"]) if isinstance(feature, Mapping) else 0


def _checked(logits: Tensor, rows: Sequence[int]) -> Tensor:
    finite = torch.isfinite(logits).flatten(1).all(1)
    if not finite.all():
        row = rows[int((~finite).nonzero()[0])]
        raise NonFiniteError(
            f"The model's output for example {row} is NaN or infinite; it must be finite to be "
            "scored. Load it in float32, or train it anew."
        )
    return logits


@contextmanager
def in_eval_mode(model: nn.Module) -> Iterator[None]:
    """The model without dropout for the while; then every module as it was."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training
