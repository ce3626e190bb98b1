"""Labelled images: a data set or a folder of folders in, one image column and one of classes out.

photos/cat/1.jpg, photos/dog/2.jpg -> imagefolder -> image, label (cat, dog)
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from collabify.data.images import as_image
from collabify.data.labels import check_range
from collabify.data.splits import datasets_package, load_split, no_progress_bars
from collabify.errors import CollabifyError, OptionError, first_line

# In the order in which one of them is taken where none is named.
_EVALUATED = ("validation", "valid", "val", "test", "train")


@dataclass(frozen=True, eq=False)
class ImageClasses:
    """Images and the class of each.

    Parameters
    ----------
    rows
        A ``datasets.Dataset``.
    image, label
        The names of its columns.
    names
        Of the classes, in the order of the labels.
    name, split
        What was read.
    """

    rows: Any
    image: str
    label: str
    names: tuple[str, ...]
    name: str
    split: str


def load_images(data: str, split: str | None = None) -> ImageClasses:
    """Labelled images to train on or to evaluate with.

    Parameters
    ----------
    data
        A Hub id (``NAME`` or ``NAME:CONFIG``), or a folder: a data set's, or one with a folder of
        images for each class.
    split
        By default the first that is there of validation, test and train.

    Raises
    ------
    OptionError
        Where there is no such data set or split, or no column of images or of class labels.
    LabelError
        Where labels are hidden or out of range.
    """
    name, config = data, None
    if not Path(data).is_dir() and data.count(":") == 1:
        name, config = data.split(":")
    split = split or _first_split(name, config)
    rows = load_split(name, config, split)
    datasets = datasets_package()
    image = _column(rows, datasets.Image, "images", name)
    label = _column(rows, datasets.ClassLabel, "class labels", name)
    names = tuple(rows.features[label].names)
    check_range(rows[label], names, f"{name}:{split}")
    return ImageClasses(rows, image, label, names, data, split)


def read_picture(images: ImageClasses, row: int) -> Any:
    """One of the images, in RGB.

    Raises
    ------
    OptionError
        Where it is damaged or no image.
    """
    place = f"Row {row} of {images.name!r}:{images.split}"
    try:
        return as_image(images.rows[row][images.image], place)
    except (OSError, SyntaxError, ValueError) as error:
        if isinstance(error, CollabifyError):
            raise
        raise OptionError(
            f"{place} cannot be read as an image ({first_line(error)}). Remove or replace it."
        ) from error


def _first_split(name: str, config: str | None) -> str:
    datasets = datasets_package()
    try:
        with no_progress_bars():
            there = list(datasets.get_dataset_split_names(name, config))
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        raise OptionError(
            f"data={name!r} must be a data set's folder, a folder of images, or a data set that "
            f"the Hub could give ({first_line(error)}). Check the name."
        ) from error
    return next((split for split in _EVALUATED if split in there), there[0])


def _column(rows: Any, feature: Any, what: str, name: str) -> str:
    """The first column of a kind."""
    for column, found in rows.features.items():
        if isinstance(found, feature):
            return str(column)
    there = ", ".join(
        f"{column} ({type(found).__name__})" for column, found in rows.features.items()
    )
    raise OptionError(
        f"data={name!r} has no column of {what}. There are: {there}. Give a data set with images "
        "and class labels, or a folder with a folder of images for each class."
    )
