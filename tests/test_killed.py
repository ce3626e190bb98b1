"""Kill -9 in the middle: nothing half-written passes for a result, and the command works again."""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
import transformers
from hub_cases import QUICK, cli, done
from hub_server import patch, serving
from tiny_tasks import FAST, write_model, write_task

import collabify
from collabify import storage
from collabify.finetuning.trainer import last_checkpoint

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="the command runs in a fork"),
    # Nothing but this test's Hub has a thread, and it stays in the parent.
    pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning"),
]
OPTIONS = [f"--{name.replace('_', '-')}={value}" for name, value in (FAST | {"epochs": 2}).items()]
STEPS = ("--samples", 32, "--max-length", 12, "--steps", 20, "--batch-size", 8)
STEPS = (*STEPS, "--learning-rate", 1e-3)


@pytest.fixture
def original(tmp_path: Path) -> Path:
    return write_model(tmp_path / "original", num_labels=2)


def die(*_: Any, **__: Any) -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("killed, and still there")


def in_half_of_the_weights() -> None:
    write: Any = transformers.modeling_utils.safe_save_file

    def save(tensors: Any, path: Any, *args: Any, **kwargs: Any) -> None:
        write(tensors, path, *args, **kwargs)
        content = Path(path).read_bytes()
        Path(path).write_bytes(content[: len(content) // 2])
        die()

    transformers.modeling_utils.safe_save_file = save


def before_the_weights() -> None:
    transformers.modeling_utils.safe_save_file = die


def as_the_old_model_is_out_and_the_new_one_not_in() -> None:
    rename = Path.rename

    def once(self: Path, target: Any) -> Path:
        result = rename(self, target)
        if Path(target).name == "old":
            die()
        return result

    Path.rename = once  # type: ignore[method-assign]


def as_the_result_is_written() -> None:
    import collabify.finetuning.run as run

    run.write = die  # type: ignore[assignment]


def as_a_file_is_sent() -> None:
    import huggingface_hub.lfs

    huggingface_hub.lfs._upload_single_part = die


def as_all_is_sent_and_nothing_committed() -> None:
    import huggingface_hub._commit_api

    huggingface_hub._commit_api._send_commit = die


def in_half_of_a_file(before: int) -> None:
    """Of the one after so many others."""
    write, begun = Path.write_text, []

    def once(self: Path, content: str, *args: Any, **kwargs: Any) -> int:
        begun.append(self)
        if len(begun) <= before:
            return write(self, content, *args, **kwargs)
        write(self, content[: len(content) // 2], *args, **kwargs)
        die()

    Path.write_text = once  # type: ignore[method-assign, assignment]


Point = Callable[[], None]


def killed(point: Point, *arguments: object) -> None:
    """Run the command in a process that is killed where ``point`` says."""
    killed_in(lambda: cli(*arguments), point)


def killed_in(work: Callable[[], Any], point: Point) -> None:
    child = os.fork()
    if child == 0:
        try:
            point()
            work()
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status), "it came to its end"
    assert os.WTERMSIG(status) == signal.SIGKILL


def whole(folder: Path) -> dict[str, bytes]:
    """The folder's files, after loading the model in it."""
    transformers.AutoModelForSequenceClassification.from_pretrained(folder)
    json.loads((folder / "collabify.json").read_text())
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


WRITING = [in_half_of_the_weights, before_the_weights]
REPLACING = [*WRITING, as_the_old_model_is_out_and_the_new_one_not_in]


@pytest.mark.parametrize("before", [0, 1])
def test_code_for_those_without_collabify(before: int, saved: Any) -> None:
    _, folder, _ = saved
    killed_in(lambda: collabify.write_standalone(folder), lambda: in_half_of_a_file(before))
    config = json.loads((folder / "config.json").read_text())
    assert "auto_map" not in config
    code = folder / "modeling_collabify.py"
    assert not code.exists() or code.read_text() == storage.modeling()
    collabify.write_standalone(folder)
    assert "auto_map" in json.loads((folder / "config.json").read_text())
    assert code.read_text() == storage.modeling()


@pytest.mark.parametrize("point", WRITING, ids=lambda point: point.__name__)
def test_convert(point: Point, original: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = ("convert", original, *QUICK, "--out", out)
    killed(point, *command)
    assert not out.exists()
    done(*command)
    assert whole(out)


@pytest.mark.parametrize("point", REPLACING, ids=lambda point: point.__name__)
def test_convert_over_another_model(point: Point, original: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done("convert", original, *QUICK, "--out", out)
    before = whole(out)
    command = ("convert", original, *QUICK, "--dk", 8, "--out", out)
    killed(point, *command, "--overwrite")
    outcome = cli(*command)
    assert (outcome.exit_code, "exists and is not empty" in outcome.stderr) == (1, True)
    assert whole(out) == before, "the old one is still, or again, there"
    done(*command, "--overwrite")
    assert json.loads(whole(out)["collabify.json"])["options"]["dk"] == 8


@pytest.mark.parametrize("point", REPLACING, ids=lambda point: point.__name__)
def test_heal(point: Point, original: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done("convert", original, *QUICK, "--dk", 4, "--out", out)
    before = whole(out)
    (out / "notes.txt").write_text("Mine.")
    killed(point, "heal", out, *STEPS)
    if out.exists():
        assert whole(out) | {"notes.txt": b""} == before | {"notes.txt": b""}
    done("heal", out, *STEPS)
    after = whole(out)
    assert json.loads(after["collabify.json"])["healing"]["kept"]
    assert after["model.safetensors"] != before["model.safetensors"]
    assert after["notes.txt"] == b"Mine."


def test_finetune(original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets")
    write_task(tmp_path / "glue", "sst2", {"train": 32, "validation": 16})
    out, work = tmp_path / "out", tmp_path / ".out-finetuning"
    task = ("--task", "sst2", "--data", tmp_path / "glue", "--device=cpu", *OPTIONS)
    command = ("finetune", original, *task, "--out", out)
    killed(in_half_of_the_weights, *command)
    assert not out.exists()
    assert list(work.rglob("*.safetensors")), "half a checkpoint is there"
    assert last_checkpoint(work) is None, "and is none"
    killed(as_the_result_is_written, *command)
    assert not out.exists()
    outcome = cli(*command)
    assert (outcome.exit_code, "Go on with --resume" in outcome.stderr) == (1, True)
    done(*command, "--resume")
    assert json.loads(whole(out)["collabify.json"])["finetuning"]["resumed_at"] == 4
    assert not work.exists()


@pytest.mark.parametrize(
    ("point", "sent"),
    [(as_a_file_is_sent, False), (as_all_is_sent_and_nothing_committed, True)],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_push(
    point: Point, sent: bool, original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    done("convert", original, *QUICK, "--out", out)
    with serving() as hub:
        patch(hub, tmp_path / "home", monkeypatch)
        killed(point, "push", out, "me/tiny")
        assert set(hub.files("me/tiny")) == {".gitattributes"}
        assert bool(hub.stored) == sent
        done("push", out, "me/tiny")
        assert hub.files("me/tiny")["model.safetensors"] == whole(out)["model.safetensors"]
        assert hub.count("PUT") == len(hub.stored), "nothing was sent twice"
