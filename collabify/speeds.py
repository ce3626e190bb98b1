"""Frozen records of what a forward pass costs; JSON, no tensors.

Latency is of whole models, in seconds. Over a baseline it is the median, over rounds of interleaved
runs, of the model's seconds divided by the baseline's in the same round: 1 is as fast, 2 half as
fast.
"""

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from collabify.results import finite
from collabify.scores import Interval


@dataclass(frozen=True)
class Machine:
    """Where time was taken.

    Parameters
    ----------
    processor
        The CPU's name.
    device
        The accelerator's name; ``cpu`` without one.
    threads
        Of torch on the CPU.
    """

    processor: str
    device: str
    threads: int


@dataclass(frozen=True)
class Size:
    """What a model holds.

    Parameters
    ----------
    query_key, attention, model
        Parameters of the query-key parts, of queries, keys, values and outputs, and of the whole
        model.
    bytes
        Of all parameters and buffers, in memory.
    """

    query_key: int
    attention: int
    model: int
    bytes: int


@dataclass(frozen=True)
class Latency:
    """Forward passes over batches of one shape.

    Parameters
    ----------
    batch_size
        Texts or images.
    length
        Tokens of a text; ``None``: images.
    seconds, quartiles
        Of a pass: the median, and the quartiles.
    baseline_seconds, baseline_quartiles
        The same of the baseline, or ``None`` without one.
    over_baseline, over_quartiles
        Seconds divided by the baseline's of the same round: median and quartiles.
    peak_bytes, baseline_peak_bytes
        What the accelerator's memory held at most in a pass, beyond weights and inputs; ``None``
        where that is not counted, as on a CPU.
    """

    batch_size: int
    length: int | None
    seconds: float
    quartiles: Interval
    baseline_seconds: float | None = None
    baseline_quartiles: Interval | None = None
    over_baseline: float | None = None
    over_quartiles: Interval | None = None
    peak_bytes: int | None = None
    baseline_peak_bytes: int | None = None


@dataclass(frozen=True)
class BenchReport:
    """What a model costs to hold and to run.

    Parameters
    ----------
    latencies
        One for each shape, in the order that was asked for.
    size, baseline_size
        Of the model, and of the baseline or ``None``.
    machine
        Where time was taken.
    dtype, attention
        Of the weights, and the implementation in both models: ``sdpa``, ``eager``.
    inputs
        What the models read, in words.
    model, baseline
        The models.
    original
        Whether the baseline is what the model's record says it was made from, with its attention as
        trained.
    options
        Everything that was asked for.
    seconds
        Of wall time, all together.
    versions
        Of collabify and the packages that numbers depend on.
    """

    latencies: tuple[Latency, ...]
    size: Size
    baseline_size: Size | None
    machine: Machine
    dtype: str
    attention: str
    inputs: str
    model: str | None = None
    baseline: str | None = None
    original: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    versions: dict[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """All of it."""
        return asdict(self)

    def to_json(self) -> str:
        """:meth:`to_dict`, indented."""
        return json.dumps(finite(self.to_dict()), indent=2, allow_nan=False)
