"""A model's score, the baseline's, and how sure the difference is.

value, interval | baseline | value - baseline, paired interval
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from collabify.bootstrap import Array, Floats, Metric, interval, resample
from collabify.errors import OptionError
from collabify.scores import Score


@dataclass(frozen=True, eq=False)
class Measured:
    """A score with the resampled values behind its intervals.

    Parameters
    ----------
    score
        What goes into a report.
    draws
        The model's value in each resample.
    baseline_draws
        The baseline's in the same resamples, or ``None``.
    """

    score: Score
    draws: Floats
    baseline_draws: Floats | None = None


def measure(
    metrics: Mapping[str, Metric],
    values: Mapping[str, float],
    predictions: Array,
    references: Array,
    *,
    baseline_values: Mapping[str, float] | None = None,
    baseline_predictions: Array | None = None,
    resamples: int,
    seed: Sequence[int],
) -> list[Measured]:
    """Every metric with its intervals.

    Parameters
    ----------
    metrics
        By name, in order.
    values, baseline_values
        Of the metrics on all examples.
    predictions, baseline_predictions
        One for each example.
    references
        The right answers.
    resamples
        Of the bootstrap, at least 2.
    seed
        Of the bootstrap.
    """
    both = [predictions] + ([] if baseline_predictions is None else [baseline_predictions])
    draws = resample(metrics, both, references, resamples=resamples, seed=seed)
    return [
        joined(
            name,
            values[name],
            draws[0][name],
            None if baseline_values is None else baseline_values[name],
            draws[1][name] if len(draws) > 1 else None,
        )
        for name in metrics
    ]


def joined(
    name: str, value: float, draws: Floats, baseline: float | None, baseline_draws: Floats | None
) -> Measured:
    """A score from values and draws of a model and, where there is one, of the baseline."""
    score = Score(name, value, interval(draws))
    if baseline is not None and baseline_draws is not None:
        paired = interval(draws - baseline_draws)
        score = Score(name, value, score.interval, baseline, value - baseline, paired)
    return Measured(score, draws, baseline_draws)


def mean_of(name: str, parts: Sequence[Measured]) -> Measured:
    """The mean of scores on data that are independent of one another, or drawn together."""
    baselines = [part.score.baseline for part in parts if part.score.baseline is not None]
    drawn = [part.baseline_draws for part in parts if part.baseline_draws is not None]
    return joined(
        name,
        sum(part.score.value for part in parts) / len(parts),
        np.mean([part.draws for part in parts], axis=0),
        sum(baselines) / len(parts) if baselines else None,
        np.mean(drawn, axis=0) if drawn else None,
    )


def check_draws(resamples: int, seed: int) -> None:
    """Refuse too few resamples, and what is no seed.

    Raises
    ------
    OptionError
    """
    if resamples < 2:
        raise OptionError(
            f"resamples={resamples} must be at least 2 for an interval. Raise --resamples."
        )
    if not 0 <= seed < 2**32:
        raise OptionError(f"seed={seed} must be in [0, 2^32). Change --seed.")
