"""Converted models on disk: saved, loaded anywhere, never loaded wrongly, written whole or not."""

import errno
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tiny_models import FORMS, LOW, TINY, aligned, factors, run
from torch import Tensor

from collabify import convert, find_attention, storage
from collabify.errors import (
    CheckpointError,
    CollabifyError,
    CollabifyWarning,
    ModelNotFoundError,
    OutputError,
    UnsupportedModelError,
)

ORDERS = ("collabify first", "transformers first", "never")


@pytest.fixture(scope="session")
def fresh(
    tmp_path_factory: pytest.TempPathFactory, load_elsewhere: Any
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Every model in every form, saved: outputs here, and in fresh processes by import order."""
    root = tmp_path_factory.mktemp("saved")
    here = {}
    for name, tiny in TINY.items():
        for form in FORMS:
            for width, options in (("low", LOW[form]), ("full", tiny.full(form))):
                model = tiny.build(headed=width == "low")
                report = convert(model, **options)
                batch, label = tiny.batch(model), f"{name}-{form}-{width}"
                with storage.output_folder(root / label) as folder:
                    storage.save(model, folder, report=report)
                torch.save(batch, root / label / "batch.pt")
                with torch.no_grad():
                    here[label] = aligned(model)(**batch)[0]
    return here, load_elsewhere(root, *ORDERS)


@pytest.mark.parametrize("width", ["low", "full"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize("order", ORDERS[:2])
def test_fresh_process_gives_the_same_bits(
    fresh: Any, name: str, form: str, width: str, order: str
) -> None:
    here, there = fresh
    label = f"{name}-{form}-{width}"
    assert isinstance(there[order][label], Tensor), there[order][label]
    assert torch.equal(there[order][label], here[label])


def test_process_without_collabify_fails_loudly(fresh: Any) -> None:
    here, there = fresh
    assert there["never"].keys() == here.keys()
    stopped = re.compile(r"RuntimeError: .*ignore_mismatched_sizes")
    assert not {label for label, said in there["never"].items() if not stopped.match(str(said))}


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Any, Path, dict[str, Tensor]]:
    """A converted BERT with a head, its folder, a batch."""
    tiny = TINY["bert"]
    model = tiny.build(headed=True)
    convert(model, **LOW["cp"])
    model.save_pretrained(tmp_path / "model")
    return model, tmp_path / "model", tiny.batch(model)


def assert_same(one: Any, other: Any, batch: dict[str, Tensor]) -> None:
    for name, value in one.state_dict().items():
        assert torch.equal(value, other.state_dict()[name]), name
    with torch.no_grad():
        assert torch.equal(run(aligned(one).eval(), batch), run(aligned(other).eval(), batch))


def edit(folder: Path, **changes: Any) -> None:
    """Change entries of config.json."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


@pytest.mark.parametrize(
    ("name", "auto"),
    [
        ("bert", transformers.AutoModelForSequenceClassification),
        ("albert-groups", transformers.AutoModelForSequenceClassification),
        ("distilbert", transformers.AutoModelForMaskedLM),
        ("dinov2", transformers.AutoModelForImageClassification),
    ],
)
@pytest.mark.parametrize("form", FORMS)
def test_auto_classes_with_and_without_the_head(
    name: str, auto: Any, form: str, tmp_path: Path
) -> None:
    model = TINY[name].build(headed=True)
    convert(model, **LOW[form])
    model.save_pretrained(tmp_path / "whole")
    model.base_model.save_pretrained(tmp_path / "base")
    batch = TINY[name].batch(model)
    assert_same(auto.from_pretrained(tmp_path / "whole"), model, batch)
    for folder in ("whole", "base"):
        loaded = transformers.AutoModel.from_pretrained(tmp_path / folder)
        assert_same(loaded, model.base_model, batch)


def test_sharded(saved: Any) -> None:
    model, folder, batch = saved
    model.save_pretrained(folder / "sharded", max_shard_size="8KB")
    assert len(list((folder / "sharded").glob("*.safetensors"))) > 3
    assert_same(type(model).from_pretrained(folder / "sharded"), model, batch)


@pytest.mark.parametrize(
    "options",
    [
        {"device_map": {"": "cpu"}},
        {"device_map": "cpu"},
        {"low_cpu_mem_usage": True},
        {"dtype": torch.float32},
        {"attn_implementation": "sdpa"},
    ],
    ids=str,
)
def test_loading_options(saved: Any, options: dict[str, Any]) -> None:
    model, folder, batch = saved
    assert_same(type(model).from_pretrained(folder, **options), model, batch)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_dtypes(saved: Any, dtype: torch.dtype) -> None:
    model, folder, batch = saved
    loaded = type(model).from_pretrained(folder, dtype=dtype)
    assert {parameter.dtype for parameter in loaded.parameters()} == {dtype}
    assert_same(loaded, model.to(dtype), batch)
    loaded.save_pretrained(folder / "again")
    again = type(model).from_pretrained(folder / "again", dtype="auto")
    assert again.dtype == dtype
    assert_same(again, loaded, batch)


@pytest.mark.parametrize("form", FORMS)
def test_loaded_model_is_an_ordinary_one(form: str, tmp_path: Path) -> None:
    tiny = TINY["roberta"]
    model = tiny.build(headed=True)
    convert(model, **LOW[form])
    batch = tiny.batch(model)
    model.save_pretrained(tmp_path / "one")
    loaded = type(model).from_pretrained(tmp_path / "one")
    for flag in ("hf_quantizer", "quantization_method", "is_quantized"):
        assert not getattr(loaded, flag, None)
    assert loaded.config.to_dict()["quantization_config"] == model.config.quantization_config
    assert all(factor.requires_grad for factor in factors(loaded).values())
    assert not any(parameter.is_meta for parameter in loaded.parameters())
    loaded.save_pretrained(tmp_path / "two")
    assert_same(type(model).from_pretrained(tmp_path / "two"), model, batch)
    assert (tmp_path / "one" / "config.json").read_text() == (
        tmp_path / "two" / "config.json"
    ).read_text()
    for change in (lambda m: m.half(), lambda m: m.float(), lambda m: m.to("cpu", torch.float64)):
        loaded = change(loaded)
        assert run(loaded, batch).isfinite().all()
    with torch.no_grad():
        factors(loaded)["encoder.layer.1.attention.self.key"] += 1
    loaded.save_pretrained(tmp_path / "three")
    assert_same(type(model).from_pretrained(tmp_path / "three", dtype="auto"), loaded, batch)


def test_trainer(saved: Any, tmp_path: Path) -> None:
    model, folder, batch = saved
    loaded = type(model).from_pretrained(folder)
    rows = [
        {key: value[row] for key, value in batch.items()} | {"labels": row % 2} for row in range(3)
    ]
    before = {name: factor.clone() for name, factor in factors(loaded).items()}
    options = {"max_steps": 1, "per_device_train_batch_size": 3, "learning_rate": 0.1}
    quiet = {"report_to": [], "use_cpu": True, "disable_tqdm": True, "save_strategy": "no"}
    arguments = transformers.TrainingArguments(str(tmp_path / "run"), **options, **quiet)
    trainer = transformers.Trainer(loaded, arguments, train_dataset=rows)
    trainer.train()
    assert not [
        name for name, factor in factors(loaded).items() if torch.equal(factor, before[name])
    ]
    trainer.save_model(tmp_path / "trained")
    assert_same(type(model).from_pretrained(tmp_path / "trained"), loaded, batch)


def test_some_layers_only(tmp_path: Path) -> None:
    model = TINY["bert"].build()
    convert(model, dk=10, layers=[1])
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModel.from_pretrained(tmp_path)
    assert [site.converted for site in find_attention(loaded)] == [False, True]
    assert_same(loaded, model, TINY["bert"].batch(model))


# What a damaged folder says.


OWN = dict.fromkeys(("cp", "cp-all", "head-svd"), ("mixing",)) | {"tucker": ("core",)}
OWN |= {"tucker-heads": ("mixing", "core")}


@pytest.mark.parametrize(
    ("form", "lost"),
    [(form, part) for form in FORMS for part in ("query.weight", "key.weight", *OWN[form])],
)
def test_missing_factors_are_never_made_up(form: str, lost: str, tmp_path: Path) -> None:
    model = TINY["bert"].build()
    convert(model, **LOW[form])
    model.save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    name = f"{TINY['bert'].sites[1]}.{lost}"
    del state[name]
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    for load in (transformers.AutoModel.from_pretrained, storage.load):
        with pytest.raises(CheckpointError, match=re.escape(name)):
            load(str(tmp_path))


def test_models_that_share_a_configuration(tmp_path: Path) -> None:
    """Converting one must not spoil the folder of the other."""
    config = TINY["bert"].config()
    one, other = (transformers.BertModel(config).eval() for _ in range(2))
    convert(one, dk=10)
    for model in (one, other):
        model.save_pretrained(tmp_path)
        loaded = transformers.AutoModel.from_pretrained(tmp_path)
        assert_same(loaded, model, TINY["bert"].batch(model))


@pytest.mark.parametrize(
    ("record", "told"),
    [
        ({"version": 2}, "version=2 must be 1"),
        ({"version": None}, "version=None must be 1"),
        ({"layers": [{"index": 7, "form": "collaborative", "rank": 10}]}, "layer 7, but the model"),
        ({"layers": [{"index": 0}]}, "is damaged"),
        ({"layers": None}, "is damaged"),
        ({"layers": [{"index": -1, "form": "collaborative", "rank": 10}]}, "index=-1 must be"),
        ({"layers": [{"index": 0, "form": "tucker", "rank": 10}]}, "do not fit"),
    ],
)
def test_records_that_do_not_fit(saved: Any, record: dict[str, Any], told: str) -> None:
    _, folder, _ = saved
    config = json.loads((folder / "config.json").read_text())
    edit(folder, quantization_config=config["quantization_config"] | record)
    assert told in refused(folder, CheckpointError)


def refused(name: Path | str, error: type[CollabifyError]) -> str:
    """The one line in which loading fails."""
    with pytest.raises(error) as caught:
        storage.load(str(name))
    assert caught.type is error
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_no_such_folder_or_hub_id(monkeypatch: Any) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for name in ("nowhere/at-all", "./nowhere", "/nowhere/at/all", "no where"):
        told = refused(name, ModelNotFoundError)
        assert f"{name!r} is neither a folder nor a model" in told
        assert "'demo'" in told


def test_damaged_folders(saved: Any) -> None:
    _, folder, _ = saved
    weights, config = folder / "model.safetensors", folder / "config.json"
    whole, text = weights.read_bytes(), config.read_text()
    weights.write_bytes(whole[:-100])
    assert "are damaged" in refused(folder, CheckpointError)
    weights.write_bytes(whole[:5])
    assert "are damaged" in refused(folder, CheckpointError)
    weights.unlink()
    assert "no weights that can be read" in refused(folder, ModelNotFoundError)
    weights.write_bytes(whole)
    config.write_text(text[:-20])
    assert "config.json of" in refused(folder, CheckpointError)
    config.write_text(text.replace('"model_type": "bert"', '"model_type": "nonesuch"'))
    assert "Supported: albert" in refused(folder, UnsupportedModelError)
    config.write_text(text.replace('"intermediate_size": 29', '"intermediate_size": 31'))
    assert "do not fit its config.json" in refused(folder, CheckpointError)
    config.unlink()
    assert "has no config.json" in refused(folder, ModelNotFoundError)


def test_unsupported_models_are_refused_before_their_weights(tmp_path: Path) -> None:
    config = transformers.GPT2Config(vocab_size=41, n_embd=24, n_layer=1, n_head=3)
    config.save_pretrained(tmp_path)  # without weights
    assert "no adapter for model_type='gpt2'" in refused(tmp_path, UnsupportedModelError)


def test_heads_that_are_new_are_said_to_be(tmp_path: Path) -> None:
    TINY["bert"].build().save_pretrained(tmp_path)
    edit(tmp_path, architectures=["BertForSequenceClassification"])
    with pytest.warns(CollabifyWarning, match=r"no weights for classifier.bias, classifier.weight"):
        storage.load(str(tmp_path))


def test_load_gives_the_class_that_was_saved(saved: Any) -> None:
    model, folder, batch = saved
    loaded, source = storage.load(str(folder), device="cpu")
    assert type(loaded) is type(model)
    assert source == storage.Source(str(folder), str(folder), None)
    assert source.is_folder
    assert_same(loaded, model, batch)
    assert storage.load(str(folder), dtype="bfloat16")[0].dtype == torch.bfloat16
    edit(folder, architectures=["NoSuchClass"])
    assert type(storage.load(str(folder))[0]).__name__ == "BertModel"


def test_demo_without_its_package(monkeypatch: Any) -> None:
    monkeypatch.setattr(storage.importlib.util, "find_spec", lambda _name: None)
    assert "pip install 'collabify[demo]'" in refused("demo", ModelNotFoundError)


# Writing: whole, or not at all.


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
    assert said == json.loads(report.to_json())
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

    monkeypatch.setattr(storage, "snapshot_download", download)
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


def test_quantised_checkpoints_are_refused(tmp_path: Path) -> None:
    model = TINY["bert"].build()
    model.config.quantization_config = {"quant_method": "gptq", "bits": 4}
    model.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match=r"quantised \(quant_method='gptq'\)"):
        storage.load(str(tmp_path))
