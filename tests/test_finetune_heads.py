"""Fine-tuning: heads that fit and heads that do not, and teachers."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from finetune_cases import (
    NEW_HEAD,
    SHORT,
    headed,
    loss_and_accuracy,
    weights,
)
from tiny_tasks import FAST, write_model, write_task
from torch import Tensor
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
)

import collabify
from collabify.data.glue import load_task
from collabify.errors import (
    CheckpointError,
    CollabifyWarning,
    LabelError,
)
from collabify.finetuning.trainer import distillation

pytestmark = pytest.mark.usefixtures("offline")


# Heads: kept where they fit, by names.


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        (("Negative", "positive"), ("Negative", "positive")),
        (("positive", "negative"), ("positive", "negative")),
        (("LABEL_0", "LABEL_1"), ("negative", "positive")),
    ],
)
def test_a_head_that_fits_is_kept(
    labels: tuple[str, ...], expected: tuple[str, ...], glue: str, tmp_path: Path
) -> None:
    source = headed(tmp_path / "m", labels)
    call: dict[str, Any] = {"task": "sst2", "data": glue, **FAST}
    slow = call | {"learning_rate": 1e-12, "epochs": 1}
    report = collabify.finetune(source, out=tmp_path / "same", **slow)
    assert (report.new_head, report.new_parameters) == (None, ())
    torch.testing.assert_close(weights(tmp_path / "same"), weights(source), atol=1e-6, rtol=0)
    report = collabify.finetune(source, out=tmp_path / "out", **call)
    assert report.scores[-1]["validation"]["accuracy"] > 0.9
    assert report.labels == expected
    config = transformers.AutoConfig.from_pretrained(tmp_path / "out")
    assert tuple(config.id2label.values()) == expected
    assert config.problem_type == "single_label_classification"
    _, accuracy = loss_and_accuracy(tmp_path / "out", glue)
    assert (accuracy > 0.9) == (expected != ("positive", "negative")), "labels moved to the head's"


@pytest.mark.parametrize(
    ("labels", "task", "reason"),
    [
        (("a", "b", "c"), "sst2", "its own tells a, b, c apart"),
        (("entailment", "not_entailment"), "sst2", "its own tells entailment, not_entailment"),
        (("number",), "sst2", "its own predicts one number"),
        (("a", "b"), "stsb", "its own has 2 labels, and one number is wanted"),
    ],
)
def test_a_head_that_does_not_fit_is_made_anew(
    labels: tuple[str, ...], task: str, reason: str, glue: str, tmp_path: Path
) -> None:
    source = headed(tmp_path / "m", labels)
    call: dict[str, Any] = SHORT | {"learning_rate": 1e-12, "epochs": 1}
    with pytest.warns(CollabifyWarning, match=f"gets a new head.*{reason}"):
        report = collabify.finetune(source, task=task, data=glue, out=tmp_path / "out", **call)
    assert report.new_head is not None
    assert reason in report.new_head
    old, new = weights(source), weights(tmp_path / "out")
    outputs = 1 if task == "stsb" else 2
    assert new["classifier.weight"].shape[0] == outputs
    if old["classifier.weight"].shape[0] == outputs:
        assert not torch.allclose(old["classifier.weight"], new["classifier.weight"], atol=0.01)
    encoder = [name for name in old if name.startswith("bert.")]
    torch.testing.assert_close([new[n] for n in encoder], [old[n] for n in encoder])


def test_a_head_without_weights_is_new(
    glue: str, tmp_path: Path, folders: Callable[[str], str]
) -> None:
    from safetensors.torch import save_file

    source = headed(tmp_path / "m", ("negative", "positive"))
    tensors = {n: t for n, t in weights(source).items() if not n.startswith("classifier")}
    save_file(tensors, Path(source) / "model.safetensors", metadata={"format": "pt"})
    with pytest.warns(CollabifyWarning, match="its checkpoint has no weights for one"):
        collabify.finetune(source, task="sst2", data=glue, out=tmp_path / "out", **SHORT)


def test_weights_of_other_shapes_are_refused(glue: str, tmp_path: Path) -> None:
    source = headed(tmp_path / "m", ("negative", "positive"))
    config = json.loads((Path(source) / "config.json").read_text())
    (Path(source) / "config.json").write_text(json.dumps(config | {"intermediate_size": 31}))
    with pytest.raises(CheckpointError, match=r"'bert.encoder.layer.*has not the shape"):
        collabify.finetune(source, task="sst2", data=glue, out=tmp_path / "out")


@NEW_HEAD
def test_a_number_is_predicted(folders: Callable[[str], str], glue: str, tmp_path: Path) -> None:
    out = tmp_path / "o"
    call: dict[str, Any] = FAST | {"epochs": 6}
    report = collabify.finetune(folders("cp-sparse"), task="stsb", data=glue, out=out, **call)
    assert report.scores[-1]["validation"]["pearson"] > 0.7
    assert report.labels == ()
    config = transformers.AutoConfig.from_pretrained(out)
    assert (config.num_labels, config.problem_type) == (1, "regression")


@NEW_HEAD
def test_both_validation_splits_of_mnli_are_scored(
    folders: Callable[[str], str], glue: str, tmp_path: Path
) -> None:
    report = collabify.finetune(
        folders("original"), task="mnli", data=glue, out=tmp_path / "o", **SHORT
    )
    assert report.evaluated == 16 + 24
    for epoch in report.scores:
        assert set(epoch) == {
            "epoch",
            "step",
            "loss",
            "validation_matched",
            "validation_mismatched",
        }
        assert set(epoch["validation_matched"]) == {"loss", "accuracy"}


# Teachers.


def logits(folder: str | Path, glue: str) -> Tensor:
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = list(load_task("sst2", glue, "validation")["sentence"])
    with torch.no_grad():
        return model(**tokenizer(texts, padding=True, return_tensors="pt")).logits


@pytest.fixture(scope="module")
def taught(tmp_path_factory: pytest.TempPathFactory, glue: str) -> tuple[str, str]:
    """A teacher that has learned the opposite of the rule, and a student that knows nothing."""
    root = tmp_path_factory.mktemp("teacher")
    opposite = root / "opposite"
    write_task(opposite, "sst2", {"train": 256, "validation": 64}, names=("positive", "negative"))
    student = headed(root / "student", ("negative", "positive"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setattr("datasets.config.HF_DATASETS_CACHE", root / "cache")
        call: dict[str, Any] = FAST | {"data": str(opposite)}
        collabify.finetune(student, task="sst2", out=root / "teacher", **call)
    return str(root / "teacher"), student


@pytest.mark.parametrize("hidden", [False, True])
def test_a_student_follows_its_teacher(
    hidden: bool, taught: tuple[str, str], glue: str, tmp_path: Path
) -> None:
    teacher, student = taught
    call: dict[str, Any] = {"task": "sst2", "data": glue, "teacher": teacher, **FAST}
    follow = {"alpha": 1.0, "temperature": 3.0, "hidden_states": hidden}
    report = collabify.finetune(student, out=tmp_path / "follows", **call, **follow)
    collabify.finetune(student, out=tmp_path / "labels", alpha=0.0, **call)
    told, said, labels = (
        logits(folder, glue) for folder in (teacher, tmp_path / "follows", tmp_path / "labels")
    )
    agree, apart = ((told.argmax(-1) == x.argmax(-1)).double().mean() for x in (said, labels))
    assert agree > 0.9, "it follows the teacher where the labels say the opposite"
    assert apart < 0.1
    assert (told - said).square().mean() < 0.2 * (told - labels).square().mean()
    assert report.teacher == teacher
    assert report.options["alpha"] == 1.0
    assert "teacher" not in json.loads((tmp_path / "follows" / "config.json").read_text())


def test_hidden_states_come_closer_where_they_are_asked_for(
    taught: tuple[str, str], glue: str, tmp_path: Path
) -> None:
    teacher, student = taught
    batch = {"input_ids": torch.arange(5, 20)[None]}
    distances = []
    for hidden in (False, True):
        out = tmp_path / str(hidden)
        collabify.finetune(
            student, task="sst2", data=glue, out=out, teacher=teacher, hidden_states=hidden, **SHORT
        )
        with torch.no_grad():
            ours, theirs = (
                AutoModelForSequenceClassification.from_pretrained(folder)(
                    **batch, output_hidden_states=True
                ).hidden_states
                for folder in (out, teacher)
            )
        distances.append(
            sum(float((h - g).square().sum()) for h, g in zip(ours, theirs, strict=True))
        )
    assert distances[1] < 0.9 * distances[0]


def test_the_teachers_loss_is_the_formula(generator: torch.Generator) -> None:
    told, said = (torch.randn(5, 3, generator=generator) for _ in range(2))
    temperature = 2.5
    slow = 0.0
    for row in range(5):
        p, q = ((z[row].double() / temperature).exp() for z in (told, said))
        p, q = p / p.sum(), q / q.sum()
        slow += float((p * (p / q).log()).sum()) / 5
    assert float(distillation(told, said, temperature)) == pytest.approx(
        slow * temperature**2, rel=1e-5
    )
    told, said = told[:, :1], said[:, :1]
    squares = ((told - said) ** 2).mean()
    assert float(distillation(told, said, temperature)) == pytest.approx(float(squares))


@pytest.mark.parametrize(
    ("labels", "kind", "error", "match"),
    [
        (("positive", "negative"), "bert", LabelError, "in the same order"),
        (("a", "b", "c"), "bert", LabelError, r"\(a, b, c\) must be the student's"),
        ((), "bert", LabelError, "is a BertModel, which has no head"),
        (("negative", "positive"), "albert-groups", CheckpointError, "model_type='albert' of the"),
    ],
)
def test_a_teacher_that_means_something_else_is_refused(
    labels: tuple[str, ...],
    kind: str,
    error: type[Exception],
    match: str,
    taught: tuple[str, str],
    glue: str,
    tmp_path: Path,
) -> None:
    teacher = headed(tmp_path / "t", labels, kind) if labels else str(write_model(tmp_path / "t"))
    with pytest.raises(error, match=match):
        collabify.finetune(
            taught[1], task="sst2", data=glue, out=tmp_path / "o", teacher=teacher, **SHORT
        )
    assert not (tmp_path / "o").exists()


def test_a_teacher_whose_labels_have_no_names_is_believed(
    taught: tuple[str, str], glue: str, tmp_path: Path
) -> None:
    teacher = headed(tmp_path / "t", ("LABEL_0", "LABEL_1"))
    with pytest.warns(CollabifyWarning, match="have no names; they are taken to be negative, pos"):
        collabify.finetune(
            taught[1], task="sst2", data=glue, out=tmp_path / "o", teacher=teacher, **SHORT
        )


def test_a_teacher_without_all_its_weights_is_refused(
    taught: tuple[str, str], glue: str, tmp_path: Path
) -> None:
    from safetensors.torch import save_file

    teacher = headed(tmp_path / "t", ("negative", "positive"))
    tensors = {n: t for n, t in weights(teacher).items() if n != "classifier.bias"}
    save_file(tensors, Path(teacher) / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"has no weights for classifier\.bias"):
        collabify.finetune(
            taught[1], task="sst2", data=glue, out=tmp_path / "o", teacher=teacher, **SHORT
        )
