"""Calibration data: from every source, the inputs of the model it is for; all else is refused."""

import inspect
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from tiny_models import TINY, VOCABULARY
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import Tensor

from collabify.data import CalibrationData, load_calibration
from collabify.data.synthetic import ALPHA, COLOUR, pink_noise, usable_ids, zipf_ids
from collabify.errors import CheckpointError, CollabifyWarning, OptionError

GLUE = Path(os.environ.get("COLLABIFY_GLUE", Path(__file__).parents[2] / "shared" / "glue"))
WORDS = [f"w{index}" for index in range(VOCABULARY - 7)]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
UNUSED = ["[unused0]", "[unused1]"]


def make_tokenizer(words: list[str] = WORDS) -> Any:
    """Words of SPECIAL + UNUSED + words; [CLS] ... [SEP] around every text."""
    vocabulary = {name: index for index, name in enumerate(SPECIAL + UNUSED + words)}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    names = dict(zip(("pad", "unk", "cls", "sep", "mask"), SPECIAL, strict=True))
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, **{f"{name}_token": token for name, token in names.items()}
    )


def sentence(index: int) -> str:
    """Distinct for every index below 17 * 34, of 2 to 6 words."""
    first, second = index % 34, index // 34
    return " ".join([f"w{first}", f"w{second}", *["w1"] * (index % 5)])


TEXTS = [sentence(index) for index in range(60)]


@pytest.fixture
def tokenizer() -> Any:
    return make_tokenizer()


@pytest.fixture
def bert() -> Any:
    return TINY["bert"].config()


@pytest.fixture
def vit() -> Any:
    return TINY["vit"].config()


def rows(batches: tuple[dict[str, Tensor], ...]) -> list[tuple[Any, ...]]:
    """Each sample's input without padding, as something that can be compared."""
    found: list[tuple[Any, ...]] = []
    for batch in batches:
        if "pixel_values" in batch:
            found += [tuple(image.flatten().tolist()) for image in batch["pixel_values"]]
        else:
            pairs = zip(batch["input_ids"], batch["attention_mask"], strict=True)
            found += [tuple(ids[mask == 1].tolist()) for ids, mask in pairs]
    return found


def refused(error: type[Exception], *parts: str) -> Any:
    """``pytest.raises`` for a message of one line that has all parts, in order."""
    return pytest.raises(error, match=r"\A(?!.*\n).*" + ".*".join(map(re.escape, parts)))


# ---------------------------------------------------------------- synthetic text


def test_zipf_frequencies() -> None:
    ids = torch.arange(11, 48)
    drawn = zipf_ids(ids, (200, 101), generator=torch.Generator().manual_seed(3))
    expected = 1 / torch.arange(1, 38, dtype=torch.float64)
    expected *= drawn.numel() / expected.sum()
    observed = torch.bincount(drawn.flatten(), minlength=48)[11:].double()
    assert observed.sum() == drawn.numel()
    chi_square = ((observed - expected).square() / expected).sum()
    assert chi_square < 36 + 4 * 72**0.5  # mean 36, variance 72


def test_synthetic_text_keeps_special_ids_at_the_ends(bert: Any, tokenizer: Any) -> None:
    data = load_calibration("synthetic", bert, samples=40, max_length=19, processor=tokenizer)
    ids = torch.cat([batch["input_ids"] for batch in data.batches])
    assert ids.shape == (40, 19)
    assert (ids[:, 0] == tokenizer.cls_token_id).all()
    assert (ids[:, -1] == tokenizer.sep_token_id).all()
    assert set(ids[:, 1:-1].unique().tolist()) == set(range(7, VOCABULARY))
    assert all((batch["attention_mask"] == 1).all() for batch in data.batches)
    assert data.synthetic
    assert (data.samples, data.tokens) == (40, 40 * 19)
    assert data.description == "synthetic: 40 sequences of 19 Zipf-distributed token ids"
    assert [len(batch["input_ids"]) for batch in data.batches] == [16, 16, 8]
    assert sum(len(batch["input_ids"]) for batch in data.held_out) == 8


def test_synthetic_text_without_a_tokenizer_leaves_out_padding(bert: Any) -> None:
    data = load_calibration("synthetic", bert, samples=40, max_length=19)
    ids = torch.cat([batch["input_ids"] for batch in data.batches])
    assert set(ids.unique().tolist()) == set(range(VOCABULARY)) - {bert.pad_token_id}
    assert data.description.endswith("token ids (no tokenizer: special ids among them)")


def test_synthetic_text_takes_the_tokenizer_of_the_models_folder(
    bert: Any, tokenizer: Any, tmp_path: Path
) -> None:
    bert.save_pretrained(tmp_path)
    without = load_calibration("synthetic", bert, processor=str(tmp_path))
    assert "no tokenizer" in without.description
    tokenizer.save_pretrained(tmp_path)
    bert = transformers.AutoConfig.from_pretrained(tmp_path)
    data = load_calibration("synthetic", bert, samples=8)
    assert (data.batches[0]["input_ids"][:, 0] == tokenizer.cls_token_id).all()


def test_an_alphabet_before_the_words_is_not_a_ranking(bert: Any) -> None:
    bert.vocab_size = 500
    characters = [chr(200 + index) for index in range(60)]
    characters += [f"##{character}" for character in characters]
    long = usable_ids(bert, make_tokenizer([*characters, *WORDS])).tolist()
    assert long == [*range(127, 127 + len(WORDS)), *range(7, 127)]
    short = usable_ids(bert, make_tokenizer([*characters[:99], *WORDS])).tolist()
    assert short == [*range(7, 7 + 99 + len(WORDS))]


def test_usable_ids_end_with_the_smaller_vocabulary(bert: Any) -> None:
    assert usable_ids(bert, make_tokenizer(WORDS[:5])).tolist() == [7, 8, 9, 10, 11]
    assert usable_ids(bert, make_tokenizer([*WORDS, "more"])).max() == VOCABULARY - 1


@pytest.mark.parametrize(
    ("kind", "length"),
    [("roberta", 21), ("xlm-roberta", 21), ("camembert", 21), ("bert", 23), ("distilbert", 23)],
)
def test_positions_stay_within_the_model(kind: str, length: int) -> None:
    model = TINY[kind].build()
    data = load_calibration("synthetic", model.config, samples=4, max_length=50)
    assert data.batches[0]["input_ids"].shape == (4, length)
    assert model(**data.batches[0])[0].isfinite().all()


# ---------------------------------------------------------------- synthetic images


def test_pink_noise_has_its_spectrum() -> None:
    images = pink_noise((9, 3, 64, 96), generator=torch.Generator().manual_seed(5))
    amplitude = torch.fft.fft2(images).abs().mean((0, 1))
    down, across = torch.fft.fftfreq(64)[:, None], torch.fft.fftfreq(96)
    frequency = (down.square() + across.square()).sqrt()
    kept = frequency > 0
    x, y = frequency[kept].log(), amplitude[kept].log()
    slope = ((x - x.mean()) * (y - y.mean())).sum() / (x - x.mean()).square().sum()
    assert slope == pytest.approx(-ALPHA, abs=0.03)


def test_pink_noise_has_its_scale_and_colours() -> None:
    images = pink_noise((300, 3, 16, 24), generator=torch.Generator().manual_seed(5))
    assert images.dtype == torch.float32
    torch.testing.assert_close(images.mean((-2, -1)), torch.zeros(300, 3), atol=1e-5, rtol=0)
    torch.testing.assert_close(images.std((-2, -1), correction=0), torch.ones(300, 3))
    between = torch.corrcoef(images.transpose(0, 1).flatten(1))[[0, 0, 1], [1, 2, 2]]
    assert between.tolist() == pytest.approx([1 / (1 + COLOUR**2)] * 3, abs=0.06)


@pytest.mark.parametrize(
    ("kind", "options", "size", "tokens"),
    [
        ("vit", {"image_size": 24, "patch_size": 8}, (24, 24), 10),
        ("vit", {"image_size": (16, 24), "patch_size": 8}, (16, 24), 7),
        ("deit", {"image_size": 24, "patch_size": 8}, (24, 24), 11),
        ("dinov2", {"image_size": 518, "patch_size": 14}, (224, 224), 257),
        ("dinov2", {"image_size": 420, "patch_size": 15}, (225, 225), 226),
        ("dinov2", {"image_size": 12, "patch_size": 4}, (12, 12), 10),
    ],
)
def test_synthetic_images_fit_the_model(
    kind: str, options: dict[str, Any], size: tuple[int, int], tokens: int
) -> None:
    config = transformers.AutoConfig.for_model(kind, **options, hidden_size=8)
    data = load_calibration("synthetic", config, samples=3, batch_size=2)
    shapes = [tuple(batch["pixel_values"].shape) for batch in data.batches]
    assert shapes == [(2, 3, *size), (1, 3, *size)]
    assert data.tokens == 3 * tokens
    assert data.description == f"synthetic: 3 images of {size[0]} x {size[1]} of 1/f noise"


def test_image_tokens_are_those_of_the_attention() -> None:
    for kind in ("vit", "deit", "dinov2"):
        model = TINY[kind].build()
        data = load_calibration("synthetic", model.config, samples=7)
        assert sum(model(**b)[0].shape[:2].numel() for b in data.batches) == data.tokens


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


def counted(items: Iterator[Any], seen: list[Any]) -> Iterator[Any]:
    for item in items:
        seen.append(item)
        yield item


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


def paint(folder: Path, count: int = 12) -> str:
    """Images of one colour each, ``(9 * index, 100, 200)``, in several formats and folders."""
    for index in range(count):
        path = folder / f"{index % 3}" / f"{index:02d}.{('png', 'BMP', 'webp')[index % 3]}"
        path.parent.mkdir(exist_ok=True)
        image = Image.new("RGB", (13, 17), (9 * index, 100, 200))
        image.save(path, **({"lossless": True} if path.suffix == ".webp" else {}))
    return str(folder)


def reds(batches: tuple[dict[str, Tensor], ...]) -> list[int]:
    """Which images these are, from their first channel; ImageNet mean and deviation."""
    pixels = torch.cat([batch["pixel_values"] for batch in batches])
    means = (pixels[:, 0].mean((-2, -1)) * 0.229 + 0.485) * 255 / 9
    return [round(value) for value in means.tolist()]


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


@pytest.fixture
def data_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A folder in the Hub's layout: two configurations, one with two splits."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "set"
    (folder / "long").mkdir(parents=True)
    (folder / "README.md").write_text(
        "---\nconfigs:\n- config_name: long\n  data_files:\n"
        "  - {split: train, path: long/train.csv}\n  - {split: test, path: long/test.csv}\n"
        "- config_name: short\n  data_files:\n  - {split: train, path: short.csv}\n---\n"
    )
    for name, texts in (("train", TEXTS), ("test", TEXTS[:20])):
        lines = ["number,first,second", *(f"{i},{text},w3 {text}" for i, text in enumerate(texts))]
        (folder / "long" / f"{name}.csv").write_text("\n".join(lines))
    (folder / "short.csv").write_text("only\nw1\nw2\nw1\n\nw3\n")
    return str(folder)


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


def ready(count: int, rows: int = 3, length: int = 5) -> Iterator[dict[str, Tensor]]:
    for index in range(count):
        ids = 2 + torch.arange(rows * length).view(rows, length) + index
        yield {"input_ids": ids % VOCABULARY, "attention_mask": torch.ones_like(ids)}


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


# ---------------------------------------------------------------- what is refused


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
