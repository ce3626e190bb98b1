"""``collabify heal`` as a user runs it."""

import json
import re
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from healing_cases import interrupt_after
from safetensors.torch import load_file
from tiny_models import TINY
from tolerances import TOLERANCES
from transformers import AutoModel
from typer.testing import CliRunner

from collabify.cli.app import app
from collabify.data import load_calibration
from collabify.drift import measure_drift


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """An original and its conversion, with files beside it."""
    source, out = tmp_path / "original", tmp_path / "converted"
    TINY["bert"].build(headed=True).save_pretrained(source)
    (source / "LICENSE").write_text("Of the original.")
    outcome = run("convert", source, "--dk", 10, "--iterations", 3, "--out", out, *QUICK)
    assert outcome.exit_code == 0, outcome.stderr
    (out / "README.md").write_text("Mine.")
    (out / "more").mkdir()
    (out / "more" / "notes.txt").write_text("Mine too.")
    return source, out


QUICK = ("--samples", 32, "--max-length", 12)
STEPS = (*QUICK, "--steps", 20, "--batch-size", 8, "--learning-rate", 1e-2)


def run(*arguments: object) -> Any:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_heal_replaces_the_model_and_keeps_what_lies_beside_it(folders: tuple[Path, Path]) -> None:
    source, out = folders
    before = contents(out)
    outcome = run("heal", out, *STEPS)
    assert outcome.exit_code == 0, outcome.stderr
    after = contents(out)
    changed = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    assert changed == {"model.safetensors", "collabify.json"}
    record, old = (json.loads(each["collabify.json"]) for each in (after, before))
    healing = record.pop("healing")
    assert old.pop("healing") is None
    assert record == old
    assert healing["kept"]
    assert healing["teacher"] == str(source)
    assert healing["loss_after"] < healing["loss_before"]
    assert healing["options"]["seed"] == 0
    assert healing["versions"]["torch"] == version("torch")
    assert [path.name for path in out.parent.iterdir() if path.name.startswith(".")] == []
    healed = AutoModel.from_pretrained(out)
    read = {"samples": 32, "max_length": 12, "batch_size": 8, "processor": str(out)}
    batches = load_calibration("synthetic", healed.config, **read).held_out
    original = AutoModel.from_pretrained(source)
    shutil.copytree(out, out.parent / "unhealed")  # the loaded model still reads its own file
    (out.parent / "unhealed" / "model.safetensors").write_bytes(before["model.safetensors"])
    unhealed = AutoModel.from_pretrained(out.parent / "unhealed")
    drift = [measure_drift(original, model, batches).hidden_error for model in (unhealed, healed)]
    for found, when in zip(drift, ("before", "after"), strict=True):
        reported = healing[f"drift_{when}"]["hidden_error"]
        assert found == pytest.approx(reported, rel=TOLERANCES["gradient"])
    assert drift[1] < drift[0]
    cosine = f"{healing['drift_before']['hidden_cosine']:.4f}"
    shown = re.search(r"hidden states, cosine +(\S+) +(\S+)", outcome.stdout)
    assert shown is not None
    assert shown[1] == cosine
    assert re.search(r"20 steps, \d+ seconds, [\d,]+ parameters, on synthetic", outcome.stdout)
    assert f"Kept the best, step {healing['best_step']}." in outcome.stdout


def test_heal_out_leaves_the_model_and_prints_only_json(folders: tuple[Path, Path]) -> None:
    source, out = folders
    before = contents(out)
    target = out.parent / "healed"
    outcome = run("heal", out, *STEPS, "--out", target, "--json")
    assert outcome.exit_code == 0, outcome.stderr
    report = json.loads(outcome.stdout)
    assert contents(out) == before
    assert (target / "LICENSE").read_text() == "Of the original."
    assert json.loads((target / "collabify.json").read_text())["healing"] == report
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (target, out))
    assert ours.keys() == theirs.keys()
    again = run("heal", out, *STEPS, "--out", target)
    assert again.exit_code == 1
    assert "exists and is not empty" in again.stderr
    assert run("heal", out, *STEPS, "--out", target, "--overwrite").exit_code == 0
    over = run("heal", out, *STEPS, "--out", source, "--overwrite")
    assert over.exit_code == 1
    assert "would be lost" in over.stderr


def test_heal_that_wins_nothing_writes_nothing(folders: tuple[Path, Path]) -> None:
    _, out = folders
    before = contents(out)
    outcome = run("heal", out, *STEPS, "--learning-rate", 1e8)
    assert outcome.exit_code == 0, outcome.stderr
    said = " ".join(outcome.stdout.split())
    assert re.search(r"After steps \d[\d, ]* healing went back .*rate \(1e\+08 at first\)", said)
    assert "Nothing was won" in outcome.stdout
    assert f"{out} is as it was." in outcome.stdout
    assert contents(out) == before
    assert [path.name for path in out.parent.iterdir() if path.name.startswith(".")] == []


def test_heal_resumes_after_an_interruption(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from collabify import healing

    _, out = folders
    before, original = contents(out), healing.heal

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs | {"progress": interrupt_after(7)})

    whole = out.parent / "whole"
    assert run("heal", out, *STEPS, "--out", whole).exit_code == 0
    monkeypatch.setattr(healing, "heal", interrupted)
    outcome = run("heal", out, *STEPS)
    assert outcome.exit_code == 130
    assert re.fullmatch(
        r"Interrupted after step 7 of 20; .* same command again .*\n", outcome.stderr
    )
    assert outcome.stdout == ""
    assert contents(out) == before
    monkeypatch.undo()
    outcome = run("heal", out, *STEPS)
    assert outcome.exit_code == 0, outcome.stderr
    assert "20 steps, resumed after 7, " in outcome.stdout
    assert contents(out)["model.safetensors"] == contents(whole)["model.safetensors"]
    assert [path.name for path in out.parent.iterdir() if path.name.startswith(".")] == []


def test_heal_says_what_is_missing(folders: tuple[Path, Path]) -> None:
    source, out = folders
    hidden = source.rename(source.with_name("elsewhere"))
    outcome = run("heal", out, *STEPS)
    assert outcome.exit_code == 1
    assert re.fullmatch(
        r"Error: .* was converted from .*original', which cannot .*--teacher MODEL\n",
        outcome.stderr,
    )
    assert run("heal", out, *STEPS, "--teacher", hidden).exit_code == 0
    (out / "collabify.json").unlink()
    outcome = run("heal", out, *STEPS)
    assert outcome.exit_code == 1
    assert re.fullmatch(r"Error: .* has no collabify.json .*--teacher MODEL\n", outcome.stderr)
    (out / "collabify.json").write_text("{")
    outcome = run("heal", out, *STEPS)
    assert outcome.exit_code == 1
    assert re.fullmatch(r"Error: .*collabify.json' cannot be read .*\n", outcome.stderr)


def test_heal_errors_are_one_line(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    source, out = folders
    for code, message, arguments in (
        (1, "None of the attention layers", (source,)),
        (2, "steps=0 must be at least 1", (out, "--steps", 0)),
        (2, "learning_rate=-1.0 must be above 0", (out, "--learning-rate", -1)),
        (2, "--out is missing", ("nobody/nothing",)),
        (1, "'nobody/nothing' is neither", ("nobody/nothing", "--out", out.parent / "new")),
        (1, "converted before", (out, "--teacher", out)),
    ):
        before = contents(out)
        outcome = run("heal", *arguments)
        assert (outcome.exit_code, outcome.stdout) == (code, ""), outcome.stderr
        assert message in outcome.stderr
        assert outcome.stderr.count("\n") == 1
        assert contents(out) == before


@pytest.mark.slow
def test_two_processes_share_the_work(folders: tuple[Path, Path]) -> None:
    _, out = folders
    # With --cpu accelerate starts a second process by mpirun only; heal is on the CPU anyhow.
    command = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu"]
    command += ["--num_processes", "2", "--num_machines", "1", "--mixed_precision", "no"]
    command += ["--main_process_port", "0"]
    command += ["-m", "collabify", "heal", str(out), *map(str, STEPS), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["options"]["processes"] == 2
    assert report["kept"]
    assert json.loads((out / "collabify.json").read_text())["healing"] == report
    assert [path.name for path in out.parent.iterdir() if path.name.startswith(".")] == []


def test_the_teacher_is_what_it_was_when_it_was_converted(hub: Any, tmp_path: Path) -> None:
    original, out = TINY["bert"].build(), tmp_path / "converted"
    commit = hub("user/name", original)
    outcome = run("convert", "user/name", "--dk", 10, "--iterations", 3, "--out", out, *QUICK)
    assert outcome.exit_code == 0, outcome.stderr
    assert json.loads((out / "collabify.json").read_text())["revision"] == commit
    with torch.no_grad():
        original.encoder.layer[1].output.dense.weight[0, 0] += 1
    newer = hub("user/name", original)  # the branch moves on
    outcome = run("heal", out, *STEPS, "--out", tmp_path / "healed")
    assert outcome.exit_code == 0, outcome.stderr
    assert "Warning" not in outcome.stderr
    outcome = run("heal", out, *STEPS, "--out", tmp_path / "other", "--teacher", "user/name")
    assert outcome.exit_code == 0, outcome.stderr
    assert "1 parameters that the conversion left alone differ" in outcome.stderr
    snapshots = tmp_path / "hub" / "models--user--name" / "snapshots"
    shutil.rmtree(snapshots / commit)
    assert (snapshots / newer).is_dir()
    outcome = run("heal", out, *STEPS)
    assert outcome.exit_code == 1
    assert re.fullmatch(
        rf"Error: .* converted from 'user/name' at revision '{commit}', .*--teacher MODEL\n",
        outcome.stderr,
    )


def test_heal_in_place_keeps_all_in_subfolders(folders: tuple[Path, Path]) -> None:
    _, out = folders
    mine = ["1_Pooling/config.json", "onnx/model.onnx", "more/deep/model.safetensors"]
    mine += ["sub/model-00001-of-00002.safetensors", "sub/pytorch_model.bin", "sub/config.json"]
    for name in mine:
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_bytes(name.encode())
    (out / "pytorch_model.bin").write_bytes(b"of the model before")
    before = contents(out)
    assert run("heal", out, *STEPS).exit_code == 0
    after = contents(out)
    assert before.keys() - after.keys() == {"pytorch_model.bin"}
    assert all(after[name] == name.encode() for name in mine)
    assert after["model.safetensors"] != before["model.safetensors"]
