"""Converted models on disk: saved, loaded anywhere, never loaded wrongly."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tiny_models import FORMS, LOW, TINY, aligned, assert_same, factors, pairs, run
from torch import Tensor

from collabify import convert, find_attention, storage
from collabify.errors import CheckpointError
from collabify.models.loading import check_shapes

ORDERS = ("collabify first", "transformers first", "never")


@pytest.fixture(scope="session")
def fresh(
    tmp_path_factory: pytest.TempPathFactory, load_elsewhere: Any
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Every model in every form, saved: outputs here, and in fresh processes by import order."""
    root = tmp_path_factory.mktemp("saved")
    here = {}
    for name, form in pairs(FORMS):
        tiny = TINY[name]
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
@pytest.mark.parametrize(("name", "form"), pairs(FORMS))
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


OWN = dict.fromkeys(("cp", "cp-all", "head-svd"), ("mixing",)) | {"tucker": ("core",)}
OWN |= {"tucker-heads": ("mixing", "core")}
OWN |= {"talking-heads": ("logits_mixing", "weights_mixing", "value.weight")}
OWN |= {"talking-weights": ("weights_mixing", "value.bias")}
OWN |= {"values": ("mixing", "value_columns", "context_rows", "value.weight")}
OWN |= {"value-heads": ("mixing", "weights_mixing")}


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


def test_shapes_are_those_of_the_configuration() -> None:
    """Checked by collabify, too: transformers up to 5.22 takes any where a quantizer is."""
    model = TINY["bert"].build()
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    check_shapes(model, shapes)
    shapes["pooler.dense.weight"] = torch.Size((25, 24))
    with pytest.raises(CheckpointError, match=r"'pooler.dense.weight' is \[24, 24\] .* \[25, 24\]"):
        check_shapes(model, shapes)
