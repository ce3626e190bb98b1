"""Projections of heads that depend on the tokens, drawn at random and small, for training.

    P_l + x2l x[t] + m2l x[s],   P_w + x2w x[t] + m2w x[s]

Variance 0.01 over heads that are mixed and inputs, as in the authors' released code.

Axes: t target, s source, h head, n base head, v value head, i input.
Reference: Shazeer et al. 2020, section 8 (dynamic projections).
"""

from dataclasses import replace
from typing import Any, TypeVar, cast

import torch

from collabify.config import LayerConfig
from collabify.decompose import BlockFactors, Factors, ValueFactors

VARIANCE = 1e-2

T = TypeVar("T", Factors, ValueFactors)


def drawn(factors: T, layer: LayerConfig, seed: int) -> T:
    """The factors with what depends on tokens, where the layer is to have it."""
    mixing = cast(Any, factors).mixing if layer.dynamic else None
    if mixing is None:
        return factors
    is_value = isinstance(factors, ValueFactors)
    source = factors.value if isinstance(factors, ValueFactors) else factors.query
    generator = torch.Generator().manual_seed(seed + 2 * layer.index + is_value)
    shape = (*mixing.shape, source.shape[1])
    spread = (VARIANCE / (shape[1] * shape[2])) ** 0.5
    terms = [
        (spread * torch.randn(shape, generator=generator, dtype=torch.float64)).to(mixing)
        for _ in range(2)
    ]
    names = ("x2w", "m2w") if is_value else ("x2l", "m2l")
    added: dict[str, Any] = dict(zip(names, terms, strict=True))
    return replace(factors, **added)  # type: ignore[type-var]
