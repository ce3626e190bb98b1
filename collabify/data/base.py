"""What calibration data are, and what a model's config says about its inputs.

n samples = samples + held_out                    held_out = max(8, samples // 8), or n // 8
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from collabify.errors import OptionError

Batch = dict[str, Tensor]
Kind = Literal["text", "image"]

IMAGE_ENDINGS = (".bmp", ".jpeg", ".jpg", ".png", ".webp")
WAYS_OUT = {
    "text": "Give texts, or 'synthetic'.",
    "image": "Give a folder of images, or 'synthetic'.",
}
# Positions are counted from pad_token_id + 1 on.
_OFFSET_POSITIONS = frozenset({"camembert", "roberta", "xlm-roberta"})
# Position embeddings are interpolated to the image; all others take one size only.
_ANY_SIZE = frozenset({"dinov2"})
_USUAL_SIDE = 224


@dataclass(frozen=True, eq=False)
class CalibrationData:
    """Model inputs to measure activations on.

    Parameters
    ----------
    batches
        Model inputs on the CPU, padded, with ``attention_mask`` for text.
    held_out
        More of the same form, on which nothing is calibrated: drift is measured there.
    description
        For reports: ``256 texts of nyu-mll/glue:rte:train:sentence1``.
    synthetic
        Whether the inputs were drawn instead of read.
    samples
        Texts or images in ``batches``.
    tokens
        Real (not padded) positions in ``batches``.
    """

    batches: tuple[Batch, ...]
    held_out: tuple[Batch, ...]
    description: str
    synthetic: bool
    samples: int
    tokens: int


def model_kind(config: Any) -> Kind:
    """Whether the model of ``config`` reads texts or images.

    Raises
    ------
    OptionError
        Where it reads neither.
    """
    if all(hasattr(config, name) for name in ("patch_size", "image_size", "num_channels")):
        return "image"
    if hasattr(config, "vocab_size"):
        return "text"
    raise OptionError(
        f"model_type={getattr(config, 'model_type', None)!r} takes neither token ids nor images "
        "(its config has no vocab_size and no patch_size), so there is nothing to calibrate it on. "
        "Convert it with calibration off."
    )


def pinned(location: str, config: Any) -> dict[str, str]:
    """What makes a tokenizer or image processor that of the model's own commit on the Hub."""
    commit = getattr(config, "_commit_hash", None)
    return {"revision": commit} if commit and location == config._name_or_path else {}


def mismatch(name: str, found: str, config: Any) -> OptionError:
    """The error for texts where the model takes images, and the reverse."""
    kind = model_kind(config)
    return OptionError(
        f"{name} holds {found}, but model_type={config.model_type!r} takes {kind}s. "
        f"{WAYS_OUT[kind]}"
    )


def missing_package(package: str, purpose: str) -> OptionError:
    """The error for an optional package that is not installed."""
    return OptionError(
        f"{purpose} needs the package {package}, which is not there. "
        f"Run: pip install {package}. Or calibrate on 'synthetic'."
    )


def max_positions(config: Any) -> int | None:
    """The longest sequence the model takes, in tokens; ``None`` where nothing bounds it."""
    positions = getattr(config, "max_position_embeddings", None)
    if positions is not None and config.model_type in _OFFSET_POSITIONS:
        positions -= config.pad_token_id + 1
    return positions


def pair(size: int | Sequence[int]) -> tuple[int, int]:
    """Height and width of a size that may be one number."""
    return (size, size) if isinstance(size, int) else (size[0], size[1])


def fixed_size(config: Any) -> bool:
    """Whether the model takes images of ``config.image_size`` only."""
    return config.model_type not in _ANY_SIZE


def image_size(config: Any) -> tuple[int, int]:
    """Height and width of the images to calibrate on, in pixels.

    ``config.image_size`` where positions are fixed; where they are interpolated, 224 (or
    ``config.image_size`` if that is smaller) rounded to whole patches.
    """
    sides, patches = pair(config.image_size), pair(config.patch_size)
    if fixed_size(config):
        return sides
    height, width = (
        max(1, round(min(_USUAL_SIDE, side) / patch)) * patch
        for side, patch in zip(sides, patches, strict=True)
    )
    return height, width


def num_tokens(batch: Batch, config: Any) -> int:
    """Real positions in a batch: what the mask leaves, or patches with their special tokens."""
    if "pixel_values" not in batch:
        return int(batch["attention_mask"].sum())
    images, _, height, width = batch["pixel_values"].shape
    rows, columns = pair(config.patch_size)
    special = 2 if config.model_type == "deit" else 1
    return images * ((height // rows) * (width // columns) + special)


def num_samples(batches: Sequence[Batch]) -> int:
    """Rows in all batches together."""
    return sum(next(iter(batch.values())).shape[0] for batch in batches)


def wanted(samples: int) -> int:
    """How many samples to read in all, held-out ones included."""
    return samples + max(8, samples // 8)


def calibration_share(found: int, samples: int, name: str) -> int:
    """How many of ``found`` samples to calibrate on; the others are held out.

    Raises
    ------
    OptionError
        Where there are fewer than two.
    """
    if found < 2:
        raise OptionError(
            f"{name} has {found} usable {'sample' if found == 1 else 'samples'}; calibration "
            "needs at least 2, one to fit and one to hold out. Give more, or 'synthetic'."
        )
    if found >= wanted(samples):
        return samples
    return min(samples, found - max(1, found // 8))
