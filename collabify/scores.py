"""Frozen records of how well models do on labelled data; JSON, no tensors.

Scores are in their own units: shares in [0, 1], correlations in [-1, 1].
"""

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from collabify.results import finite

Interval = tuple[float, float]

OWN_PROCESSOR = "the model's image processor"


@dataclass(frozen=True)
class Score:
    """One number of a model, and of the one that it is compared with.

    Parameters
    ----------
    metric
        Its name.
    value
        The model's; NaN where it is undefined.
    interval
        95 % bootstrap interval of the value over the examples; ``None`` where it is undefined.
    baseline
        The other model's value, or ``None`` without one.
    difference
        ``value - baseline``, or ``None``.
    difference_interval
        95 % paired bootstrap interval of the difference, or ``None``.
    """

    metric: str
    value: float
    interval: Interval | None = None
    baseline: float | None = None
    difference: float | None = None
    difference_interval: Interval | None = None


@dataclass(frozen=True)
class TaskScores:
    """One task on one split.

    Parameters
    ----------
    task, split
        Which one.
    examples
        How many were read.
    scores
        In the order of the task's metrics.
    implementation
        Whose metrics: ``evaluate.load('glue')``, or ours where the Hub cannot be reached.
    label_order
        Where the order of the heads' labels comes from: ``names``, or ``position`` where one of
        them has generic names (or the task predicts a number).
    model, baseline
        The models.
    nameless
        Who has generic names where the order is ``position``: ``model``, ``baseline``, ``data``.
    """

    task: str
    split: str
    examples: int
    scores: tuple[Score, ...]
    implementation: str
    label_order: str
    model: str | None = None
    baseline: str | None = None
    nameless: tuple[str, ...] = ()

    @property
    def mean(self) -> float:
        """Of the scores."""
        return sum(score.value for score in self.scores) / len(self.scores)


@dataclass(frozen=True)
class Average:
    """A mean over tasks, and what it is a mean of.

    Parameters
    ----------
    score
        The numbers; their metric is ``mean of tasks`` or ``mean of the paper's numbers``.
    over
        What was averaged: tasks, or tasks with their metrics.
    out_of
        How many of them there would be in all.
    """

    score: Score
    over: tuple[str, ...]
    out_of: int


@dataclass(frozen=True)
class GlueScores:
    """The tasks of GLUE that were evaluated, in GLUE's order.

    Parameters
    ----------
    tasks
        One entry for each task and split.
    averages
        Over the tasks that are there; none where only one is.
    options
        Everything that was asked for.
    seconds
        Of wall time.
    versions
        Of collabify and the packages that numbers depend on.
    """

    tasks: tuple[TaskScores, ...]
    averages: tuple[Average, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    versions: dict[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """All of it."""
        return asdict(self)

    def to_json(self) -> str:
        """:meth:`to_dict`, indented."""
        return _json(self.to_dict())


@dataclass(frozen=True)
class ImageScores:
    """Image classification.

    Parameters
    ----------
    data, split
        What was read.
    examples, classes
        How many.
    scores
        ``top-1`` accuracy, and ``top-5`` where there are more than five classes.
    label_order
        As in :class:`TaskScores`.
    model, baseline
        The models.
    options, seconds, versions
        As in :class:`GlueScores`.
    nameless
        As in :class:`TaskScores`.
    """

    data: str
    split: str
    examples: int
    classes: int
    scores: tuple[Score, ...]
    label_order: str
    model: str | None = None
    baseline: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    versions: dict[str, str] = field(default_factory=dict)
    nameless: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """All of it."""
        return asdict(self)

    def to_json(self) -> str:
        """:meth:`to_dict`, indented."""
        return _json(self.to_dict())


@dataclass(frozen=True)
class DriftScores:
    """How far a model is from another one, without labels.

    Parameters
    ----------
    data, samples
        What both read.
    hidden_cosine, hidden_error, attention
        As in :class:`collabify.results.Drift`.
    agreement
        Share of predictions that are the same, in [0, 1]; ``None`` without a head that classifies.
    divergence
        Kullback-Leibler divergence of the model's predictions from the baseline's, mean, in nats;
        ``None`` likewise.
    predictions
        How many: samples, or real tokens where each token has one; 0 without such a head.
    model, baseline
        The models.
    options, seconds, versions
        As in :class:`GlueScores`.
    """

    data: str
    samples: int
    hidden_cosine: float
    hidden_error: float
    attention: float
    agreement: float | None
    divergence: float | None
    predictions: int
    model: str | None = None
    baseline: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    versions: dict[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """All of it."""
        return asdict(self)

    def to_json(self) -> str:
        """:meth:`to_dict`, indented."""
        return _json(self.to_dict())


def _json(record: dict[str, Any]) -> str:
    return json.dumps(finite(record), indent=2, allow_nan=False)
