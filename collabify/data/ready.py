"""Batches that are ready for the model: checked, cut by rows, held out.

    rows 0 .. share -> batches,    rows share .. limit -> held_out

Axes: b batch.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from collabify.data.base import (
    Batch,
    calibration_share,
    max_positions,
    model_kind,
    num_samples,
    wanted,
)
from collabify.data.images import check_pixels
from collabify.errors import OptionError


def take_batches(
    items: Iterable[Any], name: str, config: Any, samples: int
) -> tuple[tuple[Batch, ...], tuple[Batch, ...]]:
    """Batches to calibrate on and to hold out, as they come, cut where enough samples are read.

    Parameters
    ----------
    items
        Mappings of tensors; read no further than needed.
    name
        For errors.
    config
        The config of the model that reads them.
    samples
        How many rows to calibrate on.

    Raises
    ------
    OptionError
        Where a batch is not the model's input, or there are fewer than two samples.
    CheckpointError
        Where the pixel values have another shape than the model takes.
    """
    limit, bound = wanted(samples), max_positions(config)
    found: list[Batch] = []
    count = 0
    for index, item in enumerate(items):
        place = f"Batch {index} of {name}"
        batch = _checked(item, place, config)
        if "pixel_values" in batch:
            check_pixels(batch["pixel_values"], config)
        elif bound is not None and batch["input_ids"].shape[1] > bound:
            raise OptionError(
                f"{place} has {batch['input_ids'].shape[1]} positions; {config.model_type!r} takes "
                f"at most {bound}. Truncate it."
            )
        found.append(batch)
        count += num_samples([batch])
        if count >= limit:
            break
    share = calibration_share(min(count, limit), samples, name)
    return tuple(_rows(found, 0, share)), tuple(_rows(found, share, limit))


def _rows(batches: list[Batch], start: int, stop: int) -> Iterator[Batch]:
    """Rows ``start`` to ``stop``, counted over all batches; their own memory is not copied."""
    passed = 0
    for batch in batches:
        rows = num_samples([batch])
        first, last = max(start - passed, 0), min(stop - passed, rows)
        if first < last:
            yield {key: value[first:last] for key, value in batch.items()}
        passed += rows


def _checked(batch: object, place: str, config: Any) -> Batch:
    """A ready batch on the CPU, without labels and with a mask.

    Raises
    ------
    OptionError
        Where it is not a mapping of tensors with a row a sample, or lacks the model's input.
    """
    needed = "pixel_values" if model_kind(config) == "image" else "input_ids"
    if not isinstance(batch, Mapping) or needed not in batch:
        got = ", ".join(map(str, batch)) if isinstance(batch, Mapping) else type(batch).__name__
        raise OptionError(
            f"{place} holds {got}; it must be a dict with {needed!r} for {config.model_type!r}. "
            "Give the model's inputs."
        )
    rows = len(batch[needed])
    inputs = {key: value for key, value in batch.items() if key not in ("label", "labels")}
    for key, value in inputs.items():
        if not isinstance(value, Tensor) or value.ndim < 2 or len(value) != rows:
            raise OptionError(
                f"{key!r} of {place} must be a tensor with {rows} rows, a sample each, and is "
                f"{_shape(value)}. Use return_tensors='pt', and only what the model takes."
            )
    ready = {key: value.detach().to("cpu") for key, value in inputs.items()}
    if needed == "input_ids" and "attention_mask" not in ready:
        ready["attention_mask"] = torch.ones_like(ready["input_ids"])
    return ready


def _shape(value: object) -> str:
    if isinstance(value, Tensor):
        return f"of shape {tuple(value.shape)}"
    return f"a {type(value).__name__}"
