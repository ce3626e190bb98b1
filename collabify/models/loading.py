"""A record and a model: its modules before weights are loaded, and that none was made up after."""

from typing import Any

from torch import nn

from collabify.config import ConversionConfig
from collabify.errors import CheckpointError
from collabify.models import find_attention


def shape_as_recorded(model: nn.Module, record: ConversionConfig) -> None:
    """Rewrite a model's layers to the forms and sizes of ``record``, on meta.

    Raises
    ------
    CheckpointError
        Where the record names a layer that the model does not have.
    """
    sites = find_attention(model)
    for layer in record.layers:
        if layer.index >= len(sites):
            raise CheckpointError(
                f"config.json's collabify record names layer {layer.index}, but the model has "
                f"{len(sites)} attention layers. Convert the model again."
            )
        sites[layer.index].install_empty(layer)


def check_loaded(model: Any, record: ConversionConfig) -> None:
    """Refuse factors that the checkpoint did not have: transformers would make them up.

    Raises
    ------
    CheckpointError
    """
    sites = find_attention(model)
    for layer in record.layers:
        for name, tensor in sites[layer.index].factor_tensors():
            if not getattr(tensor, "_is_hf_initialized", False) and not tensor.is_meta:
                raise CheckpointError(
                    f"{name!r} is not in the checkpoint, or not in "
                    "the shape that its config.json gives. Download or copy both again."
                )
