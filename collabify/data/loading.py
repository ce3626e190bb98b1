"""Names, files or Python objects in; calibration batches out.

    source -> samples + max(8, samples // 8) inputs -> batches, held_out

Axes: b batch.
"""

import warnings
from itertools import islice
from typing import Any

import torch

from collabify.data.base import (
    Batch,
    CalibrationData,
    calibration_share,
    image_size,
    model_kind,
    num_samples,
    num_tokens,
    wanted,
)
from collabify.data.images import encode_images, load_image_encoder
from collabify.data.ready import take_batches
from collabify.data.sources import Source, open_source
from collabify.data.synthetic import synthetic_images, usable_ids, zipf_ids
from collabify.data.text import encode_texts, load_tokenizer, sequence_length
from collabify.errors import CollabifyError, CollabifyWarning, OptionError

SYNTHETIC = "synthetic"


def load_calibration(
    source: object,
    config: Any,
    *,
    samples: int = 256,
    max_length: int = 128,
    batch_size: int = 16,
    seed: int = 0,
    processor: object = None,
) -> CalibrationData:
    """Model inputs to calibrate on, from whatever names or holds them.

    Parameters
    ----------
    source
        ``'synthetic'``; a text file (utf-8, one text a line); a folder of images; a data set,
        ``NAME[:CONFIG[:SPLIT[:COLUMN]]]`` with a Hub id or a local folder as its name; an iterable
        of texts, of images (PIL, or uint8 of shape [height, width, 3]) or of ready batches, which
        is read no further than needed; or a :class:`CalibrationData`, which is returned as it is.
        Files and data sets are shuffled, iterables are not. Blank and repeated texts are dropped,
        and so are the labels of ready batches.
    config
        The config of the transformers model that will read the batches.
    samples
        Texts or images to calibrate on, at least 2; some more are held out.
    max_length
        Tokens of a text at most; the model's own bound holds too. Ready batches stay as they are.
    batch_size
        Samples in a batch, but for ready ones.
    seed
        Of the order, and of synthetic input.
    processor
        Tokenizer or image processor, or where to load it; by default where ``config`` came from.

    Raises
    ------
    OptionError
        Where an option is out of bounds, or the source cannot be found or read, or is not what the
        model takes.
    CheckpointError
        Where the tokenizer or image processor cannot be loaded, or belongs to another model.

    Examples
    --------
    >>> import transformers
    >>> data = load_calibration("synthetic", transformers.BertConfig(hidden_size=96), samples=4)
    >>> data.batches[0]["input_ids"].shape, data.tokens
    (torch.Size([4, 128]), 512)
    """
    if isinstance(source, CalibrationData):
        return source
    for name, value, least in (("samples", samples, 2), ("batch_size", batch_size, 1)):
        if value < least:
            raise OptionError(
                f"{name}={value} must be at least {least} to calibrate on. "
                f"Raise --{name.replace('_', '-')}."
            )
    synthetic = isinstance(source, str) and source == SYNTHETIC
    if synthetic and model_kind(config) == "text":
        made = _synthetic_text(config, samples, max_length, batch_size, seed, processor)
    elif synthetic:
        made = _synthetic_images(config, samples, batch_size, seed)
    else:
        opened = open_source(source, config, seed)
        if opened.kind == "batch":
            made = (
                *take_batches(opened.items, opened.name, config, samples),
                f"ready batches of {opened.name}",
            )
        elif opened.kind == "text":
            made = _texts(opened, config, samples, max_length, batch_size, processor)
        else:
            made = _images(opened, config, samples, batch_size, processor)
    return _finished(*made, synthetic, config)


Made = tuple[tuple[Batch, ...], tuple[Batch, ...], str]


def _finished(
    batches: tuple[Batch, ...],
    held_out: tuple[Batch, ...],
    description: str,
    synthetic: bool,
    config: Any,
) -> CalibrationData:
    """Count, and warn where a covariance would be singular."""
    samples = num_samples(batches)
    tokens = sum(num_tokens(batch, config) for batch in batches)
    width = getattr(config, "hidden_size", 0)
    if tokens < width:
        warnings.warn(
            f"{tokens} calibration tokens are fewer than {width}, the width of the model: "
            "directions that none of them has are kept only as far as the floor of the covariance "
            f"weighs them. Raise --samples above {samples}, or give a larger source.",
            CollabifyWarning,
            stacklevel=3,
        )
    return CalibrationData(batches, held_out, description, synthetic, samples, tokens)


def _synthetic_text(
    config: Any, samples: int, max_length: int, batch_size: int, seed: int, processor: object
) -> Made:
    """Sequences of one length; special tokens where a tokenizer can be had."""
    tokenizer: Any = None
    if processor is not None or config._name_or_path:
        try:
            tokenizer = load_tokenizer(processor, config)
        except CollabifyError:
            if processor is not None and not isinstance(processor, str):
                raise  # an object that is no tokenizer; a folder may do without one
    length = sequence_length(max_length, tokenizer, config)
    ends = (
        {}
        if tokenizer is None
        else {"first": tokenizer.cls_token_id, "last": tokenizer.sep_token_id}
    )
    generator = torch.Generator().manual_seed(seed)
    ids = zipf_ids(
        usable_ids(config, tokenizer), (wanted(samples), length), generator=generator, **ends
    )
    batches, held_out = (
        tuple(
            {"input_ids": chunk, "attention_mask": torch.ones_like(chunk)}
            for chunk in torch.split(part, batch_size)
        )
        for part in (ids[:samples], ids[samples:])
    )
    note = "" if tokenizer is not None else " (no tokenizer: special ids among them)"
    description = f"{SYNTHETIC}: {samples} sequences of {length} Zipf-distributed token ids{note}"
    return batches, held_out, description


def _synthetic_images(config: Any, samples: int, batch_size: int, seed: int) -> Made:
    """1/f noise and dead leaves of the size that the model takes."""
    height, width = image_size(config)
    generator = torch.Generator().manual_seed(seed)

    def draw(count: int) -> tuple[Batch, ...]:
        sizes = [min(batch_size, count - start) for start in range(0, count, batch_size)]
        return tuple(
            {
                "pixel_values": synthetic_images(
                    (size, config.num_channels, height, width), generator=generator
                )
            }
            for size in sizes
        )

    description = f"{SYNTHETIC}: {samples} images of {height} x {width}, 1/f noise and dead leaves"
    return draw(samples), draw(wanted(samples) - samples), description


def _texts(
    source: Source,
    config: Any,
    samples: int,
    max_length: int,
    batch_size: int,
    processor: object,
) -> Made:
    tokenizer = load_tokenizer(processor, config)
    length = sequence_length(max_length, tokenizer, config)
    texts = list(islice(source.items, wanted(samples)))
    share = calibration_share(len(texts), samples, source.name)
    batches, held_out = (
        encode_texts(part, tokenizer, config, length=length, batch_size=batch_size)
        for part in (texts[:share], texts[share:])
    )
    return batches, held_out, f"{share} texts of {source.name}"


def _images(source: Source, config: Any, samples: int, batch_size: int, processor: object) -> Made:
    encode, note = load_image_encoder(processor, config)
    items = islice(source.items, wanted(samples))
    pixels = encode_images(items, encode, config, batch_size=batch_size)
    share = calibration_share(len(pixels), samples, source.name)
    batches, held_out = (
        tuple(
            {"pixel_values": torch.stack(part[start : start + batch_size])}
            for start in range(0, len(part), batch_size)
        )
        for part in (pixels[:share], pixels[share:])
    )
    return batches, held_out, f"{share} images of {source.name}{note}"
