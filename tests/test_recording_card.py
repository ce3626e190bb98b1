"""From a measurement to the record, to info and to the card."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from hub_cases import done
from huggingface_hub import ModelCard
from recording_cases import BENCH, card_of, cells, glue, go_offline, make_root, record_of
from safetensors.torch import load_file, save_file
from tiny_tasks import FAST, write_images, write_model
from transformers import ViTImageProcessor

from collabify.errors import CollabifyWarning
from collabify.modelcard import model_card
from collabify.storage import package


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_root(tmp_path_factory.mktemp("recorded"))


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    go_offline(monkeypatch, tmp_path_factory.getbasetemp() / "cache")


@pytest.fixture
def made(root: Path, tmp_path: Path) -> Path:
    """A converted model of one's own."""
    return Path(shutil.copytree(root / "sst2-small", tmp_path / "made"))


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
