"""The prediction loop, and the three evaluations, on models that know the answers."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from glue_data import (
    FIRST,
    VOCABULARY,
    KnowingForSequenceClassification,
    rows_of,
    write_glue,
    write_vocabulary,
)
from tiny_models import TINY
from torch import nn
from transformers import (
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
)

from collabify.errors import LabelError, NonFiniteError, OptionError
from collabify.evaluation import evaluate_glue, predict
from collabify.evaluation.glue import decide
from collabify.scoreboard import glue_notes, glue_table, transposed, width

Knowing = KnowingForSequenceClassification
ENTAILMENT = ("entailment", "not_entailment")
# Labels of 13 rows with a majority, so that a swapped order cannot score half.
LABELS = [0, 1, 1, 0, 1, 1, 1, 0, 1, 1, 1, 0, 1]


pytestmark = pytest.mark.usefixtures("offline")


@pytest.fixture
def tokenizer(tmp_path: Path) -> Any:
    write_vocabulary(tmp_path / "tokenizer")
    return AutoTokenizer.from_pretrained(tmp_path / "tokenizer")


@pytest.fixture
def rte(tmp_path: Path) -> str:
    return write_glue(tmp_path / "glue", {"rte": {"validation": rows_of("rte", LABELS)}})


def features(lengths: list[int]) -> list[dict[str, Any]]:
    return [
        {"input_ids": [2, FIRST + n % 3, *[8] * length], "attention_mask": [1] * (length + 2)}
        for n, length in enumerate(lengths)
    ]


def test_predictions_come_in_the_order_of_the_examples(tokenizer: Any) -> None:
    lengths = [3, 11, 5, 0, 7, 2, 13]
    model = Knowing(["a", "b", "c"], [0, 1, 2])
    seen: list[tuple[str, int, int, str]] = []
    logits = predict(
        model,
        features(lengths),
        lambda some: tokenizer.pad(some, return_tensors="pt"),
        batch_size=3,
        stage="here",
        progress=lambda *report: seen.append(report),
    )
    assert logits.argmax(-1).tolist() == [n % 3 for n in range(7)]
    # Longest first, no longer than its own longest.
    assert model.sizes == [(3, 15), (3, 7), (1, 2)]
    assert seen == [("here", 3, 7, ""), ("here", 6, 7, ""), ("here", 7, 7, "")]


def test_predictions_are_those_of_a_plain_loop(tokenizer: Any) -> None:
    torch.manual_seed(1)
    config = BertConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=24,
        num_hidden_layers=2,
        num_attention_heads=3,
        intermediate_size=29,
        initializer_range=0.4,
        num_labels=5,
    )
    model = BertForSequenceClassification(config).train()
    model.bert.encoder.eval()
    some = features([3, 11, 5, 0, 7, 2, 13])
    logits = predict(model, some, lambda f: tokenizer.pad(f, return_tensors="pt"), batch_size=4)
    assert model.training
    assert not model.bert.encoder.training  # every module as it was
    model.eval()
    with torch.no_grad():
        one_by_one = [
            model(**{name: torch.tensor([value]) for name, value in feature.items()}).logits
            for feature in some
        ]
    assert torch.allclose(logits, torch.cat(one_by_one), atol=1e-5)


def test_dropout_and_labels_stay_out_of_predictions(tokenizer: Any) -> None:
    model = Knowing(["a", "b"], [0, 1]).train()
    some = [feature | {"labels": 0} for feature in features([1, 2])]
    predict(model, some, lambda f: tokenizer.pad(f, return_tensors="pt"))
    assert model.modes == [False]
    assert model.training


def test_no_batch_and_outputs_that_are_no_numbers_are_refused(tokenizer: Any) -> None:
    model = Knowing(["a", "b", "c"], [0, 1, 2])
    with pytest.raises(OptionError, match="batch_size=0 must be at least 1"):
        predict(model, features([1]), dict, batch_size=0)

    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))

        def forward(self, input_ids: Any, **_: Any) -> Any:
            logits = torch.where(input_ids[:, 1:2] == FIRST + 2, torch.nan, 1.0)
            return type("Output", (), {"logits": logits})

    with pytest.raises(NonFiniteError, match="output for example 2 is NaN or infinite"):
        predict(Broken(), features([9, 1, 4, 2]), lambda f: tokenizer.pad(f, return_tensors="pt"))


@pytest.mark.parametrize(
    ("names", "outputs", "accuracy"),
    [
        (ENTAILMENT, [0, 1], 1.0),
        (("not_entailment", "entailment"), [1, 0], 1.0),  # swapped in head and names: as good
        (("Not Entailment", "ENTAILMENT"), [1, 0], 1.0),
        (("not_entailment", "entailment"), [0, 1], 0.0),  # really a bad model
        (("LABEL_0", "LABEL_1"), [0, 1], 1.0),
    ],
)
def test_the_order_of_labels_is_that_of_the_names(
    rte: str, tokenizer: Any, names: tuple[str, ...], outputs: list[int], accuracy: float
) -> None:
    report = evaluate_glue(Knowing(names, outputs), "rte", data=rte, processor=tokenizer)
    (scores,) = report.tasks
    assert [score.value for score in scores.scores] == [accuracy]
    assert scores.examples == 13
    assert scores.label_order == ("position" if names[0].startswith("L") else "names")
    assert report.averages == ()


def test_labels_of_three_classes_are_put_in_order() -> None:
    logits = torch.eye(3)[[2, 0, 1]]
    assert decide(logits, (2, 0, 1)).tolist() == [0, 1, 2]
    assert decide(torch.tensor([[0.5], [2.0]]), ()).tolist() == [0.5, 2.0]


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Knowing(["a", "b", "c"], [0, 1, 2]), "head has 3 labels .* and task 'rte' has 2"),
        (Knowing(["good", "bad"], [0, 1]), "must be those of task 'rte'"),
    ],
)
def test_a_model_of_another_task_is_refused(
    rte: str, tokenizer: Any, model: Any, message: str
) -> None:
    with pytest.raises(LabelError, match=message):
        evaluate_glue(model, "rte", data=rte, processor=tokenizer)


def test_a_model_without_a_head_is_told_how_to_get_one(rte: str) -> None:
    bare = TINY["bert"].build()
    with pytest.raises(LabelError, match=r"BertModel, which has no text classification head.*"):
        evaluate_glue(bare, "rte", data=rte)
    with pytest.raises(LabelError, match=r"collabify finetune MODEL --task rte --out DIR$"):
        evaluate_glue(bare, "rte", data=rte)


def test_a_baseline_gives_differences_with_paired_intervals(tmp_path: Path, tokenizer: Any) -> None:
    labels = LABELS * 5
    words = [("zero", "one")[label] for label in labels]
    for row in range(20):
        words[row] = "one" if words[row] == "zero" else "zero"  # both models err here
    data = write_glue(tmp_path / "g", {"rte": {"validation": rows_of("rte", labels, words)}})
    good = Knowing(ENTAILMENT, [0, 1])
    same = evaluate_glue(good, "rte", data=data, baseline=good, processor=tokenizer)
    score = same.tasks[0].scores[0]
    assert score.value == score.baseline == pytest.approx(45 / 65)
    assert score.difference == 0
    assert score.difference_interval == (0.0, 0.0)  # paired: the same errors
    low, high = score.interval or (1.0, 0.0)
    assert low < 45 / 65 < high
    bad = Knowing(ENTAILMENT, [0, 1], wrong=1)
    score = (
        evaluate_glue(bad, "rte", data=data, baseline=good, processor=tokenizer).tasks[0].scores[0]
    )
    assert score.difference == pytest.approx((20 - 45) / 65)
    low, high = score.difference_interval or (0.0, 0.0)
    assert low < (20 - 45) / 65 < high < 0


def test_baselines_may_have_their_labels_in_another_order(rte: str, tokenizer: Any) -> None:
    swapped = Knowing(("not_entailment", "entailment"), [1, 0])
    plain = Knowing(ENTAILMENT, [0, 1])
    report = evaluate_glue(plain, "rte", data=rte, baseline=swapped, processor=tokenizer)
    assert report.tasks[0].scores[0].difference == 0


@pytest.fixture
def four(tmp_path: Path) -> str:
    words = ["zero", "one", "zero", "zero", "one"]
    return write_glue(
        tmp_path / "four",
        {
            "rte": {"validation": rows_of("rte", LABELS)},
            "mrpc": {"validation": rows_of("mrpc", [0, 1, 1, 0, 1], words)},
            "stsb": {"validation": rows_of("stsb", [2, 1, 0, 2, 1, 2, 0])},
            "mnli": {
                "validation_matched": rows_of("mnli", [0, 1, 2, 0], ["zero", "one", "two", "one"]),
                "validation_mismatched": rows_of("mnli", [0, 1, 2]),
            },
        },
    )


def knowing(task: str) -> Any:
    names = {
        "rte": ENTAILMENT,
        "mrpc": ("not_equivalent", "equivalent"),
        "stsb": ("LABEL_0",),
        "mnli": ("entailment", "neutral", "contradiction"),
        "wnli": ("LABEL_0", "LABEL_1"),
    }[task]
    return Knowing(names, list(range(len(names))))


def test_several_tasks_their_means_and_the_papers_table(four: str, tokenizer: Any) -> None:
    report = evaluate_glue(
        knowing, "all", data=four, baseline=knowing, processor=tokenizer, resamples=50
    )
    assert [(s.task, s.split) for s in report.tasks] == [
        ("mrpc", "validation"),
        ("stsb", "validation"),
        ("mnli", "validation_matched"),
        ("mnli", "validation_mismatched"),
        ("rte", "validation"),
    ]
    values = {
        f"{s.task} {s.split[11:]} {score.metric}": score.value
        for s in report.tasks
        for score in s.scores
    }
    pearson, spearman = values.pop("stsb  pearson"), values.pop("stsb  spearmanr")
    assert values == pytest.approx(
        {
            "mrpc  accuracy": 0.8,
            "mrpc  f1": 0.8,
            "mnli matched accuracy": 0.75,
            "mnli mismatched accuracy": 1.0,
            "rte  accuracy": 1.0,
        }
    )
    tasks, paper = report.averages
    stsb = (pearson + spearman) / 2
    assert tasks.score.value == pytest.approx((0.8 + stsb + 0.875 + 1) / 4)
    assert tasks.over == ("mrpc", "stsb", "mnli", "rte")
    assert paper.score.value == pytest.approx((0.8 + 0.8 + 2 * stsb + 0.75 + 1) / 6)
    assert (len(paper.over), paper.out_of) == (6, 11)
    assert paper.score.difference == 0
    heads, rows = glue_table(report)
    assert heads == [
        "",
        "MRPC\nF1/acc",
        "STS-B\nPearson/Spearman",
        "MNLI\nm/mm",
        "RTE\nacc",
        "mean of 4\ntasks",
        "mean of 6\npaper's numbers",
    ]
    table = {row[0] + ("" if n < 3 else " of it"): row[1:] for n, row in enumerate(rows)}
    assert table["examples"] == ["5", "7", "4/3", "13", "", ""]
    assert table["model"][0] == "80.0/80.0"
    assert table["model"][2:4] == ["75.0/100.0", "100.0"]
    assert table["difference of it"] == ["+0.0/+0.0", "+0.0/+0.0", "+0.0/+0.0", *["+0.0"] * 3]
    assert table["95 % interval of it"][2] == "+0.0 to +0.0\n+0.0 to +0.0"
    turned_heads, turned = transposed((heads, rows))
    assert turned_heads[:3] == ["", "examples", "model"]
    assert turned[2][:3] == ["MNLI m/mm", "4/3", "75.0/100.0"]
    assert width((["", "ab\nc"], [["x", "1\n234"]])) == (3 + 1) + (3 + 3)
    notes = " ".join(glue_notes(report))
    assert "4 of 9" in notes
    assert "6 of its 11 numbers (MNLI once, matched; no WNLI)" in notes
    assert "the order of the data" not in notes  # only stsb has no names, and it needs none


def test_the_note_on_mnli_names_the_split_that_was_scored(tmp_path: Path, tokenizer: Any) -> None:
    both = {name: {"validation_mismatched": rows_of(name, LABELS)} for name in ("mnli", "rte")}
    data = write_glue(tmp_path / "g", both)
    report = evaluate_glue(
        knowing, "all", data=data, split="validation_mismatched", processor=tokenizer
    )
    assert "MNLI once, mismatched;" in " ".join(glue_notes(report))


def test_f1_and_accuracy_keep_their_places(tmp_path: Path, tokenizer: Any) -> None:
    rows = rows_of("mrpc", [1, 1, 1, 0], ["one", "one", "one", "one"])
    data = write_glue(tmp_path / "m", {"mrpc": {"validation": rows}})
    report = evaluate_glue(knowing, "mrpc", data=data, processor=tokenizer)
    assert glue_table(report)[1][1] == ["model", "85.7/75.0"]


def test_the_papers_mean_leaves_wnli_out(tmp_path: Path, tokenizer: Any) -> None:
    tasks = {name: {"validation": rows_of(name, LABELS)} for name in ("wnli", "rte")}
    data = write_glue(tmp_path / "w", tasks)
    report = evaluate_glue(knowing, ["wnli", "rte"], data=data, processor=tokenizer)
    assert report.averages[0].over == ("rte", "wnli")
    assert report.averages[1].over == ("rte accuracy",)
    assert "of the model for wnli: the order of the data was taken" in " ".join(glue_notes(report))


def test_scores_are_json_and_undefined_ones_null(tmp_path: Path, tokenizer: Any) -> None:
    rows = rows_of("stsb", [2, 1, 0], ["zero"] * 3)
    rows["sentence1"] = ["zero"] * 3  # one length, so one prediction
    data = write_glue(tmp_path / "s", {"stsb": {"validation": rows}})
    report = evaluate_glue(knowing, "stsb", data=data, processor=tokenizer, resamples=10)
    assert math.isnan(report.tasks[0].scores[0].value)
    record = json.loads(report.to_json())
    assert record["tasks"][0]["scores"][0]["value"] is None
    assert record["tasks"][0]["scores"][0]["interval"] is None
    assert record["options"]["resamples"] == 10
    assert "torch" in record["versions"]
    assert glue_table(report)[1][1] == ["model", "-/-"]


def test_a_seed_gives_the_same_intervals_and_another_does_not(
    tmp_path: Path, tokenizer: Any
) -> None:
    words = [("zero", "one")[n % 3 == 0] for n in range(39)]
    rows = rows_of("rte", LABELS * 3, words)
    data = write_glue(tmp_path / "s", {"rte": {"validation": rows}})

    def drawn(seed: int, **options: Any) -> Any:
        report = evaluate_glue(knowing, "rte", data=data, processor=tokenizer, seed=seed, **options)
        return report.tasks[0].scores

    assert drawn(0) == drawn(0)
    assert drawn(0)[0].value == drawn(1)[0].value
    assert any(drawn(0)[0].interval != drawn(seed)[0].interval for seed in (1, 2, 3))
    assert (
        evaluate_glue(knowing, "rte", data=data, processor=tokenizer, limit=7).tasks[0].examples
        == 7
    )


def test_several_tasks_need_several_models_and_intervals_two_resamples(four: str) -> None:
    with pytest.raises(OptionError, match=r"model is one model and there are 2 tasks \(mrpc, rte"):
        evaluate_glue(knowing("rte"), ["rte", "mrpc"], data=four)
    with pytest.raises(OptionError, match="baseline is one model"):
        evaluate_glue(knowing, ["rte", "mrpc"], data=four, baseline=knowing("rte"))
    with pytest.raises(OptionError, match="resamples=1 must be at least 2"):
        evaluate_glue(knowing, "rte", data=four, resamples=1)


def test_a_baseline_without_label_names_is_told_of(rte: str, tokenizer: Any) -> None:
    unnamed, named = Knowing(("LABEL_0", "LABEL_1"), [0, 1]), Knowing(ENTAILMENT, [0, 1])
    report = evaluate_glue(named, "rte", data=rte, baseline=unnamed, processor=tokenizer)
    (scores,) = report.tasks
    assert (scores.label_order, scores.nameless) == ("position", ("baseline",))
    notes = " ".join(glue_notes(report))
    assert "No label names in the config of the baseline for rte: the order" in notes
    assert "of the model" not in notes
