"""GLUE's metrics through the package ``evaluate``, with a network and without one.

cola  Matthews' correlation       mrpc, qqp  accuracy, F1 of label 1       stsb  Pearson, Spearman
all others  accuracy

``evaluate`` keeps its metrics on the Hub. Where the Hub cannot be reached, :class:`GlueMetric` has
the same names, inputs and numbers.
"""

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import datasets  # type: ignore[import-untyped,unused-ignore]
import evaluate  # type: ignore[import-untyped,unused-ignore]
from evaluate.utils.file_utils import (  # type: ignore[import-untyped,unused-ignore]
    DownloadConfig,
)
from scipy import stats
from sklearn import metrics

from collabify.errors import CollabifyError, first_line

HUB = "evaluate.load('glue')"
OWN = "collabify's own"
_TRUE = frozenset({"1", "ON", "TRUE", "YES"})


class GlueMetric(evaluate.Metric):  # type: ignore[misc]
    """GLUE's metric of the task that is its ``config_name``; downloads nothing."""

    def _info(self) -> Any:
        kind = "float32" if self.config_name == "stsb" else "int64"
        return evaluate.MetricInfo(
            description="The metrics of the GLUE benchmark.",
            citation="Wang et al. 2018, GLUE",
            inputs_description="predictions and references, in one order",
            features=datasets.Features(
                {"predictions": datasets.Value(kind), "references": datasets.Value(kind)}
            ),
            format="numpy",
        )

    def _compute(self, predictions: Any, references: Any) -> dict[str, float]:
        if self.config_name == "cola":
            return {
                "matthews_correlation": float(metrics.matthews_corrcoef(references, predictions))
            }
        if self.config_name == "stsb":
            return {
                "pearson": float(stats.pearsonr(predictions, references).statistic),
                "spearmanr": float(stats.spearmanr(predictions, references).statistic),
            }
        found = {"accuracy": float(metrics.accuracy_score(references, predictions))}
        if self.config_name in ("mrpc", "qqp"):
            found["f1"] = float(metrics.f1_score(references, predictions, zero_division=0))
        return found


def load_metric(task: str) -> tuple[Any, str]:
    """The metric of a task, and whose implementation it is.

    Parameters
    ----------
    task
        A name of GLUE: ``cola``, ``sst2``, ...

    Returns
    -------
    metric
        An ``evaluate.Metric``.
    implementation
        :data:`HUB`, or :data:`OWN` where the Hub cannot be reached (or ``HF_HUB_OFFLINE`` forbids
        it) and none of its files are in the cache.
    """
    try:
        with _no_waiting():
            once = DownloadConfig(max_retries=0)
            loaded = evaluate.load(
                "glue", task, module_type="metric", keep_in_memory=True, download_config=once
            )
    except (OSError, ValueError, ImportError, RuntimeError):
        return GlueMetric(config_name=task, keep_in_memory=True), OWN
    return loaded, HUB


@contextmanager
def _no_waiting() -> Iterator[None]:
    """The while with ``HF_HUB_OFFLINE`` meaning to ``evaluate`` what it means to all others."""
    before = evaluate.config.HF_EVALUATE_OFFLINE
    offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in _TRUE
    evaluate.config.HF_EVALUATE_OFFLINE = before or offline
    try:
        yield
    finally:
        evaluate.config.HF_EVALUATE_OFFLINE = before


def compute(metric: Any, predictions: Any, references: Any) -> dict[str, float]:
    """All numbers of a metric; NaN where constant predictions leave one undefined.

    Raises
    ------
    CollabifyError
        Where the metric refuses its inputs.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of undefined numbers, which are NaN or 0
        try:
            found = metric.compute(predictions=predictions, references=references)
        except ValueError as error:
            raise CollabifyError(
                f"The metric {metric.name!r} refuses {len(predictions)} predictions "
                f"({first_line(error)}). Raise --limit."
            ) from error
    return {name: float(value) for name, value in found.items()}
