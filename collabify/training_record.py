"""The frozen record of a fine-tuning: what was trained, on what, and how well it did."""

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from collabify.results import finite


@dataclass(frozen=True)
class FinetuneReport:
    """What a fine-tuning did.

    Parameters
    ----------
    task
        The task's name, or ``image-classification``.
    data, fingerprint
        Where the examples came from, and the fingerprint that ``datasets`` gives the training
        split.
    scores
        One record an epoch, in order: its number, the mean loss of training since the one before,
        and the metrics on each evaluation split.
    labels
        The labels' names in the order of the head's outputs; none for a regression.
    new_head
        Why a new head was made, or ``None`` where the model's own was trained on.
    new_parameters
        Names of what the checkpoint did not have and was drawn at random before training.
    examples, evaluated
        Examples trained on in each epoch, and examples scored after it.
    steps, parameters
        Optimizer steps, and numbers trained.
    options
        Everything that was asked for.
    source, revision, teacher
        The model, its commit where it came from the Hub, and the model whose outputs it was taught,
        or ``None``.
    converted
        Whether it was converted when it was trained, so that the scores are of a converted model.
    resumed_at
        The step where an interrupted run was taken up, or ``None``.
    seconds
        Wall time of this run.
    versions
        Of collabify and the packages that numbers depend on.
    """

    task: str
    data: str
    fingerprint: str
    scores: tuple[dict[str, Any], ...]
    labels: tuple[str, ...]
    new_head: str | None
    new_parameters: tuple[str, ...]
    examples: int
    evaluated: int
    steps: int
    parameters: int
    options: dict[str, Any] = field(default_factory=dict)
    source: str | None = None
    revision: str | None = None
    converted: bool = False
    teacher: str | None = None
    resumed_at: int | None = None
    seconds: float = 0.0
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def seed(self) -> int:
        """Of the new head, the order of the examples and dropout."""
        return int(self.options["seed"])

    def to_dict(self) -> dict[str, Any]:
        """As ``collabify.json`` holds it under ``finetuning``."""
        return asdict(self) | {"seed": self.seed}

    def to_json(self) -> str:
        """:meth:`to_dict`, indented."""
        return json.dumps(finite(self.to_dict()), indent=2, allow_nan=False)
