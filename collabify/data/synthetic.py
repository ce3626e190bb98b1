r"""Input for when no data are at hand: Zipf's law for token ids, 1/f noise and leaves for images.

    p(id of rank n) = (1/n) / sum_m (1/m)              |FFT(image)|(f) ~ 1/f^alpha

Both have what matters to a covariance: few directions that are used all the time, many that are
used rarely. Measured without training, cosine of sentence embeddings (all-MiniLM-L6-v2, RTE) and of
token features (DINOv2-small, 8 photographs at two scales) of the converted model to the original:

    MiniLM, 256 sequences of 128, D̃k =           192     128
    weights only                               0.938
    uniform ids                                0.982   0.968
    1/id                                       0.982   0.957
    1/id without [unused]                      0.983   0.961
    1/id with the alphabet last (as here)      0.987   0.968

    DINOv2, 1/f noise, 64 images, alpha, colour, D̃k = 192
    weights only                               0.962
    white noise                                0.917
    1.0, none (grey) | 0.3 | 1 | 2             0.944 | 0.963 | 0.970 | 0.970
    1.2, 0.3 | 1 (as here) | 2 | independent   0.968 | 0.973 | 0.974 | 0.973
    1.4, 1 | 2, and 1.6, 1                     0.973 | 0.974, and 0.974
    1.2, 1: another seed | 1.4 times the contrast | contrast e^(0.4 z) | mean 0.5 z
                                               0.972 | 0.974 | 0.976 | 0.973

Noise has neither edges nor empty surfaces, and fails where photographs do (a retina: 0.78).
So every other image is of dead leaves (Lee, Mumford & Huang 2001): on fifteen whole photographs,
D̃k = 192, 240 to 256 images: weights only 0.962, 1/f noise 0.961, dead leaves 0.966, both 0.980. On
crops that were held out (``benchmarks/quality/domains.json``): weights only 0.965, both 0.976.

Axes: b batch, t position.
"""

from itertools import takewhile
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

ALPHA = 1.2
COLOUR = 1.0
_ALPHABET = 100


def zipf_ids(
    ids: Int[Tensor, " rank"],
    shape: tuple[int, int],
    *,
    generator: torch.Generator,
    first: int | None = None,
    last: int | None = None,
) -> Int[Tensor, "b t"]:
    """Token ids drawn by Zipf's law.

    Parameters
    ----------
    ids
        The ids to draw from, the most frequent first.
    shape
        Sequences, and tokens in each.
    generator
        Source of chance.
    first, last
        Ids that every sequence starts and ends with, where the model has such.
    """
    cumulative = (1 / torch.arange(1, len(ids) + 1, dtype=torch.float64)).cumsum(0)
    chance = torch.rand(shape, generator=generator, dtype=torch.float64) * cumulative[-1]
    ranks = torch.searchsorted(cumulative, chance, right=True).clamp(max=len(ids) - 1)
    drawn = ids[ranks]
    if first is not None:
        drawn[:, 0] = first
    if last is not None:
        drawn[:, -1] = last
    return drawn


def usable_ids(config: Any, tokenizer: Any = None) -> Int[Tensor, " rank"]:
    """The ids that a text could hold, the most frequent first as far as their order tells.

    Vocabularies list frequent tokens first, but for what ``tokenizer`` lets one see: special ids
    and BERT's ``[unused7]`` are left out, and an alphabet before the words (BERT's 997 single
    characters, the 256 bytes of a BPE) goes to the end. Without it only the padding id is left out.

    Parameters
    ----------
    config
        The model's config.
    tokenizer
        Its tokenizer, or ``None``.
    """
    if tokenizer is None:
        padding = getattr(config, "pad_token_id", None)
        return torch.tensor([index for index in range(config.vocab_size) if index != padding])
    special = set(tokenizer.all_special_ids)
    size = min(config.vocab_size, len(tokenizer))
    names = [str(name) for name in tokenizer.convert_ids_to_tokens(range(size))]
    usable = [
        index
        for index, name in enumerate(names)
        if index not in special and not name.startswith("[unused")
    ]
    alphabet = list(takewhile(lambda index: _is_character(names[index]), usable))
    if len(alphabet) < _ALPHABET:  # '.' and ',' are frequent; atoms are words of a SMILES model
        return torch.tensor(usable)
    return torch.tensor(usable[len(alphabet) :] + alphabet)


def _is_character(name: str) -> bool:
    """Whether a token is one character, but for its tokenizer's mark of where words go on."""
    return len(name.removeprefix("##").lstrip("Ġ▁")) <= 1


def pink_noise(
    shape: tuple[int, int, int, int],
    *,
    generator: torch.Generator,
    alpha: float = ALPHA,
    colour: float = COLOUR,
) -> Float[Tensor, "b channels height width"]:
    """Images with random phases and an amplitude that falls as ``1/f^alpha``.

    A channel is a luminance that all share plus ``colour`` times a field of its own, so that two
    channels correlate by ``1/(1 + colour^2)``. Every channel of every image has mean zero and
    standard deviation one, the units after a processor's normalisation.

    Parameters
    ----------
    shape
        Images, channels, height, width.
    generator
        Source of chance.
    alpha
        Fall of the amplitude.
    colour
        Share of each channel's own field.
    """
    images, channels, height, width = shape
    down, across = torch.fft.fftfreq(height)[:, None], torch.fft.rfftfreq(width)
    amplitude = (down.square() + across.square()).sqrt().pow(-alpha)
    amplitude[0, 0] = 0
    white = torch.randn(images, 1 + channels, height, width, generator=generator)
    spectrum = torch.fft.rfft2(white)  # its phases are those of a real image
    fields = torch.fft.irfft2(torch.sgn(spectrum) * amplitude, s=(height, width))
    fields = _standardised(fields)
    return _standardised(fields[:, :1] + colour * fields[:, 1:])


def dead_leaves(
    shape: tuple[int, int, int, int],
    *,
    generator: torch.Generator,
    leaves: int = 120,
    colour: float = COLOUR,
) -> Float[Tensor, "b channels height width"]:
    """Images of discs of one colour each that cover one another, radii falling as ``r^-3``.

    They have what noise has not: edges, and surfaces with nothing on them. Means, standard
    deviations and the correlation of channels' colours as for :func:`pink_noise`.

    Parameters
    ----------
    shape
        Images, channels, height, width.
    generator
        Source of chance.
    leaves
        Discs in an image; radii lie between 1/56 and 1/2 of the smaller side.
    colour
        Share of each channel's own part of a colour.
    """
    count, channels, height, width = shape
    smallest, largest = max(min(height, width) / 56, 0.5), max(min(height, width) / 2, 1.0)
    chance = torch.rand(count, leaves, 3, generator=generator)
    far, near = smallest**-2, largest**-2
    radii = (far - chance[..., 0] * (far - near)).rsqrt()
    centres = chance[..., 1:] * torch.tensor([height, width])
    own = torch.randn(count, leaves + 1, 1 + channels, generator=generator)
    colours = own[..., :1] + colour * own[..., 1:]
    images = colours[:, 0, :, None, None].expand(shape).clone()
    for image, discs, centre, paint in zip(images, radii, centres, colours[:, 1:], strict=True):
        for radius, (y, x), tint in zip(discs.tolist(), centre.tolist(), paint, strict=True):
            rows = torch.arange(max(0, int(y - radius)), min(height, int(y + radius) + 2))
            columns = torch.arange(max(0, int(x - radius)), min(width, int(x + radius) + 2))
            inside = (rows - y).square()[:, None] + (columns - x).square() < radius**2
            part = image[:, rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
            part[:, inside] = tint[:, None]
    return _standardised(images)


def synthetic_images(
    shape: tuple[int, int, int, int], *, generator: torch.Generator
) -> Float[Tensor, "b channels height width"]:
    """1/f noise and dead leaves by turns.

    Parameters
    ----------
    shape
        Images, channels, height, width.
    generator
        Source of chance.
    """
    count, *rest = shape
    images = torch.empty(shape)
    channels, height, width = rest
    noise = (count + 1) // 2
    images[0::2] = pink_noise((noise, channels, height, width), generator=generator)
    images[1::2] = dead_leaves((count - noise, channels, height, width), generator=generator)
    return images


def _standardised(
    images: Float[Tensor, "b channels height width"],
) -> Float[Tensor, "b channels height width"]:
    """Mean zero and standard deviation one, per image and channel."""
    centred = images - images.mean((-2, -1), keepdim=True)
    spread = centred.square().mean((-2, -1), keepdim=True).sqrt()
    return centred / spread.clamp(min=torch.finfo(images.dtype).tiny)  # zero where all is one leaf
