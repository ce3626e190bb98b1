"""What is recorded of a model beside its weights: ``collabify.json``, and its origin's card.

DIR/collabify.json = "version", the conversion's report, "healing", "finetuning", "base": the
origin's card, and what was measured of these very weights: "evaluations", "latency"
"""

import json
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import metadata_load

from collabify.errors import CheckpointError, CollabifyWarning, HubError, first_line
from collabify.hub import CARD_FILE, RECORD_FILE, download
from collabify.modelcard import CARRIED
from collabify.storage.reading import read_object
from collabify.storage.shape import VERSION, check_shape
from collabify.storage.source import Source


def read_record(source: Source) -> dict[str, Any]:
    """What a model's ``collabify.json`` says; nothing where there is none.

    Raises
    ------
    CheckpointError
        Where it cannot be read, or was made by a newer collabify.

    Warns
    -----
    CollabifyWarning
        Where the Hub does not say whether there is one.
    """
    try:
        path = _file(source, RECORD_FILE)
    except HubError as error:
        _warn(f"What was recorded of {source.name!r} is not known: {error}")
        return {}
    if path is None:
        return {}
    try:
        found = read_object(path)
        version = found.get("version")
        if type(version) is not int:
            raise ValueError(f"version={version!r} must be {VERSION}")
        if version > VERSION:
            raise CheckpointError(
                f"{str(path)!r} was made by a newer collabify (version={version}; this one reads "
                f"{VERSION}). Upgrade collabify."
            )
        if version < VERSION:
            raise ValueError(f"version={version!r} must be {VERSION}")
        check_shape(found)
    except CheckpointError:
        raise
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{str(path)!r} cannot be read ({first_line(error)}). Put it right or delete it."
        ) from error
    return found


MEASURED = ("evaluations", "latency")  # of the weights as they are: others do not inherit it


def write_record(folder: Path, record: Mapping[str, Any]) -> None:
    """Write ``collabify.json``, whole or not at all."""
    new = folder / f".{RECORD_FILE}-{os.getpid()}"
    try:
        versioned = {"version": VERSION, **record}
        new.write_text(json.dumps(versioned, indent=2) + "\n", encoding="utf-8")
        new.replace(folder / RECORD_FILE)
    finally:
        new.unlink(missing_ok=True)


def unmeasured(record: Mapping[str, Any]) -> dict[str, Any]:
    """A record for other weights: without what was measured of these."""
    return {name: value for name, value in record.items() if name not in MEASURED}


def inherited(source: Source | None) -> dict[str, Any]:
    """What a model made of ``source`` keeps of its record: its fine-tuning, and its origin's card.

    Raises
    ------
    CheckpointError
        As :func:`read_record`.
    """
    if source is None:
        return {}
    before = read_record(source)
    base = before.get("base") or _card(source)
    kept = {"finetuning": before.get("finetuning"), "base": base}
    return {name: value for name, value in kept.items() if value}


def _card(source: Source) -> dict[str, Any]:
    """What the card of a model says that holds for what is made of it; nothing without one."""
    try:
        path = _file(source, CARD_FILE)
    except HubError as error:
        _warn(f"Licence, language and data sets of {source.name!r} are not carried over: {error}")
        return {}
    try:
        found = None if path is None else metadata_load(path)
    except (OSError, ValueError):
        return {}  # a card that cannot be read is none
    return {key: found[key] for key in CARRIED if found and _is_plain(found.get(key))}


def _warn(message: str) -> None:
    warnings.warn(message, CollabifyWarning, stacklevel=4)


def _is_plain(value: Any) -> bool:
    return isinstance(value, str) or (
        isinstance(value, list) and all(isinstance(each, str) for each in value)
    )


def _file(source: Source, name: str) -> Path | None:
    """One small file of a model, wherever it is."""
    if not source.is_folder:
        return download(source.location, name, source.revision)
    path = Path(source.location) / name
    return path if path.is_file() else None
