"""Labelled examples to train on and to score, of a task or of a data set of images.

name -> splits, labels, fingerprint -> (once the model is there) inputs and metrics
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from sklearn.metrics import accuracy_score, top_k_accuracy_score
from torch.utils.data import Dataset
from transformers import DataCollatorWithPadding, default_data_collator

from collabify.data.classes import ImageClasses, load_images, read_picture
from collabify.data.glue import HUB, Task, encode, find_task, load_task
from collabify.data.images import Encoder, check_pixels, load_image_encoder
from collabify.data.splits import sample
from collabify.data.text import load_tokenizer
from collabify.errors import OptionError
from collabify.finetuning.heads import Headed, warn
from collabify.metrics import compute, load_metric

TOP = 5
TRAIN = "train"

Measure = Callable[[Any], dict[str, float]]  # of transformers' EvalPrediction


@dataclass(frozen=True, eq=False)
class Encoded:
    """What the Trainer reads.

    Parameters
    ----------
    train
        Model inputs with ``labels``, one an example.
    evaluation
        The same of every split that is scored.
    collate
        Examples to a batch.
    """

    train: Any
    evaluation: dict[str, Any]
    collate: Any


@dataclass(frozen=True, eq=False)
class Examples(ABC):
    """Rows, not yet encoded.

    Parameters
    ----------
    task, place
        What the report and what errors call it.
    description
        Where the rows came from.
    train
        Rows to train on.
    evaluation
        Rows to score, by split.
    labels
        Their names in the data's order; ``None``: numbers.
    """

    task: str
    place: str
    description: str
    train: Any
    evaluation: Mapping[str, Any]
    labels: tuple[str, ...] | None

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """Of the training rows, as ``datasets`` gives it."""

    @abstractmethod
    def encode(self, headed: Headed, processor: str, max_length: int) -> Encoded:
        """Inputs of a model, its processor loaded from a folder or the Hub."""

    @abstractmethod
    def measure(self, order: Sequence[int]) -> Measure:
        """The metrics, for a head whose outputs stand in ``order`` for the labels."""


class TaskExamples(Examples):
    """Rows of a GLUE task."""

    @property
    def fingerprint(self) -> str:
        """Of the training rows."""
        return str(self.train._fingerprint)

    def encode(self, headed: Headed, processor: str, max_length: int) -> Encoded:
        """Token ids, padded batch by batch."""
        config = headed.model.config
        tokenizer = load_tokenizer(processor, config)

        def features(rows: Any) -> list[dict[str, Any]]:
            return encode(
                rows, self.task, tokenizer, config, max_length=max_length, order=headed.order
            )

        # The order changes no metric, and batches of one length are padded least.
        scored = {
            split: sorted(features(rows), key=lambda each: -len(each["input_ids"]))
            for split, rows in self.evaluation.items()
        }
        return Encoded(features(self.train), scored, DataCollatorWithPadding(tokenizer))

    def measure(self, order: Sequence[int]) -> Measure:
        """GLUE's own metrics."""
        metric, _ = load_metric(self.task)

        def measured(found: Any) -> dict[str, float]:
            if not order:
                return compute(metric, found.predictions[:, 0].tolist(), found.label_ids.tolist())
            predictions = found.predictions[:, list(order)].argmax(-1).tolist()
            return compute(metric, predictions, [order.index(k) for k in found.label_ids.tolist()])

        return measured


class _Pictures(Dataset[dict[str, Any]]):
    """Images, read and encoded when they are asked for."""

    def __init__(self, images: ImageClasses, encode: Encoder, headed: Headed) -> None:
        self.images, self.encode, self.config = images, encode, headed.model.config
        self.labels = [headed.order[label] for label in images.rows[images.label]]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, row: int) -> dict[str, Any]:
        pixels = torch.as_tensor(self.encode([read_picture(self.images, row)])).float()
        check_pixels(pixels, self.config)
        return {"pixel_values": pixels[0], "labels": self.labels[row]}


class ImageExamples(Examples):
    """Labelled images."""

    @property
    def fingerprint(self) -> str:
        """Of the training rows."""
        return str(self.train.rows._fingerprint)

    def encode(self, headed: Headed, processor: str, max_length: int) -> Encoded:
        """Pixels as the model's image processor makes them, image by image."""
        encoder, note = load_image_encoder(processor, headed.model.config)
        if note:
            warn(f"Images are prepared for {processor!r} as best one can{note}.")
        scored = {
            split: _Pictures(images, encoder, headed) for split, images in self.evaluation.items()
        }
        return Encoded(_Pictures(self.train, encoder, headed), scored, default_data_collator)

    def measure(self, order: Sequence[int]) -> Measure:
        """How often the label is the first guess, and among the first five."""

        def measured(found: Any) -> dict[str, float]:
            logits, labels = found.predictions, found.label_ids
            scores = {"accuracy": float(accuracy_score(labels, logits.argmax(-1)))}
            outputs = range(logits.shape[-1])
            if len(outputs) > TOP:
                top = top_k_accuracy_score(labels, logits, k=TOP, labels=outputs)
                scores[f"top_{TOP}_accuracy"] = float(top)
            return scores

        return measured


def open_task(name: str, data: str | None, limit: int | None, seed: int) -> Examples:
    """The rows of a GLUE task.

    Parameters
    ----------
    name, data
        As for :func:`collabify.data.glue.load_task`.
    limit, seed
        Rows of a split at most, drawn at random.

    Raises
    ------
    OptionError
        Where there is no such task, data, split or column.
    LabelError
        Where labels are none of the task's.
    """
    task: Task = find_task(name)
    train, *scored = (
        sample(load_task(task, data, split), limit, seed)
        for split in (task.train, *task.validation)
    )
    return TaskExamples(
        task=task.name,
        place=f"task {task.name!r}",
        description=f"{data or HUB}:{task.name}:{task.train}",
        train=train,
        evaluation=dict(zip(task.validation, scored, strict=True)),
        labels=task.label_names,
    )


def open_images(
    source: str, split: str | None, eval_split: str | None, limit: int | None, seed: int
) -> Examples:
    """Labelled images.

    Parameters
    ----------
    source
        As for :func:`collabify.data.classes.load_images`.
    split, eval_split
        To train on (``train``) and to score (the first there is of validation and test).
    limit, seed
        Images of a split at most, drawn at random.

    Raises
    ------
    OptionError
        Where there is no such data set, split or column.
    LabelError
        Where a label is hidden or out of range.
    """
    train, scored = load_images(source, split or TRAIN), load_images(source, eval_split)
    if _overlap(train.split, scored.split):
        raise OptionError(
            f"image_data={source!r} would be scored on what it was trained on, {train.split!r}"
            f"{'' if train.split == scored.split else f' and {scored.split!r}'}. "
            f"Name other splits or slices: --split '{TRAIN}[:80%]' --eval-split '{TRAIN}[80%:]'"
        )
    train, scored = (replace(i, rows=sample(i.rows, limit, seed)) for i in (train, scored))
    return ImageExamples(
        task="image-classification",
        place=f"{source!r}",
        description=f"{source}:{train.split}",
        train=train,
        evaluation={scored.split.partition("[")[0]: scored},
        labels=train.names,
    )


def _overlap(one: str, other: str) -> bool:
    """Whether two splits are one, or one is a slice of the other; two slices are as they were cut.

    A split may be a sum of others, ``train+validation[:50%]``.
    """
    return any(
        a == b or (a.partition("[")[0] == b.partition("[")[0] and not ("[" in a and "[" in b))
        for a in one.split("+")
        for b in other.split("+")
    )
