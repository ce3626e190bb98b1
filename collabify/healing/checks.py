"""What healing asks of its options, of the model and of the teacher, before it changes anything."""

import warnings
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import nn

from collabify.drift import base_model
from collabify.errors import AlreadyConvertedError, CheckpointError, CollabifyWarning, OptionError
from collabify.models import find_attention


def new_parameters(model: nn.Module) -> list[nn.Parameter]:
    """What a conversion made: shared projections, the method's own, values where it reduced them.

    Raises
    ------
    CheckpointError
        Where no layer was converted.
    """
    found = [
        parameter
        for site in find_attention(model)
        if site.converted
        for parameter in site.new_parameters
    ]
    if not found:
        raise CheckpointError(
            f"None of the attention layers of this {type(model).__name__} was converted, so there "
            "is nothing to heal. Convert it first."
        )
    return found


def check_options(calibration: object, steps: int, batch_size: int, learning_rate: float) -> None:
    """Refuse options of healing that are out of bounds.

    Raises
    ------
    OptionError
    """
    for name, value in (("steps", steps), ("batch_size", batch_size)):
        if value < 1:
            raise OptionError(
                f"{name}={value} must be at least 1. Raise --{name.replace('_', '-')}."
            )
    if not 0 < learning_rate < float("inf"):
        raise OptionError(
            f"learning_rate={learning_rate} must be above 0 and finite. Change --learning-rate."
        )
    if calibration is None or calibration == "none":
        raise OptionError(
            f"calibration={calibration!r} leaves nothing to heal on. "
            "Leave out --calibration for 'synthetic', or give a file."
        )


def check_teacher(model: nn.Module, teacher: nn.Module, trained: Sequence[nn.Parameter]) -> None:
    """Refuse a teacher of another architecture, of other sizes, or that was converted too.

    One whose other weights differ is warned of.

    Raises
    ------
    AlreadyConvertedError, CheckpointError
    """
    if any(site.converted for site in find_attention(teacher)):
        raise AlreadyConvertedError(
            "The teacher was converted before; it must be the original. Change --teacher."
        )
    (ours, is_), (theirs, was) = (_outline(each) for each in (model, teacher))
    if ours != theirs:
        raise CheckpointError(
            f"The teacher ({was}) must be the model that this one was converted from ({is_}). "
            "Change --teacher."
        )
    new = {id(parameter) for parameter in trained}
    originals = dict(base_model(teacher).named_parameters())
    differ = []
    for name, parameter in base_model(model).named_parameters():
        if id(parameter) in new or name not in originals:
            continue
        if parameter.shape != originals[name].shape:
            raise CheckpointError(
                f"{name!r} of the teacher is {tuple(originals[name].shape)}; it must be "
                f"{tuple(parameter.shape)}, as in the converted model. Change --teacher."
            )
        if not torch.equal(originals[name].detach().to(parameter), parameter.detach()):
            differ.append(name)
    if differ:
        warnings.warn(
            f"{len(differ)} parameters that the conversion left alone differ from the teacher's "
            f"({differ[0]!r} first): it is not what this model was converted from, or the model "
            "was trained since.",
            CollabifyWarning,
            stacklevel=3,
        )


def _outline(model: nn.Module) -> tuple[tuple[Any, ...], str]:
    """A model's architecture, to compare and in words."""
    config, sites = cast(Any, model).config, find_attention(model)
    heads = [(site.name, site.num_heads, site.width) for site in sites]
    words = (
        f"{config.model_type}, {config.num_hidden_layers} layers of {sites[0].num_heads} heads, "
        f"width {sites[0].width}"
    )
    return (config.model_type, config.num_hidden_layers, heads), words
