"""Synthetic calibration data: Zipf-distributed token ids and 1/f noise, as a model takes them."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from data_cases import WORDS, make_tokenizer
from tiny_models import TINY, VOCABULARY

from collabify.data import load_calibration
from collabify.data.synthetic import (
    ALPHA,
    COLOUR,
    dead_leaves,
    pink_noise,
    synthetic_images,
    usable_ids,
    zipf_ids,
)


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


def test_dead_leaves_have_surfaces_and_edges() -> None:
    shape = (60, 3, 56, 70)
    images = dead_leaves(shape, generator=torch.Generator().manual_seed(5))
    torch.testing.assert_close(images.mean((-2, -1)), torch.zeros(60, 3), atol=1e-5, rtol=0)
    torch.testing.assert_close(images.std((-2, -1), correction=0), torch.ones(60, 3))
    between = torch.corrcoef(images.transpose(0, 1).flatten(1))[[0, 0, 1], [1, 2, 2]]
    assert between.tolist() == pytest.approx([1 / (1 + COLOUR**2)] * 3, abs=0.1)
    flat = (images.diff(dim=-1) == 0).float().mean()
    assert 0.7 < flat < 0.97, "most neighbours lie on one leaf"
    colours = [len(image.flatten(1).unique(dim=1).T) for image in images]
    assert 15 < sum(colours) / 60 < 121
    assert torch.equal(images, dead_leaves(shape, generator=torch.Generator().manual_seed(5)))
    assert (dead_leaves((1, 1, 1, 1), generator=torch.Generator()) == 0).all()


@pytest.mark.parametrize("count", [1, 2, 5])
def test_noise_and_leaves_take_turns(count: int) -> None:
    images = synthetic_images((count, 3, 28, 28), generator=torch.Generator().manual_seed(5))
    flat = [bool((image.diff(dim=-1) == 0).any()) for image in images]
    assert flat == [number % 2 == 1 for number in range(count)]


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
    assert (
        data.description
        == f"synthetic: 3 images of {size[0]} x {size[1]}, 1/f noise and dead leaves"
    )


def test_image_tokens_are_those_of_the_attention() -> None:
    for kind in ("vit", "deit", "dinov2"):
        model = TINY[kind].build()
        data = load_calibration("synthetic", model.config, samples=7)
        assert sum(model(**b)[0].shape[:2].numel() for b in data.batches) == data.tokens
