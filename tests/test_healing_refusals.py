"""What healing refuses or warns of, before it changes anything."""

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from healing_cases import FAST, data, equal, pair, values
from tiny_models import TINY
from transformers import AutoModel

import collabify
from collabify.data import CalibrationData
from collabify.errors import (
    AlreadyConvertedError,
    CheckpointError,
    CollabifyWarning,
    NonFiniteError,
    OptionError,
)
from collabify.healing import new_parameters


def test_what_is_not_converted_is_refused() -> None:
    original = TINY["bert"].build()
    with pytest.raises(CheckpointError, match=r"None of the attention layers .*Convert it first"):
        collabify.heal(original, copy.deepcopy(original), calibration=data(TINY["bert"]))
    with pytest.raises(CheckpointError, match="BertModel was converted"):
        new_parameters(original)


def _wider() -> Any:
    config = TINY["bert"].config()
    config.intermediate_size = 31
    return AutoModel.from_config(config)


def _deeper() -> Any:
    config = TINY["bert"].config()
    config.num_hidden_layers = 3
    return AutoModel.from_config(config)


@pytest.mark.parametrize(
    ("teacher", "error", "message"),
    [
        (lambda: TINY["roberta"].build(), CheckpointError, r"\(roberta, 2 layers .*\(bert, 2"),
        (_deeper, CheckpointError, r"\(bert, 3 layers of 3 heads, width 24\) .*Change --teacher"),
        (_wider, CheckpointError, r"'encoder.layer.0.intermediate.dense.weight' .*\(31, 24\)"),
        (lambda: pair()[0], AlreadyConvertedError, "must be the original"),
    ],
)
def test_a_wrong_teacher_is_refused(
    teacher: Callable[[], Any], error: type[Exception], message: str
) -> None:
    converted, _, seen = pair()
    before = values(converted)
    with pytest.raises(error, match=message):
        collabify.heal(converted, teacher(), calibration=seen, **FAST)
    assert equal(before, values(converted))


def test_a_teacher_with_other_weights_warns() -> None:
    converted, original, seen = pair()
    with torch.no_grad():
        original.encoder.layer[1].output.dense.weight[0, 0] += 1
    with pytest.warns(CollabifyWarning, match=r"^1 parameters .*'encoder.layer.1.output.dense"):
        collabify.heal(converted, original, calibration=seen, **FAST | {"steps": 1})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 0}, "steps=0 must be at least 1. Raise --steps."),
        ({"batch_size": 0}, "batch_size=0 must be at least 1. Raise --batch-size."),
        ({"learning_rate": 0.0}, "learning_rate=0.0 must be above 0 and finite"),
        ({"learning_rate": float("nan")}, "learning_rate=nan must be above 0 and finite"),
        ({"calibration": "none"}, "leaves nothing to heal on"),
        ({"samples": 1}, "samples=1 must be at least 2"),
        ({"calibration": CalibrationData((), (), "nothing", True, 0, 0)}, "needs both"),
    ],
)
def test_options_are_checked(options: dict[str, Any], message: str) -> None:
    converted, original, _ = pair()
    with pytest.raises(OptionError, match=re.escape(message)):
        collabify.heal(converted, original, **options)


def test_weights_that_are_not_finite_are_refused() -> None:
    converted, original, seen = pair()
    with torch.no_grad():
        original.encoder.layer[1].attention.self.query.weight[0, 0] = float("inf")
    with pytest.raises(NonFiniteError, match=r"encoder.layer.1.attention.self.query.weight"):
        collabify.heal(converted, original, calibration=seen)
