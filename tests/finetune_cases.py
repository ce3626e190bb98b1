"""What the tests of fine-tuning have in common."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_models import LOW
from tiny_tasks import FAST, write_model
from torch import Tensor
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from collabify.data.glue import load_task

CHANNELS = 5
FORMS: dict[str, tuple[str, dict[str, Any] | None]] = {
    "original": ("bert", None),
    "cp-sparse": ("bert", LOW["cp"] | {"channels": CHANNELS}),
    "cp-all": ("distilbert", LOW["cp"] | {"channels": "all"}),
    "head-svd": ("bert", LOW["head-svd"]),
    "tucker": ("roberta", LOW["tucker"] | {"dk": 7}),
    "tucker-heads": ("albert-inner", LOW["tucker-heads"]),
}
SHORT: dict[str, Any] = FAST | {"epochs": 2, "limit": 24, "batch_size": 6}  # 4 steps an epoch
PREPARED = pytest.mark.filterwarnings("ignore:Images are prepared for .* as best one can")
NEW_HEAD = pytest.mark.filterwarnings("ignore:.*gets a new head")


def weights(folder: str | Path) -> dict[str, Tensor]:
    return load_file(Path(folder) / "model.safetensors")


def equal(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def names_of_hidden(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.startswith(".")]


def headed(folder: Path, labels: tuple[str, ...], kind: str = "bert", **config: Any) -> str:
    names = dict(enumerate(labels))
    ids = {name: number for number, name in names.items()}
    return str(write_model(folder, kind, id2label=names, label2id=ids, **config))


def loss_and_accuracy(folder: Path, glue: str) -> tuple[float, float]:
    """Of a saved model on held-out sentences, by a loop that is not the Trainer's."""
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows = load_task("sst2", glue, "validation")
    batch = tokenizer(list(rows["sentence"]), padding=True, return_tensors="pt")
    labels = torch.tensor(rows["label"])
    with torch.no_grad():
        found = model(**batch, labels=labels)
    return float(found.loss), float((found.logits.argmax(-1) == labels).double().mean())
