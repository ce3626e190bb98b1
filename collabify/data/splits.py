"""Splits of labelled data sets, on the Hub or in a folder: opened with every error in one line.

(nyu-mll/glue, rte, validation) -> Dataset        (../photos, None, test) -> Dataset
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from collabify.errors import OptionError, first_line


def datasets_package() -> Any:
    """The package ``datasets``, imported when data are there to be read."""
    import datasets  # type: ignore[import-untyped,unused-ignore]

    return datasets


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """The while without the bars of ``datasets``; commands have their own."""
    datasets = datasets_package()
    if datasets.are_progress_bars_disabled():
        yield
        return
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        datasets.enable_progress_bars()


def load_split(name: str, config: str | None, split: str) -> Any:
    """One split of a data set, as ``datasets.load_dataset(name, config, split=split)`` gives it.

    Parameters
    ----------
    name
        Hub id or folder.
    config
        The data set's configuration; ``None`` where it has one only.
    split
        By name; slices (``validation[:100]``) too.

    Raises
    ------
    OptionError
        Where there is no such data set, configuration or split, or no rows; what is there is named.
    """
    datasets = datasets_package()
    with no_progress_bars():
        try:
            return datasets.load_dataset(name, config, split=split)
        except (
            OSError,
            ValueError,
            RuntimeError,
            TypeError,
            KeyError,
            ImportError,
            datasets.exceptions.DatasetsError,
        ) as error:
            raise _explained(error, name, config, split) from error


def config_names(name: str) -> list[str]:
    """The configurations of a data set.

    Raises
    ------
    OptionError
        Where there is no such data set.
    """
    datasets = datasets_package()
    try:
        return list(datasets.get_dataset_config_names(name))
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise _explained(error, name, None, "") from error


def _explained(error: Exception, name: str, config: str | None, split: str) -> OptionError:
    """What ``datasets`` says, as one line that names the choices where it offers some."""
    said = str(error)
    brackets = re.search(r"\[([^\]]*)\]", said)
    offered = brackets[1].replace("'", "") if brackets else ""
    if offered and "Config name is missing" in said:
        return OptionError(
            f"data={name!r} has several configurations and none is named. "
            f"There are: {offered}. Name one."
        )
    if offered and "BuilderConfig" in said:
        return OptionError(
            f"data={name!r} has no configuration {config!r}. There are: {offered}. "
            "Choose one of these, or give other data."
        )
    if offered and "Unknown split" in said:
        return OptionError(
            f"data={name!r} has no split {split!r}. There are: {offered}. Choose one of these."
        )
    if "corresponds to no data" in said:
        return OptionError(f"data={name!r} has no rows in its split {split!r}. Give another.")
    return OptionError(
        f"data={name!r} must be a data set's folder, or a data set that the Hub could give "
        f"({first_line(error)}). Check the name and the split {split!r}."
    )


def check_columns(data: Any, columns: Sequence[str], name: str) -> None:
    """Refuse data without the columns that are to be read.

    Raises
    ------
    OptionError
        Saying which columns are there.
    """
    missing = [column for column in columns if column not in data.column_names]
    if missing:
        raise OptionError(
            f"data={name!r} has no column {', '.join(map(repr, missing))}. "
            f"There are: {', '.join(data.column_names)}. Rename them, or give other data."
        )


def sample(data: Any, limit: int | None, seed: int) -> Any:
    """``limit`` rows drawn at random, in the order of the data; all where there are no more.

    Raises
    ------
    OptionError
        Where ``limit`` is below 1.
    """
    if limit is None:
        return data
    if limit < 1:
        raise OptionError(f"limit={limit} must be at least 1. Raise --limit.")
    if limit >= len(data):
        return data
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(seed))
    return data.select(sorted(order[:limit].tolist()))
