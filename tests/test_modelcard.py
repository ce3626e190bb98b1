"""Model cards, from records alone."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from hub_cases import CARD, QUICK, cli, done
from huggingface_hub import ModelCard
from safetensors.torch import load_file
from tiny_models import TINY
from tiny_tasks import FAST, write_model, write_task

from collabify import convert
from collabify.modelcard import auto_class, base_model, is_generated, is_hub_id, model_card, public

CONFIG: dict[str, Any] = {
    "architectures": ["BertForSequenceClassification"],
    "model_type": "bert",
    "quantization_config": {"layers": [{"index": 0, "form": "collaborative", "rank": 8}]},
}
DRIFT = {"hidden_cosine": 0.91234, "hidden_error": 0.2, "attention": None}
RECORD: dict[str, Any] = {
    "source": "google/tiny",
    "revision": "c0ffee",
    "method": "cp",
    "solver": "factored",
    "options": {"dk": 8, "kept": None, "layers": [0, 1], "seed": 0, "sequential": True},
    "calibration": "31 texts of texts.txt",
    "drift": DRIFT,
    "healing": None,
    "layers": [
        {"index": 0, "name": "a", "rank": 8, "head_rank": None, "channels": 7, "sweeps": 3},
        {"index": 1, "name": "b", "rank": 16, "head_rank": None, "channels": None, "sweeps": 3},
    ],
    "error": 0.123456,
    "mean_relative_error": 0.5,
    "parameters": {"query_key": {"before": 1000, "after": 250, "kept": 0.25}},
    "versions": {"collabify": "9.8.7", "torch": "2.0"},
}
HEALING = {
    "kept": True,
    "steps": 20,
    "best_step": 10,
    "drift_before": DRIFT,
    "drift_after": DRIFT | {"hidden_cosine": 0.98765},
    "calibration": "40 texts of /home/Jane Doe/more texts.txt",
    "options": {"steps": 20, "calibration": "/home/Jane Doe/more texts.txt", "processes": 1},
    "teacher": "google/tiny",
}
TUNED = {
    "task": "rte",
    "data": "nyu-mll/glue:rte:train",
    "scores": [
        {"epoch": 1, "loss": 0.6, "validation": {"loss": 0.1, "accuracy": 0.55}},
        {"epoch": 2, "loss": 0.3, "validation": {"loss": 0.4, "accuracy": 0.6875}},
    ],
    "examples": 2490,
    "evaluated": 277,
    "steps": 156,
    "options": {"epochs": 2, "device": "cuda:0", "only": "attention"},
    "source": "/home/Jane Doe/tiny-8",
    "teacher": None,
    "converted": True,
}


def card(record: dict[str, Any] = RECORD, config: dict[str, Any] = CONFIG, **more: Any) -> str:
    return model_card(record, config, repo="me/tiny-8", **more)


def data_of(text: str) -> dict[str, Any]:
    """The metadata as huggingface_hub's classes understand them: nothing is lost or added."""
    found: dict[str, Any] = ModelCard(text).data.to_dict()
    assert found == yaml.safe_load(text.split("---\n")[1])
    return found


def test_every_number_of_the_record_is_in_it() -> None:
    text = card()
    for said in ("0.1235", "0.5000", "0.9123", "not finite", "25.0%", "1,000", "250"):
        assert said in text, said
    assert "| rank, layer by layer | 8, 16 |" in text
    assert "| channels, layer by layer | 7, all |" in text
    assert "head rank" not in text, "no layer has one"
    assert "31 texts of texts.txt" in text
    assert "collabify 9.8.7" in text
    assert "2006.16362" in text
    assert "2003.02436" in text
    assert "[google/tiny](https://huggingface.co/google/tiny)" in text
    assert 'AutoModelForSequenceClassification.from_pretrained("me/tiny-8")' in text
    assert (
        "collabify convert google/tiny --method cp --solver factored --revision c0ffee --dk 8 "
        "--layer 0 1 --seed 0 --sequential --out tiny-8\n" in text
    )


def test_metadata() -> None:
    data = data_of(card())
    assert data == {
        "base_model": "google/tiny",
        "base_model_relation": "finetune",
        "library_name": "transformers",
        "pipeline_tag": "text-classification",
        "tags": ["collabify", "collaborative-attention"],
    }
    licence = {"license": "other", "license_name": "own", "license_link": "LICENSE"}
    base = licence | {"language": ["en"], "datasets": "someone/texts", "base_model": "a/b"}
    data = data_of(card(RECORD | {"base": base}))
    assert {name: data[name] for name in licence} == licence
    assert (data["language"], data["datasets"]) == (["en"], ["someone/texts"])
    assert data["base_model"] == "google/tiny"


def test_data_given_in_python_are_no_data_set() -> None:
    model = TINY["bert"].build()
    batch = TINY["bert"].batch(model)
    record = convert(model, dk=12, calibration=[batch] * 2, iterations=2).to_dict()
    text = card(record)
    assert "datasets" not in data_of(text)
    assert "--calibration 'a list given in Python'" in text


def test_a_healed_one_tells_drift_before_and_after() -> None:
    text = card(RECORD | {"healing": HEALING})
    assert "20 steps without labels on 40 texts of more texts.txt; best at step 10" in text
    assert "| final hidden states, cosine (held-out samples, before healing) | 0.9123 |" in text
    assert "| final hidden states, cosine (held-out samples, after healing) | 0.9877 |" in text
    heal = "collabify heal tiny-8 --teacher google/tiny --steps 20 --calibration './more texts.txt'"
    assert f"--out tiny-8\n{heal}\n" in text
    assert "Doe" not in text
    lost = HEALING | {"kept": False, "best_step": 0}
    assert "; nothing won, undone |" in card(RECORD | {"healing": lost})
    asked = RECORD["options"] | {"heal": 20}
    text = card(RECORD | {"healing": HEALING, "options": asked})
    assert "--heal 20" in text
    assert "collabify heal" not in text


def test_scores_of_a_fine_tuning_after_the_conversion_are_this_models() -> None:
    text = card(RECORD | {"finetuning": TUNED})
    (index,) = data_of(text)["model-index"]
    assert index["name"] == "tiny-8"
    (result,) = index["results"]
    assert result["task"] == {"type": "text-classification"}
    assert result["dataset"] == {
        "name": "nyu-mll/glue rte",
        "type": "nyu-mll/glue",
        "config": "rte",
        "split": "validation",
    }
    assert result["metrics"] == [{"type": "accuracy", "value": 0.6875}]
    assert data_of(text)["datasets"] == ["nyu-mll/glue"]
    assert data_of(text)["metrics"] == ["accuracy"]
    assert "Scores of this model for rte, after the last epoch, on 277 examples:" in text
    assert "| validation | accuracy | 0.6875 |" in text
    assert "0.55" not in text
    assert (
        "--out tiny-8-converted\ncollabify finetune tiny-8-converted --task rte --epochs 2 "
        "--device cuda --only attention --out tiny-8\n" in text
    )
    assert "Doe" not in text


def test_scores_from_before_the_conversion_are_not_this_models() -> None:
    before = TUNED | {"converted": False, "source": "google/tiny"}
    text = card(RECORD | {"source": "/home/me/tiny-rte", "revision": None, "finetuning": before})
    data = data_of(text)
    assert "model-index" not in data
    assert data["base_model"] == "google/tiny"
    assert "Scores of the model before its conversion for rte" in text
    assert (
        "collabify finetune google/tiny --task rte --epochs 2 --device cuda --only attention "
        "--out ./tiny-rte\ncollabify convert ./tiny-rte " in text
    )
    unsaid = {name: value for name, value in before.items() if name != "converted"}
    text = card(RECORD | {"finetuning": unsaid})
    assert "model-index" not in data_of(text)
    assert "(before or after the conversion: not recorded)" in text


def test_images_and_sentences() -> None:
    tuned = TUNED | {
        "task": "image-classification",
        "data": "someone/photos:train",
        "options": {"image_data": "someone/photos", "eval_split": "test"},
    }
    config = CONFIG | {"architectures": ["ViTForImageClassification"], "image_size": 8}
    text = card(RECORD | {"finetuning": tuned}, config)
    data = data_of(text)
    assert data["pipeline_tag"] == "image-classification"
    assert data["datasets"] == ["someone/photos"]
    assert data["model-index"][0]["results"][0]["dataset"]["type"] == "someone/photos"
    assert "finetune tiny-8-converted --image-data someone/photos --eval-split test" in text
    for architecture, tag in (("ViTModel", "image-feature-extraction"), ("ViTForSomething", None)):
        made = card(config=config | {"architectures": [architecture]})
        assert data_of(made).get("pipeline_tag") == tag
    headless = CONFIG | {"architectures": ["BertModel"]}
    assert data_of(card(config=headless))["pipeline_tag"] == "feature-extraction"
    assert data_of(card(config=headless, sentences=True))["pipeline_tag"] == "sentence-similarity"
    assert data_of(card(sentences=True))["pipeline_tag"] == "text-classification", "it has a head"
    assert "pipeline_tag" not in data_of(card(config={"model_type": "bert"}))
    assert auto_class({"architectures": ["ElectraForPreTraining"]}) == "ElectraForPreTraining"
    assert auto_class({}) == "AutoModel"


def test_a_form_that_nobody_has_thought_of() -> None:
    layers = [{"index": 0, "form": "round-table", "rank": 8, "knights": 12}]
    record = RECORD | {"method": "round-table", "layers": layers}
    record |= {"options": {"knights_per_head": 12}}
    text = card(record, CONFIG | {"quantization_config": {"layers": layers}})
    assert "round-table-attention" in data_of(text)["tags"]
    assert "| knights, layer by layer | 12 |" in text
    assert "--knights-per-head 12" in text


def test_only_what_was_not_touched_is_generated() -> None:
    text = card()
    assert is_generated(text)
    assert is_generated(text.replace("\n", "\r\n"))
    assert not is_generated(text.replace("tiny-8", "tiny-9"))
    assert not is_generated(text.replace("license", "licence") + "\n")
    assert not is_generated(text + "One more thing.\n")
    assert not is_generated("Mine.\n")
    assert is_generated(card(tags=["mine"]))


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/home/me/models/bert", "bert"),
        ("~/models/bert", "bert"),
        ("../models/bert/", "bert"),
        ("./bert", "bert"),
        ("C:\\Users\\me\\bert", "bert"),
        ("/home/Jane Doe/my bert", "my bert"),
    ],
)
def test_paths_go_by_their_names(path: str, name: str) -> None:
    assert public({"a": [path]}) == {"a": [f"./{name}"]}
    said = f"40 texts of {path.rstrip('/')}"
    assert public({"b": said}) == {"b": f"40 texts of {name}"}
    assert not is_hub_id(public(path))


def test_relative_ways_to_a_known_path_go_too() -> None:
    record = {"calibration": "/home/me/private/texts.txt", "is": "9 texts of private/texts.txt"}
    assert public(record) == {"calibration": "./texts.txt", "is": "9 texts of texts.txt"}


@pytest.mark.parametrize(
    "plain",
    [
        "google/bert",
        "bert",
        "nyu-mll/glue:rte:train",
        "1/f noise and dead leaves",
        "",
        7,
        None,
        0.5,
    ],
)
def test_what_is_no_path_stays(plain: Any) -> None:
    assert public([plain]) == [plain]


def test_the_nearest_name_on_the_hub_is_the_base() -> None:
    assert base_model({"source": "a/b"}) == "a/b"
    assert base_model({"source": "bert-base-uncased"}) == "bert-base-uncased"
    assert base_model({"source": "./b"}) is None
    assert base_model({"source": "demo"}) is None
    assert base_model({}) is None
    for named in ("c/d", ["c/d", "e/f"]):
        assert base_model({"source": "/x/b", "base": {"base_model": named}}) == "c/d"


def test_the_command_in_a_card_makes_the_same_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Converted, healed, and trained: in another folder, by the card alone."""
    for place in ("here", "there"):
        write_model(tmp_path / place / "original", num_labels=2)
        write_task(tmp_path / place / "glue", "sst2", {"train": 32, "validation": 16})
        texts = "\n".join(f"w{i} w{i + 1} w3" for i in range(25))
        (tmp_path / place / "texts.txt").write_text(texts)
    (tmp_path / "here" / "original" / "README.md").write_text(CARD)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.chdir(tmp_path / "here")
    done("convert", "original", *QUICK, "--dk", 4, "--calibration", "texts.txt", "--out", "a")
    steps = ("--samples", 16, "--steps", 20, "--batch-size", 8, "--learning-rate", 1e-3)
    healed = done("heal", "a", "--calibration", "texts.txt", *steps, "--seed", 5)
    assert "Kept the best" in healed.stdout
    fast = [f"--{name.replace('_', '-')}={value}" for name, value in (FAST | {"epochs": 1}).items()]
    done("finetune", "a", "--task", "sst2", "--data", "glue", "--out", "b", "--device=cpu", *fast)
    report = json.loads(done("push", "b", "me/b", "--dry-run", "--json").stdout)
    data = data_of(report["readme"])
    assert (data["license"], data["language"]) == ("mit", ["en", "de"])
    assert data["model-index"][0]["results"][0]["dataset"]["name"] == "glue sst2"
    assert str(tmp_path) not in report["readme"]
    commands = report["readme"].split("```sh\n")[1].split("```")[0].splitlines()
    assert [command.split()[1] for command in commands] == ["convert", "heal", "finetune"]
    monkeypatch.chdir(tmp_path / "there")
    for command in commands:
        outcome = cli(*_spread(shlex.split(command)[1:]))
        assert outcome.exit_code == 0, outcome.stderr
    for name, tensor in load_file(tmp_path / "here" / "b" / "model.safetensors").items():
        assert tensor.equal(load_file(tmp_path / "there" / "b" / "model.safetensors")[name]), name


def _spread(arguments: list[str]) -> list[str]:
    from collabify.cli.common import spread

    return spread(arguments)
