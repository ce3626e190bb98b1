"""GLUE in small: folders in the Hub's layout, a tokenizer of a few words, models that know a rule.

The first word of a text is its answer: ``zero``, ``one`` or ``two``; the rest is length.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from datasets import ClassLabel, Dataset, Features, Value
from torch import Tensor, nn
from transformers import BertConfig, BertTokenizerFast

from collabify.data.glue import TASKS

WORDS = ("zero", "one", "two")
VOCABULARY = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS, "a", "b", "c")
FIRST = VOCABULARY.index("zero")


def write_vocabulary(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    BertTokenizerFast(vocab={word: n for n, word in enumerate(VOCABULARY)}).save_pretrained(folder)


def text(word: str, row: int) -> str:
    return " ".join([word, *("a" for _ in range(row * 7 % 11))])


def rows_of(task: str, labels: Sequence[Any], words: Sequence[str] | None = None) -> dict[str, Any]:
    """Rows whose first text says the label (or the word that is given)."""
    said = [WORDS[int(label)] for label in labels] if words is None else list(words)
    first, *rest = TASKS[task].columns
    rows: dict[str, Any] = {first: [text(word, row) for row, word in enumerate(said)]}
    rows |= {column: ["b c"] * len(said) for column in rest}
    return rows | {"label": list(labels), "idx": list(range(len(said)))}


def features_of(task: str, rows: Mapping[str, Any], names: Sequence[str] | None) -> Features:
    label = Value("float32") if names is None else ClassLabel(names=list(names))
    return Features(
        {
            name: label if name == "label" else Value("int32" if name == "idx" else "string")
            for name in rows
        }
    )


def write_glue(
    folder: Path,
    tasks: Mapping[str, Mapping[str, Mapping[str, Any]]],
    names: Mapping[str, Sequence[str] | None] | None = None,
) -> str:
    """A folder in the layout of nyu-mll/glue: ``tasks[task][split]`` are columns."""
    lines = ["---", "configs:"]
    for task, splits in tasks.items():
        lines += [f"- config_name: {task}", "  data_files:"]
        labels = (names or {}).get(task, TASKS[task].label_names)
        for split, rows in splits.items():
            path = folder / task / f"{split}-00000-of-00001.parquet"
            path.parent.mkdir(parents=True, exist_ok=True)
            features = features_of(task, rows, labels)
            Dataset.from_dict(dict(rows), features=features).to_parquet(path)
            lines.append(f"  - {{split: {split}, path: {task}/{split}-*}}")
    (folder / "README.md").write_text("\n".join([*lines, "---", ""]))
    return str(folder)


class KnowingForSequenceClassification(nn.Module):
    """Reads the answer off the first word; ``outputs[label]`` is where its head puts that."""

    def __init__(self, names: Sequence[str], outputs: Sequence[int], wrong: int = 0) -> None:
        super().__init__()
        self.config: Any = BertConfig(
            vocab_size=len(VOCABULARY),
            max_position_embeddings=37,
            id2label=dict(enumerate(names)),
            label2id={name: n for n, name in enumerate(names)},
        )
        self.scale = nn.Parameter(torch.tensor(3.0))
        self.outputs, self.wrong = list(outputs), wrong
        self.sizes: list[tuple[int, ...]] = []
        self.modes: list[bool] = []

    def forward(self, input_ids: Tensor, attention_mask: Tensor, **_: Any) -> Any:
        self.sizes.append(tuple(input_ids.shape))
        self.modes.append(self.training)
        answers = (input_ids[:, 1] - FIRST + self.wrong) % len(self.outputs)
        if len(self.outputs) == 1:  # a number: how long the text is
            return SimpleNamespace(logits=attention_mask.sum(1, keepdim=True) * self.scale)
        placed = torch.tensor(self.outputs)[answers]
        return SimpleNamespace(logits=nn.functional.one_hot(placed, len(self.outputs)) * self.scale)
