"""Image classification: top-1 and top-5 accuracy, against a baseline's on the same images.

image -> RGB -> the model's image processor -> logits[:, order] -> is the class among the first k?
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from collabify.bootstrap import Array, Metric
from collabify.data.classes import ImageClasses, load_images, read_picture
from collabify.data.images import encode_images, load_image_encoder
from collabify.data.labels import check_named, label_order, nameless
from collabify.data.splits import sample
from collabify.evaluation.compare import check_draws, measure
from collabify.evaluation.heads import IMAGE, check_head
from collabify.evaluation.predict import Progress, predict
from collabify.scores import OWN_PROCESSOR, ImageScores
from collabify.storage import versions

FIVE = 5
Collate = Callable[[list[int]], Mapping[str, Tensor]]


def evaluate_image(
    model: Any,
    data: str,
    *,
    split: str | None = None,
    batch_size: int = 32,
    limit: int | None = None,
    baseline: Any = None,
    resamples: int = 1000,
    seed: int = 0,
    processor: object = None,
    progress: Progress | None = None,
) -> ImageScores:
    """Score an image classifier, with 95 % intervals.

    Parameters
    ----------
    model
        A transformers model that classifies images.
    data
        A Hub id (``NAME`` or ``NAME:CONFIG``), or a folder: a data set's, or one with a folder of
        images for each class.
    split
        By default the first that is there of validation, test and train.
    batch_size
        Images at once.
    limit
        Images at most, drawn at random.
    baseline
        What the model is compared with, on the same images.
    resamples
        Of the bootstrap behind the intervals.
    seed
        Of ``limit`` and of the bootstrap.
    processor
        Image processor, or where to load it; by default each model's own.
    progress
        ``(stage, done, total, note)``.

    Raises
    ------
    OptionError
        Where an option is out of bounds, or there is no such data, split or column.
    LabelError
        Where a model has no head, or one with other classes than the data.
    CheckpointError
        Where the image processor cannot be loaded or is another model's.
    NonFiniteError
        Where a model's output is NaN or infinite.
    """
    check_draws(resamples, seed)
    start = time.perf_counter()
    images = load_images(data, split)
    images = replace(images, rows=sample(images.rows, limit, seed))
    references = np.asarray(images.rows[images.label])
    prepared: dict[str, str] = {}

    def ranked(one: Any, who: str) -> Array:
        check_head(one, IMAGE, f"{data!r}", f"collabify finetune MODEL --image-data {data}")
        order = label_order(images.names, one.config, f"{data!r}")
        check_named(images.names, one.config, f"{data!r}")
        collate, prepared[who] = _collate(images, one, processor, batch_size)
        logits = predict(
            one,
            range(len(images.rows)),
            collate,
            batch_size=batch_size,
            stage=f"images, {who}",
            progress=progress,
        )
        return _ranks(logits[:, list(order)], references)

    found = {"model": ranked(model, "model")}
    if baseline is not None:
        found["baseline"] = ranked(baseline, "baseline")
    metrics = _metrics(len(images.names))
    values = {
        who: {name: float(metric(ranks, references)) for name, metric in metrics.items()}
        for who, ranks in found.items()
    }
    parts = measure(
        metrics,
        values["model"],
        found["model"],
        references,
        baseline_values=values.get("baseline"),
        baseline_predictions=found.get("baseline"),
        resamples=resamples,
        seed=[seed],
    )
    configs = {"model": model.config} | ({} if baseline is None else {"baseline": baseline.config})
    unnamed = nameless(images.names, configs)
    return ImageScores(
        data,
        images.split,
        len(images.rows),
        len(images.names),
        tuple(part.score for part in parts),
        "position" if unnamed else "names",
        getattr(model.config, "_name_or_path", None) or None,
        None if baseline is None else getattr(baseline.config, "_name_or_path", None) or None,
        {
            "batch_size": batch_size,
            "limit": limit,
            "resamples": resamples,
            "seed": seed,
            "preprocessing": prepared,
        },
        time.perf_counter() - start,
        versions(),
        unnamed,
    )


def _collate(
    images: ImageClasses, model: Any, processor: object, batch_size: int
) -> tuple[Collate, str]:
    """Row numbers to pixel values, read when their batch is due; and how they are prepared."""
    encode, note = load_image_encoder(processor, model.config)

    def collate(numbers: list[int]) -> Mapping[str, Tensor]:
        read = (read_picture(images, number) for number in numbers)
        pixels = encode_images(read, encode, model.config, batch_size=batch_size)
        return {"pixel_values": torch.stack(pixels)}

    return collate, note.strip(" ()") or OWN_PROCESSOR


def _ranks(logits: Tensor, references: Array) -> Array:
    """How many classes a model prefers to the right one; a tie counts against it."""
    truth = logits.gather(1, torch.from_numpy(references)[:, None])
    return np.asarray(((logits >= truth).sum(1) - 1).numpy())


def _metrics(classes: int) -> dict[str, Metric]:
    """Top-1, and top-5 where that says anything; predictions are ranks."""

    def within(k: int) -> Metric:
        return lambda ranks, references: np.asarray((ranks < k).mean(-1))

    return {f"top-{k}": within(k) for k in (1, FIVE) if k == 1 or k < classes}
