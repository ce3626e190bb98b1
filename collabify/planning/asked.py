"""What was asked for queries and keys; what no model could accept is refused here."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from collabify.config import Form
from collabify.errors import OptionError
from collabify.models import AttentionSite

Method = Literal["cp", "tucker", "head-svd", "talking-heads"]
Solver = Literal["factored", "tensorly"]
Projections = Literal["logits", "weights", "both"]
FORM_OF: dict[str, Form] = {
    "cp": "collaborative",
    "tucker": "tucker",
    "head-svd": "collaborative",
    "talking-heads": "talking-heads",
}


@dataclass(frozen=True)
class Asked(ABC):
    """What was asked for, as :func:`collabify.convert` documents it.

    Whether layers can be made so depends on them, and a subclass says it.

    Raises
    ------
    OptionError
        Where no model could accept it.
    """

    dk: int | None
    kept: float | None
    error: float | None
    method: str
    head_rank: int | None
    channels: int | Literal["all"] | None
    solver: str
    iterations: int
    tolerance: float
    multiple: int
    base_heads: int | None = None
    base_width: int | None = None
    projections: str | None = None
    dynamic: bool = False
    value_heads: int | None = None
    values_alone: bool = False

    @abstractmethod
    def check(self, sites: Sequence[AttentionSite]) -> None:
        """Refuse sizes that do not fit the layers, before anything takes time.

        Raises
        ------
        RankError, OptionError
        """

    def __post_init__(self) -> None:
        sizes = {"dk": self.dk, "kept": self.kept, "error": self.error}
        given = [name for name, value in sizes.items() if value is not None]
        alone = self.values_alone and self.method != "tucker"
        optional = alone or self.method == "talking-heads"
        if len(given) > 1 or not (given or optional):
            raise OptionError(
                f"{' and '.join(given) or 'no size'} given, exactly one of --dk, --kept and "
                "--error must be. Say how small the model is to be in one way."
            )
        self._check_choices()
        self._check_numbers()

    def _check_choices(self) -> None:
        if self.method not in FORM_OF:
            raise OptionError(
                f"method={self.method!r} must be one of {', '.join(get_args(Method))}. "
                "Change --method."
            )
        if self.solver not in get_args(Solver):
            raise OptionError(
                f"solver={self.solver!r} must be one of {', '.join(get_args(Solver))}. "
                "Change --solver."
            )
        if self.head_rank is not None and self.method != "tucker":
            raise OptionError(
                f"head_rank={self.head_rank} goes with method='tucker' only, not {self.method!r}. "
                "Leave out --head-rank or use --method tucker."
            )
        if self._tensorly and self.method in ("head-svd", "talking-heads"):
            raise OptionError(
                f"solver='tensorly' has no method {self.method!r}. Leave out --solver."
            )
        for name, value in self._of_talking_heads().items():
            if value and self.method != "talking-heads":
                raise OptionError(
                    f"{name}={value} goes with method='talking-heads' only, not {self.method!r}. "
                    f"Leave out --{name.replace('_', '-')} or use --method talking-heads."
                )
        self._check_projections()
        few = self.method in ("tucker", "talking-heads") or self._tensorly
        if self.channels == "all" and self.method == "talking-heads":
            raise OptionError(
                "channels='all' goes with method='cp' or 'head-svd' only. Leave out --channels."
            )
        if isinstance(self.channels, int) and few:
            raise OptionError(
                f"channels={self.channels} goes with method='cp' or 'head-svd' "
                "and our solver only. Leave out --channels."
            )

    def _check_projections(self) -> None:
        choices = get_args(Projections)
        if self.projections not in (None, *choices):
            raise OptionError(
                f"projections={self.projections!r} must be one of {', '.join(choices)}. "
                "Change --projections."
            )
        if self.base_heads is not None and self.projections == "weights":
            raise OptionError(
                f"base_heads={self.base_heads} goes with a logits projection, and "
                "projections='weights' has none. Use --projections both."
            )
        if self.value_heads is not None and self.projections == "logits":
            raise OptionError(
                f"value_heads={self.value_heads} goes with a weights projection, and "
                "projections='logits' has none. Use --projections both."
            )

    def _of_talking_heads(self) -> dict[str, object]:
        return {
            "base_heads": self.base_heads,
            "base_width": self.base_width,
            "projections": self.projections,
            "dynamic": self.dynamic,
        }

    def _check_numbers(self) -> None:
        for name in ("base_heads", "base_width"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise OptionError(
                    f"{name}={value} must be at least 1. Raise --{name.replace('_', '-')}."
                )
        if isinstance(self.channels, int) and self.channels < 1:
            raise OptionError(f"channels={self.channels} must be at least 1. Raise --channels.")
        if isinstance(self.channels, str) and self.channels != "all":
            raise OptionError(
                f"channels={self.channels!r} must be a whole number or 'all'. Change --channels."
            )
        if self.iterations < 1:
            raise OptionError(
                f"iterations={self.iterations} must be at least 1. Raise --iterations."
            )
        if not 0 <= self.tolerance < 1:
            raise OptionError(
                f"tolerance={self.tolerance} must be at least 0 and below 1: it is a share of the "
                "error. Change --tol."
            )
        if self.multiple < 1:
            raise OptionError(f"round={self.multiple} must be at least 1. Raise --round.")
        if self.kept is not None and not 0 < self.kept <= 1:
            raise OptionError(
                f"kept={self.kept} must be above 0 and at most 1: it is a share of the query-key "
                "parameters. Write 0.5 for half."
            )
        if self.error is not None and not 0 < self.error < 1:
            raise OptionError(
                f"error={self.error} must be above 0 and below 1: it is a relative error. "
                "Change --error."
            )

    @property
    def _tensorly(self) -> bool:
        return self.solver == "tensorly"
