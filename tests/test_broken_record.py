"""Records that are damaged, odd or newer: told in one line by whatever reads them."""

import copy
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hub_cases import QUICK, cli, done
from tiny_tasks import write_model

import collabify
from collabify import storage
from collabify.errors import CheckpointError
from collabify.info import ModelInfo, describe, info_table
from collabify.modelcard import model_card

PAIR = [0.1, 0.2]
DRIFT = {"hidden_cosine": 0.9, "hidden_error": 0.2, "attention": None}
SCORE = {"metric": "accuracy", "value": 0.7, "interval": PAIR, "baseline": 0.8}
SCORE |= {"difference": -0.1, "difference_interval": PAIR}
TIME = {"batch_size": 1, "length": 8, "seconds": 0.1, "quartiles": PAIR}
TIME |= {"peak_bytes": 10, "baseline_peak_bytes": 12, "baseline_seconds": 0.2}
TIME |= {"baseline_quartiles": PAIR, "over_baseline": 0.5, "over_quartiles": PAIR}
# All that a record can have, and all of it is read.
FULL: dict[str, Any] = {
    "version": 1,
    **{"source": "google/tiny", "revision": "c0ffee", "method": "cp", "solver": "factored"},
    **{"options": {"dk": 8, "dtype": "float16"}, "calibration": "31 texts", "drift": DRIFT},
    **{"error": 0.1, "mean_relative_error": 0.5, "versions": {"collabify": "9", "torch": "2"}},
    "layers": [{"index": 0, "name": "a", "rank": 8}],
    "parameters": {"query_key": {"before": 1000, "after": 250, "kept": 0.25}},
    "healing": {
        **{"kept": True, "steps": 20, "best_step": 10, "calibration": "40 texts"},
        **{"drift_before": DRIFT, "drift_after": DRIFT, "teacher": "a/b", "options": {"steps": 2}},
    },
    "finetuning": {
        **{"task": "rte", "data": "nyu-mll/glue:rte:train", "examples": 9, "evaluated": 8},
        **{"steps": 7, "options": {"epochs": 2}, "source": "a/b", "revision": "c", "teacher": "d"},
        **{"converted": True, "scores": [{"epoch": 1, "validation": {"accuracy": 0.5}}]},
    },
    "base": {"license": "mit", "language": ["en"], "datasets": "a/texts", "base_model": "a/b"},
    "evaluations": [
        {
            **{"kind": "glue", "task": "rte", "data": "glue", "split": "validation"},
            **{"examples": 9, "options": {"limit": 9}, "baseline": "a/b", "scores": [SCORE]},
        },
        {
            **{"kind": "drift", "data": "synthetic", "samples": 4, "baseline": "a/b"},
            **{"hidden_cosine": 0.9, "hidden_error": 0.1, "attention": 0.2},
            **{"agreement": 0.9, "divergence": 0.1},
        },
    ],
    "latency": [
        {
            **{"latencies": [TIME], "options": {"repeats": 5}, "inputs": "random ids"},
            **{"size": {"bytes": 100}, "baseline_size": {"bytes": 120}, "baseline": "a/b"},
            **{"dtype": "float32", "attention": "sdpa", "versions": {"torch": "2"}},
            "machine": {"processor": "x", "device": "cpu", "threads": 1},
        }
    ],
}
GONE = object()
ODD = (GONE, None, 3, "x", [1], {"a": 1})


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("records")
    write_model(root / "original", num_labels=2)
    done("convert", root / "original", *QUICK, "--out", root / "made")
    return root / "made"


@pytest.fixture(scope="module")
def info(made: Path) -> ModelInfo:
    return describe(str(made))


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to everything in a record."""
    if path:
        yield path
    whole = isinstance(value, dict | list)
    inner = value.items() if isinstance(value, dict) else enumerate(value if whole else ())
    for name, one in inner:
        yield from places(one, (*path, name))


def with_odd(place: tuple[Any, ...], value: Any) -> dict[str, Any]:
    record = copy.deepcopy(FULL)
    *way, last = place
    at: Any = record
    for name in way:
        at = at[name]
    if value is GONE:
        del at[last]
    else:
        at[last] = value
    return record


def told(folder: Path, info: ModelInfo) -> bool:
    """Whether info and card could tell the record; a refusal is one line, all else is raised."""
    config = json.loads((folder / "config.json").read_text())
    try:
        record = storage.read_record(storage.locate(str(folder)))
        assert info_table(replace(info, record=record))
        assert replace(info, record=record).to_json()
        assert model_card(record, config, repo="me/tiny")
    except CheckpointError as error:
        said = str(error)
        assert "collabify.json' " in said
        assert "\n" not in said
        assert said.endswith(("Put it right or delete it.", "Upgrade collabify."))
        return False
    return True


@pytest.mark.parametrize("section", FULL)
def test_whatever_is_odd_is_refused_or_told(section: str, made: Path, info: ModelInfo) -> None:
    refused = 0
    for place in places(FULL):
        for odd in ODD if place[0] == section else ():
            storage.write_record(made, with_odd(place, odd))
            refused += not told(made, info)
    assert refused >= 3
    storage.write_record(made, FULL)
    assert told(made, info), "the whole record is told"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"healing": {}}, "(healing.kept is missing)"),
        ({"finetuning": {}}, "(finetuning.task is missing)"),
        ({"drift": 3}, "(drift must be an object)"),
        ({"drift": {"attention": "b"}}, "(drift.attention must be a number)"),
        ({"parameters": {"x": 3}}, "(parameters.x must be an object)"),
        ({"error": "b"}, "(error must be a number)"),
        ({"versions": []}, "(versions must be an object)"),
        ({"calibration": 3}, "(calibration must be text)"),
        ({"layers": [7]}, "(layers[0] must be an object)"),
        ({"latency": [FULL["latency"][0] | {"latencies": []}]}, "must be a list with something in"),
        ({"version": 99}, "made by a newer collabify (version=99; this one reads 1). Upgrade"),
        ({"version": "1"}, "(version='1' must be 1)"),
        ({"version": True}, "(version=True must be 1)"),
    ],
)
def test_the_fault_is_named(change: dict[str, Any], said: str, made: Path) -> None:
    (made / "collabify.json").write_text(json.dumps(FULL | change))
    for command in (("info", made), ("push", made, "me/tiny", "--dry-run")):
        outcome = cli(*command)
        assert (outcome.exit_code, outcome.stdout) == (1, "")
        assert said in outcome.stderr
        assert outcome.stderr.count("\n") == 1


def nest(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("odd", "fits"), [(nest(20), True), (nest(500), False), (2**62, True), (-(2**64), False)]
)
def test_depth_and_size_are_bounded(odd: Any, fits: bool, made: Path, info: ModelInfo) -> None:
    storage.write_record(made, FULL | {"options": {"odd": odd}})
    assert told(made, info) is fits


def test_every_door_writes_the_version(made: Path, tmp_path: Path) -> None:
    def version(folder: Path) -> Any:
        return json.loads((folder / "collabify.json").read_text())["version"]

    storage.write_record(made, {name: FULL[name] for name in FULL if name != "version"})
    assert version(made) == 1
    done("convert", made.parent / "original", *QUICK, "--heal", 1, "--out", tmp_path / "healed")
    assert version(tmp_path / "healed") == 1
    done("heal", tmp_path / "healed", *("--steps", 1, "--samples", 16))
    assert version(tmp_path / "healed") == 1
    model, _ = storage.load(str(tmp_path / "healed"))
    model.save_pretrained(tmp_path / "again")
    assert version(tmp_path / "again") == 1
    plain, _ = storage.load(str(made.parent / "original"))
    collabify.convert(plain, dk=10, iterations=2)
    plain.save_pretrained(tmp_path / "python")
    assert version(tmp_path / "python") == 1


def test_architectures_of_any_kind_are_read() -> None:
    read: Callable[[Any], Any] = collabify.modelcard.architecture
    for odd in (3, [3], [], "Bert", {}, None):
        assert read({"architectures": odd}) is None
    assert read({"architectures": ["BertModel"]}) == "BertModel"
