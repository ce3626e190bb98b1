"""``collabify info``: what a model is, without its weights."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hub_cases import QUICK, cli, done
from hub_server import Hub, patch, serving
from safetensors.torch import load_file
from tiny_models import FORMS, LOW, TINY
from tiny_tasks import write_model
from transformers import AutoModel

import collabify
from collabify.info import describe


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """An original, and what became of it."""
    root = tmp_path_factory.mktemp("info")
    write_model(root / "original", num_labels=2)
    done("convert", root / "original", *QUICK, "--heal", 2, "--out", root / "made")
    return root / "original", root / "made"


def rows(outcome: Any) -> dict[str, str]:
    lines = [line.strip().partition("  ") for line in outcome.stdout.splitlines()]
    return {name: value.strip() for name, _, value in lines if value}


def test_it_says_in_one_screen_what_a_model_is(made: tuple[Path, Path]) -> None:
    original, folder = made
    outcome = done("info", folder)
    said, record = rows(outcome), json.loads((folder / "collabify.json").read_text())
    assert len(outcome.stdout.splitlines()) <= 24
    assert said["architecture"] == "BertForSequenceClassification (bert)"
    assert said["converted"] == "2 attention layers, collaborative"
    assert said["rank by layer"] == "10 x 2"
    assert said["channels by layer"] == "7 x 2"
    assert said["method"] == "cp (factored)"
    assert said["made from"] == str(original)
    count = record["parameters"]["query_key"]
    kept = f"{count['before']:,} -> {count['after']:,} ({count['kept']:.1%} kept)"
    assert said["query-key parameters"] == kept
    assert f"hidden cosine {record['drift']['hidden_cosine']:.4f}" in said["held-out drift"]
    assert said["healed"].startswith("2 steps on synthetic: 16 sequences")
    assert f"collabify {collabify.__version__}" in said["made with"]
    tensors = load_file(folder / "model.safetensors").values()
    numbers = sum(tensor.numel() for tensor in tensors if tensor.is_floating_point())
    assert said["weights"].startswith(f"{numbers:,} F32, ")


def test_json_has_all_of_it(made: tuple[Path, Path]) -> None:
    _, folder = made
    found = json.loads(done("info", folder, "--json").stdout)
    assert found["converted"] is True
    assert found["record"] == json.loads((folder / "collabify.json").read_text())
    assert [layer["form"] for layer in found["layers"]] == ["collaborative"] * 2
    tensors = load_file(folder / "model.safetensors").values()
    assert found["bytes"] == sum(t.numel() * t.element_size() for t in tensors)


def test_of_a_model_that_was_not_converted_it_says_so(made: tuple[Path, Path]) -> None:
    original, _ = made
    said = rows(done("info", original))
    assert said["converted"] == "no: its attention is as trained"
    assert "made from" not in said
    found = json.loads(done("info", original, "--json").stdout)
    assert (found["converted"], found["layers"], found["record"]) == (False, [], {})


def test_it_reads_no_weights(
    made: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("weights were read")

    _, folder = made
    monkeypatch.setattr("transformers.PreTrainedModel.from_pretrained", refuse)
    monkeypatch.setattr("torch.frombuffer", refuse)
    assert describe(str(folder)).converted
    # What is behind the header may be anything.
    shutil.copytree(folder, tmp_path / "copy")
    content = (folder / "model.safetensors").read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    zeros = content[:start] + b"\xff" * (len(content) - start)
    (tmp_path / "copy" / "model.safetensors").write_bytes(zeros)
    assert describe(str(tmp_path / "copy")).numbers == describe(str(folder)).numbers


def test_without_a_record_it_says_that(made: tuple[Path, Path], tmp_path: Path) -> None:
    shutil.copytree(made[1], tmp_path / "copy")
    (tmp_path / "copy" / "collabify.json").unlink()
    said = rows(done("info", tmp_path / "copy"))
    assert said["recorded"] == "nothing: there is no collabify.json"
    assert said["rank by layer"] == "10 x 2"


@pytest.mark.parametrize("form", FORMS)
def test_every_form(form: str, tmp_path: Path) -> None:
    model = TINY["bert"].build()
    report = collabify.convert(model, **LOW[form] | {"layers": [1]})
    model.half().save_pretrained(tmp_path, max_shard_size="10KB")
    info = describe(str(tmp_path))
    assert [(layer["index"], layer["rank"]) for layer in info.layers] == [
        (1, report.layers[0].rank)
    ]
    assert len(info.files) > 1
    floats = list(AutoModel.from_pretrained(tmp_path).state_dict().values())
    assert info.numbers["F16"] == sum(p.numel() for p in floats if p.dtype == torch.float16)
    assert rows(done("info", tmp_path))["weights"].startswith(f"{info.numbers['F16']:,} F16")


def test_of_the_hub_only_small_files_are_downloaded(
    made: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, folder = made
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    with serving() as hub:
        patch(hub, tmp_path, monkeypatch)
        commit = hub.add("me/tiny", files)
        found, here = describe("me/tiny"), describe(str(folder))
        assert (found.revision, here.revision) == (commit, None)
        assert (found.numbers, found.layers) == (here.numbers, here.layers)
        assert found.record == here.record
        cached = {path.name for path in (tmp_path / "hub").rglob("*") if path.is_file()}
        assert {"config.json", "collabify.json"} <= cached
        assert "model.safetensors" not in cached
        said = rows(done("info", "me/tiny", "--revision", commit[:40]))
        assert said["model"] == f"me/tiny at {commit}"
        errors(hub, files)


def errors(hub: Hub, files: dict[str, bytes]) -> None:
    hub.add("me/empty", {})
    hub.add("me/other", {"config.json": b'{"model_type": "bert"}', "pytorch_model.bin": b""})
    hub.add("me/bad", files | {"model.safetensors": b"\x02\0\0\0\0\0\0\0[]"})
    for name, said in (
        ("me/empty", "'me/empty' has no config.json on the Hub. Give a folder"),
        ("me/other", "'me/other' has no model.safetensors on the Hub."),
        ("me/bad", "'model.safetensors' of 'me/bad' on the Hub is missing or damaged ("),
        ("/nowhere/model", "'/nowhere/model' is no folder here, and no name on the Hub ("),
        ("me/nothing", "'me/nothing' does not exist, or is private and this token may not see"),
    ):
        outcome = cli("info", name)
        assert (outcome.exit_code, outcome.stdout) == (1, "")
        assert said in outcome.stderr
        assert outcome.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"version": 2}, "version=2 must be 1 in config.json's collabify record. Install"),
        ({"layers": 7}, "config.json's collabify record is damaged ("),
    ],
)
def test_records_of_others(
    made: tuple[Path, Path], tmp_path: Path, change: dict[str, Any], said: str
) -> None:
    shutil.copytree(made[1], tmp_path / "copy")
    path = tmp_path / "copy" / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] |= change
    path.write_text(json.dumps(config))
    outcome = cli("info", tmp_path / "copy")
    assert (outcome.exit_code, outcome.stdout) == (1, "")
    assert said in outcome.stderr
    path.write_text("[]")
    assert "it holds no JSON object" in cli("info", tmp_path / "copy").stderr
