"""``--record``: into the right record, whole, and nothing lost that says more."""

import copy
import errno
import json
import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hub_cases import QUICK, cli, done
from huggingface_hub import ModelCard
from recording_cases import BENCH, card_of, glue, go_offline, make_root, record_of
from tiny_tasks import FAST
from transformers import AutoModelForSequenceClassification

import collabify
from collabify.errors import CheckpointError, OutputError
from collabify.evaluation import evaluate_glue
from collabify.recording import record, recordable
from collabify.scores import DriftScores
from collabify.storage import write_record


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_root(tmp_path_factory.mktemp("recording"))


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    go_offline(monkeypatch, tmp_path_factory.getbasetemp() / "cache")


@pytest.fixture
def made(root: Path, tmp_path: Path) -> Path:
    """A converted model of one's own."""
    return Path(shutil.copytree(root / "sst2-small", tmp_path / "made"))


def test_an_entry_gives_way_to_one_that_says_as_much(root: Path, made: Path) -> None:
    def examples() -> list[tuple[str, int]]:
        return [(each["split"], each["examples"]) for each in record_of(made)["evaluations"]]

    glue(root, made, "--limit", 7)
    glue(root, made, "--split", "train")
    glue(root, made, "--limit", 3)
    assert examples() == [("validation", 7), ("train", 32), ("validation", 3)]
    glue(root, made, "--limit", 8)
    assert examples() == [("train", 32), ("validation", 8)]
    glue(root, made)
    assert examples() == [("train", 32), ("validation", 21)]
    glue(root, made, "--baseline", root / "secret" / "sst2")
    assert examples() == [("train", 32), ("validation", 21)]
    glue(root, made, "--limit", 4)
    glue(root, made)
    assert examples() == [("train", 32), *[("validation", 21)] * 2]
    train, compared, alone = record_of(made)["evaluations"]
    assert (compared["baseline"], alone["baseline"]) == (str(root / "secret" / "sst2"), None)
    (index,) = ModelCard(card_of(made)).data.to_dict()["model-index"]
    found = [(each["dataset"]["split"], each["metrics"][0]["value"]) for each in index["results"]]
    scores = [(each["split"], each["scores"][0]["value"]) for each in (train, alone)]
    assert found == scores, "each split once"


def shapes(folder: Path) -> list[tuple[str, bool, list[int]]]:
    """Of each entry: attention, whether it is compared, and lengths."""
    return [
        (
            each["attention"],
            each["baseline"] is not None,
            [one["length"] for one in each["latencies"]],
        )
        for each in record_of(folder)["latency"]
    ]


def test_no_shape_and_no_comparison_is_lost(root: Path, made: Path, tmp_path: Path) -> None:
    quick = ("--repeats", 4, "--batch-size", 1, "--record")
    for more in (("--length", 9), ("--length", 12), ("--length", 9, "--attention", "eager")):
        done("bench", made, *quick, *more)
    before = [("sdpa", True, [9]), ("sdpa", True, [12]), ("eager", True, [9])]
    assert shapes(made) == before
    changed = record_of(made) | {"source": "/gone"}
    (made / "collabify.json").write_text(json.dumps(changed))
    done("bench", made, *quick, "--length", 9)
    assert shapes(made) == [*before, ("sdpa", False, [9])]
    original = ("--baseline", root / "secret" / "sst2")
    done("bench", made, *quick, *original, "--length", 12, "--length", 9)
    assert shapes(made) == [("eager", True, [9]), ("sdpa", True, [12, 9])]
    other = shutil.copytree(root / "secret" / "sst2", tmp_path / "other")
    done("bench", made, *quick, "--baseline", other, "--length", 9)
    assert shapes(made)[1:] == [("sdpa", True, [12, 9]), ("sdpa", True, [9])]


def test_drifts_are_told_apart_by_what_was_read_and_from_where(
    root: Path, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(root)
    other = shutil.copytree(root / "secret" / "sst2", tmp_path / "other")

    def drift(
        data: object, samples: int, baseline: Path = root / "secret" / "sst2"
    ) -> list[tuple[int, str]]:
        options = ("--data", data, "--samples", samples, "--max-length", 9, "--record")
        done("eval", "drift", made, "--baseline", baseline, *options)
        return [(e["samples"], Path(e["baseline"]).name) for e in record_of(made)["evaluations"]]

    drift("texts.txt", 8)
    assert drift(root / "texts.txt", 9) == [(17, "sst2")]
    assert drift("texts.txt", 4) == [(17, "sst2"), (12, "sst2")]
    assert drift("texts.txt", 4, other) == [(17, "sst2"), (12, "sst2"), (12, "other")]
    assert drift("./texts.txt", 9) == [(12, "other"), (17, "sst2")]
    assert drift("synthetic", 4) == [(12, "other"), (17, "sst2"), (12, "sst2")]


def test_baselines_are_named_as_they_can_be_found_again(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(root)
    data = ("--task", "sst2", "--data", "secret/glue", "--resamples", 20, "--limit", 4)
    said = done("eval", "glue", "{task}-small", *data, "--baseline", "secret/{task}", "--json")
    (task,) = json.loads(said.stdout)["tasks"]
    assert task["model"] == str(root / "sst2-small")
    assert task["baseline"] == str(root / "secret" / "sst2")


def test_every_tasks_model_gets_its_own(root: Path, tmp_path: Path) -> None:
    for task in ("sst2", "rte"):
        shutil.copytree(root / f"{task}-small", tmp_path / f"{task}-small")
    done(
        "eval", "glue", tmp_path / "{task}-small", "--task", "all", "--resamples", 20,
        "--data", root / "secret" / "glue", "--record",
    )  # fmt: skip
    for task in ("sst2", "rte"):
        assert [e["task"] for e in record_of(tmp_path / f"{task}-small")["evaluations"]] == [task]


def test_without_record_nothing_is_written(root: Path, made: Path) -> None:
    before = {path.name: path.read_bytes() for path in made.iterdir()}
    done("bench", made, *BENCH)
    done("eval", "glue", made, "--task", "sst2", "--data", root / "secret" / "glue")
    drift = ("--baseline", root / "secret" / "sst2", "--samples", 8, "--data", "synthetic")
    done("eval", "drift", made, *drift, "--max-length", 9)
    assert {path.name: path.read_bytes() for path in made.iterdir()} == before


def measured(root: Path, folder: Path) -> Path:
    glue(root, folder)
    done("bench", folder, *BENCH, "--record")
    assert {"evaluations", "latency"} <= set(record_of(folder))
    return folder


def test_other_weights_do_not_inherit_what_was_measured(
    root: Path, made: Path, tmp_path: Path
) -> None:
    measured(root, made)
    steps = ("--samples", 16, "--steps", 20, "--batch-size", 8, "--calibration", root / "texts.txt")
    done("heal", made, *steps, "--out", tmp_path / "healed")
    fast = [f"--{name.replace('_', '-')}={value}" for name, value in (FAST | {"epochs": 1}).items()]
    tuning = ("--task", "sst2", "--data", root / "secret" / "glue", "--device", "cpu", *fast)
    done("finetune", made, *tuning, "--out", tmp_path / "tuned")
    model = AutoModelForSequenceClassification.from_pretrained(made)
    model.save_pretrained(tmp_path / "saved")
    done("finetune", root / "secret" / "sst2", *tuning, "--out", tmp_path / "first")
    measured(root, tmp_path / "first")
    done("convert", tmp_path / "first", *QUICK, "--out", tmp_path / "second")
    kept = {"healed": "healing", "tuned": "finetuning", "saved": "layers", "second": "finetuning"}
    for name, key in kept.items():
        found = record_of(tmp_path / name)
        assert found[key], name
        assert not {"evaluations", "latency"} & set(found), name
    # In place, too.
    done("heal", made, *steps, "--learning-rate", 1e-3, "--seed", 5)
    assert record_of(made)["healing"]["kept"]
    assert not {"evaluations", "latency"} & set(record_of(made))
    assert "Latency was not recorded" in card_of(made)


@pytest.mark.parametrize("json_only", [False, True])
def test_what_cannot_be_recorded_is_told_all_the_same(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, json_only: bool
) -> None:
    for task in ("sst2", "rte"):
        shutil.copytree(root / f"{task}-small", tmp_path / f"{task}-small")

    def full(folder: Path, record: dict[str, Any]) -> None:
        if folder.name == "sst2-small":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write_record(folder, record)

    monkeypatch.setattr("collabify.recording.write_record", full)
    data = ("--data", root / "secret" / "glue", "--resamples", 20)
    drift = ("--baseline", root / "secret" / "sst2", "--data", "synthetic", "--samples", 4)
    for command, said in (
        (("bench", tmp_path / "sst2-small", *BENCH), "2 x 9"),
        (("eval", "drift", tmp_path / "sst2-small", *drift), "hidden states, cosine"),
        (("eval", "glue", tmp_path / "{task}-small", "--task", "all", *data), "SST-2"),
    ):
        outcome = cli(*command, "--record", *["--json"] * json_only)
        assert outcome.exit_code == 1
        assert "could not be written (No space left on device)" in outcome.stderr
        assert outcome.stderr.count("\n") == 1
        assert json.loads(outcome.stdout) if json_only else said in outcome.stdout
    assert "evaluations" not in record_of(tmp_path / "sst2-small")
    assert [e["task"] for e in record_of(tmp_path / "rte-small")["evaluations"]] == ["rte"]


def test_nothing_is_measured_that_could_not_be_recorded(
    made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: False)
    with pytest.raises(OutputError, match=r"collabify.json' could not be written \(no right to"):
        recordable(str(made))


def test_the_hubs_cache_is_not_written_to(made: Path, tmp_path: Path) -> None:
    repository = tmp_path / "hub" / "models--me--made"
    snapshot = repository / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    shutil.copytree(made, repository / "blobs")
    for path in (repository / "blobs").iterdir():
        (snapshot / path.name).symlink_to(path)
    outcome = cli("bench", snapshot, *BENCH, "--record")
    assert (outcome.exit_code, outcome.stdout) == (2, "")
    assert "is in the Hub's cache, where what is recorded would pass for" in outcome.stderr
    assert "hf download me/made --local-dir DIR" in outcome.stderr
    assert (snapshot / "collabify.json").is_symlink()
    own = Path(shutil.copytree(made, tmp_path / "run" / "snapshots" / "step-3"))
    assert recordable(str(own)).folder == own.resolve(), "any folder may be called so"


def test_a_model_without_a_record_leaves_none_where_it_is_saved(made: Path) -> None:
    model = AutoModelForSequenceClassification.from_pretrained(made)
    (made / "collabify.json").unlink()
    bare = AutoModelForSequenceClassification.from_pretrained(made)
    model.save_pretrained(made)
    assert record_of(made)["layers"]
    bare.save_pretrained(made)
    assert not (made / "collabify.json").exists()


def test_several_at_once_lose_nothing(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(folder: Path, record: dict[str, Any]) -> None:
        time.sleep(0.02)
        write_record(folder, record)

    monkeypatch.setattr("collabify.recording.write_record", slow)
    (made / ".collabify.json-7").write_text("of a process that was killed")
    place, asked = recordable(str(made)), {"data": None}

    def put(number: int) -> None:
        numbers = (1, 1.0, 0.0, 0.0, None, None, 0)
        record(place, DriftScores(f"{number}", *numbers, baseline="another", options=asked))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(put, range(12)))
    assert {entry["data"] for entry in record_of(made)["evaluations"]} == set(map(str, range(12)))
    assert not list(made.glob(".collabify.json-*"))


@pytest.mark.parametrize("command", ["bench", "eval glue", "eval image", "eval drift"])
def test_only_a_folder_with_a_record_can_be_recorded_in(
    root: Path, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {
        "bench": (),
        "eval glue": ("--task", "sst2", "--data", root / "secret" / "glue"),
        "eval image": ("--data", root),
        "eval drift": ("--data", "synthetic", "--baseline", root / "secret" / "sst2"),
    }[command]
    monkeypatch.setattr("transformers.PreTrainedModel.from_pretrained", None)  # nothing is loaded
    monkeypatch.setattr("collabify.storage.find", lambda name, revision=None: None)
    for model, said in (
        ("me/made", "MODEL='me/made' must be a folder for --record, to write to. Download it"),
        (root / "secret" / "sst2", "has no collabify.json to record in: collabify neither"),
    ):
        outcome = cli(*command.split(), model, *options, "--record")
        assert (outcome.exit_code, outcome.stdout) == (2, ""), outcome.stderr
        assert said in outcome.stderr
        assert outcome.stderr.count("\n") == 1


def scored(root: Path, folder: Path) -> Any:
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    return evaluate_glue(model, "sst2", data=str(root / "secret" / "glue"), resamples=20)


def test_a_model_that_changed_meanwhile_is_not_recorded_in(root: Path, made: Path) -> None:
    report, place = scored(root, made), recordable(str(made))
    weights = made / "model.safetensors"
    shutil.copyfile(weights, made / "new")
    (made / "new").replace(weights)
    before = (made / "collabify.json").read_bytes()
    with pytest.raises(CheckpointError, match="changed while it was measured, so that nothing was"):
        record(place, report)
    assert (made / "collabify.json").read_bytes() == before
    place = recordable(str(made))
    weights.unlink()
    with pytest.raises(CheckpointError):
        record(place, report)


def test_a_full_disk_leaves_the_record_that_was_there(
    root: Path, made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report, place = scored(root, made), recordable(str(made))
    files = {path.name: path.read_bytes() for path in made.iterdir()}
    write_text = Path.write_text

    def full(path: Path, text: str, **options: Any) -> int:
        write_text(path, text[: len(text) // 2], **options)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OutputError, match=r"could not be written \(No space left on device\)"):
        record(place, report)
    monkeypatch.undo()
    (made / ".collabify.json.lock").unlink()
    assert {path.name: path.read_bytes() for path in made.iterdir()} == files


def test_a_damaged_record_is_found_before_anything_takes_time(made: Path) -> None:
    (made / "collabify.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"collabify.json' cannot be read"):
        recordable(str(made))


def test_from_python(root: Path, made: Path) -> None:
    place = recordable(str(made))
    assert record(place, scored(root, made)) == made.resolve() / "collabify.json"
    model = AutoModelForSequenceClassification.from_pretrained(made)
    original = AutoModelForSequenceClassification.from_pretrained(root / "secret" / "sst2")
    bare = copy.deepcopy(original)
    bare.config._name_or_path = ""
    record(place, collabify.bench(model, bare, repeats=4, lengths=[5]))
    found = record_of(made)
    assert found["latency"][0]["baseline"] is None
    assert len(found["evaluations"]) == 1
    assert "Latency of the whole model beside a model without a name, measured" in card_of(made)
    assert "| baseline, ms |" in card_of(made)
