"""What the tests of healing share: models as converted, their originals, data."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from tiny_models import LOW, TINY, VOCABULARY, Tiny
from torch import Tensor, nn

import collabify
from collabify.data import CalibrationData

CHANNELS = 5
CONVERSIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "cp-sparse": ("bert", LOW["cp"] | {"channels": CHANNELS}),
    "cp-all": ("bert", LOW["cp"] | {"channels": "all"}),
    "head-svd": ("distilbert", LOW["head-svd"]),
    "tucker": ("roberta", LOW["tucker"] | {"dk": 7}),
    "tucker-heads": ("albert-inner", LOW["tucker-heads"]),
    "vit": ("vit", LOW["cp"]),
}
FAST: dict[str, Any] = {"steps": 20, "batch_size": 6, "learning_rate": 1e-2}


def data(tiny: Tiny, batches: int = 6) -> CalibrationData:
    """Random inputs, padded; two batches are held out."""
    generator = torch.Generator().manual_seed(5)
    found = []
    for _ in range(batches + 2):
        if tiny.is_vision:
            found.append({"pixel_values": torch.randn(6, 3, 8, 8, generator=generator)})
            continue
        ids = torch.randint(5, VOCABULARY, (6, 11), generator=generator)
        mask = torch.ones_like(ids)
        mask[1, 7:] = 0
        mask[4, 3:] = 0
        found.append({"input_ids": ids.masked_fill(mask == 0, 1), "attention_mask": mask})
    return CalibrationData(
        tuple(found[:-2]), tuple(found[-2:]), "random", True, 6 * batches, 66 * batches
    )


def pair(name: str = "cp-sparse", **options: Any) -> tuple[Any, Any, CalibrationData]:
    """A model as converted, its original, and data."""
    kind, conversion = CONVERSIONS[name]
    original = TINY[kind].build(**options)
    converted = copy.deepcopy(original)
    collabify.convert(converted, **conversion)
    return converted, original, data(TINY[kind])


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(
        torch.equal(a[name], b[name]) and a[name].dtype == b[name].dtype for name in a
    )


def interrupt_after(step: int) -> Callable[[str, int, int, str], None]:
    def progress(stage: str, done: int, total: int, note: str) -> None:
        if stage == "Healing" and done == step:
            raise KeyboardInterrupt

    return progress
