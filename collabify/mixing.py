"""How a converted model's heads mix what they share: which channels, base heads, value heads.

    effective[h] = (sum_n w[h, n]^2)^2 / sum_n w[h, n]^4

the number of channels or heads that a head reads, as if all that it reads counted alike: one for a
one-hot row, all for an even one. Weights of channels, cores and base heads count by the length of
what they weigh.

Axes: h head that mixes, n channel or head that is mixed.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from collabify.attention import SharedAttention
from collabify.decompose import BlockFactors, CPFactors, TuckerFactors
from collabify.errors import LayerError
from collabify.models import find_attention
from collabify.planning import check_finite
from collabify.results import finite

Kind = Literal["M", "P_l", "P_w"]
NAMES: dict[Kind, tuple[str, str]] = {
    "M": ("head", "shared channels"),
    "P_l": ("head", "base heads"),
    "P_w": ("value head", "heads"),
}


@dataclass(frozen=True)
class Mixing:
    """One mixing matrix of one layer.

    Parameters
    ----------
    index, name
        Which layer.
    kind
        ``M`` (channels, or cores, that heads mix), ``P_l`` (base heads) or ``P_w`` (heads whose
        probabilities value heads mix).
    of
        What is mixed, in words.
    weights
        A row for each head that mixes; of channels times their lengths.
    effective
        How many each row reads.
    """

    index: int
    name: str
    kind: Kind
    of: str
    weights: tuple[tuple[float, ...], ...]
    effective: tuple[float, ...]

    @property
    def mean_effective(self) -> float:
        """Mean over the rows."""
        return sum(self.effective) / len(self.effective)

    def words(self) -> str:
        """One line for a person."""
        reads, of = NAMES[self.kind][0], self.of
        least, most = min(self.effective), max(self.effective)
        return (
            f"layer {self.index}, {self.kind}: a {reads} reads {self.mean_effective:.1f} of "
            f"{len(self.weights[0])} {of} ({least:.1f} to {most:.1f})"
        )


@dataclass(frozen=True)
class MixingReport:
    """All mixing matrices of a converted model.

    Parameters
    ----------
    mixings
        In the order of the layers.
    layers
        How many layers were looked at.
    source, revision
        The model, and its commit where it came from the Hub.
    """

    mixings: tuple[Mixing, ...]
    layers: int
    source: str | None = None
    revision: str | None = None

    def of(self, kind: Kind) -> tuple[Mixing, ...]:
        """Those of one kind."""
        return tuple(mixing for mixing in self.mixings if mixing.kind == kind)

    def reading(self) -> str:
        """One sentence a kind."""
        said = []
        for kind, (reads, _) in NAMES.items():
            found = self.of(kind)
            if found:
                of = found[0].of
                mean = sum(mixing.mean_effective for mixing in found) / len(found)
                out_of = sum(len(mixing.weights[0]) for mixing in found) / len(found)
                said.append(f"{kind}: a {reads} reads {mean:.1f} of {out_of:.0f} {of}.")
        return " ".join(said) or "Every head has a core of its own; nothing is mixed."

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "source": self.source,
            "revision": self.revision,
            "layers": self.layers,
            "reading": self.reading(),
            "mixings": [asdict(mixing) for mixing in self.mixings],
        }

    def to_json(self) -> str:
        """:meth:`to_dict`, indented."""
        return json.dumps(finite(self.to_dict()), indent=2, allow_nan=False)


def is_converted(model: nn.Module) -> bool:
    """Whether any layer has a shared form."""
    return any(site.converted for site in find_attention(model))


def mixing_report(model: nn.Module, *, layers: Sequence[int] | None = None) -> MixingReport:
    """Look at the mixing matrices of a converted model.

    Parameters
    ----------
    model
        A converted model, with or without a head.
    layers
        Positions of the layers to look at, from 0; by default all that were converted.

    Raises
    ------
    LayerError
        Where a layer is not there or was not converted.
    NonFiniteError
        Where a weight is NaN or infinite.
    """
    check_finite(model)
    sites = find_attention(model)
    if layers is not None and not layers:
        raise LayerError(f"layers={layers!r} must name at least one layer. Leave it out for all.")
    for index in layers or ():
        if not 0 <= index < len(sites) or not sites[index].converted:
            there = ", ".join(str(site.index) for site in sites if site.converted)
            raise LayerError(
                f"layer={index} must be one that was converted ({there}). Change --layer."
            )
    chosen = [s for s in sites if s.converted and (layers is None or s.index in layers)]
    found = []
    for site in chosen:
        for kind, weights in _matrices(cast(SharedAttention, site.module)):
            rows = tuple(tuple(row) for row in weights.tolist())
            shared = cast(SharedAttention, site.module)
            is_core = kind == "M" and isinstance(shared.factors(), TuckerFactors)
            of = "shared cores" if is_core else NAMES[kind][1]
            found.append(Mixing(site.index, site.name, kind, of, rows, tuple(effective(weights))))
    return MixingReport(tuple(found), len(chosen))


def effective(weights: Float[Tensor, "h n"]) -> list[float]:
    """How many entries each row reads; 0 for a row of zeros."""
    squares = weights.double().square()
    fourth = squares.square().sum(1)
    counted: Tensor = squares.sum(1).square() / fourth.clamp(min=torch.finfo(torch.float64).tiny)
    return cast(list[float], counted.tolist())


def _matrices(module: SharedAttention) -> list[tuple[Kind, Tensor]]:
    """A layer's mixing matrices."""
    found: list[tuple[Kind, Tensor]] = []
    with torch.no_grad():
        factors = module.factors()
        if isinstance(factors, CPFactors):
            lengths = factors.query.norm(dim=1) * factors.key.norm(dim=1)
            found.append(("M", factors.head_mixing() * lengths))
        elif isinstance(factors, TuckerFactors) and factors.mixing is not None:
            lengths = factors.core.flatten(1).norm(dim=1)
            found.append(("M", factors.mixing * lengths))
        elif isinstance(factors, BlockFactors) and factors.mixing is not None:
            base = factors.mixing.shape[1]
            query, key = (w.view(base, -1, w.shape[-1]) for w in (factors.query, factors.key))
            grams = (query @ query.mT) * (key @ key.mT)  # their sum is |query[n]^T key[n]|^2
            found.append(("P_l", factors.mixing * grams.sum((1, 2)).clamp(min=0).sqrt()))
        if module.weights_mixing is not None:
            found.append(("P_w", module.weights_mixing))
    return [(kind, weights.detach().cpu().float()) for kind, weights in found]
