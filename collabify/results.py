"""Frozen records of what was measured; JSON in, JSON out, no tensors.

``kept`` is parameters after over parameters before, in (0, 1] for a compression.
"""

import json
import math
from dataclasses import asdict, dataclass, field
from typing import Any


def finite(record: Any) -> Any:
    """The same record with ``None`` for NaN and infinity, which JSON does not have."""
    if isinstance(record, dict):
        return {key: finite(value) for key, value in record.items()}
    if isinstance(record, list | tuple):
        return [finite(value) for value in record]
    return None if isinstance(record, float) and not math.isfinite(record) else record


@dataclass(frozen=True)
class LayerReport:
    """One converted layer.

    Parameters
    ----------
    index, name
        Which one.
    rank
        Shared channels, D̃k.
    head_rank
        Cores that the heads mix, or ``None``.
    channels
        Shared channels that each head keeps; ``None``: all, or another method.
    base_heads, dynamic
        Base heads whose logits the heads mix, and whether by what depends on tokens.
    values, value_heads
        Channels of all values, and value heads that read mixed probabilities; ``None``: as before.
    relative_error
        Frobenius norm of the difference over that of the layer's stack of forms; ``None`` in a dry
        run, as are the rest.
    calibrated_error
        The same in the space of the calibration data, where the solver worked; ``None`` without.
    energy
        Squared Frobenius norm of that stack, in squared logits, where the solver worked.
    value_error
        Of what the layer's values and outputs make, relative: of its output about its mean, or with
        ``value_heads`` of the stack of their forms.
    sweeps, converged, seconds
        What the solver did; ``seconds`` of wall time.
    """

    index: int
    name: str
    rank: int
    head_rank: int | None = None
    channels: int | None = None
    base_heads: int | None = None
    values: int | None = None
    value_heads: int | None = None
    dynamic: bool = False
    relative_error: float | None = None
    calibrated_error: float | None = None
    energy: float | None = None
    value_error: float | None = None
    sweeps: int | None = None
    converged: bool | None = None
    seconds: float | None = None


@dataclass(frozen=True)
class ParameterCount:
    """Numbers held before and after."""

    before: int
    after: int

    @property
    def kept(self) -> float:
        """Parameters after over parameters before."""
        return self.after / self.before

    def to_dict(self) -> dict[str, Any]:
        """With ``kept``."""
        return {"before": self.before, "after": self.after, "kept": self.kept}


@dataclass(frozen=True)
class Drift:
    """How far a model moved, on data that it was not calibrated with.

    Parameters
    ----------
    hidden_cosine
        Cosine of the final hidden states to the original's, mean over real tokens.
    hidden_error
        Norm of their difference over that of the original's.
    attention
        Total variation between attention probabilities, in [0, 1], mean over layers, heads and real
        targets.
    """

    hidden_cosine: float
    hidden_error: float
    attention: float


@dataclass(frozen=True)
class ConversionReport:
    """What a conversion did, or with ``dry_run`` what it would do.

    Parameters
    ----------
    method, solver
        As asked for.
    layers
        The converted layers, in order.
    query_key, attention, model
        Parameters of the query-key parts, of queries, keys, values and outputs, and of the whole
        model. All layers count, converted or not; shared ones once.
    options
        Everything else that was asked for.
    calibration
        What the errors were measured on; ``None``: the weights alone.
    drift
        From the original to the converted model on held-out calibration data, after healing where
        there was some; or ``None``.
    healing
        What healing after the conversion brought, or ``None``.
    source, revision
        The model, and its commit where it came from the Hub.
    versions
        Of collabify and the packages that numbers depend on.
    """

    method: str
    solver: str
    layers: tuple[LayerReport, ...]
    query_key: ParameterCount
    attention: ParameterCount
    model: ParameterCount
    dry_run: bool
    options: dict[str, Any] = field(default_factory=dict)
    calibration: str | None = None
    drift: Drift | None = None
    healing: "HealingReport | None" = None
    source: str | None = None
    revision: str | None = None
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def mean_relative_error(self) -> float | None:
        """Mean over layers, ``None`` in a dry run."""
        errors = [layer.relative_error for layer in self.layers if layer.relative_error is not None]
        return sum(errors) / len(errors) if errors else None

    @property
    def error(self) -> float | None:
        """Relative error over all layers together, of logits, where the solver worked.

        What ``--error`` bounds; ``None`` in a dry run.
        """
        lost = whole = 0.0
        for layer in self.layers:
            calibrated = layer.calibrated_error
            seen = layer.relative_error if calibrated is None else calibrated
            if seen is None or layer.energy is None:
                return None
            lost, whole = lost + seen**2 * layer.energy, whole + layer.energy
        return math.sqrt(lost / whole) if whole else 0.0

    def to_dict(self) -> dict[str, Any]:
        """As ``collabify.json`` holds it."""
        return {
            "source": self.source,
            "revision": self.revision,
            "method": self.method,
            "solver": self.solver,
            "dry_run": self.dry_run,
            "options": self.options,
            "calibration": self.calibration,
            "drift": None if self.drift is None else asdict(self.drift),
            "healing": None if self.healing is None else self.healing.to_dict(),
            "layers": [asdict(layer) for layer in self.layers],
            "error": self.error,
            "mean_relative_error": self.mean_relative_error,
            "parameters": {
                "query_key": self.query_key.to_dict(),
                "attention": self.attention.to_dict(),
                "model": self.model.to_dict(),
            },
            "versions": self.versions,
        }

    def to_json(self) -> str:
        """:meth:`to_dict`, indented."""
        return json.dumps(finite(self.to_dict()), indent=2, allow_nan=False)


@dataclass(frozen=True)
class HealingReport:
    """What healing won back.

    Parameters
    ----------
    kept
        Whether the model is better than it was; if not, it is what it was.
    steps, best_step
        Steps taken, and after which the model was best on held-out samples; 0: never.
    loss_before, loss_after
        Squared distance of the hidden states to the original's over the square of those, all layers
        together, on held-out samples.
    drift_before, drift_after
        From the original to the model, on the same samples.
    curve
        Steps and the loss on held-out samples after them.
    went_back
        The steps after which the loss was above the start's, so that training went back to the best
        so far, and on from there at a quarter of the learning rate.
    parameters
        How many were trained.
    calibration
        What the models read.
    options
        Everything that was asked for.
    resumed_at
        The step where an interrupted run was taken up, or ``None``.
    seconds
        Wall time of this run.
    teacher, versions
        The original, and the versions of collabify and the packages that numbers depend on.
    """

    kept: bool
    steps: int
    best_step: int
    loss_before: float
    loss_after: float
    drift_before: Drift
    drift_after: Drift
    curve: tuple[tuple[int, float], ...]
    went_back: tuple[int, ...]
    parameters: int
    calibration: str
    options: dict[str, Any] = field(default_factory=dict)
    resumed_at: int | None = None
    seconds: float = 0.0
    teacher: str | None = None
    versions: dict[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """As ``collabify.json`` holds it under ``healing``."""
        return asdict(self) | {"curve": [list(point) for point in self.curve]}

    def to_json(self) -> str:
        """:meth:`to_dict`, indented."""
        return json.dumps(finite(self.to_dict()), indent=2, allow_nan=False)
