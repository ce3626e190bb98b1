"""Images to batches of pixel values.

    image -> RGB -> the model's image processor, or (pixels / 255 - mean) / deviation

Axes: b batch.
"""

import os
from collections.abc import Callable, Iterable, Sequence
from os import PathLike, fspath
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from collabify.data.base import (
    IMAGE_ENDINGS,
    fixed_size,
    image_size,
    missing_package,
    pair,
    pinned,
)
from collabify.errors import CheckpointError, OptionError, first_line
from collabify.hub import download

Encoder = Callable[[Sequence[Any]], Any]

_MEAN, _DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet
_SETTINGS = ("preprocessor_config.json", "processor_config.json")


def pillow() -> Any:
    """``PIL.Image``, imported when an image is there to be read.

    Raises
    ------
    OptionError
        Where it is not installed.
    """
    try:
        from PIL import Image
    except ImportError as error:
        raise missing_package("pillow", "Reading images") from error
    return Image


def find_images(folder: Path) -> list[Path]:
    """Every image file under a folder, sorted."""
    found = (Path(root) / name for root, _, names in os.walk(folder) for name in names)
    return sorted(path for path in found if path.suffix.lower() in IMAGE_ENDINGS)


def read_image(path: Path) -> Any:
    """An image file in RGB.

    Raises
    ------
    OptionError
        Where it is damaged or no image.
    """
    image = pillow()
    try:
        with image.open(path) as opened:
            return _rgb(opened)
    except (OSError, SyntaxError, ValueError, image.DecompressionBombError) as error:
        raise OptionError(
            f"{str(path)!r} cannot be read as an image ({first_line(error)}). Remove or replace it."
        ) from error


def as_image(value: object, place: str) -> Any:
    """A picture from Python in RGB: a PIL image, or an array of bytes [height, width, 3].

    Raises
    ------
    OptionError
        Where it is something else.
    """
    image = pillow()
    if isinstance(value, image.Image):
        return _rgb(value)
    array: Any = value.cpu().numpy() if isinstance(value, Tensor) else value
    shape, dtype = tuple(getattr(array, "shape", ())), str(getattr(array, "dtype", ""))
    if len(shape) != 3 or shape[2] != 3 or dtype != "uint8":
        raise OptionError(
            f"{place} is a {type(value).__name__} of shape {shape} and dtype {dtype or None}; "
            "it must be a PIL image, or uint8 of shape (height, width, 3). Convert it, "
            "or give ready batches ({'pixel_values': ...})."
        )
    return image.fromarray(array)


def _rgb(opened: Any) -> Any:
    """A palette may hold transparency, which only RGBA takes without a warning."""
    return (opened.convert("RGBA") if opened.mode == "P" else opened).convert("RGB")


def load_image_encoder(processor: object, config: Any) -> tuple[Encoder, str]:
    """``images -> pixel values`` as the model expects them, and a note for the report.

    Parameters
    ----------
    processor
        An image processor, a folder or Hub id, or ``None``: from where the model's config came.
    config
        The model's config.

    Raises
    ------
    OptionError
        Where nothing says which processor, or ``processor`` is none.
    CheckpointError
        Where it cannot be loaded.
    """
    from transformers import AutoImageProcessor, PreTrainedTokenizerBase

    if processor is not None and not isinstance(processor, (str, PathLike)):
        if isinstance(processor, PreTrainedTokenizerBase) or not callable(processor):
            raise OptionError(
                f"processor={type(processor).__name__} must be an image processor, for a model of "
                f"model_type={config.model_type!r} takes images. Pass its image processor."
            )
        return _processed_by(processor), ""
    location = fspath(processor or config._name_or_path)
    if not location:
        raise OptionError(
            f"Images need an image processor, and the config of model_type={config.model_type!r} "
            "does not say where it came from (no _name_or_path). Pass processor=; "
            "calibration also takes 'synthetic'."
        )
    folder = Path(location)
    if folder.is_dir() and not any((folder / name).is_file() for name in _SETTINGS):
        return _plain(location, config)
    pillow()
    at = pinned(location, config)
    auto: Any = AutoImageProcessor
    try:
        loaded = auto.from_pretrained(location, trust_remote_code=False, **at)
    except (OSError, ValueError, TypeError, KeyError, ImportError) as error:
        if at and not any(download(location, name, **at) for name in _SETTINGS):
            return _plain(location, config)
        raise CheckpointError(
            f"No image processor could be loaded from {location!r} ({first_line(error)}). "
            "Put its preprocessor_config.json there, or pass processor=."
        ) from error
    return _processed_by(loaded), ""


def _processed_by(processor: Any) -> Encoder:
    def encode(images: Sequence[Any]) -> Any:
        return processor(images=list(images), return_tensors="pt")["pixel_values"]

    return encode


def _plain(location: str, config: Any) -> tuple[Encoder, str]:
    """Resize and normalise as most models trained on ImageNet expect it."""
    height, width = image_size(config)
    if config.num_channels != 3:
        raise CheckpointError(
            f"{location!r} has no {_SETTINGS[0]}, and num_channels={config.num_channels} must be 3 "
            "to do without. Pass processor=."
        )
    mean, deviation = (torch.tensor(values)[:, None, None] for values in (_MEAN, _DEVIATION))

    def encode(images: Sequence[Any]) -> Any:
        resized = [image.resize((width, height), pillow().Resampling.BICUBIC) for image in images]
        pixels = [
            torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8) for image in resized
        ]
        stacked = torch.stack(pixels).view(-1, height, width, 3).permute(0, 3, 1, 2)
        return ((stacked / 255 - mean) / deviation).contiguous()

    return encode, (
        f" (no {_SETTINGS[0]}: resized to {height} x {width}, ImageNet mean and deviation)"
    )


def encode_images(
    images: Iterable[Any], encode: Encoder, config: Any, *, batch_size: int
) -> list[Float[Tensor, "channels height width"]]:
    """The pixel values of every image; only ``batch_size`` images are in memory at a time.

    Raises
    ------
    OptionError
        Where the processor refuses an image.
    CheckpointError
        Where it makes something that the model does not take.
    """
    pixels: list[Tensor] = []
    chunk: list[Any] = []
    for image in images:
        chunk.append(image)
        if len(chunk) == batch_size:
            pixels.extend(_encode(chunk, encode, config))
            chunk = []
    return pixels + (_encode(chunk, encode, config) if chunk else [])


def _encode(chunk: Sequence[Any], encode: Encoder, config: Any) -> list[Tensor]:
    try:
        pixels = torch.as_tensor(encode(chunk)).to("cpu", torch.float32)
    except (ValueError, RuntimeError, TypeError, KeyError) as error:
        raise OptionError(
            f"The image processor cannot make one batch of {len(chunk)} images for "
            f"{config.model_type!r} ({first_line(error)}). Give images it takes, or another "
            "processor=."
        ) from error
    check_pixels(pixels, config)
    return list(pixels)


def check_pixels(pixels: Tensor, config: Any) -> None:
    """Refuse pixel values that the model would not take.

    Raises
    ------
    CheckpointError
        Naming the shape and the shape that the model takes.
    """
    sides = pair(config.image_size) if fixed_size(config) else pixels.shape[-2:]
    if pixels.ndim != 4 or tuple(pixels.shape[1:]) != (config.num_channels, *sides):
        raise CheckpointError(
            f"pixel_values of shape {tuple(pixels.shape)} must be [images, {config.num_channels}, "
            f"{sides[0]}, {sides[1]}] for {config.model_type!r}. Pass the model's own image "
            "processor as processor=."
        )
