"""Tiny labelled data with a planted rule, and tiny models on disk that can learn it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from datasets import ClassLabel, Dataset, Features, Value
from PIL import Image
from tiny_models import TINY
from transformers import BertTokenizer

import collabify

WORDS = [f"w{number}" for number in range(30)]
GOOD, BAD = WORDS[:2], WORDS[2:4]
NAMES = {
    "sst2": ("negative", "positive"),
    "rte": ("entailment", "not_entailment"),
    "mnli": ("entailment", "neutral", "contradiction"),
}
# What makes tiny models learn within seconds.
FAST: dict[str, Any] = {"epochs": 5, "learning_rate": 5e-3, "batch_size": 16, "max_length": 16}


def sentences(count: int, seed: int) -> tuple[list[str], list[int]]:
    """Four to six words, of which one says the label and the others mean nothing."""
    generator = torch.Generator().manual_seed(seed)

    def draw(size: int, high: int) -> list[int]:
        return torch.randint(high, (size,), generator=generator).tolist()

    texts, labels = [], draw(count, 2)
    for label in labels:
        words = [WORDS[10 + index] for index in draw(4 + draw(1, 3)[0], 20)]
        words[draw(1, len(words))[0]] = (BAD, GOOD)[label][draw(1, 2)[0]]
        texts.append(" ".join(words))
    return texts, labels


def write_task(
    root: Path,
    task: str,
    sizes: dict[str, int],
    *,
    names: Sequence[str] | None = None,
) -> None:
    """A task in GLUE's layout; a sentence's label says what the planted word says."""
    for number, (split, size) in enumerate(sizes.items()):
        texts, labels = sentences(size, number)
        columns: dict[str, Any] = {"sentence": texts}
        if task != "sst2":
            first = {"mnli": ("premise", "hypothesis")}.get(task, ("sentence1", "sentence2"))
            columns = dict(zip(first, (texts, texts[::-1]), strict=True))
        kind: Any = Value("float32")
        if task != "stsb":
            kind = ClassLabel(names=list(names or NAMES[task]))
        features = Features({name: Value("string") for name in columns} | {"label": kind})
        rows = columns | {"label": [4.0 * y for y in labels] if task == "stsb" else labels}
        (root / task).mkdir(parents=True, exist_ok=True)
        Dataset.from_dict(rows, features=features).to_parquet(
            root / task / f"{split}-00000-of-00001.parquet"
        )
    found = sorted(path.name for path in root.iterdir() if path.is_dir())
    lines = ["---", "configs:"]
    for name in found:
        splits = sorted({path.name.partition("-0")[0] for path in (root / name).iterdir()})
        lines += [f"- config_name: {name}", "  data_files:"]
        lines += [f"  - {{split: {split}, path: {name}/{split}-*}}" for split in splits]
    (root / "README.md").write_text("\n".join([*lines, "---", ""]))


def write_images(
    root: Path, sizes: dict[str, int], labels: Sequence[str] = ("red", "blue")
) -> None:
    """A folder of pictures for each label of each split: more red than blue, or the reverse."""
    generator = torch.Generator().manual_seed(3)
    for split, size in sizes.items():
        for number in range(size):
            label = number % len(labels)
            pixels = torch.randint(0, 120, (8, 8, 3), generator=generator).to(torch.uint8)
            pixels[..., (0, 2, 1)[label % 3]] += 100
            folder = root / split / labels[label]
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels.numpy()).save(folder / f"{number}.png")


def write_model(
    folder: Path, kind: str = "bert", conversion: dict[str, Any] | None = None, **config: Any
) -> Path:
    """A tiny model, converted or not, with a tokenizer where it reads texts.

    With ``config`` it has a head, and the configuration these values.
    """
    tiny = TINY[kind]
    made = tiny.config()
    made.initializer_range = 0.15  # peaked attention is slow to learn
    made.update(config)
    with torch.random.fork_rng():
        torch.manual_seed(11)
        cls = getattr(transformers, tiny.headed) if config else transformers.AutoModel
        model = cls(made) if config else cls.from_config(made)
    if conversion is not None:
        collabify.convert(model, **conversion)
    model.save_pretrained(folder)
    if not tiny.is_vision:
        special = ["[CLS]", "[PAD]", "[SEP]", "[UNK]", "[MASK]"]
        vocabulary = {token: number for number, token in enumerate([*special, *WORDS])}
        BertTokenizer(vocab=vocabulary).save_pretrained(folder)
    return folder
