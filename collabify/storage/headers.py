"""What weights there are, read off the headers of safetensors files.

headers(source) -> name, shape and dtype of every tensor; nothing else is read
"""

import math
import re
from collections import Counter
from dataclasses import dataclass
from glob import escape
from pathlib import Path, PurePosixPath

from huggingface_hub import (
    file_exists,
    parse_safetensors_file_metadata,
    snapshot_download,
    try_to_load_from_cache,
)
from huggingface_hub.errors import EntryNotFoundError, SafetensorsParsingError

from collabify.errors import CheckpointError, ModelNotFoundError, first_line
from collabify.hub import download, told
from collabify.models.loading import check_dtype, check_file_name, header_of
from collabify.storage.reading import read_object
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


def check_weights(source: Source) -> None:
    """Refuse weights that :func:`headers` refuses, before transformers reads them.

    Those of a model on the Hub are downloaded; errors as of :func:`headers`.
    """
    _local(Path(source.location) if source.is_folder else _fetch(source), source.name)


def _local(folder: Path, name: str) -> Headers:
    files = _files(folder, name)
    numbers: Counter[str] = Counter()
    for file in files:
        for _, dtype, shape in header_of(folder / file, name):
            numbers[dtype] += math.prod(shape)
    return Headers(files, dict(numbers))


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
    return index_files(folder / INDEX_FILE, name)


def index_files(path: Path, name: str) -> tuple[str, ...]:
    """The files that an index names.

    Raises
    ------
    CheckpointError
        Where it is damaged, or names files that are elsewhere or no safetensors.
    """
    try:
        files = sorted(set(read_object(path)["weight_map"].values()))
        if not files:
            raise ValueError("it names no files")
        if any(PurePosixPath(file).name != file or "\\" in file for file in files):
            raise ValueError("it names files elsewhere")
    except (OSError, ValueError, *_ODD) as error:
        raise CheckpointError(
            f"The {INDEX_FILE} of {name!r} cannot be used ({first_line(error)}). "
            "Make or copy the model again."
        ) from error
    for file in files:
        check_file_name(file, name)
    return tuple(files)


def _remote(source: Source) -> Headers:
    here = _cached(source)
    if here is not None:
        return _local(here, source.name)
    numbers: Counter[str] = Counter()
    with told(source.name):
        single = file_exists(source.location, WEIGHTS_FILE, revision=source.revision)
        files = (WEIGHTS_FILE,) if single else _indexed(source)[1]
        for file in files:
            try:
                found = parse_safetensors_file_metadata(
                    source.location, file, revision=source.revision
                )
            except (SafetensorsParsingError, EntryNotFoundError, *_ODD) as error:
                raise CheckpointError(
                    f"{file!r} of {source.name!r} on the Hub is missing or damaged "
                    f"({first_line(error)}). Push the model again."
                ) from error
            for tensor, one in found.tensors.items():
                check_dtype(tensor, str(one.dtype), f"{file!r} of {source.name!r}")
            numbers.update({str(k): count for k, count in found.parameter_count.items()})
    return Headers(files, dict(numbers))


_ODD = (AttributeError, KeyError, TypeError)  # of a header that is JSON, but no header's


def _fetch(source: Source) -> Path:
    """The folder of the cache with a Hub model's weights, downloaded if need be."""
    here = _cached(source)
    if here is not None:
        return here
    single = download(source.location, WEIGHTS_FILE, source.revision)
    if single is not None:
        return single.parent
    index, files = _indexed(source)
    with told(source.name):
        snapshot_download(
            source.location, revision=source.revision, allow_patterns=[escape(f) for f in files]
        )
    return index.parent


def _indexed(source: Source) -> tuple[Path, tuple[str, ...]]:
    """The index of a Hub model, and the files that it names."""
    index = download(source.location, INDEX_FILE, source.revision)
    if index is None:
        raise ModelNotFoundError(
            f"{source.name!r} has no {WEIGHTS_FILE} on the Hub. Name a model with one."
        )
    return index, index_files(index, source.name)


def _cached(source: Source) -> Path | None:
    """The folder of the cache where all of a Hub model's weights are."""

    def find(name: str) -> Path | None:
        found = try_to_load_from_cache(source.location, name, revision=source.revision)
        return Path(found) if isinstance(found, str) else None

    with told(source.name):
        single, index = find(WEIGHTS_FILE), find(INDEX_FILE)
    if single is not None or index is None:
        return None if single is None else single.parent
    files = index_files(index, source.name)
    return index.parent if all((index.parent / file).is_file() for file in files) else None


def _width(dtype: str) -> int:
    """Bytes of a number: ``F32``, ``BF16``, ``F8_E4M3``, ``I64``, ``BOOL``."""
    bits = re.search(r"\d+", dtype)
    return 1 if bits is None else int(bits[0]) // 8
