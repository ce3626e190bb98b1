"""Calibration data that cannot be used: refused in one line, or warned of."""

import sys
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
import transformers
from data_cases import TEXTS, paint, ready, refused
from PIL import Image

from collabify.data import load_calibration
from collabify.errors import CheckpointError, CollabifyWarning, OptionError


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"samples": 1}, ("samples=1", "at least 2", "--samples")),
        ({"batch_size": 0}, ("batch_size=0", "at least 1", "--batch-size")),
        ({"max_length": 1}, ("max_length=1", "at least 2", "'bert'", "--max-length")),
    ],
)
def test_options_out_of_bounds(options: dict[str, int], parts: tuple[str, ...], bert: Any) -> None:
    with refused(OptionError, *parts):
        load_calibration("synthetic", bert, **options)


@pytest.mark.parametrize("source", ["synthetic", TEXTS])
def test_max_length_holds_the_special_tokens(source: Any, bert: Any, tokenizer: Any) -> None:
    with refused(OptionError, "max_length=2", "at least 3", "2 special tokens"):
        load_calibration(source, bert, max_length=2, processor=tokenizer)
    bert.hidden_size = 1
    data = load_calibration(source, bert, max_length=3, samples=2, processor=tokenizer)
    assert data.tokens == 6


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("no/such/file.txt", "no such file or folder"),
        ("missing.txt", "no such file or folder"),
        ("x" * 5000 + "/a/b", "no such file or folder"),
        ("someone/not-cached", "not-cached"),
        ("../no:train", "no such file or folder"),
    ],
)
def test_source_not_found(
    name: str, reason: str, bert: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    asked = f"calibration='{name[:197]}"
    with refused(OptionError, asked, "folder of images (.bmp", reason, "Check the name"):
        load_calibration(name, bert, processor=tokenizer)


@pytest.mark.parametrize(
    ("spec", "parts"),
    [
        ("", ("several configurations", "There are: long, short.", ":long.")),
        (":lang", ("no configuration 'lang'", "There are: long, short.")),
        (":long:dev", ("no split 'dev'", "There are: train, test.")),
        (":long:train:third", ("no column 'third'", "There are: number, first, second.")),
        (
            ":long:train:number",
            ("number, first", "neither texts nor images", "'bert' takes texts"),
        ),
        (":long:train:first:1", ("5 parts", "at most 4", "NAME[:CONFIG[:SPLIT[:COLUMN]]]")),
    ],
)
def test_parts_of_a_data_set_that_are_missing(
    spec: str, parts: tuple[str, ...], data_set: str, bert: Any, tokenizer: Any
) -> None:
    with refused(OptionError, data_set, *parts):
        load_calibration(data_set + spec, bert, processor=tokenizer)


def test_data_set_without_a_column_of_the_models_kind(data_set: str, vit: Any) -> None:
    with refused(OptionError, "no column of images", "'vit'", "number, first, second"):
        load_calibration(f"{data_set}:long", vit)


def test_packages_that_are_not_there(
    data_set: str, bert: Any, vit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with refused(OptionError, "needs the package datasets", "pip install datasets"):
        load_calibration(data_set, bert)
    monkeypatch.setitem(sys.modules, "PIL", None)
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "a.png").write_bytes(b"")
    with refused(OptionError, "needs the package pillow", "pip install pillow"):
        load_calibration(tmp_path / "images", vit, processor=tmp_path)


def test_text_files_that_cannot_be_used(bert: Any, tokenizer: Any, tmp_path: Path) -> None:
    file = tmp_path / "texts.txt"
    file.write_text("\n \n\t\n")
    with refused(OptionError, str(file), "holds no text", "one text a line"):
        load_calibration(file, bert, processor=tokenizer)
    file.write_bytes(b"a\n\xff\xfe\n")
    with refused(OptionError, str(file), "utf-8", "0xff", "Save it as utf-8"):
        load_calibration(file, bert, processor=tokenizer)
    file.write_text("alone\nalone\n")
    with refused(OptionError, str(file), "has 1 usable sample;", "at least 2"):
        load_calibration(file, bert, processor=tokenizer)
    table = tmp_path / "texts.csv"
    table.write_text("a,b\n")
    with refused(OptionError, str(table), "a table (.csv)", f"{tmp_path}:default:train:COLUMN"):
        load_calibration(table, bert, processor=tokenizer)


def test_folders_with_nothing_in_them(bert: Any, vit: Any, tmp_path: Path) -> None:
    with refused(OptionError, str(tmp_path), "no images", ".bmp, .jpeg, .jpg, .png, .webp"):
        load_calibration(tmp_path, vit)
    with refused(OptionError, str(tmp_path), "nothing to read", ".csv", ".parquet"):
        load_calibration(tmp_path, bert)


def test_damaged_images(vit: Any, tmp_path: Path) -> None:
    (tmp_path / "bad.png").write_bytes(b"no image")
    with refused(OptionError, "bad.png", "cannot be read as an image", "Remove or replace"):
        load_calibration(tmp_path, vit, processor=tmp_path)
    Image.effect_noise((64, 64), 50).save(tmp_path / "bad.png")
    whole = (tmp_path / "bad.png").read_bytes()
    (tmp_path / "bad.png").write_bytes(whole[: len(whole) // 2])
    with refused(OptionError, "bad.png", "truncated"):
        load_calibration(tmp_path, vit, processor=tmp_path)


def test_texts_for_a_vision_model(vit: Any, tmp_path: Path) -> None:
    (tmp_path / "texts.txt").write_text("a\nb\n")
    with refused(OptionError, "texts.txt", "holds texts", "'vit' takes images"):
        load_calibration(tmp_path / "texts.txt", vit)
    with refused(OptionError, "a Python list", "holds texts", "'vit' takes images"):
        load_calibration(TEXTS, vit)
    with refused(OptionError, "Batch 0", "'pixel_values'", "'vit'"):
        load_calibration(ready(3), vit)


def test_images_for_a_text_model(bert: Any, tmp_path: Path) -> None:
    folder = paint(tmp_path)
    with refused(OptionError, folder, "holds images", "'bert' takes texts"):
        load_calibration(folder, bert)
    with refused(OptionError, "00.png", "holds an image", "'bert' takes texts"):
        load_calibration(tmp_path / "0" / "00.png", bert)
    with refused(OptionError, "a Python list", "holds images", "'bert' takes texts"):
        load_calibration([Image.new("RGB", (3, 3))] * 9, bert)
    with refused(OptionError, "Batch 0", "pixel_values", "'input_ids'", "'bert'"):
        load_calibration([{"pixel_values": torch.ones(9, 3, 8, 8)}], bert)


def test_one_image_is_not_a_folder(vit: Any, tmp_path: Path) -> None:
    paint(tmp_path)
    with refused(OptionError, "00.png", "one image", "Give its folder"):
        load_calibration(tmp_path / "0" / "00.png", vit)


@pytest.mark.parametrize(
    ("source", "parts"),
    [
        (17, ("calibration=17", "iterable")),
        ([], ("a Python list", "has no items", "at least 2")),
        ([17, 18], ("Item 0", "of type int", "'bert'")),
        (["w1", 17], ("Item 1", "of type int", "must be a text")),
        (["w1", "w1"], ("a Python list", "1 usable sample;", "at least 2")),
        ([{"input_ids": [[1, 2]]}], ("'input_ids' of Batch 0", "a list", "return_tensors='pt'")),
        ([{"input_ids": torch.ones(4)}], ("'input_ids' of Batch 0", "of shape (4,)")),
        (
            [{"input_ids": torch.ones(4, 2), "token_type_ids": torch.ones(3, 2)}],
            ("'token_type_ids' of Batch 0", "4 rows", "of shape (3, 2)"),
        ),
        (ready(1, length=24), ("Batch 0", "24 positions", "at most 23")),
    ],
)
def test_python_objects_that_cannot_be_used(
    source: Any, parts: tuple[str, ...], bert: Any, tokenizer: Any
) -> None:
    with refused(OptionError, *parts):
        load_calibration(source, bert, processor=tokenizer)


@pytest.mark.parametrize(
    "picture",
    [
        np.zeros((3, 5, 7), dtype=np.uint8),
        np.zeros((5, 7, 3), dtype=np.float32),
        torch.zeros(5, 7),
    ],
)
def test_arrays_that_are_no_pictures(picture: Any, vit: Any, tmp_path: Path) -> None:
    shape = str(tuple(picture.shape))
    with refused(OptionError, "Item 0", shape, "uint8", "(height, width, 3)"):
        load_calibration([picture] * 3, vit, processor=tmp_path)


def test_pixel_values_of_another_shape(vit: Any) -> None:
    from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

    with refused(CheckpointError, "(3, 3, 8, 9)", "[images, 3, 8, 8]", "'vit'"):
        load_calibration([{"pixel_values": torch.ones(3, 3, 8, 9)}], vit)
    wrong = ViTImageProcessorPil(size={"height": 16, "width": 16})
    images = [Image.new("RGB", (11, 13))] * 4
    with refused(CheckpointError, "(4, 3, 16, 16)", "[images, 3, 8, 8]", "processor="):
        load_calibration(images, vit, processor=wrong)
    ragged = ViTImageProcessorPil(do_resize=False)
    with refused(OptionError, "image processor cannot make one batch of 2 images", "'vit'"):
        load_calibration([images[0], Image.new("RGB", (8, 8))], vit, processor=ragged)


def test_processors_that_are_missing(bert: Any, vit: Any, tmp_path: Path) -> None:
    images = [Image.new("RGB", (8, 8))] * 4
    with refused(OptionError, "Texts need a tokenizer", "'bert'", "_name_or_path", "processor="):
        load_calibration(TEXTS, bert)
    with refused(OptionError, "Images need an image processor", "'vit'", "processor="):
        load_calibration(images, vit)
    bert.save_pretrained(tmp_path)
    with refused(CheckpointError, "No tokenizer", str(tmp_path), "no vocabulary", "processor="):
        load_calibration(TEXTS, bert, processor=tmp_path)
    with refused(CheckpointError, "No tokenizer", "/no/such/folder", "processor="):
        load_calibration(TEXTS, bert, processor="/no/such/folder")
    with refused(CheckpointError, "No image processor", "/no/such/folder", "processor="):
        load_calibration(images, vit, processor="/no/such/folder")
    vit.num_channels = 1
    with refused(CheckpointError, "no preprocessor_config.json", "num_channels=1 must be 3"):
        load_calibration(images, vit, processor=tmp_path)


def test_processors_of_another_model(bert: Any, vit: Any, tokenizer: Any) -> None:
    with refused(OptionError, "processor=TokenizersBackend", "image processor", "'vit'"):
        load_calibration([Image.new("RGB", (8, 8))] * 4, vit, processor=tokenizer)
    for source in (TEXTS, "synthetic"):
        with refused(OptionError, "processor=int", "a tokenizer", "'bert'"):
            load_calibration(source, bert, processor=17)
    bert.vocab_size = 11
    with refused(CheckpointError, "Token id", "below 11", "'bert'", "processor="):
        load_calibration(TEXTS, bert, processor=tokenizer)
    tokenizer.pad_token = None
    with refused(OptionError, "no padding token", "'bert'", "pad_token"):
        load_calibration(TEXTS, bert, processor=tokenizer)


def test_a_model_of_neither_kind() -> None:
    with refused(OptionError, "model_type=''", "neither token ids nor images"):
        load_calibration("synthetic", transformers.PreTrainedConfig())


def test_too_few_tokens_are_warned_of(bert: Any) -> None:
    with pytest.warns(
        CollabifyWarning, match=r"^12 calibration tokens are fewer than 24, .* --samples above 3"
    ):
        load_calibration("synthetic", bert, samples=3, max_length=4)
    load_calibration("synthetic", bert, samples=6, max_length=4)  # as many as needed: no warning
