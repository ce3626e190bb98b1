"""Drift of a model from its original, on models that know the answers."""

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from glue_data import (
    KnowingForSequenceClassification,
)
from tiny_models import TINY
from transformers import (
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    BertModel,
)

import collabify
from collabify.errors import LabelError
from collabify.evaluation import evaluate_drift, evaluate_glue
from collabify.evaluation.drift import compare_logits

Knowing = KnowingForSequenceClassification
ENTAILMENT = ("entailment", "not_entailment")
# Labels of 13 rows with a majority, so that a swapped order cannot score half.
LABELS = [0, 1, 1, 0, 1, 1, 1, 0, 1, 1, 1, 0, 1]


pytestmark = pytest.mark.usefixtures("offline")


def test_drift_of_a_model_from_itself_is_nothing(tmp_path: Path) -> None:
    model = TINY["bert"].build(headed=True)
    report = evaluate_drift(model, model, "synthetic", samples=16, max_length=7)
    assert report.hidden_cosine == pytest.approx(1)
    assert (report.agreement, report.attention) == (1.0, 0.0)
    assert report.divergence == pytest.approx(0, abs=1e-12)
    assert report.predictions == report.samples == 24
    assert json.loads(report.to_json())["agreement"] == 1


def test_drift_of_a_converted_model_shows_in_every_measure() -> None:
    original = TINY["bert"].build(headed=True)
    converted = TINY["bert"].build(headed=True)
    collabify.convert(converted, dk=6, calibration="none", iterations=2)
    seen: list[str] = []
    report = evaluate_drift(
        converted,
        original,
        "synthetic",
        samples=64,
        max_length=7,
        progress=lambda stage, *_: seen.append(stage),
    )
    assert report.hidden_cosine < 0.99
    assert 0 < report.attention < 1
    assert (report.divergence or 0) > 0
    assert seen == ["hidden states"] * 5 + ["predictions"] * 5


def test_logits_are_compared_as_defined() -> None:
    p = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.2, 0.7]], dtype=torch.float64)
    q = torch.tensor([[0.2, 0.5, 0.3], [0.2, 0.2, 0.6]], dtype=torch.float64)
    same, divergence = compare_logits(p.log() + 4, q.log() - 1)
    expected = sum(
        a * math.log(a / b)
        for row, other in zip(p.tolist(), q.tolist(), strict=True)
        for a, b in zip(row, other, strict=True)
    )
    assert same == 1
    assert divergence == pytest.approx(expected)  # not the same the other way round


def test_drift_counts_real_tokens_of_token_heads() -> None:
    torch.manual_seed(2)
    config = TINY["bert"].config()
    models = [BertForMaskedLM(config).eval() for _ in range(2)]
    batches = [
        {
            "input_ids": torch.full((2, 5), 7),
            "attention_mask": torch.tensor([[1] * 5, [1] * 2 + [0] * 3]),
        }
        for _ in range(2)
    ]
    report = evaluate_drift(*models, batches, samples=2)
    assert report.predictions == 14
    assert (report.divergence or 0) > 0


def test_drift_without_heads_has_no_predictions() -> None:
    model = TINY["bert"].build()
    report = evaluate_drift(model, model, "synthetic", samples=4, max_length=7)
    assert (report.agreement, report.divergence, report.predictions) == (None, None, 0)


def test_drift_goes_by_the_names_of_labels() -> None:
    model, original = (TINY["bert"].build(headed=True) for _ in range(2))
    original.config.id2label = {0: "no", 1: "yes"}
    model.config.id2label = {0: "YES", 1: "NO"}
    with torch.no_grad():
        for parameter in model.classifier.parameters():
            parameter.copy_(parameter.flip(0))
    report = evaluate_drift(model, original, "synthetic", samples=8, max_length=7)
    assert report.agreement == 1
    model.config.id2label = {0: "good", 1: "bad"}
    with pytest.raises(LabelError, match="must be those of the baseline"):
        evaluate_drift(model, original, "synthetic", samples=8, max_length=7)


def test_drift_needs_two_models_of_one_kind() -> None:
    small = TINY["bert"].build()
    large = BertModel(BertConfig(**TINY["bert"].options | {"num_hidden_layers": 3}))
    with pytest.raises(LabelError, match="num_hidden_layers=2 and the baseline has 3"):
        evaluate_drift(small, large, "synthetic")


@pytest.mark.skipif("COLLABIFY_GLUE" not in os.environ, reason="no GLUE: set COLLABIFY_GLUE")
def test_real_data_and_a_real_model(real_model: Any) -> None:
    """Sorted and padded in batches, the scores are those of one pair at a time."""
    folder = real_model("minilm-l6")
    config = BertConfig.from_pretrained(folder, num_labels=1)
    model = BertForSequenceClassification.from_pretrained(folder, config=config).eval()
    data = os.environ["COLLABIFY_GLUE"]
    with torch.no_grad():
        model.classifier.weight.zero_()
        model.classifier.weight[0, :192] = 0.1
    report = evaluate_glue(model, "stsb", data=data, limit=48, baseline=model)
    (scores,) = report.tasks
    assert scores.examples == 48
    assert scores.split == "validation"
    assert all(-1 <= score.value <= 1 for score in scores.scores)
    assert all(score.difference == 0 for score in scores.scores)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    from scipy import stats

    from collabify.data.glue import load_task
    from collabify.data.splits import sample

    rows = sample(load_task("stsb", data), 48, 0)
    with torch.no_grad():  # one by one, unsorted and unpadded
        one_by_one = [
            float(model(**tokenizer(a, b, return_tensors="pt")).logits)
            for a, b in zip(rows["sentence1"], rows["sentence2"], strict=True)
        ]
    expected = stats.spearmanr(one_by_one, rows["label"]).statistic
    assert scores.scores[1].value == pytest.approx(expected, abs=0.01)  # ranks of near ties move
