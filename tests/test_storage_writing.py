"""Model folders: written whole, with what travels along, or not at all."""

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from tiny_models import LOW, TINY, assert_same

from collabify import convert, storage
from collabify.errors import CheckpointError, OutputError


def write(out: Path, note: str = "", *, stop: Any = None, **options: Any) -> None:
    """What looks like a model's folder."""
    with storage.output_folder(out, **options) as folder:
        assert folder.is_dir()
        assert not list(folder.iterdir())
        (folder / "config.json").write_text(json.dumps({"model_type": "bert", "note": note}))
        (folder / "model.safetensors").touch()
        if stop is not None:
            raise stop


def note_in(out: Path) -> str:
    return json.loads((out / "config.json").read_text())["note"]


def test_output_appears_whole_with_its_parents(tmp_path: Path, monkeypatch: Any) -> None:
    write(tmp_path / "a" / "b" / "c")
    written = sorted(path.name for path in (tmp_path / "a" / "b" / "c").iterdir())
    assert written == ["config.json", "model.safetensors"]
    (tmp_path / "empty").mkdir()
    write(tmp_path / "empty")
    monkeypatch.chdir(tmp_path)
    write(Path("relative"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "empty", "relative"]


@pytest.mark.parametrize("stop", [ValueError, KeyboardInterrupt, CheckpointError])
@pytest.mark.parametrize("exists", [False, True])
def test_nothing_stays_of_a_failure(
    tmp_path: Path, stop: type[BaseException], exists: bool
) -> None:
    out = tmp_path / "deep" / "out"
    if exists:
        write(out, "old")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(stop):
        write(out, "new", overwrite=exists, stop=stop)
    assert sorted(tmp_path.rglob("*")) == before
    assert not exists or note_in(out) == "old"


def test_only_checked(tmp_path: Path) -> None:
    write(tmp_path / "deep" / "out", keep=False)
    assert not list(tmp_path.iterdir())


def test_overwriting(tmp_path: Path) -> None:
    write(tmp_path / "out", "old")
    (tmp_path / "out" / "extra").touch()
    with pytest.raises(OutputError, match=r"exists and is not empty\. .* --overwrite\.$"):
        write(tmp_path / "out")
    write(tmp_path / "out", "new", overwrite=True)
    assert note_in(tmp_path / "out") == "new"
    assert not (tmp_path / "out" / "extra").exists()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").touch()
    with pytest.raises(OutputError, match=r"not a model's folder"):
        write(tmp_path / "mine", overwrite=True)
    with pytest.raises(OutputError, match="is a file; it must be a folder"):
        write(tmp_path / "mine" / "thesis.tex", overwrite=True)
    with pytest.raises(OutputError, match=r"is a file; it must be a folder"):
        write(tmp_path / "mine" / "thesis.tex" / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", "out"]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES, errno.EIO], ids=errno.errorcode.get)
def test_disk_errors(tmp_path: Path, number: int) -> None:
    error = OSError(number, os.strerror(number))
    with pytest.raises(OutputError, match=r"could not be written \(.*\)\. Free space") as caught:
        write(tmp_path / "out", stop=error)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_converted_model_never_replaces_its_source(saved: Any, monkeypatch: Any) -> None:
    _, folder, _ = saved
    for out in (folder, folder.parent, folder / ".." / folder.name):
        with pytest.raises(OutputError, match="holds the model to convert"):
            storage.check_not_source(out, str(folder))
    monkeypatch.chdir(folder)
    with pytest.raises(OutputError, match="holds the model to convert"):
        storage.check_not_source(Path(), str(folder))
    storage.check_not_source(folder / "new", str(folder))


def test_companions_travel(saved: Any, tmp_path: Path) -> None:
    model, folder, _ = saved
    travel = ["tokenizer.json", "vocab.txt", "1_Pooling/config.json", "modules.json", "LICENSE.md"]
    stay = ["pytorch_model.bin", "README.md", "optimizer.pt", "onnx/model.onnx"]
    (folder / "1_Pooling").mkdir()
    (folder / "onnx").mkdir()
    for name in travel + stay:
        (folder / name).write_bytes(name.encode() + b"\r\n\xff")
    report = convert(TINY["bert"].build(), **LOW["cp"])
    with storage.output_folder(tmp_path / "out") as new:
        source = storage.Source("given", str(folder))
        storage.save(model, new, source=source, report=report)
    written = {str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*.*")}
    assert written == {*travel, "config.json", "model.safetensors", "collabify.json"}
    for name in travel:
        assert (tmp_path / "out" / name).read_bytes() == (folder / name).read_bytes()
    said = json.loads((tmp_path / "out" / "collabify.json").read_text())
    assert said == {"version": 1} | json.loads(report.to_json())
    assert said["parameters"]["query_key"]["kept"] == report.query_key.kept
    shutil.rmtree(folder)
    assert_same(type(model).from_pretrained(tmp_path / "out"), model, TINY["bert"].batch(model))


def test_companions_of_a_hub_model_come_from_its_revision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "snapshot" / "vocab.txt").write_text("[PAD]")
    asked: list[tuple[object, ...]] = []

    def download(name: str, *, revision: str, allow_patterns: list[str]) -> str:
        asked.append((name, revision, tuple(allow_patterns)))
        return str(tmp_path / "snapshot")

    monkeypatch.setattr("collabify.storage.writing.snapshot_download", download)
    source = storage.Source("user/name", "user/name", "c0ffee")
    storage.save(TINY["bert"].build(), tmp_path / "out", source=source)
    assert asked == [("user/name", "c0ffee", storage.COMPANIONS)]
    assert (tmp_path / "out" / "vocab.txt").read_text() == "[PAD]"
    assert source.record == "user/name"


def test_overwriting_that_breaks_off_keeps_the_old_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, rename = tmp_path / "out", Path.rename
    with storage.output_folder(out) as folder:
        storage.save(TINY["bert"].build(), folder)
    before = {path.name: path.read_bytes() for path in out.iterdir()}

    def broken(self: Path, target: Path) -> Path:
        if self.name == "new":
            raise KeyboardInterrupt
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", broken)
    with pytest.raises(KeyboardInterrupt), storage.output_folder(out, overwrite=True) as folder:
        storage.save(TINY["vit"].build(), folder)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_another_models_copy_is_never_put_back(tmp_path: Path) -> None:
    """A run that replaced m-2 was killed; m is not there and never was."""
    scratch = tmp_path / ".m-2-abcd1234" / "old"
    scratch.mkdir(parents=True)
    (scratch / "config.json").write_text("{}")
    storage.recover(tmp_path / "m")
    assert not (tmp_path / "m").exists()
    storage.recover(tmp_path / "m-2")
    assert (tmp_path / "m-2" / "config.json").read_text() == "{}"
    assert not scratch.parent.exists()
