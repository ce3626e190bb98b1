"""What a record says in public: folders of somebody's machine go by their names only."""

import re
from collections.abc import Iterator
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_ROOT = re.compile(r"(~|\.{1,2}|[A-Za-z]:)?[/\\]")
# From where a path begins to its last separator; paths may have spaces.
_FOLDERS = re.compile(r"(?:^|(?<=[\s'\"(]))(?:~|\.{1,2}|[A-Za-z]:)?[/\\](?:.*[/\\])?")
_DEMO = "demo"


def is_hub_id(name: object) -> bool:
    """Whether a recorded source is the name of a repository, and no folder."""
    return isinstance(name, str) and name != _DEMO and _HUB_ID.fullmatch(name) is not None


def public(record: Any) -> Any:
    """The same record without the folders of the machine that it was made on.

    A path alone becomes ``./NAME``, so that it is never taken for a repository; within a sentence
    it becomes ``NAME``.
    """
    known = {
        suffix: parts[-1]
        for path in _paths(record)
        for parts in [_parts(path)]
        for suffix in _suffixes(parts)
    }
    return _cleaned(record, dict(sorted(known.items(), key=lambda item: -len(item[0]))))


def _cleaned(record: Any, known: dict[str, str]) -> Any:
    if isinstance(record, dict):
        return {key: _cleaned(value, known) for key, value in record.items()}
    if isinstance(record, list | tuple):
        return [_cleaned(value, known) for value in record]
    if not isinstance(record, str):
        return record
    if _is_path(record):
        return f"./{_parts(record)[-1]}"
    for suffix, name in known.items():
        record = record.replace(suffix, name)
    return _FOLDERS.sub("", record)


def _paths(record: Any) -> Iterator[str]:
    """Every string that is a path and nothing else."""
    if isinstance(record, dict):
        record = list(record.values())
    if isinstance(record, list | tuple):
        for value in record:
            yield from _paths(value)
    elif isinstance(record, str) and _is_path(record):
        yield record


def _is_path(text: str) -> bool:
    return _ROOT.match(text) is not None and bool(_parts(text))


def _parts(path: str) -> tuple[str, ...]:
    """Names of folders and of the file, without the root."""
    pure = PureWindowsPath(path) if "\\" in path else PurePosixPath(path)
    return tuple(part for part in pure.parts if part not in (pure.anchor, "~", ".", ".."))


def _suffixes(parts: tuple[str, ...]) -> Iterator[str]:
    """The path as it is written from folders on the way to it."""
    for start in range(len(parts) - 1):
        yield "/".join(parts[start:])
