"""How far a run of healing is, and the best that it found."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from collabify.healing.borrowing import put


class Best(NamedTuple):
    """The best step on held-out data, 0 for the start, and the parameters' values after it."""

    step: int
    loss: float
    values: Sequence[Tensor]


@dataclass
class Run:
    """What changes from step to step; what is saved so that a run can go on.

    Parameters
    ----------
    trained
        The parameters that are healed; ``start`` are their values before.
    steps, learning_rate, seed
        As :func:`collabify.heal` takes them.
    step
        Steps taken.
    torn
        Whether a change is half made, so that nothing may be saved.
    limit
        What the last layer's part of the loss may be at most: what it was at the start.
    curve
        Steps and the loss on held-out data after them.
    went_back
        The steps after which it went back to the best, since it had gone astray.
    resumed_at
        The step where an interrupted run was taken up, or ``None``.
    """

    trained: list[nn.Parameter]
    steps: int
    learning_rate: float
    seed: int
    step: int = 0
    torn: bool = False
    limit: float = float("inf")
    curve: list[tuple[int, float]] = field(default_factory=list)
    went_back: list[int] = field(default_factory=list)
    resumed_at: int | None = None

    def __post_init__(self) -> None:
        self.dtypes: list[torch.dtype] = [parameter.dtype for parameter in self.trained]
        self.start: list[Tensor] = [parameter.detach().clone() for parameter in self.trained]
        self.best = Best(0, float("inf"), self.start)

    def judge(self, loss: float, last: float) -> None:
        """Keep what the parameters are now if it is the best so far; NaN never is.

        The loss is of all layers, but the last one's part of it may not grow on the way: it is what
        the model gives.
        """
        if not self.curve:
            self.limit = last
        if loss < self.best.loss and last <= self.limit:
            now = (parameter.detach().clone() for parameter in self.trained)
            self.best = Best(self.step, loss, list(now) if self.step else self.start)
        self.curve.append((self.step, loss))

    @property
    def judged(self) -> int:
        """The last step that was judged; -1: none."""
        return self.curve[-1][0] if self.curve else -1

    @contextmanager
    def changing(self) -> Iterator[None]:
        """What is not to be saved half done; an interruption leaves it torn."""
        self.torn = True
        yield
        self.torn = False

    @property
    def is_best(self) -> bool:
        """Whether the parameters are the start's, or the best just gone back to."""
        return self.step in (0, *self.went_back[-1:])

    @property
    def astray(self) -> bool:
        """Whether the last loss of all layers is above the start's; NaN is."""
        return not self.curve[-1][1] <= self.curve[0][1]

    def restore(self) -> None:
        """Give the parameters the values that they had; nothing is better than the start."""
        put(self.start, self.trained)
        self.best = Best(0, self.curve[0][1], self.start)

    def state_dict(self) -> dict[str, Any]:
        """For accelerate; plain values and tensors."""
        return {
            "now": [parameter.detach() for parameter in self.trained],
            "step": self.step,
            "best": tuple(self.best),
            "limit": self.limit,
            "curve": self.curve,
            "went_back": self.went_back,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """For accelerate."""
        put(state["now"], self.trained)
        self.step = self.resumed_at = state["step"]
        self.best = Best(*state["best"])
        self.limit, self.curve = state["limit"], state["curve"]
        self.went_back = state["went_back"]
