"""A record and a model: its modules before weights are loaded, and that none was made up after."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from collabify.attention import SharedAttention
from collabify.config import ConversionConfig
from collabify.errors import CheckpointError
from collabify.models import AttentionSite, find_attention


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


def check_shapes(model: nn.Module, shapes: Mapping[str, torch.Size]) -> None:
    """Refuse tensors of other shapes than the modules were built for.

    Where a quantizer is at work, transformers up to 5.22 takes them from the checkpoint as they
    are.

    Raises
    ------
    CheckpointError
    """
    for name, tensor in model.state_dict().items():
        if tensor.shape != shapes.get(name, tensor.shape):
            raise CheckpointError(
                f"{name!r} is {list(tensor.shape)} in the checkpoint and does not fit its "
                f"config.json, of which it must be {list(shapes[name])}. "
                "Download or copy both again."
            )


def check_loaded(model: Any, record: ConversionConfig) -> None:
    """Refuse factors that the checkpoint did not have, which transformers would make up.

    Indices beyond what they index are refused, too.

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
        _check_indices(sites[layer.index])


def _check_indices(site: AttentionSite) -> None:
    module = site.module
    found = module.indices() if isinstance(module, SharedAttention) else {}
    for name, (indices, count) in found.items():
        if not indices.is_meta and not bool(((indices >= 0) & (indices < count)).all()):
            raise CheckpointError(
                f"'{site.name}.{name}' must be from 0 to {count - 1} everywhere, and in the "
                "checkpoint it is not. Download or copy it again."
            )
