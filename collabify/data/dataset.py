"""A column of a data set, on the Hub or in a local folder, named NAME[:CONFIG[:SPLIT[:COLUMN]]].

nyu-mll/glue:rte:train:sentence1    ../shared/glue:rte    username/photos::validation
"""

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from collabify.data.base import IMAGE_ENDINGS, WAYS_OUT, Kind, mismatch, missing_package, model_kind
from collabify.data.splits import datasets_package, no_progress_bars
from collabify.errors import OptionError, first_line

_HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
_SHOWN = 200  # letters of a name in a message
_FORM = "NAME[:CONFIG[:SPLIT[:COLUMN]]]"


@dataclass(frozen=True)
class Spec:
    """A parsed name.

    Parameters
    ----------
    name
        Hub id or folder.
    config, split, column
        As in the data set; ``None`` where the name leaves them out.
    """

    name: str
    config: str | None = None
    split: str = "train"
    column: str | None = None


def parse_spec(source: str) -> Spec:
    """Take a data set's name apart.

    Raises
    ------
    OptionError
        Where it has too many parts, or names nothing that there could be.
    """
    parts = re.split(r":(?![^\[]*\])", source)  # not within split[:100]
    if len(parts) > 4:
        raise OptionError(
            f"calibration={source!r} has {len(parts)} parts; a data set has at most 4. "
            f"Write {_FORM}."
        )
    name, config, split, column = parts + [""] * (4 - len(parts))
    on_hub = _HUB_ID.fullmatch(name) and not name.lower().endswith((".txt", *IMAGE_ENDINGS))
    if not os.path.isdir(name) and not on_hub:  # noqa: PTH112 (Path raises for long names)
        raise not_found(source, "no such file or folder, and no Hub id")
    return Spec(name, config or None, split or "train", column or None)


def not_found(source: str, reason: str) -> OptionError:
    """The error for a source that is nowhere."""
    shown = source if len(source) <= _SHOWN else source[: _SHOWN - 3] + "..."
    return OptionError(
        f"calibration={shown!r} must be 'synthetic', a text file, a folder of images "
        f"({', '.join(IMAGE_ENDINGS)}) or a data set {_FORM} ({reason}). Check the name."
    )


def open_dataset(source: str, config: Any, seed: int) -> tuple[Iterator[Any], str]:
    """The values of one column in shuffled order, and the data set's full name.

    Parameters
    ----------
    source
        ``NAME[:CONFIG[:SPLIT[:COLUMN]]]``; by default the split ``train`` and the first column
        that the model could read.
    config
        The model's config.
    seed
        Of the order.

    Raises
    ------
    OptionError
        Where there is no such data set, configuration, split or column, or the column holds what
        the model does not read.
    """
    spec = parse_spec(source)
    try:
        datasets = datasets_package()
    except ImportError as error:
        raise missing_package("datasets", f"calibration={source!r}") from error
    with no_progress_bars():
        try:
            data: Any = datasets.load_dataset(spec.name, spec.config, split=spec.split)
        except ImportError as error:
            raise missing_package(
                error.name or "that it names", f"calibration={source!r}"
            ) from error
        except (
            OSError,
            ValueError,
            RuntimeError,
            TypeError,
            KeyError,
            datasets.exceptions.DatasetsError,
        ) as error:
            raise _explained(error, source, spec) from error
    column = _column(data.features, spec, config)
    name = f"{spec.name}:{data.config_name}:{spec.split}:{column}"
    return _values(data.select_columns([column]), column, seed, name), name


def _explained(error: Exception, source: str, spec: Spec) -> OptionError:
    """What datasets says, as one line that names the choices where it offers some."""
    said = str(error)
    brackets = re.search(r"\[([^\]]*)\]", said)
    offered = brackets[1].replace("'", "") if brackets else ""
    first = offered.partition(",")[0]
    if offered and "Config name is missing" in said:
        return OptionError(
            f"{spec.name!r} has several configurations and calibration={source!r} names none. "
            f"There are: {offered}. Write {spec.name}:{first}."
        )
    if offered and "BuilderConfig" in said:
        return OptionError(
            f"{spec.name!r} has no configuration {spec.config!r}. There are: {offered}. "
            f"Write {spec.name}:{first}."
        )
    if offered and "split" in said.lower():
        return OptionError(
            f"{spec.name!r} has no split {spec.split!r}. There are: {offered}. "
            f"Write {spec.name}:{spec.config or ''}:{first}."
        )
    return not_found(source, first_line(error))


def _column(features: Mapping[str, Any], spec: Spec, config: Any) -> str:
    """The column to read: the one that is named, or the first of the model's kind."""
    kinds = {name: _kind(feature) for name, feature in features.items()}
    kind, there = model_kind(config), ", ".join(kinds)
    prefix = f"{spec.name}:{spec.config or ''}:{spec.split}"
    if spec.column is not None:
        if spec.column not in kinds:
            raise OptionError(
                f"{prefix!r} has no column {spec.column!r}. There are: {there}. "
                f"Write {prefix}:COLUMN."
            )
        if kinds[spec.column] != kind:
            other = kinds[spec.column]
            found = f"{other}s" if other else "neither texts nor images"
            raise mismatch(
                f"Column {spec.column!r} of {prefix!r} (columns: {there})", found, config
            )
        return spec.column
    column = next((name for name, found in kinds.items() if found == kind), None)
    if column is None:
        raise OptionError(
            f"{prefix!r} has no column of {kind}s for model_type={config.model_type!r}. "
            f"There are: {there}. {WAYS_OUT[kind]}"
        )
    return column


def _kind(feature: Any) -> Kind | None:
    if isinstance(feature, datasets_package().Image):
        return "image"
    if getattr(feature, "dtype", None) in ("string", "large_string"):
        return "text"
    return None


def _values(data: Any, column: str, seed: int, name: str) -> Iterator[Any]:
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(seed))
    for row in order.tolist():
        try:
            yield data[row][column]
        except ImportError as error:
            raise missing_package("pillow", f"{name!r}") from error
        except (OSError, SyntaxError, ValueError) as error:
            raise OptionError(
                f"Row {row} of {name!r} cannot be read ({first_line(error)}). "
                "Remove it, or give another data set."
            ) from error
