"""Projections of heads that depend on the tokens, drawn at random and small, for training.

    P_l + x2l x[t] + m2l x[s],   P_w + x2w x[t] + m2w x[s]

Variance 0.01 over heads that are mixed and inputs, as in the authors' released code.

Axes: t target, s source, h head, n base head, v value head, i input.
Reference: Shazeer et al. 2020, section 8 (dynamic projections).
"""

from dataclasses import replace
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from collabify.config import LayerConfig
from collabify.decompose import Factors, ValueFactors

VARIANCE = 1e-2
SEEDS = 1_000_003  # apart, so that no two of them share what they draw

T = TypeVar("T", Factors, ValueFactors)


def drawn(factors: T, layer: LayerConfig, seed: int) -> T:
    """The factors with what depends on tokens, where the layer is to have it."""
    if not layer.dynamic:
        return factors
    whole: Any = factors
    mixing: Tensor | None = whole.mixing
    if mixing is None:
        return factors
    is_value = isinstance(factors, ValueFactors)
    width = (whole.value if is_value else whole.query).shape[1]
    generator = torch.Generator().manual_seed(seed * SEEDS + 2 * layer.index + is_value)
    spread = (VARIANCE / (mixing.shape[1] * width)) ** 0.5
    terms = (
        (spread * torch.randn(*mixing.shape, width, generator=generator)).to(mixing)
        for _ in range(2)
    )
    names = ("x2w", "m2w") if is_value else ("x2l", "m2l")
    return cast(T, replace(whole, **dict(zip(names, terms, strict=True))))
