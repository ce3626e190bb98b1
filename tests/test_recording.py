"""``--record``: from a measurement to the record, to info and to the card; never to others."""

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
import yaml
from hub_cases import QUICK, cli, done
from huggingface_hub import ModelCard
from safetensors.torch import load_file, save_file
from tiny_tasks import FAST, write_images, write_model, write_task
from transformers import AutoModelForSequenceClassification, ViTImageProcessor

import collabify
from collabify.errors import CheckpointError, CollabifyWarning, OutputError
from collabify.evaluation import evaluate_glue
from collabify.modelcard import model_card
from collabify.recording import record, recordable
from collabify.scores import DriftScores
from collabify.storage import package, write_record

BENCH = ("--repeats", 4, "--batch-size", 2, "--length", 9)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tasks, originals for two of them, and what became of those."""
    root = tmp_path_factory.mktemp("recording")
    for task in ("sst2", "rte"):
        write_task(root / "secret" / "glue", task, {"train": 32, "validation": 21})
        original = write_model(root / "secret" / task, num_labels=2)
        done("convert", original, *QUICK, "--out", root / f"{task}-small")
    (root / "texts.txt").write_text("\n".join(f"w{i} w{i + 1} w3" for i in range(25)))
    return root


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    cache = tmp_path_factory.getbasetemp() / "cache"
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", cache)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(cache))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture
def made(root: Path, tmp_path: Path) -> Path:
    """A converted model of one's own."""
    return Path(shutil.copytree(root / "sst2-small", tmp_path / "made"))


def record_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "collabify.json").read_text())
    return found


def glue(root: Path, model: object, *more: object) -> Any:
    data = ("--data", root / "secret" / "glue", "--resamples", 50)
    return done("eval", "glue", model, "--task", "sst2", *data, "--record", *more)


def card_of(folder: Path) -> str:
    text: str = json.loads(done("push", folder, "me/made", "--dry-run", "--json").stdout)["readme"]
    return text


def cells(card: str, first: str) -> list[str]:
    """Of the one row of a table that begins so."""
    (row,) = [line for line in card.splitlines() if line.startswith(f"| {first} |")]
    return [cell.strip() for cell in row.strip("|").split("|")]


def test_a_score_goes_to_the_record_to_info_and_to_the_card(root: Path, made: Path) -> None:
    before = record_of(made)
    outcome = glue(root, made, "--baseline", root / "secret" / "sst2", "--json")
    (task,) = json.loads(outcome.stdout)["tasks"]
    (score,) = task["scores"]
    after = record_of(made)
    (entry,) = after.pop("evaluations")
    assert after == before
    assert entry["scores"] == task["scores"]
    assert (entry["kind"], entry["task"], entry["split"]) == ("glue", "sst2", "validation")
    assert (entry["examples"], entry["options"]["resamples"]) == (21, 50)
    assert entry["data"] == str(root / "secret" / "glue")
    assert entry["baseline"] == str(root / "secret" / "sst2")
    assert "model" not in entry
    value = f"{score['value']:.4f} [{score['interval'][0]:.4f}, {score['interval'][1]:.4f}]"
    low, high = score["difference_interval"]
    difference = f"{score['difference']:+.4f} [{low:+.4f}, {high:+.4f}]"
    said = " ".join(done("info", made).stdout.split())
    assert f"sst2, validation: accuracy {value}, difference {difference}; against" in said
    assert "in brackets 95 % intervals" in said
    card = card_of(made)
    baseline = f"{score['baseline']:.4f} (`./sst2`)"
    row = ["./glue sst2, validation", "accuracy", "21", value, baseline, difference]
    assert cells(card, "./glue sst2, validation") == row
    assert "95 % bootstrap intervals over the examples" in card
    assert "secret" not in card
    (index,) = ModelCard(card).data.to_dict()["model-index"]
    assert index == yaml.safe_load(card.split("---\n")[1])["model-index"][0]
    (result,) = index["results"]
    named = {"name": "glue sst2", "type": "local", "config": "glue sst2", "split": "validation"}
    assert result["dataset"] == named, "a folder is no data set of the Hub"
    assert result["metrics"] == [{"type": "accuracy", "value": score["value"]}]


def test_without_a_baseline_nothing_is_compared(root: Path, made: Path) -> None:
    text = glue(root, made, "--limit", 10).stdout
    assert f"Recorded in {made.resolve() / 'collabify.json'}." in text
    (entry,) = record_of(made)["evaluations"]
    assert (entry["baseline"], entry["examples"], entry["options"]["limit"]) == (None, 10, 10)
    card = card_of(made)
    assert len(cells(card, "./glue sst2, validation")) == 4
    assert cells(card, "./glue sst2, validation")[2] == "10 drawn"
    assert "compared with" not in card
    assert "model-index" not in ModelCard(card).data.to_dict(), "it cannot say how many were drawn"


def test_latency_goes_to_the_record_to_info_and_to_the_card(root: Path, made: Path) -> None:
    assert "Latency was not recorded" in card_of(made)
    report = json.loads(done("bench", made, *BENCH, "--record", "--json").stdout)
    (entry,) = record_of(made)["latency"]
    assert entry["latencies"] == report["latencies"]
    assert entry["baseline"] == str(root / "secret" / "sst2")
    (found,) = report["latencies"]
    low, high = found["over_quartiles"]
    over = f"{found['over_baseline']:.3f} [{low:.3f}, {high:.3f}]"
    said = " ".join(done("info", made).stdout.split())
    assert f"2 x 9: {1e3 * found['seconds']:.4g} ms, {over} of the original's" in said
    assert f"({root / 'secret' / 'sst2'}), in brackets quartiles;" in said
    card = card_of(made)
    row = cells(card, "2 x 9")
    assert row[-1] == over
    assert row[1].startswith(f"{1e3 * found['seconds']:.4g} [")
    assert row[2].startswith(f"{1e3 * found['baseline_seconds']:.4g} [")
    assert (
        "medians of 4 interleaved runs, in brackets quartiles; this model / original: the" in card
    )
    assert "| original, ms | this model / original |" in card
    assert f"on {report['machine']['processor']}, " in card
    assert "beside `./sst2`" in card
    assert "Latency was not recorded" not in card
    assert "secret" not in card


def test_drift_goes_to_the_record_to_info_and_to_the_card(root: Path, made: Path) -> None:
    options = ("--baseline", root / "secret" / "sst2", "--samples", 8, "--record")
    outcome = done("eval", "drift", made, "--data", root / "texts.txt", *options)
    assert "Recorded in " in outcome.stdout
    (entry,) = record_of(made)["evaluations"]
    said = " ".join(done("info", made).stdout.split())
    assert f"hidden cosine {entry['hidden_cosine']:.4f}, same predictions" in said
    card = card_of(made)
    row = cells(card, "`./sst2`")
    assert row[1:4] == ["8 texts of texts.txt", "16", f"{entry['hidden_cosine']:.4f}"]
    assert row[-1] == f"{entry['divergence']:.4f}"
    assert "| samples, held-out ones too |" in card
    assert "model-index" not in ModelCard(card).data.to_dict()


def test_images(root: Path, tmp_path: Path) -> None:
    photos = tmp_path / "photos"
    write_images(photos, {"validation": 6})
    names = {0: "red", 1: "blue"}
    labels = {"id2label": names, "label2id": {name: n for n, name in names.items()}}
    original = write_model(tmp_path / "vit", "vit", **labels)
    ViTImageProcessor(size={"height": 8, "width": 8}).save_pretrained(original)
    made = tmp_path / "made"
    done("convert", original, "--dk", 10, "--calibration", "none", "--out", made)
    outcome = done("eval", "image", made, "--data", photos, "--baseline", original, "--record")
    assert "Recorded in " in outcome.stdout
    done("bench", made, "--repeats", 4, "--batch-size", 3, "--record")
    (entry,), (latency,) = record_of(made)["evaluations"], record_of(made)["latency"]
    assert (entry["kind"], entry["data"], entry["examples"]) == ("image", str(photos), 6)
    assert (latency["latencies"][0]["length"], latency["inputs"]) == (None, "images of 8 x 8")
    card = card_of(made)
    assert cells(card, "./photos, validation")[1] == "top-1"
    assert len(cells(card, "3")) == 4
    (result,) = ModelCard(card).data.to_dict()["model-index"][0]["results"]
    (metric,) = result["metrics"]
    value = entry["scores"][0]["value"]
    assert metric == {"type": "accuracy", "name": "top-1 accuracy", "value": value}
    said = " ".join(done("info", made).stdout.split())
    assert "validation: top-1 " in said


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


@pytest.mark.parametrize(
    "data",
    ["secret/glue:sst2:train:sentence", "./secret/glue:sst2", "secret/../link/secret-too:sst2::"],
)
def test_folders_on_the_way_to_relative_data_stay_private(
    root: Path, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: str
) -> None:
    for name in ("secret", "link"):
        (tmp_path / name).mkdir()
    (tmp_path / "secret" / "glue").symlink_to(root / "secret" / "glue")
    (tmp_path / "link" / "secret-too").symlink_to(root / "secret" / "glue")
    (tmp_path / "secret" / "sst2").symlink_to(root / "secret" / "sst2")
    monkeypatch.chdir(tmp_path)
    options = ("--baseline", "secret/sst2", "--samples", 8, "--max-length", 9, "--record")
    report = json.loads(done("eval", "drift", made, "--data", data, *options, "--json").stdout)
    assert report["baseline"] == str(root / "secret" / "sst2")
    sent = package(made, "me/made").files
    for name in ("collabify.json", "README.md"):
        content = sent[name]
        assert isinstance(content, bytes)
        assert b"8 texts of glue:sst2:train:sentence" in content
        assert b"secret" not in content
        assert b"link" not in content


def test_baselines_are_named_as_they_can_be_found_again(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(root)
    data = ("--task", "sst2", "--data", "secret/glue", "--resamples", 20, "--limit", 4)
    said = done("eval", "glue", "{task}-small", *data, "--baseline", "secret/{task}", "--json")
    (task,) = json.loads(said.stdout)["tasks"]
    assert task["model"] == str(root / "sst2-small")
    assert task["baseline"] == str(root / "secret" / "sst2")


def test_any_other_model_than_the_original_is_called_a_baseline(root: Path, made: Path) -> None:
    other = root / "rte-small"
    done("bench", made, *BENCH, "--baseline", other, "--record")
    (entry,) = record_of(made)["latency"]
    assert (entry["baseline"], entry["original"]) == (str(other), False)
    card = card_of(made)
    assert "| baseline, ms | this model / baseline |" in card
    assert "this model / baseline: the median of each round's quotient" in card
    assert "beside `./rte-small`" in card
    said = " ".join(done("info", made).stdout.split())
    assert "of the baseline's" in said
    assert "of the original's" not in said
    # Nor is it one where the record names a converted model.
    (made / "collabify.json").write_text(json.dumps(record_of(made) | {"source": str(other)}))
    report = json.loads(done("bench", made, *BENCH, "--json").stdout)
    assert (report["baseline"], report["original"]) == (str(other), False)


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


def test_what_was_measured_of_other_weights_is_not_pushed(root: Path, made: Path) -> None:
    glue(root, made)
    done("bench", made, *BENCH, "--record")
    assert "Scores of this model" in card_of(made)
    weights = load_file(made / "model.safetensors")
    halved = {name: t / 2 if t.is_floating_point() else t for name, t in weights.items()}
    save_file(halved, made / "model.safetensors", metadata={"format": "pt"})
    outcome = done("push", made, "me/made", "--dry-run", "--json")
    assert "holds other weights than 2 of the measurements in its" in outcome.stderr
    assert outcome.stderr.count("\n") == 1
    card = json.loads(outcome.stdout)["readme"]
    assert "Scores of this model" not in card
    assert "Latency was not recorded" in card
    with pytest.warns(CollabifyWarning, match="other weights"):
        content = package(made, "me/made").files["collabify.json"]
    assert isinstance(content, bytes)
    sent = json.loads(content)
    assert sent["evaluations"] == sent["latency"] == []
    # What is recorded now is of these, and takes the place of what is not.
    glue(root, made, "--split", "train")
    assert [e["split"] for e in record_of(made)["evaluations"]] == ["train"]
    assert "Scores of this model" in card_of(made)


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
        record(place, DriftScores(f"{number}", 1, 1.0, 0.0, 0.0, None, None, 0, options=asked))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(put, range(12)))
    assert {entry["data"] for entry in record_of(made)["evaluations"]} == set(map(str, range(12)))
    assert not list(made.glob(".collabify.json-*"))


def test_scores_of_an_evaluation_come_before_those_of_the_fine_tuning(
    root: Path, made: Path, tmp_path: Path
) -> None:
    fast = [f"--{name.replace('_', '-')}={value}" for name, value in (FAST | {"epochs": 1}).items()]
    tuning = ("--task", "sst2", "--data", root / "secret" / "glue", "--device", "cpu", *fast)
    done("finetune", made, *tuning, "--out", tmp_path / "tuned")
    (result,) = ModelCard(card_of(tmp_path / "tuned")).data.to_dict()["model-index"][0]["results"]
    last = record_of(tmp_path / "tuned")["finetuning"]["scores"][-1]["validation"]["accuracy"]
    assert result["metrics"] == [{"type": "accuracy", "value": last}]
    glue(root, tmp_path / "tuned", "--split", "train")
    found = ModelCard(card_of(tmp_path / "tuned")).data.to_dict()["model-index"][0]["results"]
    assert [each["dataset"]["split"] for each in found] == ["train", "validation"]
    assert found[1] == result, "what was not evaluated stays"
    path = tmp_path / "tuned" / "collabify.json"
    changed = record_of(path.parent)
    changed["finetuning"]["scores"][-1]["validation"]["accuracy"] = last = 0.123
    path.write_text(json.dumps(changed))
    glue(root, tmp_path / "tuned")
    card = card_of(tmp_path / "tuned")
    found = ModelCard(card).data.to_dict()["model-index"][0]["results"]
    assert [each["dataset"]["split"] for each in found] == ["train", "validation"]
    assert found[1]["metrics"][0]["value"] != last
    assert f"| validation | accuracy | {last:.4f} |" in card


def test_an_undefined_score_is_in_the_table_and_not_in_the_metadata() -> None:
    score = {"metric": "pearson", "value": None, "interval": None, "difference": None}
    entry = {"kind": "glue", "task": "stsb", "data": "nyu-mll/glue", "split": "validation"}
    entries = [entry | {"examples": 2000, "scores": [score], "options": {}}]
    config = {"architectures": ["BertForSequenceClassification"]}
    card = model_card({"method": "cp", "evaluations": entries}, config, repo="me/made")
    assert cells(card, "nyu-mll/glue stsb, validation")[1:] == ["pearson", "2,000", "-"]
    assert "model-index" not in ModelCard(card).data.to_dict()


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


def test_on_an_accelerator_both_processors_are_named() -> None:
    machine = {"processor": "Quill", "device": "Abacus 3000", "threads": 3}
    found: dict[str, Any] = {"batch_size": 1, "length": 5, "seconds": 0.25, "quartiles": [0.1, 0.4]}
    found |= {"peak_bytes": 4_000_000, "baseline_peak_bytes": None}
    entry = {"kind": "bench", "machine": machine, "dtype": "float16", "attention": "sdpa"}
    entry |= {"latencies": [found], "options": {"repeats": 4}, "inputs": "ids"}
    entry |= {"size": {"bytes": 5_000_000}}
    config = {"architectures": ["BertModel"]}
    card = model_card({"method": "cp", "latency": [entry]}, config, repo="me/made")
    assert "on Abacus 3000, Quill, 3 threads, float16, sdpa attention;" in card
    assert cells(card, "1 x 5") == ["1 x 5", "250 [100, 400]", "4.0"]


def test_folders_of_images_are_told_apart_in_the_index() -> None:
    score = {"metric": "top-1", "value": 0.5, "interval": None, "difference": None}
    entries = [
        {"kind": "image", "data": data, "split": "test", "examples": 6, "scores": [score]}
        for data in ("/home/me/imagenet-1k", "/home/me/photos", "someone/photos:small")
    ]
    config = {"architectures": ["ViTForImageClassification"]}
    card = model_card({"method": "cp", "evaluations": entries}, config, repo="me/made")
    found = ModelCard(card).data.to_dict()["model-index"][0]["results"]
    assert [(each["dataset"]["type"], each["dataset"]["name"]) for each in found] == [
        ("local", "imagenet-1k"),
        ("local", "photos"),
        ("someone/photos", "someone/photos"),
    ]
