"""What the commands share: options, errors as one line, tables and progress.

Standard output carries results (with ``--json`` the JSON and nothing else); progress, warnings and
errors go to standard error. Exit codes: 0 done, 1 an error told in one line, 2 usage, 130
interrupted.
"""

import functools
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, ParamSpec, TypeVar

import typer

from collabify.errors import CollabifyError, CollabifyWarning, OptionError

if TYPE_CHECKING:
    from collabify.recording import Place, Report
    from collabify.storage import Source

P = ParamSpec("P")
T = TypeVar("T")

Model = Annotated[
    str, typer.Argument(metavar="MODEL", help="A folder, a Hub id, or 'demo'.", show_default=False)
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON on standard output, nothing else.")]
Device = Annotated[
    str | None,
    typer.Option(metavar="DEVICE", help="Where to compute: cpu, cuda, cuda:1, mps. (default: cpu)"),
]
Revision = Annotated[
    str | None,
    typer.Option(metavar="R", help="Of MODEL on the Hub: a branch, tag or commit. (default: main)"),
]
Layers = Annotated[
    list[int] | None,
    typer.Option("--layer", metavar="N ...", help="Only these layers, from 0. (default: all)"),
]

Calibration = Annotated[
    str,
    typer.Option(
        metavar="SOURCE",
        help="What the layers see: a text file, a folder of images, a data set "
        "(NAME[:CONFIG[:SPLIT[:COLUMN]]]), 'synthetic' (no data needed) or 'none' (weights only).",
    ),
]
Baseline = Annotated[
    str | None,
    typer.Option(metavar="MODEL", help="What MODEL is compared with, on the same examples."),
]
BatchSize = Annotated[int, typer.Option(metavar="B", help="Examples at once.")]
Limit = Annotated[
    int | None,
    typer.Option(metavar="N", help="Examples at most, drawn at random. (default: all)"),
]
Resamples = Annotated[
    int, typer.Option(metavar="N", help="Of the bootstrap behind the 95 % intervals.")
]
Seed = Annotated[int, typer.Option(metavar="S", help="For all that is drawn at random.")]
Record = Annotated[
    bool,
    typer.Option(
        "--record", help="Add the result to MODEL's collabify.json: for its card, and for info."
    ),
]
Samples = Annotated[int, typer.Option(metavar="N", help="Calibration samples.")]
MaxLength = Annotated[int, typer.Option(metavar="T", help="Tokens of a text at most.")]

_SEVERAL = ("--layer", "--energy")
_SEVERAL_TO_BENCH = ("--batch-size", "--length")  # other commands take one batch size


class DtypeName(StrEnum):
    """Choices of ``--dtype``."""

    AUTO = "auto"
    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"


def spread(arguments: Sequence[str]) -> list[str]:
    """Let a repeatable option take several numbers: ``--layer 0 1`` is ``--layer 0 --layer 1``.

    So is ``--layer=0 1``.
    """
    several = _SEVERAL + (_SEVERAL_TO_BENCH if list(arguments[:1]) == ["bench"] else ())
    spread_out: list[str] = []
    current: str | None = None
    for argument in arguments:
        if current is not None and spread_out[-1] != current:
            if _is_number(argument):
                spread_out.append(current)
            else:
                current = None
        if argument.partition("=")[0] in several:
            current = argument.partition("=")[0]
        spread_out.append(argument)
    return spread_out


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def reported(command: Callable[P, T]) -> Callable[P, T]:
    """Tell errors of the user's world in one line and exit with 1; after Ctrl-C exit with 130."""

    @functools.wraps(command)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> T:
        warnings.filterwarnings("ignore")
        warnings.filterwarnings("always", category=CollabifyWarning)
        warnings.showwarning = _show_warning  # type: ignore[assignment]
        try:
            return command(*args, **kwargs)
        except CollabifyError as error:
            typer.echo(f"Error: {error}", err=True)
            raise typer.Exit(2 if isinstance(error, OptionError) else 1) from None
        except KeyboardInterrupt:
            typer.echo("Interrupted; nothing was written.", err=True)
            raise typer.Exit(130) from None

    return wrapper


def record_each(measured: "Sequence[tuple[Place, Report]]", *, quiet: bool) -> None:
    """Record reports that were printed already; where one cannot be, the others still are.

    Parameters
    ----------
    measured
        Where to, and what.
    quiet
        Do not say where it was recorded.
    """
    from collabify.recording import record

    failed = False
    for place, report in measured:
        try:
            path = record(place, report)
        except CollabifyError as error:
            typer.echo(f"Error: {error}", err=True)
            failed = True
        else:
            if not quiet:
                typer.echo(f"Recorded in {path}.")
    if failed:
        raise typer.Exit(1)


def _show_warning(message: Warning | str, *_: Any) -> None:
    typer.echo(f"Warning: {message}", err=True)


def load_model(
    name: str,
    dtype: str,
    device: str | None,
    revision: str | None = None,
    *,
    strict: bool = False,
) -> tuple[Any, "Source"]:
    """Load with transformers' own chatter off."""
    from collabify.storage import load, quiet

    quiet()
    return load(name, dtype=dtype, device=device, revision=revision, strict=strict)


def check_revision(name: str, revision: str | None) -> None:
    """Refuse a revision of what is not on the Hub, before anything takes time."""
    from collabify.storage import check_revision as check

    check(name, revision)


def print_table(heads: Sequence[str], rows: Sequence[Sequence[str]], *, text: int = 1) -> None:
    """A table on standard output; columns from ``text`` on are right-aligned."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for number, head in enumerate(heads):
        is_text = number < text
        # Where a terminal is too narrow, it is the last text column that wraps.
        wraps = number == text - 1 and number > 0
        table.add_column(head, justify="left" if is_text else "right", no_wrap=not wraps)
    for row in rows:
        table.add_row(*row)
    Console(highlight=False, width=_width()).print(table)


def print_scores(heads: list[str], rows: list[list[str]]) -> None:
    """A table with a column for each score, or a row for each where it is too wide for that."""
    from collabify.scoreboard import transposed, width

    table = (heads, rows)
    print_table(*(table if width(table) <= _width() else transposed(table)))


def _width() -> int:
    """Characters in a line."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else 160


@contextmanager
def progress_bar(*, quiet: bool) -> Iterator[Callable[[str, int, int, str], None]]:
    """Bars on standard error, one a stage; off when that is no terminal or ``quiet``.

    Yields
    ------
    show
        ``(stage, done, total, note)``: how far a stage is, and a few words on it.
    """
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        Task,
        TextColumn,
        TimeRemainingColumn,
    )
    from rich.text import Text

    class Rate(TextColumn):
        """How many are done in a second."""

        def render(self, task: Task) -> Text:
            return Text("" if task.speed is None else f"{task.speed:.1f}/s")

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        Rate(""),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    hidden = quiet or not sys.stderr.isatty()
    with Progress(*columns, console=Console(stderr=True), disable=hidden, transient=True) as bar:
        tasks: dict[str, Any] = {}

        def show(stage: str, done: int, total: int, note: str) -> None:
            if stage not in tasks:
                tasks[stage] = bar.add_task(stage, note="")
            bar.update(tasks[stage], completed=done, total=total, note=note)

        yield show
