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
import transformers
from hub_cases import QUICK, cli, make
from safetensors.torch import load_file, save_file
from tiny_models import FORMS, LOW, TINY
from tiny_tasks import write_images, write_model, write_task

import collabify
from collabify import storage
from collabify.errors import CheckpointError, CollabifyWarning
from collabify.models.loading import check_dtype

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
MIXING = "bert.encoder.layer.1.attention.self.mixing"
CHANNELS = "bert.encoder.layer.1.attention.self.channels"
LAYER = "bert.encoder.layer.1"
READERS = {
    "convert": lambda folder, root: ("convert", folder, *QUICK, "--out", root / "out"),
    "heal": lambda folder, root: ("heal", folder, "--steps", 1, "--samples", 16),
    "drift": lambda folder, root: (
        *("eval", "drift", folder, "--baseline", root / "secret" / "original"),
        *("--data", "synthetic", "--samples", 4),
    ),
    "analyze": lambda folder, root: ("analyze", folder, "--calibration", "none"),
    "finetune": lambda folder, root: (
        *("finetune", folder, "--task", "sst2", "--data", root / "secret" / "glue"),
        *("--epochs", 1, "--max-length", 12, "--out", root / "out"),
    ),
    "glue": lambda folder, root: (
        *("eval", "glue", folder, "--task", "sst2", "--data", root / "secret" / "glue"),
        *("--max-length", 12),
    ),
    "info": lambda folder, root: ("info", folder),
    "push": lambda folder, root: ("push", folder, "me/tiny", "--dry-run"),
}
LOADERS = ("convert", "heal", "drift")
EVERY = (*LOADERS, "info", "push")
ALL = tuple(READERS)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("broken")
    make(made)
    write_task(made / "secret" / "glue", "sst2", {"train": 16, "validation": 16})
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


def booleans(folder: Path) -> None:
    replace(folder, lambda state: state.update({CHANNELS: state[CHANNELS] > 3}))


def bytes_(folder: Path) -> None:
    replace(folder, lambda state: state.update({CHANNELS: state[CHANNELS].to(torch.uint8)}))


def lacking(folder: Path) -> None:
    replace(folder, lambda state: state.pop(MIXING))


def indices_gone(folder: Path) -> None:
    replace(folder, lambda state: state.pop(CHANNELS))


def key_gone(folder: Path) -> None:
    replace(folder, lambda state: state.pop(f"{LAYER}.attention.self.key.weight"))


def value_gone(folder: Path) -> None:
    """Of no factor: transformers makes up what a model lacks."""
    names = ("attention.self.value.weight", "attention.self.value.bias", "output.dense.weight")
    replace(folder, lambda state: [state.pop(f"{LAYER}.{name}") for name in names])


def words_gone(folder: Path) -> None:
    replace(folder, lambda state: state.pop("bert.embeddings.word_embeddings.weight"))


def norm_cut(folder: Path) -> None:
    name = f"{LAYER}.output.LayerNorm.weight"
    replace(folder, lambda state: state.update({name: state[name][:-2].clone()}))


def pickled_shard(folder: Path) -> None:
    """An index that names a file that is none of safetensors."""
    shards(folder, "weights.bin")
    state = load_file(folder / "weights.bin")
    torch.save({name: tensor.clone() for name, tensor in state.items()}, folder / "new")
    (folder / "new").rename(folder / "weights.bin")


def renamed_weights(folder: Path) -> None:
    """Weights that transformers reads from elsewhere."""
    torch.save(load_file(folder / WEIGHTS), folder / "adapter_model.bin")
    edit(folder, lambda config: config.update(transformers_weights="adapter_model.bin"))


def nested(folder: Path) -> None:
    (folder / "config.json").write_text('{"a":' * 200_000)


def architectures_number(folder: Path) -> None:
    edit(folder, lambda config: config.update(architectures=3))


def architectures_odd(folder: Path) -> None:
    edit(folder, lambda config: config.update(architectures=[3]))


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


def value_gone_of_vit(folder: Path) -> None:
    def change(state: dict[str, torch.Tensor]) -> None:
        for name in [
            name for name in state if "1.attention" in name and "v" in name.split(".")[-2]
        ]:
            del state[name]

    replace(folder, change)


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


def record_nested(folder: Path) -> None:
    (folder / "collabify.json").write_text("[" * 200_000)


def record_newer(folder: Path) -> None:
    (folder / "collabify.json").write_text('{"version": 99, "steps": [{"kind": "convert"}]}')


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
    truncated: (ALL, "'model.safetensors' of .* is missing or damaged .*not fully covered"),
    overlong: (EVERY, "is missing or damaged .*header too large"),
    integers: (ALL, "mixing' in .* holds I64 and must hold numbers in floating point"),
    fractions: (EVERY, "channels' in .* holds F32 and must hold whole numbers"),
    booleans: (EVERY, "channels' in .* holds BOOL and must hold whole numbers, I32 or I64"),
    bytes_: (EVERY, "channels' in .* holds U8 and must hold whole numbers, I32 or I64"),
    outside: ((*LOADERS, "push"), "channels' must be from 0 to 12 everywhere"),
    below: ((*LOADERS, "push"), "channels' must be from 0 to 12 everywhere"),
    lacking: ((*LOADERS, "push"), "mixing' is not in the checkpoint"),
    indices_gone: ((*LOADERS, "push"), "channels' is not in the checkpoint"),
    key_gone: ((*LOADERS, "push"), "key.weight' is not in the checkpoint"),
    value_gone: (
        (*LOADERS, "push", "analyze", "finetune", "glue"),
        "has no weights for 'bert.encoder.layer.1.attention.self.value.bias' and 2 more of its "
        "encoder: outputs would be random. Download or copy it again",
    ),
    words_gone: (
        (*LOADERS, "push"),
        "has no weights for 'bert.embeddings.word_embeddings.weight': outputs would be random",
    ),
    norm_cut: (
        (*LOADERS, "push", "finetune"),
        r"LayerNorm.weight' .*is \[22\] in the checkpoint and .* its config.json .* \[24\]\. ",
    ),
    climbing: (EVERY, "index.json of .* cannot be used .it names files elsewhere"),
    absolute: (EVERY, "index.json of .* cannot be used .it names files elsewhere"),
    shard_gone: (EVERY, "'model-00001-of-00002.safetensors' of .* is missing"),
    index_odd: (EVERY, "index.json of .* cannot be used"),
    index_empty: (EVERY, "index.json of .* cannot be used .it names no files"),
    pickled: (EVERY, "in pytorch_model.bin, a pickle, which could run code"),
    pickled_well: (ALL, "in pytorch_model.bin, a pickle, which could run code"),
    pickled_shard: (ALL, "has weights in 'weights.bin', which is no safetensors"),
    renamed_weights: ((*LOADERS, "push"), "config.json .transformers_weights., which is not supp"),
    nested: (("info", "push"), "config.json' cannot be read .it is nested too deeply"),
    architectures_number: (
        (*LOADERS, "analyze", "finetune", "glue"),
        "architectures=3 in the",
    ),
    architectures_odd: ((*LOADERS, "finetune", "push"), r"architectures=\[3\] in the config.json"),
    foreign: ((*LOADERS, "push"), "quant_method='gptq'|that was not converted"),
    unnamed: ((*LOADERS, "push"), "quant_method='None'|that was not converted"),
    list_of_records: ((*LOADERS, "push"), "does not know the config|that was not converted"),
    newer: (ALL, "version=2 must be 1 in config.json's collabify record"),
    newer_layer: (EVERY, "collabify record is damaged .unknown shape"),
    config_halved: (EVERY, "config.json.* cannot be read"),
    config_binary: (EVERY, "config.json.* cannot be read"),
    config_list: (
        ("heal", "info", "push"),
        "config.json.* cannot be read .it holds no JSON object",
    ),
    record_halved: (("heal", "info", "push"), "collabify.json' cannot be read"),
    record_list: (("heal", "info", "push"), "collabify.json' .*it holds no JSON object"),
    record_nested: (("heal", "info", "push", "finetune"), "json' .*it is nested too deeply"),
    record_newer: (
        ("heal", "info", "push", "finetune"),
        "was made by a newer collabify .version=99; this one reads 1.. Upgrade collabify",
    ),
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


@pytest.mark.parametrize("command", ALL)
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
    elsewhere = tmp_path / "elsewhere"
    if command == "finetune":
        shutil.copytree(root / "secret", elsewhere / "secret")
    writes = command in ("convert", "finetune")
    outcome = cli(*READERS[command](folder, elsewhere if writes else root))
    assert outcome.exit_code == 0, outcome.stderr
    assert not (tmp_path / "pwned").exists()
    if command == "convert":
        made = tmp_path / "elsewhere" / "out"
        assert "auto_map" not in json.loads((made / "config.json").read_text())
        assert not (made / "evil.py").exists()


def test_pickles_from_the_hub(hub: Any, tmp_path: Path) -> None:
    """Refused by what is asked of transformers, since nothing lies in a folder yet."""
    commit = hub("me/pickled", TINY["bert"].build())
    cache = tmp_path / "hub" / "models--me--pickled"
    pickled(cache / "snapshots" / commit)
    (cache / ".no_exist" / commit / WEIGHTS).touch()
    outcome = cli("convert", "me/pickled", "--dk", 10, "--out", tmp_path / "out")
    assert outcome.exit_code == 1
    assert re.match(r"Error: 'me/pickled' .*model\.safetensors.*\n\Z", outcome.stderr)


@pytest.mark.parametrize("damage", [truncated, value_gone_of_vit])
def test_eval_image_tells_it_too(damage: Callable[[Path], None], tmp_path: Path) -> None:
    write_model(tmp_path / "vit", "vit", num_labels=2)
    write_images(tmp_path / "photos", {"test": 2})
    damage(tmp_path / "vit")
    outcome = cli("eval", "image", tmp_path / "vit", "--data", tmp_path / "photos")
    assert outcome.exit_code == 1
    assert re.match(
        r"Error: .*(missing or damaged|has no weights for 'vit\.).*\n\Z", outcome.stderr
    )


@pytest.mark.parametrize("kind", ["bert", "albert"])
def test_a_pooler_may_be_missing(kind: str, tmp_path: Path) -> None:
    """transformers ships such models; what reads it is new, as the warning says."""
    TINY[kind].build().save_pretrained(tmp_path)
    replace(tmp_path, lambda state: [state.pop(name) for name in list(state) if "pooler" in name])
    with pytest.warns(CollabifyWarning, match=r"no weights for pooler\.(dense\.)?bias, pooler"):
        storage.load(str(tmp_path))


@pytest.mark.parametrize("kind", TINY)
def test_no_whole_model_lacks_weights(kind: str, tmp_path: Path) -> None:
    """Tied weights, buffers that are not saved and renamed keys are no gaps."""
    for headed in (True, False):
        model = TINY[kind].build(headed=headed)
        model.save_pretrained(tmp_path / str(headed))
        loaded, _ = storage.load(str(tmp_path / str(headed)), strict=True)
        assert type(loaded).__name__ == type(model).__name__


@pytest.mark.parametrize("form", FORMS)
def test_every_tensor_of_a_conversion_has_its_kind(form: str) -> None:
    model = TINY["bert"].build()
    collabify.convert(model, **LOW[form])
    for site in collabify.models.find_attention(model):
        for name, tensor in site.factor_tensors():
            wrong = "I64" if tensor.is_floating_point() else "F32"
            with pytest.raises(CheckpointError, match=f"holds {wrong} and must hold"):
                check_dtype(name, wrong, "a file")
            check_dtype(name, "F16" if tensor.is_floating_point() else "I32", "a file")


@pytest.mark.parametrize("damage", [integers, pickled_shard])
def test_transformers_itself_is_stopped(damage: Callable[[Path], None], folder: Path) -> None:
    damage(folder)
    with pytest.raises(CheckpointError, match=r"floating point|no safetensors"):
        transformers.AutoModel.from_pretrained(folder)
