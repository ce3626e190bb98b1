"""Calibration data: from every source, the inputs of the model it is for."""

import inspect
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
import transformers
from data_cases import (
    TEXTS,
    counted,
    make_tokenizer,
    paint,
    ready,
    reds,
    refused,
    rows,
    sentence,
)
from PIL import Image
from tiny_models import TINY

from collabify.data import CalibrationData, load_calibration
from collabify.errors import OptionError

GLUE = Path(os.environ.get("COLLABIFY_GLUE", Path(__file__).parents[2] / "shared" / "glue"))


# ---------------------------------------------------------------- texts


def test_text_file(bert: Any, tokenizer: Any, tmp_path: Path) -> None:
    file = tmp_path / "texts.txt"
    lines = [line for text in TEXTS for line in (text, "", text, "  \t")]
    file.write_text("\ufeff" + "\r\n".join(lines), encoding="utf-8")
    data = load_calibration(file, bert, samples=30, processor=tokenizer, batch_size=7)
    assert data.description == f"30 texts of {file}"
    assert not data.synthetic
    calibrated, held_out = rows(data.batches), rows(data.held_out)
    expected = {tuple(tokenizer(text)["input_ids"]) for text in TEXTS}
    assert len(expected) == 60
    assert (len(calibrated), len(held_out)) == (30, 8)
    assert len(set(calibrated) | set(held_out)) == 38  # disjoint, nothing twice
    assert set(calibrated) | set(held_out) <= expected
    assert data.tokens == sum(map(len, calibrated))


def test_texts_are_padded_little_and_masked(bert: Any, tokenizer: Any) -> None:
    data = load_calibration(TEXTS, bert, samples=30, processor=tokenizer, batch_size=7)
    lengths = [len(row) for row in rows(data.batches)]
    assert lengths == sorted(lengths)
    for batch in data.batches:
        torch.testing.assert_close(
            batch["attention_mask"], (batch["input_ids"] != tokenizer.pad_token_id).long()
        )
        assert batch["input_ids"].shape[1] == batch["attention_mask"].sum(1).max()
        assert set(batch) == set(tokenizer("w1"))
    assert any((batch["attention_mask"] == 0).any() for batch in data.batches)


@pytest.mark.parametrize(("max_length", "expected"), [(5, 5), (100, 21)])
def test_texts_are_truncated(max_length: int, expected: int, tokenizer: Any) -> None:
    long = [f"w{index} " * 30 for index in range(20)]
    config = TINY["roberta"].config()
    data = load_calibration(long, config, samples=8, max_length=max_length, processor=tokenizer)
    assert data.batches[0]["input_ids"].shape == (8, expected)


def test_generators_are_read_in_order_and_no_further_than_needed(bert: Any, tokenizer: Any) -> None:
    seen: list[Any] = []
    texts = counted((sentence(index // 2) for index in range(1000)), seen)  # each text twice
    data = load_calibration(texts, bert, samples=24, processor=tokenizer)
    assert len(seen) == 2 * (24 + 8) - 1
    assert data.description == "24 texts of a Python generator"
    assert set(rows(data.batches)) == {tuple(tokenizer(t)["input_ids"]) for t in TEXTS[:24]}
    assert set(rows(data.held_out)) == {tuple(tokenizer(t)["input_ids"]) for t in TEXTS[24:32]}


@pytest.mark.parametrize(
    ("found", "samples", "calibrated", "held_out"),
    [(2, 256, 1, 1), (20, 256, 18, 2), (9, 2, 2, 7), (100, 80, 80, 10), (85, 80, 75, 10)],
)
def test_held_out_share(
    found: int, samples: int, calibrated: int, held_out: int, bert: Any, tokenizer: Any
) -> None:
    bert.hidden_size = 1
    texts = [sentence(index) for index in range(found)]
    data = load_calibration(texts, bert, samples=samples, processor=tokenizer)
    assert (len(rows(data.batches)), len(rows(data.held_out))) == (calibrated, held_out)
    assert data.samples == calibrated


def test_the_tokenizer_comes_from_the_models_folder(
    bert: Any, tokenizer: Any, tmp_path: Path
) -> None:
    bert.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    by_object = load_calibration(TEXTS, bert, samples=8, processor=tokenizer)
    by_name = load_calibration(TEXTS, bert, samples=8, processor=tmp_path)
    by_config = load_calibration(
        TEXTS, transformers.AutoConfig.from_pretrained(tmp_path), samples=8
    )
    assert rows(by_object.batches) == rows(by_name.batches) == rows(by_config.batches)


@pytest.mark.parametrize("source", ["synthetic", "file", "folder"])
def test_the_seed_decides(source: str, bert: Any, vit: Any, tokenizer: Any, tmp_path: Path) -> None:
    config, processor, name = bert, tokenizer, source
    if source == "file":
        (tmp_path / "texts.txt").write_text("\n".join(TEXTS))
        name = str(tmp_path / "texts.txt")
    elif source == "folder":
        config, processor, name = vit, tmp_path.as_posix(), paint(tmp_path, 20)
    load: Callable[[int], CalibrationData] = lambda seed: load_calibration(  # noqa: E731
        name, config, samples=10, seed=seed, processor=processor
    )
    one, again, other = load(5), load(5), load(6)
    assert rows(one.batches + one.held_out) == rows(again.batches + again.held_out)
    assert set(rows(one.batches)) != set(rows(other.batches))


# ---------------------------------------------------------------- images


def test_folder_of_images_without_a_processor(vit: Any, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    vit.save_pretrained(tmp_path / "model")
    config = transformers.AutoConfig.from_pretrained(tmp_path / "model")
    data = load_calibration(paint(tmp_path), config, samples=256, batch_size=4)
    assert data.description == (
        f"11 images of {tmp_path} (no preprocessor_config.json: resized to 8 x 8, "
        "ImageNet mean and deviation)"
    )
    assert sorted(reds(data.batches) + reds(data.held_out)) == list(range(12))
    assert len(data.held_out) == 1
    assert [len(batch["pixel_values"]) for batch in data.batches] == [4, 4, 3]
    green = (torch.tensor(100 / 255) - 0.456) / 0.224
    torch.testing.assert_close(data.batches[0]["pixel_values"][:, 1], green.expand(4, 8, 8))
    assert data.tokens == 11 * 5


def test_images_go_through_the_models_processor(vit: Any, tmp_path: Path) -> None:
    from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

    processor = ViTImageProcessorPil(size={"height": 8, "width": 8})
    images = [Image.new("RGB", (11, 13), (9 * index, 100, 200)) for index in range(7)]
    data = load_calibration(images, vit, samples=6, processor=processor)
    expected = processor(images=images, return_tensors="pt")["pixel_values"]
    found = torch.cat([b["pixel_values"] for b in data.batches + data.held_out])
    torch.testing.assert_close(found, expected)
    assert data.description == "6 images of a Python list"
    processor.save_pretrained(tmp_path)
    loaded = load_calibration(images, vit, samples=6, processor=tmp_path)
    assert rows(loaded.batches) == rows(data.batches)


def test_pictures_from_python(vit: Any, tmp_path: Path) -> None:
    vit.hidden_size = 1  # one token is enough
    arrays = [np.full((5, 7, 3), 9 * index, dtype=np.uint8) for index in range(4)]
    pictures = [Image.fromarray(array) for array in arrays]
    modes = [pictures[index].convert(m) for index, m in enumerate(("L", "P", "RGBA", "RGB"))]
    seen: list[Any] = []
    for kind in (arrays, [torch.from_numpy(array) for array in arrays], modes):
        data = load_calibration(kind, vit, processor=tmp_path)
        assert reds(data.batches + data.held_out) == [0, 1, 2, 3]
    many = counted((arrays[index % 4] for index in range(100)), seen)
    load_calibration(many, vit, samples=3, processor=tmp_path)
    assert len(seen) == 3 + 8


# ---------------------------------------------------------------- data sets


def test_data_set_with_defaults(data_set: str, bert: Any, tokenizer: Any) -> None:
    data = load_calibration(f"{data_set}:long", bert, samples=40, processor=tokenizer)
    assert data.description == f"40 texts of {data_set}:long:train:first"
    found = set(rows(data.batches + data.held_out))
    assert len(found) == 48
    assert found <= {tuple(tokenizer(text)["input_ids"]) for text in TEXTS}
    assert datasets.is_progress_bar_enabled()


def test_data_set_named_in_full(data_set: str, bert: Any, tokenizer: Any) -> None:
    name = f"{data_set}:long:test:second"
    data = load_calibration(name, bert, samples=8, processor=tokenizer)
    assert data.description == f"8 texts of {name}"
    expected = {tuple(tokenizer(f"w3 {text}")["input_ids"]) for text in TEXTS[:20]}
    assert set(rows(data.batches + data.held_out)) <= expected
    sliced = load_calibration(f"{data_set}:long:train[:12]", bert, processor=tokenizer)
    assert {len(sliced.batches), len(rows(sliced.batches + sliced.held_out))} == {1, 12}


def test_data_set_without_blank_and_repeated_rows(data_set: str, bert: Any, tokenizer: Any) -> None:
    bert.hidden_size = 1
    data = load_calibration(f"{data_set}:short", bert, processor=tokenizer)
    assert sorted(rows(data.batches + data.held_out)) == [(2, 8, 3), (2, 9, 3), (2, 10, 3)]


def test_data_set_of_images(vit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    images = [Image.new("RGB", (5, 7), (9 * index, 0, 0)) for index in range(9)]
    made = datasets.Dataset.from_dict({"caption": TEXTS[:9], "picture": images})
    made = made.cast_column("picture", datasets.Image())
    (tmp_path / "set").mkdir()
    made.to_parquet(tmp_path / "set" / "train.parquet")
    name = str(tmp_path / "set")
    data = load_calibration(name, vit, processor=tmp_path)
    assert data.description.startswith(f"8 images of {name}:default:train:picture (no pre")
    assert sorted(reds(data.batches + data.held_out)) == list(range(9))
    with refused(OptionError, "'caption'", "holds texts", "'vit' takes images"):
        load_calibration(f"{name}:default:train:caption", vit, processor=tmp_path)


def test_glue(bert: Any) -> None:
    if not GLUE.is_dir():
        pytest.skip(f"{GLUE} is not there; set COLLABIFY_GLUE")
    words = sorted({word for text in TEXTS for word in text.split()})
    data = load_calibration(f"{GLUE}:rte", bert, processor=make_tokenizer(words))
    assert data.description == f"256 texts of {GLUE}:rte:train:sentence1"
    assert len(rows(data.held_out)) == 32


# ---------------------------------------------------------------- ready batches


def test_ready_batches_are_cut_and_not_copied_further(bert: Any) -> None:
    seen: list[Any] = []
    data = load_calibration(counted(ready(100), seen), bert, samples=7)
    assert len(seen) == 5  # 15 rows, the first number from 7 + 8 on
    assert [len(batch["input_ids"]) for batch in data.batches] == [3, 3, 1]
    assert [len(batch["input_ids"]) for batch in data.held_out] == [2, 3, 3]
    given = torch.cat([batch["input_ids"] for batch in seen])
    kept = torch.cat([batch["input_ids"] for batch in data.batches + data.held_out])
    torch.testing.assert_close(kept, given)
    assert (data.samples, data.tokens, data.synthetic) == (7, 35, False)
    assert data.description == "ready batches of a Python generator"


def test_ready_batches_get_a_mask_and_lose_their_labels(bert: Any) -> None:
    ids = torch.full((9, 4), 5)
    batch = transformers.BatchEncoding({"input_ids": ids, "labels": torch.zeros(9)})
    data = load_calibration(batch, bert)
    assert set(data.batches[0]) == {"input_ids", "attention_mask"}
    assert data.tokens == 8 * 4


def test_ready_pixel_values(vit: Any) -> None:
    data = load_calibration([{"pixel_values": torch.ones(16, 3, 8, 8)}], vit, samples=8)
    assert data.tokens == 8 * 5


def test_calibration_data_pass_through(bert: Any) -> None:
    data = load_calibration("synthetic", bert, samples=4)
    assert load_calibration(data, bert, samples=1) is data


def test_importing_loads_no_datasets() -> None:
    code = "import sys, collabify.data; print('datasets' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False"]


def test_signature() -> None:
    defaults = {
        name: parameter.default
        for name, parameter in inspect.signature(load_calibration).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY
    }
    assert defaults == {
        "samples": 256,
        "max_length": 128,
        "batch_size": 16,
        "seed": 0,
        "processor": None,
    }
