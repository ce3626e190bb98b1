"""How sure a score is: the bootstrap over examples, the same draws for every model.

index[r, n] uniform on the examples;   draw[r] = metric(predictions[index[r]], references[index[r]])
interval = percentiles 2.5 and 97.5 of the draws;   a difference is taken draw by draw (paired)

Axes: r resample, n example. The metrics are the same as those of ``evaluate``, over many resamples
at once.

References
----------
Efron & Tibshirani 1993, An Introduction to the Bootstrap.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import stats

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float64]
Metric = Callable[[Array, Array], Floats]  # predictions[r, n], references[r, n] -> [r]

LEVEL = 0.95
_AT_ONCE = 2_000_000  # numbers of one index array


def accuracy(predictions: Array, references: Array) -> Floats:
    """Share of predictions that are right."""
    return np.asarray((predictions == references).mean(-1))


def f1(predictions: Array, references: Array) -> Floats:
    """Harmonic mean of precision and recall for the label 1; 0 where there is none of it."""
    found, there = predictions == 1, references == 1
    all_of_them = found.sum(-1) + there.sum(-1)
    return np.asarray(2 * (found & there).sum(-1) / np.maximum(all_of_them, 1))


def pearson(predictions: Array, references: Array) -> Floats:
    """Linear correlation; NaN where one side is constant."""
    x, y = (
        side - side.mean(-1, keepdims=True, dtype=np.float64) for side in (predictions, references)
    )
    norms = np.sqrt((x * x).sum(-1) * (y * y).sum(-1))
    return np.asarray(
        np.divide((x * y).sum(-1), norms, out=np.full(norms.shape, np.nan), where=norms > 0)
    )


def matthews(predictions: Array, references: Array) -> Floats:
    """Matthews' correlation of two labels, which is Pearson's; 0 where one side is constant."""
    return np.asarray(np.nan_to_num(pearson(predictions, references), nan=0.0))


def spearman(predictions: Array, references: Array) -> Floats:
    """Correlation of ranks; NaN where one side is constant."""
    return pearson(stats.rankdata(predictions, axis=-1), stats.rankdata(references, axis=-1))


# By evaluate's names.
METRICS: Mapping[str, Metric] = {
    "accuracy": accuracy,
    "f1": f1,
    "matthews_correlation": matthews,
    "pearson": pearson,
    "spearmanr": spearman,
}


def resample(
    metrics: Mapping[str, Metric],
    predictions: Sequence[Array],
    references: Array,
    *,
    resamples: int,
    seed: Sequence[int],
) -> list[dict[str, Floats]]:
    """Draws of every metric, for several models on the same resampled examples.

    Parameters
    ----------
    metrics
        By name.
    predictions
        Of each model, one for each example.
    references
        The right answers.
    resamples
        How many.
    seed
        Of the draws; different for data that are independent of one another.

    Returns
    -------
    draws
        For each model ``[r]`` by the metric's name.
    """
    rng, count = np.random.default_rng(seed), len(references)
    sizes = _chunks(resamples, max(1, _AT_ONCE // count))
    parts: list[dict[str, list[Floats]]] = [{name: [] for name in metrics} for _ in predictions]
    for size in sizes:
        index = rng.integers(count, size=(size, count))
        truth = references[index]
        for part, answers in zip(parts, predictions, strict=True):
            drawn = answers[index]
            for name, metric in metrics.items():
                part[name].append(metric(drawn, truth))
    return [{name: np.concatenate(part[name]) for name in metrics} for part in parts]


def _chunks(total: int, size: int) -> list[int]:
    return [min(size, total - start) for start in range(0, total, size)]


def interval(draws: Floats) -> tuple[float, float] | None:
    """The middle 95 % of the draws; ``None`` where a twentieth or more of them are undefined."""
    defined = draws[np.isfinite(draws)]
    if len(defined) <= LEVEL * len(draws):
        return None
    low, high = np.quantile(defined, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)
