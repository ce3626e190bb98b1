"""What weights there are, read off the headers of safetensors files.

headers(source) -> name, shape and dtype of every tensor; nothing else is read
"""

import json
import math
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import get_safetensors_metadata
from huggingface_hub.errors import NotASafetensorsRepoError, SafetensorsParsingError
from safetensors import SafetensorError, safe_open

from collabify.errors import CheckpointError, ModelNotFoundError, first_line
from collabify.hub import told
from collabify.storage.source import Source

WEIGHTS_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"


@dataclass(frozen=True)
class Headers:
    """The tensors of a model.

    Parameters
    ----------
    files
        Names of the weights' files.
    numbers
        How many numbers there are of each dtype, as safetensors calls it.
    """

    files: tuple[str, ...]
    numbers: dict[str, int]

    @property
    def total(self) -> int:
        """All numbers."""
        return sum(self.numbers.values())

    @property
    def bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(count * _width(dtype) for dtype, count in self.numbers.items())


def headers(source: Source) -> Headers:
    """Read the headers of a model's weights, on disk or on the Hub.

    Raises
    ------
    ModelNotFoundError
        Where there are none in safetensors.
    CheckpointError
        Where a file is missing or damaged.
    HubError
        Where the Hub cannot be reached or refuses.
    """
    return _local(Path(source.location), source.name) if source.is_folder else _remote(source)


def _local(folder: Path, name: str) -> Headers:
    files = _files(folder, name)
    numbers: Counter[str] = Counter()
    for file in files:
        try:
            with safe_open(folder / file, framework="np") as opened:
                for tensor in opened.keys():  # noqa: SIM118 (it is no mapping)
                    found = opened.get_slice(tensor)
                    _check_dtype(tensor, found.get_dtype(), f"{file!r} of {name!r}")
                    numbers[found.get_dtype()] += math.prod(found.get_shape())
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"{file!r} of {name!r} is missing or damaged ({first_line(error)}). "
                "Make or copy the model again."
            ) from error
    return Headers(files, dict(numbers))


_INDICES = ("channels", "value_columns", "context_rows")  # of converted layers


def _check_dtype(tensor: str, dtype: str, where: str) -> None:
    """Refuse whole numbers for weights, and others for indices: they would be cast silently."""
    leaf = tensor.rpartition(".")[2]
    whole = dtype.startswith(("I", "U", "BOOL"))
    if leaf in _INDICES and not whole:
        wanted = "whole numbers"
    elif leaf in _WEIGHTS and whole:
        wanted = "numbers in floating point"
    else:
        return
    raise CheckpointError(
        f"{tensor!r} in {where} holds {dtype} and must hold {wanted}. Make or copy the model again."
    )


_WEIGHTS = ("weight", "bias", "mixing", "core", "logits_mixing", "weights_mixing")


def _files(folder: Path, name: str) -> tuple[str, ...]:
    """The file of the weights, or those that the index names."""
    if (folder / WEIGHTS_FILE).is_file():
        return (WEIGHTS_FILE,)
    if not (folder / INDEX_FILE).is_file():
        pickled = sorted(path.name for path in folder.glob("pytorch_model*"))
        if pickled:
            raise ModelNotFoundError(
                f"{name!r} has its weights in {pickled[0]}, a pickle, which could run code. "
                "Save them as model.safetensors."
            )
        raise ModelNotFoundError(
            f"{name!r} has no {WEIGHTS_FILE}. Give a folder that save_pretrained wrote."
        )
    try:
        index: Any = json.loads((folder / INDEX_FILE).read_text(encoding="utf-8"))
        files = sorted(set(index["weight_map"].values()))
        if not files:
            raise ValueError("it names no files")
        if any(Path(file).name != file for file in files):
            raise ValueError("it names files elsewhere")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"The {INDEX_FILE} of {name!r} cannot be used ({first_line(error)}). "
            "Make or copy the model again."
        ) from error
    return tuple(files)


def _remote(source: Source) -> Headers:
    try:
        with told(source.name):
            found = get_safetensors_metadata(source.location, revision=source.revision)
    except NotASafetensorsRepoError as error:
        raise ModelNotFoundError(
            f"{source.name!r} has no {WEIGHTS_FILE} on the Hub. Name a model with one."
        ) from error
    except (SafetensorsParsingError, AttributeError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"The weights of {source.name!r} on the Hub are damaged ({first_line(error)}). "
            "Push them again."
        ) from error
    return Headers(
        tuple(sorted(found.files_metadata)),
        {str(dtype): count for dtype, count in found.parameter_count.items()},
    )


def _width(dtype: str) -> int:
    """Bytes of a number: ``F32``, ``BF16``, ``F8_E4M3``, ``I64``, ``BOOL``."""
    bits = re.search(r"\d+", dtype)
    return 1 if bits is None else int(bits[0]) // 8
