"""GLUE's metrics against computations of their own, and the bootstrap against scipy's."""

import math
import sys
import textwrap
from pathlib import Path
from typing import Any

import evaluate
import numpy as np
import pytest
from scipy import stats

from collabify import bootstrap, metrics
from collabify.bootstrap import METRICS, interval, resample
from collabify.data.glue import TASKS
from collabify.errors import CollabifyError

EXACT = 1e-12
FLOAT32 = 1e-6  # evaluate keeps numbers to predict in float32


def by_hand(task: str, p: list[Any], y: list[Any]) -> dict[str, float]:
    """The definitions, one example at a time."""
    n = len(p)
    if task == "stsb":
        return {"pearson": correlation(p, y), "spearmanr": correlation(ranks(p), ranks(y))}
    tp = sum(a == 1 and b == 1 for a, b in zip(p, y, strict=True))
    fp = sum(a == 1 and b == 0 for a, b in zip(p, y, strict=True))
    fn = sum(a == 0 and b == 1 for a, b in zip(p, y, strict=True))
    tn = n - tp - fp - fn
    if task == "cola":
        product = (tp + fp) * (tp + fn) * (tn + fp) * (tn + fn)
        return {"matthews_correlation": (tp * tn - fp * fn) / math.sqrt(product)}
    found = {"accuracy": sum(a == b for a, b in zip(p, y, strict=True)) / n}
    if task in ("mrpc", "qqp"):
        precision, recall = tp / (tp + fp), tp / (tp + fn)
        found["f1"] = 2 * precision * recall / (precision + recall)
    return found


def correlation(x: list[float], y: list[float]) -> float:
    mx, my = sum(x) / len(x), sum(y) / len(y)
    top = sum((a - mx) * (b - my) for a, b in zip(x, y, strict=True))
    return top / math.sqrt(sum((a - mx) ** 2 for a in x) * sum((b - my) ** 2 for b in y))


def ranks(x: list[float]) -> list[float]:
    """Mean rank of ties."""
    return [sum(b < a for b in x) + (sum(b == a for b in x) + 1) / 2 for a in x]


def draw(task: str, seed: int, n: int = 97) -> tuple[Any, Any]:
    rng = np.random.default_rng(seed)
    if task == "stsb":
        y = np.round(rng.uniform(0, 5, n) * 5) / 5  # with ties
        return (y + rng.normal(0, 1, n)).astype(np.float32), y.astype(np.float32)
    y = rng.integers(TASKS[task].num_labels, size=n)
    return np.where(rng.random(n) < 0.7, y, rng.integers(TASKS[task].num_labels, size=n)), y


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without the Hub, and with nothing of it in the cache."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(evaluate.config, "HF_MODULES_CACHE", str(tmp_path))
    monkeypatch.setattr(evaluate.loading, "init_dynamic_modules", lambda *_: str(tmp_path))


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("task", TASKS)
def test_our_metric_is_glues_definition(task: str, seed: int) -> None:
    p, y = draw(task, seed)
    metric, implementation = metrics.load_metric(task)
    assert implementation == metrics.OWN
    assert isinstance(metric, evaluate.Metric)
    found = metrics.compute(metric, p, y)
    expected = by_hand(task, p.tolist(), y.tolist())
    assert sorted(found) == sorted(TASKS[task].metrics)
    assert found == pytest.approx(expected, abs=FLOAT32 if task == "stsb" else EXACT)


@pytest.mark.parametrize("task", TASKS)
def test_the_bootstraps_metrics_are_glues_over_many_resamples(task: str) -> None:
    pairs = [draw(task, seed) for seed in range(3)]
    p, y = (np.stack(side) for side in zip(*pairs, strict=True))
    for name in TASKS[task].metrics:
        expected = [by_hand(task, a.tolist(), b.tolist())[name] for a, b in pairs]
        tolerance = FLOAT32 if task == "stsb" else EXACT
        assert METRICS[name](p, y).tolist() == pytest.approx(expected, abs=tolerance)


def test_undefined_metrics() -> None:
    ones, mixed = np.ones(4), np.array([0, 1, 1, 0])
    assert bootstrap.matthews(ones, mixed) == 0
    assert np.isnan(bootstrap.pearson(ones, mixed))
    assert np.isnan(bootstrap.spearman(ones, mixed))
    assert bootstrap.f1(np.zeros(4), np.zeros(4)) == 0
    found = metrics.compute(metrics.GlueMetric("stsb", keep_in_memory=True), ones, mixed)
    assert all(math.isnan(value) for value in found.values())
    found = metrics.compute(metrics.GlueMetric("mrpc", keep_in_memory=True), np.zeros(4), ones)
    assert found == {"accuracy": 0, "f1": 0}


def test_a_metric_that_refuses_says_so_in_one_line() -> None:
    with pytest.raises(CollabifyError, match=r"refuses 1 predictions .* Raise --limit"):
        metrics.compute(metrics.GlueMetric("stsb", keep_in_memory=True), np.ones(1), np.ones(1))


def test_the_hubs_metric_is_taken_where_it_can_be_had(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: dict[str, Any] = {}

    def load(*names: str, **options: Any) -> str:
        asked.update(options, names=names, offline=evaluate.config.HF_EVALUATE_OFFLINE)
        return "the Hub's"

    monkeypatch.setattr(evaluate, "load", load)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    assert metrics.load_metric("rte") == ("the Hub's", metrics.HUB)
    assert asked["names"] == ("glue", "rte")
    assert asked["download_config"].max_retries == 0
    assert not asked["offline"]
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    metrics.load_metric("rte")
    assert asked["offline"]
    assert not evaluate.config.HF_EVALUATE_OFFLINE


@pytest.mark.usefixtures("offline")
def test_a_cached_metric_of_the_hub_works_offline(tmp_path: Path) -> None:
    """What evaluate wrote when it was online is used, and found to be the same."""
    sys.path.insert(0, str(tmp_path.parent))
    name = "a" * 64
    folder = tmp_path / "metrics" / "evaluate-metric--glue" / name
    folder.mkdir(parents=True)
    (folder / "glue.py").write_text(
        textwrap.dedent(
            """
            import datasets, evaluate
            class Glue(evaluate.Metric):
                def _info(self):
                    value = datasets.Value("int64")
                    return evaluate.MetricInfo(description="", citation="", features=
                        datasets.Features({"predictions": value, "references": value}))
                def _compute(self, predictions, references):
                    return {"accuracy": 0.125}
            """
        )
    )
    try:
        metric, implementation = metrics.load_metric("rte")
    finally:
        sys.path.remove(str(tmp_path.parent))
    assert implementation == metrics.HUB
    assert metrics.compute(metric, [1], [1]) == {"accuracy": 0.125}


def test_intervals_are_those_of_scipy() -> None:
    p, y = draw("mrpc", 5, 400)
    (drawn,) = resample({"f1": bootstrap.f1}, [p], y, resamples=4000, seed=[1])
    theirs = stats.bootstrap(
        (p, y),
        lambda a, b, axis: bootstrap.f1(a, b),
        paired=True,
        vectorized=True,
        method="percentile",
        n_resamples=4000,
        rng=np.random.default_rng(2),
    ).confidence_interval
    # Quantiles of 4000 draws of deviation 0.02 vary by about 0.001.
    assert interval(drawn["f1"]) == pytest.approx((theirs.low, theirs.high), abs=0.005)


def test_models_are_resampled_together_and_seeds_matter() -> None:
    p, y = draw("rte", 3, 60)
    both = resample({"accuracy": bootstrap.accuracy}, [p, p], y, resamples=50, seed=[4])
    assert both[0]["accuracy"].tolist() == both[1]["accuracy"].tolist()
    other = resample({"accuracy": bootstrap.accuracy}, [p], y, resamples=50, seed=[5])
    assert other[0]["accuracy"].tolist() != both[0]["accuracy"].tolist()


def test_many_examples_are_resampled_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    p, y = draw("rte", 3, 60)
    whole = resample({"accuracy": bootstrap.accuracy}, [p], y, resamples=50, seed=[4])
    monkeypatch.setattr(bootstrap, "_AT_ONCE", 7 * 60)
    pieces = resample({"accuracy": bootstrap.accuracy}, [p], y, resamples=50, seed=[4])
    assert whole[0]["accuracy"].tolist() == pieces[0]["accuracy"].tolist()


def test_an_interval_covers_the_truth_as_often_as_it_says() -> None:
    rng = np.random.default_rng(0)
    hits = 0
    for trial in range(200):
        right = (rng.random(150) < 0.8).astype(int)
        (drawn,) = resample(
            {"accuracy": bootstrap.accuracy}, [right], np.ones(150), resamples=300, seed=[trial]
        )
        low, high = interval(drawn["accuracy"]) or (1.0, 0.0)
        hits += low <= 0.8 <= high
    assert 180 <= hits <= 199  # 95 % of 200, give or take three deviations


def test_an_interval_of_undefined_draws_is_none() -> None:
    assert interval(np.array([0.5] * 5 + [np.nan] * 95)) is None
    assert interval(np.full(10, 0.5)) == (0.5, 0.5)
