"""A record and a model: its modules before weights are loaded, and that none was made up after."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from collabify.attention import SharedAttention
from collabify.config import ConversionConfig
from collabify.errors import CheckpointError, first_line
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


def check_files(files: Iterable[str | Path]) -> None:
    """Refuse files of weights that are no safetensors, or hold tensors of the wrong kind.

    Parameters
    ----------
    files
        On disk, as transformers is about to read them.

    Raises
    ------
    CheckpointError
    """
    for file in map(Path, files):
        header_of(file, str(file.parent))


def header_of(file: Path, name: str) -> list[tuple[str, str, tuple[int, ...]]]:
    """Name, dtype and shape of every tensor of a file, checked as :func:`check_files` does.

    Parameters
    ----------
    file
        On disk.
    name
        Of the model, for messages.

    Raises
    ------
    CheckpointError
    """
    check_file_name(file.name, name)
    found = []
    try:
        with safe_open(file, framework="np") as opened:
            for tensor in opened.keys():  # noqa: SIM118 (it is no mapping)
                part = opened.get_slice(tensor)
                found.append((tensor, part.get_dtype(), tuple(part.get_shape())))
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{file.name!r} of {name!r} is missing or damaged ({first_line(error)}). "
            "Make or copy the model again."
        ) from error
    for tensor, dtype, _ in found:
        check_dtype(tensor, dtype, f"{file.name!r} of {name!r}")
    return found


def check_file_name(file: str, name: str) -> None:
    """Refuse weights in anything but safetensors: transformers reads pickles by their names.

    Raises
    ------
    CheckpointError
    """
    if not file.endswith(".safetensors"):
        raise CheckpointError(
            f"{name!r} has weights in {file!r}, which is no safetensors and could be a pickle. "
            "Save them as model.safetensors."
        )


def check_dtype(tensor: str, dtype: str, where: str) -> None:
    """Refuse whole numbers for weights, and others for indices: they would be cast silently.

    Parameters
    ----------
    tensor
        Its name.
    dtype
        As safetensors calls it.
    where
        The file, in words.

    Raises
    ------
    CheckpointError
    """
    leaf = tensor.rpartition(".")[2]
    if leaf in _INDICES and dtype not in ("I32", "I64"):
        wanted = "whole numbers, I32 or I64"
    elif leaf in _WEIGHTS and dtype.startswith(("I", "U", "BOOL")):
        wanted = "numbers in floating point"
    else:
        return
    raise CheckpointError(
        f"{tensor!r} in {where} holds {dtype} and must hold {wanted}. Make or copy the model again."
    )


_INDICES = ("channels", "value_columns", "context_rows")  # of converted layers
_WEIGHTS = (
    *("weight", "bias", "mixing", "core", "logits_mixing", "weights_mixing"),
    *("x2l", "m2l", "x2w", "m2w"),
)


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
                f"{name!r} is {list(tensor.shape)} in the checkpoint and has not the shape "
                f"that its config.json gives, {list(shapes[name])}. "
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
