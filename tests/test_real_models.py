"""Trained models: exact at full width, the same bits in a fresh process, ready for a pipeline."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tiny_models import aligned, run
from tolerances import assert_close
from torch import Tensor

from collabify import convert, find_attention, storage

SENTENCES = [
    "Attention heads project their tokens on subspaces that turn out to be much alike.",
    "A cat.",
    "The quick brown fox jumps over the lazy dog, who was dreaming of rabbits in the long grass.",
    "12.5 % of 80 is 10; isn't it?",
]
OTHERS = ("albert-rxn", "bert-rxn", "dinov2-small")


def pretrained(folder: Path) -> Any:
    """The model with its head, from a folder that transformers wrote."""
    (architecture,) = transformers.AutoConfig.from_pretrained(folder).architectures
    return getattr(transformers, architecture).from_pretrained(folder, dtype=torch.float32)


def batch_for(model: Any) -> dict[str, Tensor]:
    """Two images of stripes and discs, or token ids padded on the right."""
    if hasattr(model.config, "patch_size"):
        x, y = torch.meshgrid(*2 * [torch.linspace(-3, 3, 224)], indexing="ij")
        stripes, discs = (5 * x + y).sin(), torch.where(x**2 + (y - 1) ** 2 < 2, 1.0, -1.0)
        return {"pixel_values": torch.stack([stripes, discs])[:, None].repeat(1, 3, 1, 1)}
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(12, model.config.vocab_size, (3, 40), generator=generator)
    mask = (torch.arange(40) < torch.tensor([40, 13, 27])[:, None]).long()
    return {"input_ids": ids * mask, "attention_mask": mask}


@pytest.fixture(scope="module")
def minilm(real_model: Callable[[str], Path]) -> tuple[Path, Any, dict[str, Tensor]]:
    """The folder, its tokenizer, and padded sentences."""
    folder = real_model("minilm-l6")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    batch = dict(tokenizer(SENTENCES, padding=True, return_tensors="pt"))
    assert (batch["attention_mask"] == 0).any()
    return folder, tokenizer, batch


@pytest.mark.parametrize("kernel", ["eager", "sdpa"])
@pytest.mark.parametrize(
    "form",
    [
        {"method": "cp"},
        {"method": "head-svd"},
        {"method": "tucker"},
        {"method": "talking-heads"},
        {"method": "cp", "dv": 384},
    ],
    ids=lambda form: "-".join(map(str, form.values())),
)
def test_minilm_is_itself_at_full_width(minilm: Any, form: dict[str, Any], kernel: str) -> None:
    folder, _, batch = minilm
    model = pretrained(folder)
    model.set_attn_implementation(kernel)
    with torch.no_grad():
        before = run(model, batch)
        report = convert(model, dk=384, calibration="none", **form)
        assert_close(run(model, batch), before, "trained")
    assert len(report.layers) == 6
    assert report.mean_relative_error is not None
    assert report.mean_relative_error < 1e-6


@pytest.fixture(scope="module")
def others(
    real_model: Callable[[str], Path],
    tmp_path_factory: pytest.TempPathFactory,
    load_elsewhere: Any,
) -> Callable[[str], tuple[Tensor, dict[str, tuple[Tensor, Tensor]]]]:
    """Name to the original's output, and at full and half width the output here and elsewhere."""
    done: dict[str, Any] = {}

    def outputs(name: str) -> Any:
        if name in done:
            return done[name]
        root, here = tmp_path_factory.mktemp(name), {}
        for width in ("full", "half"):
            model = pretrained(real_model(name))
            batch, full_rank = batch_for(model), find_attention(model)[0].full_rank
            with torch.no_grad():
                original = model(**batch)[0]
                dk = full_rank if width == "full" else full_rank // 2
                convert(model, dk=dk, calibration="none", iterations=2)
                with storage.output_folder(root / width) as folder:
                    storage.save(model, folder)
                here[width] = aligned(model)(**batch)[0]
            torch.save(batch, root / width / "batch.pt")
        elsewhere = load_elsewhere(root, "collabify first")["collabify first"]
        done[name] = original, {width: (here[width], elsewhere[width]) for width in here}
        return done[name]

    return outputs


@pytest.mark.parametrize("name", OTHERS)
def test_others_are_themselves_at_full_width_elsewhere(name: str, others: Any) -> None:
    original, widths = others(name)
    assert isinstance(widths["full"][1], Tensor), widths["full"][1]
    scale = original.std()
    assert_close(widths["full"][1] / scale, original / scale, "trained")


@pytest.mark.parametrize("name", OTHERS)
def test_others_give_the_same_bits_elsewhere(name: str, others: Any) -> None:
    original, widths = others(name)
    for here, elsewhere in widths.values():
        assert isinstance(elsewhere, Tensor), elsewhere
        assert torch.equal(here, elsewhere)
    assert (widths["half"][0] - original).abs().max() > 1e-3


def test_pipeline_takes_a_converted_folder(minilm: Any, tmp_path: Path) -> None:
    folder, tokenizer, _ = minilm
    model, source = storage.load(str(folder))
    convert(model, dk=192, calibration="none", iterations=2)
    with storage.output_folder(tmp_path / "out") as new:
        storage.save(model, new, source=source)
    extract = transformers.pipeline("feature-extraction", model=str(tmp_path / "out"))
    for sentence, features in zip(SENTENCES, extract(SENTENCES), strict=True):
        with torch.no_grad():
            expected = model(**tokenizer(sentence, return_tensors="pt"))[0]
        assert_close(torch.tensor(features), expected, "trained")
