"""Labelled examples to train on and to score, of a task or of a data set of images.

name -> splits, labels, fingerprint -> (once the model is there) inputs and metrics
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import DataCollatorWithPadding, EvalPrediction

from collabify.data.glue import HUB, Task, encode, find_task, load_task
from collabify.data.splits import sample
from collabify.data.text import load_tokenizer
from collabify.finetuning.heads import Headed
from collabify.metrics import compute, load_metric

Measure = Callable[[EvalPrediction], dict[str, float]]


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
        ``datasets.Dataset`` to train on.
    evaluation
        To score, by split.
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
    def fingerprint(self) -> str:
        """Of the training rows, as ``datasets`` gives it."""
        return str(self.train._fingerprint)

    @abstractmethod
    def encode(self, headed: Headed, processor: str, max_length: int) -> Encoded:
        """Inputs of a model, its processor loaded from a folder or the Hub."""

    @abstractmethod
    def measure(self, order: Sequence[int]) -> Measure:
        """The metrics, for a head whose outputs stand in ``order`` for the labels."""


class TaskExamples(Examples):
    """Rows of a GLUE task."""

    def encode(self, headed: Headed, processor: str, max_length: int) -> Encoded:
        """Token ids, padded batch by batch."""
        config = headed.model.config
        tokenizer = load_tokenizer(processor, config)

        def features(rows: Any) -> list[dict[str, Any]]:
            return encode(
                rows, self.task, tokenizer, config, max_length=max_length, order=headed.order
            )

        scored = {split: features(rows) for split, rows in self.evaluation.items()}
        return Encoded(features(self.train), scored, DataCollatorWithPadding(tokenizer))

    def measure(self, order: Sequence[int]) -> Measure:
        """GLUE's own metrics."""
        metric, _ = load_metric(self.task)

        def measured(found: EvalPrediction) -> dict[str, float]:
            if not order:
                return compute(metric, found.predictions[:, 0].tolist(), found.label_ids.tolist())
            predictions = found.predictions[:, list(order)].argmax(-1).tolist()
            return compute(metric, predictions, [order.index(k) for k in found.label_ids.tolist()])

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
