"""A corpus of broken and hostile inputs: every command that reads one tells it in one line."""

import json
import os
import pickle
import re
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hub_cases import QUICK, cli, make
from safetensors.torch import load_file, save_file
from tiny_models import TINY

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
MIXING = "bert.encoder.layer.1.attention.self.mixing"
CHANNELS = "bert.encoder.layer.1.attention.self.channels"
READERS = {
    "convert": lambda folder, root: ("convert", folder, *QUICK, "--out", root / "out"),
    "heal": lambda folder, root: ("heal", folder, "--steps", 1, "--samples", 16),
    "drift": lambda folder, root: (
        *("eval", "drift", folder, "--baseline", root / "secret" / "original"),
        *("--data", "synthetic", "--samples", 4),
    ),
    "info": lambda folder, root: ("info", folder),
    "push": lambda folder, root: ("push", folder, "me/tiny", "--dry-run"),
}
EVERY = tuple(READERS)
LOADERS = ("convert", "heal", "drift")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("broken")
    make(made)
    return made


@pytest.fixture
def folder(root: Path, tmp_path: Path) -> Path:
    """A converted model to break."""
    shutil.copytree(root / "made", tmp_path / "model")
    return tmp_path / "model"


def edit(folder: Path, change: Callable[[dict[str, Any]], Any], name: str = "config.json") -> None:
    found = json.loads((folder / name).read_text())
    change(found)
    (folder / name).write_text(json.dumps(found))


def replace(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    state = load_file(folder / WEIGHTS)
    change(state)
    save_file(state, folder / WEIGHTS, {"format": "pt"})


def truncated(folder: Path) -> None:
    whole = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(whole[: len(whole) // 2])


def overlong(folder: Path) -> None:
    whole = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(struct.pack("<Q", 2**40) + whole[8:])


def integers(folder: Path) -> None:
    replace(folder, lambda state: state.update({MIXING: state[MIXING].to(torch.int64)}))


def fractions(folder: Path) -> None:
    replace(folder, lambda state: state.update({CHANNELS: state[CHANNELS].float() + 0.5}))


def outside(folder: Path) -> None:
    replace(folder, lambda state: state[CHANNELS].fill_(99))


def below(folder: Path) -> None:
    replace(folder, lambda state: state[CHANNELS].fill_(-1))


def lacking(folder: Path) -> None:
    replace(folder, lambda state: state.pop(MIXING))


def shards(folder: Path, name: str) -> None:
    """Weights whose index names ``name``, which is there and whole."""
    target = folder / name
    (folder / WEIGHTS).rename(target)
    index = {"metadata": {}, "weight_map": dict.fromkeys(load_file(target), name)}
    (folder / INDEX).write_text(json.dumps(index))


def climbing(folder: Path) -> None:
    shards(folder, "../elsewhere.safetensors")


def absolute(folder: Path) -> None:
    shards(folder, str(folder.parent / "elsewhere.safetensors"))


def shard_gone(folder: Path) -> None:
    shards(folder, "model-00001-of-00002.safetensors")
    (folder / "model-00001-of-00002.safetensors").unlink()


def index_odd(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    (folder / INDEX).write_text('{"weight_map": ["model.safetensors"]}')


def index_empty(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    (folder / INDEX).write_text('{"weight_map": {}}')


class Bomb:
    def __reduce__(self) -> Any:
        return os.system, ("touch $PWNED",)


def pickled(folder: Path) -> None:
    """Weights that run a command when they are unpickled."""
    (folder / WEIGHTS).unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb()))


def pickled_well(folder: Path) -> None:
    torch.save(load_file(folder / WEIGHTS), folder / "pytorch_model.bin")
    (folder / WEIGHTS).unlink()


def foreign(folder: Path) -> None:
    edit(folder, lambda config: config.update(quantization_config={"quant_method": "gptq"}))


def unnamed(folder: Path) -> None:
    edit(folder, lambda config: config["quantization_config"].pop("quant_method"))


def list_of_records(folder: Path) -> None:
    edit(folder, lambda config: config.update(quantization_config=["collabify"]))


def newer(folder: Path) -> None:
    edit(folder, lambda config: config["quantization_config"].update(version=2))


def newer_layer(folder: Path) -> None:
    edit(folder, lambda config: config["quantization_config"]["layers"][0].update(shape="moebius"))


def config_halved(folder: Path) -> None:
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(text[: len(text) // 2])


def config_binary(folder: Path) -> None:
    (folder / "config.json").write_bytes(b"\xff\xfe\x00binary")


def config_list(folder: Path) -> None:
    (folder / "config.json").write_text("[1, 2]")


def record_halved(folder: Path) -> None:
    (folder / "collabify.json").write_text('{"method": ')


def record_list(folder: Path) -> None:
    (folder / "collabify.json").write_text("[]")


def sizes_of_words(folder: Path) -> None:
    edit(folder, lambda config: config.update(hidden_size="wide"))


def unknown_kind(folder: Path) -> None:
    """The configuration wants code that lies beside it."""
    code = {"AutoConfig": "evil.Config", "AutoModel": "evil.Model"}
    edit(folder, lambda config: config.update(model_type="evil", auto_map=code))
    evil(folder)


def evil(folder: Path) -> None:
    (folder / "evil.py").write_text("import os\nos.system('touch $PWNED')\n")


# What is broken, by which commands it is read, and what they say.
BROKEN: dict[Callable[[Path], None], tuple[tuple[str, ...], str]] = {
    truncated: (EVERY, "'model.safetensors' of .* is missing or damaged .*not fully covered"),
    overlong: (EVERY, "is missing or damaged .*header too large"),
    integers: (EVERY, "mixing' in .* holds I64 and must hold numbers in floating point"),
    fractions: (EVERY, "channels' in .* holds F32 and must hold whole numbers"),
    outside: (LOADERS, "channels' must be from 0 to 12 everywhere"),
    below: (LOADERS, "channels' must be from 0 to 12 everywhere"),
    lacking: (LOADERS, "mixing' is not in the checkpoint"),
    climbing: (EVERY, "index.json of .* cannot be used .it names files elsewhere"),
    absolute: (EVERY, "index.json of .* cannot be used .it names files elsewhere"),
    shard_gone: (EVERY, "'model-00001-of-00002.safetensors' of .* is missing"),
    index_odd: (EVERY, "index.json of .* cannot be used"),
    index_empty: (EVERY, "index.json of .* cannot be used .it names no files"),
    pickled: (EVERY, "in pytorch_model.bin, a pickle, which could run code"),
    pickled_well: (EVERY, "in pytorch_model.bin, a pickle, which could run code"),
    foreign: ((*LOADERS, "push"), "quant_method='gptq'|that was not converted"),
    unnamed: ((*LOADERS, "push"), "quant_method='None'|that was not converted"),
    list_of_records: ((*LOADERS, "push"), "does not know the config|that was not converted"),
    newer: (EVERY, "version=2 must be 1 in config.json's collabify record"),
    newer_layer: (EVERY, "collabify record is damaged .unknown shape"),
    config_halved: (EVERY, "config.json.* cannot be read"),
    config_binary: (EVERY, "config.json.* cannot be read"),
    config_list: (
        ("heal", "info", "push"),
        "config.json.* cannot be read .it holds no JSON object",
    ),
    record_halved: (("heal", "info", "push"), "collabify.json' cannot be read"),
    record_list: (("heal", "info", "push"), "collabify.json' must hold a JSON object"),
    sizes_of_words: (LOADERS, "does not know the configuration .*hidden_size"),
    unknown_kind: (LOADERS, "does not know the configuration .*custom code"),
}


@pytest.mark.parametrize(
    ("damage", "command"),
    [(damage, command) for damage in BROKEN for command in BROKEN[damage][0]],
    ids=lambda part: part if isinstance(part, str) else part.__name__,
)
def test_one_clear_line(
    damage: Callable[[Path], None],
    command: str,
    folder: Path,
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PWNED", str(folder.parent / "pwned"))
    damage(folder)
    before = contents(folder)
    outcome = cli(*READERS[command](folder, root))
    assert outcome.exit_code == 1
    assert re.match(f"Error: .*({BROKEN[damage][1]}).*\n\\Z", outcome.stderr), outcome.stderr
    assert not (folder.parent / "pwned").exists()
    assert contents(folder) == before
    assert not (root / "out").exists()


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("command", EVERY)
def test_code_beside_a_model_is_never_run(
    command: str, folder: Path, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the configuration of the model and that of its tokenizer ask for it."""
    if command == "convert":
        shutil.rmtree(folder)
        shutil.copytree(root / "secret" / "original", folder)
    monkeypatch.setenv("PWNED", str(tmp_path / "pwned"))
    auto = {name: f"evil.{name}" for name in ("AutoConfig", "AutoModel", "AutoTokenizer")}
    auto["AutoModelForSequenceClassification"] = "evil.Model"
    edit(folder, lambda config: config.update(auto_map=auto))
    edit(
        folder,
        lambda config: config.update(auto_map={"AutoTokenizer": ["evil.Tokenizer", None]}),
        "tokenizer_config.json",
    )
    evil(folder)
    outcome = cli(
        *READERS[command](folder, tmp_path / "elsewhere" if command == "convert" else root)
    )
    assert outcome.exit_code == 0, outcome.stderr
    assert not (tmp_path / "pwned").exists()
    if command == "convert":
        made = tmp_path / "elsewhere" / "out"
        assert "auto_map" not in json.loads((made / "config.json").read_text())
        assert not (made / "evil.py").exists()


def test_pickles_from_the_hub(hub: Any, tmp_path: Path) -> None:
    """Refused by what is asked of transformers, since nothing lies in a folder yet."""
    commit = hub("me/pickled", TINY["bert"].build())
    snapshot = tmp_path / "hub" / "models--me--pickled" / "snapshots" / commit
    pickled(snapshot)
    outcome = cli("convert", "me/pickled", "--dk", 10, "--out", tmp_path / "out")
    assert outcome.exit_code == 1
    assert re.match(r"Error: 'me/pickled' .*model\.safetensors.*\n\Z", outcome.stderr)
