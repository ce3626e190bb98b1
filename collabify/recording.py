"""What was measured of a model, put into its own record, ``collabify.json``, for card and info.

    "evaluations": [{"kind": "glue", "task": "rte", "data": ..., "scores": [...], ...}, ...]
    "latency":     [{"kind": "bench", "machine": {...}, "dtype": ..., "latencies": [...], ...}, ...]

A new entry takes the place of the earlier ones of the same thing that say no more than it does.
Whatever makes other weights (convert, heal, finetune) does not take the entries along, see
:func:`collabify.storage.unmeasured`; each holds a digest of the weights that it is of.
"""

import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock

from collabify.data.glue import HUB
from collabify.errors import CheckpointError, OptionError, OutputError, first_line
from collabify.results import finite
from collabify.scores import DriftScores, GlueScores, ImageScores
from collabify.speeds import BenchReport
from collabify.storage import (
    REPORT_FILE,
    Source,
    cached_repository,
    headers,
    locate,
    of_these_weights,
    read_record,
    resolved,
    weights_digest,
    write_record,
)

Report = GlueScores | ImageScores | DriftScores | BenchReport


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
        Where it is no folder, is in the Hub's cache, or has no record.
    CheckpointError
        Where its record or weights cannot be read.
    OutputError
        Where nothing can be written there.
    """
    folder = Path(name)
    if not folder.is_dir():
        raise OptionError(
            f"MODEL={name!r} must be a folder for --record, to write to. Download it (hf download) "
            "or convert it (collabify convert), and give the folder."
        )
    cached = cached_repository(folder)
    if cached is not None:
        raise OptionError(
            f"MODEL={name!r} is in the Hub's cache, where what is recorded would pass for what is "
            f"on the Hub. Copy it first: hf download {cached} --local-dir DIR"
        )
    source = locate(name)
    if not read_record(source):
        raise OptionError(
            f"MODEL={name!r} has no {REPORT_FILE} to record in: collabify neither converted nor "
            "fine-tuned it. Leave out --record."
        )
    if not os.access(folder, os.W_OK):
        raise OutputError(
            f"{str(folder / REPORT_FILE)!r} could not be written (no right to write there). "
            "Copy the model, or leave out --record."
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
    _check_unchanged(place, source)
    try:
        digest = weights_digest(place.folder, headers(source).files)
        with FileLock(place.folder / f".{REPORT_FILE}.lock"):
            _check_unchanged(place, source)
            for left in place.folder.glob(f".{REPORT_FILE}-*"):
                left.unlink()  # of a process that was killed: no other writes now
            before, _ = of_these_weights(read_record(source), digest)
            write_record(place.folder, _joined(before, report, digest))
    except OSError as error:
        raise OutputError(
            f"{str(place.folder / REPORT_FILE)!r} could not be written "
            f"({error.strerror or first_line(error)}). Free space, or leave out --record."
        ) from error
    return place.folder / REPORT_FILE


def _check_unchanged(place: Place, source: Source) -> None:
    try:
        unchanged = _state(source) == place.state
    except OSError:
        unchanged = False
    if not unchanged or not read_record(source):
        raise CheckpointError(
            f"{str(place.folder)!r} was changed while it was measured, so that nothing was "
            "recorded. Run the command again."
        )


def _joined(before: Mapping[str, Any], report: Report, digest: str) -> dict[str, Any]:
    """A record with the entries of a report, and of the earlier ones those that say more."""
    name = "latency" if isinstance(report, BenchReport) else "evaluations"
    new = [entry | {"weights": digest} for entry in finite(_entries(report))]
    earlier = before.get(name) or ()
    kept = [old for old in earlier if not any(_replaces(each, old) for each in new)]
    return {**before, name: [*kept, *new]}


def _replaces(new: Mapping[str, Any], old: Mapping[str, Any]) -> bool:
    """Whether both are of the same thing, and the new one says at least as much of it."""
    return (
        _thing(new) == _thing(old)
        and _against(old) in (None, _against(new))
        and _extent(old) <= _extent(new)
    )


def _thing(entry: Mapping[str, Any]) -> list[Any]:
    """What was measured, and where."""
    if entry.get("kind") == "bench":
        return [entry["machine"], entry["dtype"], entry["attention"]]
    data = _options(entry).get("data") or entry["data"]
    return [entry.get("kind"), entry.get("task"), data, entry.get("split")]


def _against(entry: Mapping[str, Any]) -> str | None:
    """What it is compared with: nothing, or a model, which may be nameless."""
    scores = entry.get("scores") or ()
    compared = entry.get("kind") == "drift" or entry.get("baseline_size") is not None
    compared = compared or any(score["baseline"] is not None for score in scores)
    return entry.get("baseline") or ("" if compared else None)


def _extent(entry: Mapping[str, Any]) -> Any:
    """How much was run, as ``<=`` compares it: shapes, samples, or examples, of which all is most.

    A few examples drawn from many never stand for all of them.
    """
    if entry.get("kind") == "bench":
        return {(each["batch_size"], each["length"]) for each in entry["latencies"]}
    if entry.get("kind") == "drift":
        return entry["samples"]
    limit = _options(entry).get("limit")
    return math.inf if limit is None else limit


def _options(entry: Mapping[str, Any]) -> Mapping[str, Any]:
    return entry.get("options") or {}


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
        if entry["kind"] == "drift":
            _resolve_within(entry)
        elif "data" in entry:
            entry["data"] = resolved(entry["data"])
    return found


def _resolve_within(entry: dict[str, Any]) -> None:
    """Resolve the data of a drift, also in the sentence that says how many of which were read."""
    named = entry["options"]["data"]
    if named is not None:
        found = str(resolved(named))
        path, place = named.partition(":")[0], found.partition(":")[0]
        entry["data"] = entry["data"].replace(f" of {path}", f" of {place}")
        entry["options"]["data"] = found
