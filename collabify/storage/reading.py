"""JSON of a model's folder, which may be anybody's: what is odd is a ValueError, and no more.

read_object(path) -> {...}
"""

import json
from pathlib import Path
from typing import Any

_DEEPEST, _LARGEST = 64, 2**63


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object out of a file.

    Raises
    ------
    OSError
        Where the file cannot be read.
    ValueError
        Where it holds no JSON, no object, or one that is nested or has numbers beyond all reason.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(found, dict):
        raise ValueError("it holds no JSON object")
    level: list[Any] = [found]
    for _ in range(_DEEPEST):
        if any(type(each) is int and abs(each) >= _LARGEST for each in level):
            raise ValueError("it holds a number that is too large")
        inner = (
            each.values() if isinstance(each, dict) else each for each in level if _holds(each)
        )
        level = [value for values in inner for value in values]
        if not level:
            return found
    raise ValueError("it is nested too deeply")


def _holds(value: Any) -> bool:
    return isinstance(value, dict | list)
