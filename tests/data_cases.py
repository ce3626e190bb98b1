"""What the tests of calibration data share: a tokenizer, texts, images, ready batches."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from PIL import Image
from tiny_models import VOCABULARY
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import Tensor

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


def counted(items: Iterator[Any], seen: list[Any]) -> Iterator[Any]:
    for item in items:
        seen.append(item)
        yield item


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


def ready(count: int, rows: int = 3, length: int = 5) -> Iterator[dict[str, Tensor]]:
    for index in range(count):
        ids = 2 + torch.arange(rows * length).view(rows, length) + index
        yield {"input_ids": ids % VOCABULARY, "attention_mask": torch.ones_like(ids)}
