"""Where samples come from: a file, a folder, a data set, or any iterable in Python.

source -> (texts | images | batches), read one by one and no further than needed
"""

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch

from collabify.data.base import IMAGE_ENDINGS, mismatch, model_kind
from collabify.data.dataset import open_dataset
from collabify.data.images import as_image, find_images, read_image
from collabify.data.text import distinct, read_lines
from collabify.errors import OptionError

T = TypeVar("T")

_TABLES = (".arrow", ".csv", ".json", ".jsonl", ".parquet", ".tsv")


@dataclass(frozen=True, eq=False)
class Source:
    """Samples, not yet read.

    Parameters
    ----------
    kind
        What ``items`` are.
    items
        Distinct texts, images in RGB, or model inputs.
    name
        For reports and errors.
    """

    kind: Literal["text", "image", "batch"]
    items: Iterator[Any]
    name: str


def open_source(source: object, config: Any, seed: int) -> Source:
    """Find out what ``source`` is, and whether the model of ``config`` reads that.

    Parameters
    ----------
    source
        As for :func:`collabify.data.load_calibration`, but for ``'synthetic'``.
    config
        The model's config.
    seed
        Of the order of files and data sets.

    Raises
    ------
    OptionError
        Where it is nothing that can be read, or of the wrong kind.
    """
    if isinstance(source, (str, os.PathLike)):
        return _open_named(os.fspath(source), config, seed)
    if isinstance(source, Mapping):
        return _open_iterable([source], "batch", config)
    if isinstance(source, Iterable):
        return _open_iterable(source, type(source).__name__, config)
    raise OptionError(
        f"calibration={source!r} must be 'synthetic', a path, the name of a data set, or an "
        "iterable of texts, images or batches. Give one of these."
    )


def _open_named(source: str, config: Any, seed: int) -> Source:
    kind = model_kind(config)
    if os.path.isfile(source):  # noqa: PTH113 (Path.is_file raises where a name is too long)
        return _open_file(Path(source), config, seed)
    if os.path.isdir(source):  # noqa: PTH112
        folder = Path(source)
        images = find_images(folder)
        tables = [path for path in folder.rglob("*") if path.suffix in (*_TABLES, ".txt")]
        if images and kind == "image":
            return Source("image", map(read_image, _shuffled(images, seed)), source)
        if images and not tables:
            raise mismatch(repr(source), "images", config)
        if kind == "image" and not tables:
            raise OptionError(
                f"{source!r} has no images; looked for {', '.join(IMAGE_ENDINGS)}, in its "
                "folders too. Give a folder of images, or 'synthetic'."
            )
        if not tables:
            raise OptionError(
                f"{source!r} has nothing to read; looked for .txt, {', '.join(_TABLES)}. "
                "Give a text file or a data set's folder, or 'synthetic'."
            )
    values, name = open_dataset(source, config, seed)
    return Source(kind, distinct(values) if kind == "text" else _images(values, name), name)


def _open_file(path: Path, config: Any, seed: int) -> Source:
    suffix = path.suffix.lower()
    if model_kind(config) == "image":
        if suffix in IMAGE_ENDINGS:
            raise OptionError(
                f"{str(path)!r} is one image; calibration takes many. "
                f"Give its folder, {str(path.parent)!r}."
            )
        raise mismatch(repr(str(path)), "texts", config)
    if suffix in IMAGE_ENDINGS:
        raise mismatch(repr(str(path)), "an image", config)
    if suffix in _TABLES:
        raise OptionError(
            f"{str(path)!r} is a table ({suffix}), not a text file with one text a line. "
            f"Give its folder as a data set: {path.parent}:default:train:COLUMN."
        )
    return Source("text", iter(_shuffled(read_lines(path), seed)), str(path))


def _shuffled(items: list[T], seed: int) -> list[T]:
    order = torch.randperm(len(items), generator=torch.Generator().manual_seed(seed))
    return [items[index] for index in order.tolist()]


def _open_iterable(source: Iterable[Any], what: str, config: Any) -> Source:
    """Texts, images or batches, by the first item."""
    rest, name, kind = iter(source), f"a Python {what}", model_kind(config)
    for first in rest:
        items = chain([first], rest)
        if isinstance(first, Mapping):
            return Source("batch", items, name)
        found: Literal["text", "image"] = "text" if isinstance(first, str) else "image"
        if found == "image" and not (hasattr(first, "mode") or hasattr(first, "dtype")):
            raise OptionError(
                f"Item 0 of {name} is of type {type(first).__name__}; it must be a text, an image "
                f"or a batch (a dict of tensors) for {config.model_type!r}. Convert it."
            )
        if found != kind:
            raise mismatch(name, f"{found}s", config)
        read = distinct(_texts(items, name)) if found == "text" else _images(items, name)
        return Source(found, read, name)
    raise OptionError(
        f"{name} has no items; calibration of {config.model_type!r} needs at least 2 samples. "
        "Give more, or 'synthetic'."
    )


def _texts(items: Iterable[Any], name: str) -> Iterator[str]:
    for index, item in enumerate(items):
        if not isinstance(item, str):
            raise OptionError(
                f"Item {index} of {name} is of type {type(item).__name__}; it must be a text, as "
                "the first one is. Give items of one kind."
            )
        yield item


def _images(items: Iterable[Any], name: str) -> Iterator[Any]:
    return (
        as_image(item, f"Item {index} of {name}")
        for index, item in enumerate(items)
        if item is not None
    )
