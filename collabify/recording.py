"""What was measured of a model, put into its own record, ``collabify.json``, for card and info.

    "evaluations": [{"kind": "glue", "task": "rte", "data": ..., "scores": [...], ...}, ...]
    "latency":     [{"machine": {...}, "dtype": ..., "latencies": [...], ...}, ...]

The same thing measured again takes the place of the earlier entry. Whatever makes other weights
(convert, heal, finetune) does not take the entries along: see :func:`collabify.storage.unmeasured`.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from collabify.data.glue import HUB
from collabify.errors import CheckpointError, OptionError, OutputError, first_line
from collabify.results import finite
from collabify.scores import DriftScores, GlueScores, ImageScores
from collabify.speeds import BenchReport
from collabify.storage import (
    REPORT_FILE,
    Source,
    headers,
    locate,
    read_record,
    resolved,
    write_record,
)

Report = GlueScores | ImageScores | DriftScores | BenchReport

# What tells entries apart, besides their kind.
_SAME = {
    "evaluations": ("kind", "task", "data", "split"),
    "latency": ("machine", "dtype", "attention"),
}


@dataclass(frozen=True)
class Place:
    """A model's folder with a record, as it was before anything was measured.

    Parameters
    ----------
    folder
        Of the model.
    state
        Size and time of its weights and configuration.
    """

    folder: Path
    state: tuple[tuple[str, int, int, int], ...]


def recordable(name: str) -> Place:
    """Where to record what will be measured of a model; refuses before anything takes time.

    Parameters
    ----------
    name
        A folder with a converted or fine-tuned model.

    Raises
    ------
    OptionError
        Where it is no folder, or has no record.
    CheckpointError
        Where its record or weights cannot be read.
    """
    folder = Path(name)
    if not folder.is_dir():
        raise OptionError(
            f"MODEL={name!r} must be a folder for --record, to write to. Download it (hf download) "
            "or convert it (collabify convert), and give the folder."
        )
    source = locate(name)
    if not read_record(source):
        raise OptionError(
            f"MODEL={name!r} has no {REPORT_FILE} to record in: collabify neither converted nor "
            "fine-tuned it. Leave out --record."
        )
    return Place(folder.resolve(), _state(source))


def _state(source: Source) -> tuple[tuple[str, int, int, int], ...]:
    found = []
    for name in ("config.json", *headers(source).files):
        stat = (Path(source.location) / name).stat()
        found.append((name, stat.st_size, stat.st_mtime_ns, stat.st_ino))
    return tuple(found)


def record(place: Place, report: Report) -> Path:
    """Add a report to the record of the model that it is of.

    Parameters
    ----------
    place
        As :func:`recordable` gave it before the model was loaded.
    report
        Of that model alone.

    Returns
    -------
    path
        Of the record.

    Raises
    ------
    CheckpointError
        Where the folder holds another model by now.
    OutputError
        Where the record cannot be written.
    """
    source = Source(str(place.folder), str(place.folder))
    try:
        unchanged = _state(source) == place.state
    except OSError:
        unchanged = False
    before = read_record(source)
    if not unchanged or not before:
        raise CheckpointError(
            f"{str(place.folder)!r} was changed while it was measured, so that nothing was "
            "recorded. Run the command again."
        )
    name = "latency" if isinstance(report, BenchReport) else "evaluations"
    new = finite(_entries(report))
    kept = [old for old in before.get(name) or () if _key(name, old) not in _keys(name, new)]
    try:
        write_record(place.folder, {**before, name: [*kept, *new]})
    except OSError as error:
        raise OutputError(
            f"{str(place.folder / REPORT_FILE)!r} could not be written "
            f"({error.strerror or first_line(error)}). Free space, or leave out --record."
        ) from error
    return place.folder / REPORT_FILE


def _key(name: str, entry: Mapping[str, Any]) -> list[Any]:
    return [entry.get(field) for field in _SAME[name]]


def _keys(name: str, entries: list[dict[str, Any]]) -> list[list[Any]]:
    return [_key(name, entry) for entry in entries]


def _entries(report: Report) -> list[dict[str, Any]]:
    """Plain entries, without the model's own name and with paths that hold from anywhere."""
    if isinstance(report, GlueScores):
        where = {"data": report.options["data"] or HUB}
        options = {n: v for n, v in report.options.items() if n not in ("data", "split")}
        how = {"options": options, "versions": report.versions}
        found = [{"kind": "glue"} | asdict(each) | where | how for each in report.tasks]
    else:
        kinds = {ImageScores: "image", DriftScores: "drift", BenchReport: "bench"}
        found = [{"kind": kinds[type(report)]} | report.to_dict()]
    for entry in found:
        del entry["model"]
        entry["baseline"] = resolved(entry["baseline"])
        if "data" in entry:
            entry["data"] = resolved(entry["data"])
    return found
