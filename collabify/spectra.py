"""Frozen records of spectra: how energy spreads over principal directions; JSON, no tensors."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from collabify.results import finite


def directions(energy: Sequence[float], level: float) -> int:
    """The smallest number of directions whose cumulative energy reaches ``level``.

    Parameters
    ----------
    energy
        Cumulative share of the energy, ascending, ending at 1.
    level
        Share of energy, in (0, 1].
    """
    return next((n for n, share in enumerate(energy, start=1) if share >= level), len(energy))


@dataclass(frozen=True)
class Spectrum:
    """How one matrix, or stack of matrices, spreads over its principal directions.

    Parameters
    ----------
    energy
        Cumulative share of the squared singular values, strongest first: what a truncation keeps.
    variance
        The same with the columns centred, as PCA does and as the paper plots; ``None`` where no PCA
        is meant.
    """

    energy: tuple[float, ...]
    variance: tuple[float, ...] | None = None

    def to_dict(self, levels: Sequence[float]) -> dict[str, Any]:
        """Curves, and directions at each level."""
        record: dict[str, Any] = {
            "out_of": len(self.energy),
            "directions": {str(level): directions(self.energy, level) for level in levels},
            "energy": [round(share, 6) for share in self.energy],
        }
        if self.variance is not None:
            record["variance_directions"] = {
                str(level): directions(self.variance, level) for level in levels
            }
            record["variance"] = [round(share, 6) for share in self.variance]
        return record


@dataclass(frozen=True)
class LayerSpectra:
    """The spectra of one layer.

    Parameters
    ----------
    index, name
        Which one.
    heads
        Of each head's own ``W_Q^h W_K^hT``, out of d.
    concatenated
        Of the product of the concatenations, ``W_Q W_K^T``, which is the sum over heads (the
        paper's Figure 1).
    query_side, key_side
        Of the unfoldings ``[P_1 | ... | P_H]``: what bounds a shared rank.
    triplets
        Of all heads' singular triplets pooled: what a head-SVD of a rank keeps, the floor of every
        method.
    """

    index: int
    name: str
    heads: tuple[Spectrum, ...]
    concatenated: Spectrum
    query_side: Spectrum
    key_side: Spectrum
    triplets: Spectrum

    def heads_alone(self, level: float) -> float:
        """Directions that a head needs for ``level``, mean over heads."""
        return sum(directions(head.energy, level) for head in self.heads) / len(self.heads)

    def together(self, level: float) -> int:
        """Directions that all heads need for ``level`` on the side that needs more."""
        return max(directions(side.energy, level) for side in (self.query_side, self.key_side))

    def to_dict(self, levels: Sequence[float]) -> dict[str, Any]:
        """All spectra as JSON."""
        return {
            "index": self.index,
            "name": self.name,
            "heads": [head.to_dict(levels) for head in self.heads],
            "concatenated": self.concatenated.to_dict(levels),
            "query_side": self.query_side.to_dict(levels),
            "key_side": self.key_side.to_dict(levels),
            "triplets": self.triplets.to_dict(levels),
        }


@dataclass(frozen=True)
class AnalysisReport:
    """How redundant a model's heads are.

    Parameters
    ----------
    layers
        Spectra of each layer asked for.
    levels
        Shares of energy at which directions are counted, in (0, 1].
    full_rank
        h * d, the largest ``dk``.
    suggested_dk
        The smallest multiple of 8 at which the pooled triplets of every layer's heads keep, on
        average over layers, the share ``suggestion_energy`` of the energy.
    suggestion_energy
        Share of energy behind the suggestion.
    calibrated
        The same spectra in the space of the calibration data; empty without.
    calibration
        What that data is; ``None``: the weights alone.
    source, revision
        The model, and its commit where it came from the Hub.
    """

    layers: tuple[LayerSpectra, ...]
    levels: tuple[float, ...]
    full_rank: int
    suggested_dk: int
    suggestion_energy: float
    calibrated: tuple[LayerSpectra, ...] = ()
    calibration: str | None = None
    source: str | None = None
    revision: str | None = None

    def reading(self, level: float | None = None) -> str:
        """One line for a person, at the first level unless told; calibrated where it can be."""
        level = self.levels[0] if level is None else level
        layers = self.calibrated or self.layers
        first = layers[0]
        alone = sum(layer.heads_alone(level) for layer in layers) / len(layers)
        together = sum(layer.together(level) for layer in layers) / len(layers)
        of_head, of_layer = len(first.heads[0].energy), len(first.query_side.energy)
        pays = together / of_layer < 0.9 * alone / of_head
        verdict = "sharing pays" if pays else "the heads have little in common"
        return (
            f"For {level:.0%} of the energy, "
            f"heads alone need {alone:.0f} of {of_head} directions each; "
            f"together {together:.0f} of {of_layer}: {verdict}."
        )

    def to_dict(self) -> dict[str, Any]:
        """All of it as JSON."""
        return {
            "source": self.source,
            "revision": self.revision,
            "levels": list(self.levels),
            "full_rank": self.full_rank,
            "suggested_dk": self.suggested_dk,
            "suggestion_energy": self.suggestion_energy,
            "reading": self.reading(),
            "calibration": self.calibration,
            "layers": [layer.to_dict(self.levels) for layer in self.layers],
            "calibrated": [layer.to_dict(self.levels) for layer in self.calibrated],
        }

    def to_json(self) -> str:
        """:meth:`to_dict`, indented."""
        return json.dumps(finite(self.to_dict()), indent=2, allow_nan=False)
