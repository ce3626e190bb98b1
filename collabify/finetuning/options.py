"""What a fine-tuning is asked to do, checked before anything is loaded."""

import math
from dataclasses import asdict, dataclass
from typing import Any

from collabify.errors import OptionError

ONLY = ("all", "attention")

# As people write them, and as transformers' own flags say it.
PRECISIONS = {
    "fp32": "fp32",
    "no": "fp32",
    "float32": "fp32",
    "fp16": "fp16",
    "float16": "fp16",
    "bf16": "bf16",
    "bfloat16": "bf16",
}


@dataclass(frozen=True)
class Options:
    """The numbers of one run; the defaults are those of the paper.

    Parameters
    ----------
    epochs
        Passes over the training split.
    learning_rate
        At the start; it falls to nothing in a straight line.
    batch_size
        Examples that a process reads in a step.
    max_length
        Tokens of an example at most.
    only
        ``attention``: what a conversion made, the head, and what the checkpoint did not have.
    alpha
        Share of the teacher in the loss, in [0, 1]; the labels have the rest.
    temperature
        Divides both models' logits, above 0.
    hidden_states
        Whether the hidden states follow the teacher's too.
    seed
        Of the new head, the order of the examples and dropout.
    limit
        Examples of every split at most.
    precision
        A key of ``PRECISIONS``; weights are in float32 whatever it is.
    """

    epochs: int = 3
    learning_rate: float = 2e-5
    batch_size: int = 32
    max_length: int = 128
    only: str = "all"
    alpha: float | None = None
    temperature: float | None = None
    hidden_states: bool = False
    seed: int = 0
    limit: int | None = None
    precision: str = "fp32"

    def check(self, *, teacher: bool) -> None:
        """Refuse what no run could use.

        Parameters
        ----------
        teacher
            Whether there is one.

        Raises
        ------
        OptionError
        """
        for name in ("epochs", "batch_size", "max_length", "limit"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise OptionError(f"{name}={value} must be at least 1. Raise {_flag(name)}.")
        for name in ("learning_rate", "temperature"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise OptionError(
                    f"{name}={value} must be above 0 and finite. Change {_flag(name)}."
                )
        if not 0 <= self.seed < 2**32:
            raise OptionError(f"seed={self.seed} must be in [0, 2^32). Change --seed.")
        if self.alpha is not None and not 0 <= self.alpha <= 1:
            raise OptionError(f"alpha={self.alpha} must be in [0, 1]. Change --alpha.")
        _one_of("only", self.only, ONLY)
        _one_of("precision", self.precision, PRECISIONS)
        asked = self.to_dict()
        given = [name for name in ("alpha", "temperature", "hidden_states") if name in asked]
        if given and not teacher:
            raise OptionError(
                f"{given[0]}={getattr(self, given[0])} says how to learn from a teacher, and there "
                f"is none. Name it: --teacher MODEL, or leave out {_flag(given[0])}."
            )

    def to_dict(self) -> dict[str, Any]:
        """As the report holds them; what was not asked for is left out."""
        asked = asdict(self).items()
        return {name: value for name, value in asked if value is not None and value is not False}


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _one_of(name: str, value: str, choices: Any) -> None:
    if value not in choices:
        raise OptionError(
            f"{name}={value!r} must be one of {', '.join(choices)}. Change {_flag(name)}."
        )
