"""Labelled images: a data set, or a folder with a folder of images for each label.

NAME[:CONFIG], split -> rows of one image and one class label

A data set's columns are found by their types, whatever their names are.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from collabify.data.images import as_image
from collabify.data.labels import check_range
from collabify.data.splits import datasets_package, load_split
from collabify.errors import LabelError, OptionError, first_line

SCORED = ("validation", "test")  # the splits to score, in the order in which they are looked for


@dataclass(frozen=True, eq=False)
class LabelledImages:
    """A split.

    Parameters
    ----------
    name
        For messages: data set and split.
    rows
        A ``datasets.Dataset``.
    image, label
        Its columns.
    """

    name: str
    rows: Any
    image: str
    label: str

    @property
    def label_names(self) -> tuple[str, ...]:
        """In the order of the labels."""
        return tuple(self.rows.features[self.label].names)

    @property
    def labels(self) -> list[int]:
        """Of all rows, in order."""
        return list(self.rows[self.label])

    def picture(self, row: int) -> Any:
        """One image in RGB.

        Raises
        ------
        OptionError
            Where it cannot be read.
        """
        try:
            return as_image(self.rows[row][self.image], f"Row {row} of {self.name!r}")
        except (OSError, SyntaxError) as error:
            raise OptionError(
                f"Row {row} of {self.name!r} cannot be read ({first_line(error)}). Remove it."
            ) from error


def load_images(source: str, split: str) -> LabelledImages:
    """A split of labelled images.

    Parameters
    ----------
    source
        ``NAME[:CONFIG]``, a Hub id or a folder.
    split
        By name; slices (``train[80%:]``) too.

    Raises
    ------
    OptionError
        Where there is no such data set or split, or no column of images or of class labels.
    LabelError
        Where a label is hidden or out of range.
    """
    name, config = _parts(source)
    rows = load_split(name, config, split)
    datasets = datasets_package()
    image = _column(rows, datasets.Image, "images", source)
    label = _column(rows, datasets.ClassLabel, "class labels", source)
    check_range(rows[label], rows.features[label].names, repr(f"{source}:{split}"))
    return LabelledImages(f"{source}:{split}", rows, image, label)


def scored_split(source: str) -> str:
    """The split to score where none is named.

    Raises
    ------
    OptionError
        Where there is neither a validation split nor a test split.
    """
    name, config = _parts(source)
    datasets = datasets_package()
    try:
        there = datasets.get_dataset_split_names(name, config)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise OptionError(
            f"data={source!r} must be a folder of images, or a data set that the Hub could give "
            f"({first_line(error)}). Check the name."
        ) from error
    found = next((split for split in SCORED if split in there), None)
    if found is None:
        raise OptionError(
            f"data={source!r} has none of the splits {', '.join(SCORED)}. There are: "
            f"{', '.join(there)}. Name slices: --split 'train[:80%]' --eval-split 'train[80%:]'"
        )
    return str(found)


def check_same_labels(first: LabelledImages, second: LabelledImages) -> None:
    """Refuse two splits whose labels differ.

    Raises
    ------
    LabelError
    """
    if first.label_names != second.label_names:
        raise LabelError(
            f"The labels of {second.name!r} ({', '.join(second.label_names)}) must be those of "
            f"{first.name!r} ({', '.join(first.label_names)}), in the same order. "
            "Put the data right."
        )


def _parts(source: str) -> tuple[str, str | None]:
    if Path(source).exists():
        return source, None
    name, _, config = source.partition(":")
    return name, config or None


def _column(rows: Any, kind: Any, what: str, source: str) -> str:
    found = next((name for name, found in rows.features.items() if isinstance(found, kind)), None)
    if found is None:
        columns = [f"{name} ({type(found).__name__})" for name, found in rows.features.items()]
        raise OptionError(
            f"data={source!r} has no column of {what}. There are: {', '.join(columns)}. "
            "Give a folder with a folder of images for each label, or another data set."
        )
    return str(found)
