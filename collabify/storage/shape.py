"""The shape of ``collabify.json``: what is read of it is there, and of the kind that it must be.

check_shape(record)

A check takes a value and where it stands, and yields what is wrong with it. What a record has
beyond this is left alone.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from collabify.modelcard import CARRIED

VERSION = 1  # of collabify.json, which write_record puts there

Check = Callable[[Any, str], Iterator[str]]


def check_shape(record: Mapping[str, Any]) -> None:
    """Refuse a record that cannot be told.

    Raises
    ------
    ValueError
        Saying what is wrong, and where.
    """
    for fault in _RECORD(record, ""):
        raise ValueError(fault)


def _is(kind: str, test: Callable[[Any], bool]) -> Check:
    def check(value: Any, where: str) -> Iterator[str]:
        if not test(value):
            yield f"{where} must be {kind}"

    return check


def _or_none(inner: Check) -> Check:
    def check(value: Any, where: str) -> Iterator[str]:
        if value is not None:
            yield from inner(value, where)

    return check


def _list(inner: Check, *, least: int = 0) -> Check:
    def check(value: Any, where: str) -> Iterator[str]:
        if not isinstance(value, list) or len(value) < least:
            yield f"{where} must be a list{' with something in it' * bool(least)}"
            return
        for index, one in enumerate(value):
            yield from inner(one, f"{where}[{index}]")

    return check


def _values(inner: Check) -> Check:
    """An object, whatever its names are."""

    def check(value: Any, where: str) -> Iterator[str]:
        if not isinstance(value, dict):
            yield f"{where} must be an object"
            return
        for name, one in value.items():
            yield from inner(one, f"{where}.{name}")

    return check


def _object(must: Mapping[str, Check], may: Mapping[str, Check] | None = None) -> Check:
    """What has to be there, and what may be absent or null."""

    def check(value: Any, where: str) -> Iterator[str]:
        if not isinstance(value, dict):
            yield f"{where} must be an object"
            return
        dot = f"{where}." if where else ""
        for name, inner in must.items():
            if name in value:
                yield from inner(value[name], dot + name)
            else:
                yield f"{dot}{name} is missing"
        for name, inner in (may or {}).items():
            yield from _or_none(inner)(value.get(name), dot + name)

    return check


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


_ANY = _is("anything", lambda value: True)
_TEXT = _is("text", lambda value: isinstance(value, str))
_FLAG = _is("true or false", lambda value: isinstance(value, bool))
_COUNT = _is("a whole number", lambda value: type(value) is int and value >= 0)
_SOME = _is("a whole number above 0", lambda value: type(value) is int and value > 0)
_NUMBER = _is("a number", _number)
_FOUND = _or_none(_NUMBER)  # null: not finite, or not measured
_PAIR = _is(
    "two numbers",
    lambda value: isinstance(value, list) and len(value) == 2 and all(map(_number, value)),
)
_PLAIN = _is(
    "text, or a list of it",
    lambda value: all(
        isinstance(each, str) for each in (value if isinstance(value, list) else [value])
    ),
)
_OBJECT = _values(_ANY)
_OPTIONS = _object({}, {"dtype": _TEXT})
_VERSIONS = _values(_TEXT)
_DRIFT = _values(_FOUND)
_BYTES = _object({"bytes": _NUMBER})

_HEALING = _object(
    {
        **{"kept": _FLAG, "steps": _COUNT, "best_step": _COUNT, "calibration": _TEXT},
        **{"drift_before": _DRIFT, "drift_after": _DRIFT},
    },
    {"teacher": _TEXT, "options": _OPTIONS},
)
_TUNING = _object(
    {
        **{"task": _TEXT, "data": _TEXT},
        **{"examples": _COUNT, "evaluated": _COUNT, "steps": _COUNT},
    },
    {
        **{"scores": _list(_OBJECT), "options": _OPTIONS, "converted": _FLAG},
        **{"source": _TEXT, "revision": _TEXT, "teacher": _TEXT},
    },
)
_SCORE = _object(
    {
        **{"metric": _TEXT, "value": _FOUND, "interval": _or_none(_PAIR), "baseline": _FOUND},
        **{"difference": _FOUND, "difference_interval": _or_none(_PAIR)},
    }
)
_SCORED = _object(
    {"data": _TEXT, "split": _TEXT, "examples": _COUNT},
    {"task": _TEXT, "baseline": _TEXT, "options": _OPTIONS, "scores": _list(_SCORE)},
)
_DRIFTED = _object(
    {
        **{"data": _TEXT, "baseline": _TEXT, "samples": _COUNT},
        **{"hidden_cosine": _FOUND, "hidden_error": _FOUND, "attention": _FOUND},
        **{"agreement": _FOUND, "divergence": _FOUND},
    }
)


def _evaluation(value: Any, where: str) -> Iterator[str]:
    yield from _OBJECT(value, where)
    is_drift = isinstance(value, dict) and value.get("kind") == "drift"
    if is_drift:
        yield from _DRIFTED(value, where)
    if not is_drift or value.get("scores"):
        yield from _SCORED(value, where)


_TIME = _object(
    {
        **{"seconds": _NUMBER, "quartiles": _PAIR},
        **{"batch_size": _COUNT, "length": _or_none(_COUNT)},
        **{"peak_bytes": _FOUND, "baseline_peak_bytes": _FOUND},
    }
)
_TIME_BESIDE = _object(
    {
        **{"baseline_seconds": _NUMBER, "baseline_quartiles": _PAIR},
        **{"over_baseline": _NUMBER, "over_quartiles": _PAIR},
    }
)
_LATENCY = _object(
    {
        **{"latencies": _list(_TIME, least=1), "options": _object({"repeats": _COUNT})},
        **{"inputs": _TEXT, "size": _BYTES, "dtype": _TEXT, "attention": _TEXT},
        "machine": _object({"processor": _TEXT, "device": _TEXT, "threads": _COUNT}),
    },
    {"baseline": _TEXT, "baseline_size": _BYTES, "versions": _VERSIONS},
)


def _latency(value: Any, where: str) -> Iterator[str]:
    yield from _LATENCY(value, where)
    if isinstance(value, dict) and value.get("baseline_size") is not None:
        yield from _list(_TIME_BESIDE)(value.get("latencies"), f"{where}.latencies")


_RECORD = _object(
    {},
    {
        **{"source": _TEXT, "revision": _TEXT, "method": _TEXT, "solver": _TEXT},
        **{"options": _OPTIONS, "calibration": _TEXT, "layers": _list(_OBJECT)},
        **{"error": _NUMBER, "mean_relative_error": _NUMBER, "drift": _DRIFT},
        "parameters": _values(_object({"before": _SOME, "after": _COUNT, "kept": _NUMBER})),
        **{"versions": _VERSIONS, "healing": _HEALING, "finetuning": _TUNING},
        "base": _object({}, dict.fromkeys(CARRIED, _PLAIN)),
        **{"evaluations": _list(_evaluation), "latency": _list(_latency)},
    },
)
