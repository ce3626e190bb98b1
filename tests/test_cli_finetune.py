"""``collabify finetune`` as a user runs it, also in two processes."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_models import LOW
from tiny_tasks import FAST, write_model, write_task
from transformers import AutoModelForSequenceClassification
from typer.testing import CliRunner

from collabify.cli.app import app
from collabify.finetuning.trainer import last_checkpoint

OPTIONS = [f"--{name.replace('_', '-')}={value}" for name, value in FAST.items()]
COMMAND = [sys.executable, "-m", "collabify", "finetune"]
# With --cpu accelerate starts a second process by mpirun only.
LAUNCH = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes"]
LAUNCH += ["2", "--num_machines", "1", "--mixed_precision", "no", "--main_process_port", "0"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A converted model and a task in GLUE's layout."""
    root = tmp_path_factory.mktemp("tiny")
    write_task(root / "glue", "sst2", {"train": 256, "validation": 65})
    return str(write_model(root / "model", "bert", LOW["cp"])), str(root / "glue")


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """No network, and no data left in the user's cache."""
    cache = tmp_path_factory.getbasetemp() / "datasets"
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(cache))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", cache)


def run(*arguments: object) -> Any:
    result = CliRunner().invoke(app, ["finetune", *map(str, arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def call(tiny: tuple[str, str], out: Path) -> list[str]:
    model, glue = tiny
    return [model, "--task", "sst2", "--data", glue, "--out", str(out), *OPTIONS]


def test_it_trains_and_says_so(tiny: tuple[str, str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    outcome = run(*call(tiny, out))
    assert outcome.exit_code == 0, outcome.stderr
    assert outcome.stderr.count("\n") == 1
    assert "Warning" in outcome.stderr
    assert "gets a new head for task 'sst2' (negative, positive): BertModel has none." in (
        outcome.stderr
    )
    record = json.loads((out / "collabify.json").read_text())["finetuning"]
    for epoch in record["scores"]:
        numbers = (epoch["loss"], epoch["validation"]["accuracy"])
        assert all(f"{number:.4f}" in outcome.stdout for number in numbers)
    assert "80 steps" in outcome.stdout
    assert f"Saved to {out}." in outcome.stdout
    assert record["scores"][-1]["validation"]["accuracy"] > 0.9
    assert record["source"] == tiny[0]
    assert AutoModelForSequenceClassification.from_pretrained(out).config.num_labels == 2


def test_json_is_the_record_and_nothing_else(tiny: tuple[str, str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    outcome = run(*call(tiny, out), "--json", "--limit", 16, "--only", "attention")
    report = json.loads(outcome.stdout)
    assert report == json.loads((out / "collabify.json").read_text())["finetuning"]
    assert (report["examples"], report["options"]["only"]) == (16, "attention")


def test_converting_what_was_fine_tuned_keeps_the_record(
    tiny: tuple[str, str], tmp_path: Path
) -> None:
    source = write_model(tmp_path / "original")
    assert run(*call((str(source), tiny[1]), tmp_path / "a"), "--limit", 16).exit_code == 0
    arguments = ["convert", str(tmp_path / "a"), "--dk", "8", "--calibration", "none"]
    done = CliRunner().invoke(app, [*arguments, "--out", str(tmp_path / "b")])
    assert done.exit_code == 0, done.stderr
    before, after = (
        json.loads((tmp_path / name / "collabify.json").read_text()) for name in ("a", "b")
    )
    assert after["finetuning"] == before["finetuning"]
    assert after["layers"][0]["rank"] == 8


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--epochs", 0], 2, "epochs=0 must be at least 1. Raise --epochs."),
        (["--alpha", 0.5], 2, "alpha=0.5 says how to learn from a teacher"),
        (["--task", "glue"], 2, "task='glue' must be one of cola"),
        (["--learning-rate", 1e35], 1, "The loss is"),
        (["--teacher", "/nowhere/at-all"], 1, "'/nowhere/at-all' is neither a folder nor"),
    ],
)
def test_errors_are_one_line(
    arguments: list[Any], code: int, message: str, tiny: tuple[str, str], tmp_path: Path
) -> None:
    outcome = run(*call(tiny, tmp_path / "out"), *arguments)
    errors = [line for line in outcome.stderr.splitlines() if not line.startswith("Warning: ")]
    assert outcome.exit_code == code
    assert outcome.stdout == ""
    assert len(errors) == 1, outcome.stderr
    assert message in errors[0]
    assert not (tmp_path / "out").exists()


def test_a_model_that_is_not_there(tiny: tuple[str, str], tmp_path: Path) -> None:
    outcome = run(*call(("/nowhere/model", tiny[1]), tmp_path / "out"))
    assert outcome.exit_code == 1
    assert "Error: '/nowhere/model' is neither a folder nor a model" in outcome.stderr


def test_ctrl_c_says_how_to_go_on(tiny: tuple[str, str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    arguments = [*call(tiny, out), "--epochs=200"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    child = subprocess.Popen(
        [*COMMAND, *arguments], stderr=subprocess.PIPE, text=True, env=environment
    )
    work = tmp_path / ".out-finetuning"
    while child.poll() is None and last_checkpoint(work) is None:
        time.sleep(0.01)
    child.send_signal(signal.SIGINT)
    _, said = child.communicate(timeout=120)
    assert child.returncode == 130, said
    assert "Go on with the same command and --resume." in said
    assert "Traceback" not in said
    assert not out.exists()
    assert run(*arguments).exit_code == 1, "it asks what to do"
    # A shorter run would be another one.
    outcome = run(*call(tiny, out), "--resume")
    assert (outcome.exit_code, "epochs=5 must be 200" in outcome.stderr) == (2, True)


def test_two_processes_share_the_work(tiny: tuple[str, str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [*LAUNCH, *COMMAND[1:], *call(tiny, out), "--device", "cpu", "--json"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert done.stderr.count("gets a new head") == 1, "the main process alone speaks"
    assert report["options"]["processes"] == 2
    assert report["steps"] == 5 * 256 // (2 * 16)
    assert report["evaluated"] == 65
    accuracy = report["scores"][-1]["validation"]["accuracy"]
    assert accuracy > 0.9
    assert accuracy * 65 == pytest.approx(round(accuracy * 65)), "each sentence counts once"
    assert report == json.loads((out / "collabify.json").read_text())["finetuning"]
    tensors = load_file(out / "model.safetensors")
    assert all(torch.isfinite(t).all() for t in tensors.values() if t.is_floating_point())
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    shutil.rmtree(out)


def test_two_processes_have_the_loss_of_one(tiny: tuple[str, str], tmp_path: Path) -> None:
    still = ["--device=cpu", "--json", "--limit=64", "--epochs=1", "--learning-rate=1e-12"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [*LAUNCH, *COMMAND[1:], *call(tiny, tmp_path / "two"), *still]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
    (two,) = json.loads(done.stdout)["scores"]
    (one,) = json.loads(run(*call(tiny, tmp_path / "one"), *still, "--batch-size=32").stdout)[
        "scores"
    ]
    assert two["step"] == one["step"] == 2
    assert two["loss"] == pytest.approx(one["loss"], rel=1e-4)
