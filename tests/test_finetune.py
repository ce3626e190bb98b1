"""Fine-tuning: it learns a planted rule, resumes bit for bit, and changes only what it may."""

import errno
import json
import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from tiny_models import LOW
from tiny_tasks import FAST, write_images, write_model, write_task
from torch import Tensor
from transformers import (
    AutoModelForImageClassification,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
)

import collabify
from collabify.data.glue import load_task
from collabify.errors import (
    CheckpointError,
    CollabifyWarning,
    LabelError,
    NonFiniteError,
    OptionError,
    OutputError,
)
from collabify.finetuning.trainer import COMPLETE, distillation

CHANNELS = 5
FORMS: dict[str, tuple[str, dict[str, Any] | None]] = {
    "original": ("bert", None),
    "cp-sparse": ("bert", LOW["cp"] | {"channels": CHANNELS}),
    "cp-all": ("distilbert", LOW["cp"] | {"channels": "all"}),
    "head-svd": ("bert", LOW["head-svd"]),
    "tucker": ("roberta", LOW["tucker"] | {"dk": 7}),
    "tucker-heads": ("albert-inner", LOW["tucker-heads"]),
}
SHORT: dict[str, Any] = FAST | {"epochs": 2, "limit": 24, "batch_size": 6}  # 4 steps an epoch
PREPARED = pytest.mark.filterwarnings("ignore:Images are prepared for .* as best one can")
NEW_HEAD = pytest.mark.filterwarnings("ignore:.*gets a new head")


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """No network, and no data left in the user's cache."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    cache = tmp_path_factory.getbasetemp() / "datasets"
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", cache)


@pytest.fixture(scope="module")
def glue(tmp_path_factory: pytest.TempPathFactory) -> str:
    root = tmp_path_factory.mktemp("glue")
    for task in ("sst2", "rte", "stsb"):
        write_task(root, task, {"train": 256, "validation": 64})
    both = {"validation_matched": 16, "validation_mismatched": 24}
    write_task(root, "mnli", {"train": 24, **both})
    return str(root)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """A model's folder by its name in FORMS, made once."""
    root = tmp_path_factory.mktemp("models")

    def folder(name: str) -> str:
        kind, conversion = FORMS[name]
        if not (root / name).is_dir():
            write_model(root / name, kind, conversion)
        return str(root / name)

    return folder


def weights(folder: str | Path) -> dict[str, Tensor]:
    return load_file(Path(folder) / "model.safetensors")


def equal(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def names_of_hidden(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.startswith(".")]


def loss_and_accuracy(folder: Path, glue: str) -> tuple[float, float]:
    """Of a saved model on held-out sentences, by a loop that is not the Trainer's."""
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows = load_task("sst2", glue, "validation")
    batch = tokenizer(list(rows["sentence"]), padding=True, return_tensors="pt")
    labels = torch.tensor(rows["label"])
    with torch.no_grad():
        found = model(**batch, labels=labels)
    return float(found.loss), float((found.logits.argmax(-1) == labels).double().mean())


@pytest.mark.parametrize("name", FORMS)
def test_learns_the_rule_and_saves_what_it_learned(
    name: str, folders: Callable[[str], str], glue: str, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    with pytest.warns(CollabifyWarning, match="gets a new head for task 'sst2'"):
        report = collabify.finetune(folders(name), task="sst2", data=glue, out=out, **FAST)
    last = report.scores[-1]
    assert [epoch["epoch"] for epoch in report.scores] == [1, 2, 3, 4, 5]
    assert last["loss"] < 0.6 * report.scores[0]["loss"]
    assert last["validation"]["accuracy"] > 0.9
    loss, accuracy = loss_and_accuracy(out, glue)
    assert accuracy == last["validation"]["accuracy"]
    assert loss == pytest.approx(last["validation"]["loss"], rel=1e-4)
    again = AutoModelForSequenceClassification.from_pretrained(out)
    again.save_pretrained(tmp_path / "again")
    assert equal(weights(out), weights(tmp_path / "again"))
    assert names_of_hidden(tmp_path) == []


@NEW_HEAD
def test_sparse_mixing_stays_sparse(
    folders: Callable[[str], str], glue: str, tmp_path: Path
) -> None:
    before = weights(folders("cp-sparse"))
    collabify.finetune(folders("cp-sparse"), task="sst2", data=glue, out=tmp_path / "o", **SHORT)
    after = weights(tmp_path / "o")
    layers = [name for name in before if name.endswith("channels")]
    assert len(layers) == 2
    for name in layers:
        assert torch.equal(before[name], after[f"bert.{name}"])
        mixing = name.replace("channels", "mixing")
        kept = before[mixing].shape
        assert after[f"bert.{mixing}"].shape == kept
        rank = before[name.replace("channels", "query.weight")].shape[0]
        assert kept[1] < min(rank, before[name].shape[1]), "fewer than all, and the content bias"
        assert not torch.equal(before[mixing], after[f"bert.{mixing}"])


@NEW_HEAD
def test_only_attention_leaves_the_rest_bit_for_bit(
    folders: Callable[[str], str], glue: str, tmp_path: Path
) -> None:
    source = folders("cp-sparse")
    before = weights(source)
    report = collabify.finetune(
        source, task="sst2", data=glue, out=tmp_path / "o", only="attention", **SHORT
    )
    after = weights(tmp_path / "o")
    moved = {name for name in before if not torch.equal(before[name], after[f"bert.{name}"])}
    made = ("query.weight", "key.weight", "mixing")
    assert moved == {name for name in before if name.endswith(made)}
    trained = moved | {"classifier.weight", "classifier.bias"}
    numels = {name.removeprefix("bert."): tensor.numel() for name, tensor in after.items()}
    assert report.parameters == sum(numels[name] for name in trained)
    assert report.new_parameters == ("classifier.bias", "classifier.weight")


@NEW_HEAD
def test_what_the_checkpoint_lacks_is_trained_with_the_attention(
    folders: Callable[[str], str], glue: str, tmp_path: Path
) -> None:
    source = write_model(tmp_path / "m", "bert", LOW["cp"])
    tensors = {n: t for n, t in weights(source).items() if not n.startswith("pooler")}
    from safetensors.torch import save_file

    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.warns(CollabifyWarning, match=r"no weights for bert\.pooler\.dense\.bias, bert"):
        report = collabify.finetune(
            str(source), task="sst2", data=glue, out=tmp_path / "o", only="attention", **SHORT
        )
    assert "bert.pooler.dense.weight" in report.new_parameters
    assert weights(tmp_path / "o")["bert.pooler.dense.bias"].abs().min() > 0, "they start at zero"


def test_only_attention_needs_a_converted_model(
    folders: Callable[[str], str], glue: str, tmp_path: Path
) -> None:
    with (
        pytest.warns(CollabifyWarning, match="new head"),
        pytest.raises(OptionError, match="no layer of this BertForSequenceClassification"),
    ):
        collabify.finetune(
            folders("original"), task="sst2", data=glue, out=tmp_path / "o", only="attention"
        )


def interrupt_at(step: int, *, politely: bool) -> Callable[[str, int, int, str], None]:
    def progress(stage: str, done: int, total: int, note: str) -> None:
        if (stage, done) == ("Training", step):
            assert total == 8
            if not politely:
                raise KeyboardInterrupt
            os.kill(os.getpid(), signal.SIGINT)

    return progress


@NEW_HEAD
@pytest.mark.parametrize(
    ("step", "politely", "kept"), [(6, False, 4), (6, True, 6), (4, True, 4), (8, True, 8)]
)
def test_a_resumed_run_ends_bit_for_bit_where_an_uninterrupted_one_does(
    step: int, politely: bool, kept: int, tmp_path: Path, glue: str
) -> None:
    source = write_model(tmp_path / "m", "bert", LOW["cp"], hidden_dropout_prob=0.3)
    call: dict[str, Any] = {"task": "sst2", "data": glue, **SHORT}
    whole = collabify.finetune(str(source), out=tmp_path / "whole", **call)
    out = tmp_path / "out"
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt, match=f"step {kept} of 8 is kept.*--resume"):
        collabify.finetune(
            str(source), out=out, progress=interrupt_at(step, politely=politely), **call
        )
    assert signal.getsignal(signal.SIGINT) is before
    assert not out.exists()
    with pytest.raises(OutputError, match=f"up to step {kept}. Go on with --resume"):
        collabify.finetune(str(source), out=out, **call)
    resumed = collabify.finetune(str(source), out=out, resume=True, **call)
    assert (resumed.resumed_at, whole.resumed_at) == (kept, None)
    assert equal(weights(out), weights(tmp_path / "whole"))
    assert len(resumed.scores) == 2
    for ours, theirs in zip(resumed.scores, whole.scores, strict=True):
        assert ours["validation"] == theirs["validation"]
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
    assert names_of_hidden(tmp_path) == []


@NEW_HEAD
def test_another_run_is_not_gone_on_with(
    folders: Callable[[str], str], glue: str, tmp_path: Path
) -> None:
    out, source = tmp_path / "out", folders("original")
    call: dict[str, Any] = {"task": "sst2", "data": glue, "out": out, **SHORT}
    with pytest.raises(KeyboardInterrupt):
        collabify.finetune(source, progress=interrupt_at(6, politely=True), **call)
    with pytest.raises(OptionError, match=r"learning_rate=0.5 must be 0.005, as in the run to go"):
        collabify.finetune(source, resume=True, **(call | {"learning_rate": 0.5}))
    record = tmp_path / ".out-finetuning" / "run.json"
    record.write_text("{")
    with pytest.raises(CheckpointError, match=r"cannot be read.*--overwrite instead"):
        collabify.finetune(source, resume=True, **call)
    assert not out.exists()
    report = collabify.finetune(source, overwrite=True, **call)
    assert (report.resumed_at, report.steps) == (None, 8)
    assert names_of_hidden(tmp_path) == []


@NEW_HEAD
def test_resume_starts_where_nothing_was_interrupted(
    folders: Callable[[str], str], glue: str, tmp_path: Path
) -> None:
    call: dict[str, Any] = {"task": "sst2", "data": glue, **SHORT, "epochs": 1}
    report = collabify.finetune(folders("original"), out=tmp_path / "o", resume=True, **call)
    assert (report.resumed_at, report.steps) == (None, 4)


@NEW_HEAD
def test_a_full_disk_leaves_the_last_good_checkpoint(
    folders: Callable[[str], str], glue: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    call: dict[str, Any] = {"task": "sst2", "data": glue, "out": out, **SHORT}
    save, full = PreTrainedModel.save_pretrained, [False, True]

    def saved(self: Any, folder: Any, *args: Any, **kwargs: Any) -> None:
        save(self, folder, *args, **kwargs)
        if full.pop(0):
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(PreTrainedModel, "save_pretrained", saved)
    with pytest.raises(OutputError, match=r"checkpoint-8.*No space left.*'checkpoint-4' stays"):
        collabify.finetune(folders("original"), **call)
    work = tmp_path / ".out-finetuning"
    assert [path.name for path in work.glob("checkpoint-*")] == ["checkpoint-4"]
    assert (work / "checkpoint-4" / COMPLETE).is_file()
    # The second time the result itself does not fit.
    full += [False, True]
    with pytest.raises(OutputError, match=r"'.*out' could not be written"):
        collabify.finetune(folders("original"), resume=True, **call)
    assert not out.exists()
    full += [False]
    report = collabify.finetune(folders("original"), resume=True, **call)
    assert report.resumed_at == 8
    assert out.is_dir()


@NEW_HEAD
def test_a_full_disk_at_the_first_checkpoint(
    folders: Callable[[str], str], glue: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def saved(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(PreTrainedModel, "save_pretrained", saved)
    with pytest.raises(OutputError, match="There is none before it"):
        collabify.finetune(folders("original"), task="sst2", data=glue, out=tmp_path / "o", **SHORT)


@NEW_HEAD
def test_a_loss_that_is_not_finite_stops_at_its_step(
    folders: Callable[[str], str], glue: str, tmp_path: Path
) -> None:
    with pytest.raises(NonFiniteError, match=r"The loss is \w+ at step 2 of 8; .*--learning-rate"):
        collabify.finetune(
            folders("original"),
            task="sst2",
            data=glue,
            out=tmp_path / "o",
            **(SHORT | {"learning_rate": 1e38}),
        )
    assert not (tmp_path / "o").exists()


# Heads: kept where they fit, by names.


def headed(folder: Path, labels: tuple[str, ...], kind: str = "bert", **config: Any) -> str:
    names = dict(enumerate(labels))
    ids = {name: number for number, name in names.items()}
    return str(write_model(folder, kind, id2label=names, label2id=ids, **config))


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


# The record.


@NEW_HEAD
def test_the_record_says_what_was_done_beside_what_was_there(
    folders: Callable[[str], str], glue: str, tmp_path: Path
) -> None:
    source = write_model(tmp_path / "m", "bert", LOW["cp"])
    counted = {"before": 10, "after": 5, "kept": 0.5}
    before = {"version": 1, "source": "x", "parameters": {"model": counted}}
    (source / "collabify.json").write_text(json.dumps(before))
    call: dict[str, Any] = {"task": "sst2", "data": glue, **SHORT}
    first = collabify.finetune(str(source), out=tmp_path / "one", **call)
    record = json.loads((tmp_path / "one" / "collabify.json").read_text())
    assert (record["source"], record["parameters"]) == ("x", {"model": counted})
    assert record["finetuning"] == json.loads(first.to_json())
    told = record["finetuning"]
    assert told["task"] == "sst2"
    assert told["fingerprint"] == first.fingerprint != ""
    assert (told["seed"], told["steps"], told["examples"], told["evaluated"]) == (0, 8, 24, 24)
    assert told["options"] | SHORT == told["options"]
    assert {"collabify", "torch", "transformers"} <= set(told["versions"])
    assert told["source"] == str(source)
    again = collabify.finetune(str(tmp_path / "one"), out=tmp_path / "two", **call)
    assert again.fingerprint == first.fingerprint
    assert again.new_head is None
    record = json.loads((tmp_path / "two" / "collabify.json").read_text())
    assert record["finetuning"]["before"] == told
    assert record["source"] == "x"
    assert (tmp_path / "two" / "tokenizer.json").read_bytes() == (
        source / "tokenizer.json"
    ).read_bytes()
    other = collabify.finetune(str(source), out=tmp_path / "o", **(call | {"limit": 23}))
    assert other.fingerprint != first.fingerprint


@NEW_HEAD
def test_the_seed_decides(folders: Callable[[str], str], glue: str, tmp_path: Path) -> None:
    found = []
    for number, seed in enumerate((1, 1, 2)):
        out = tmp_path / str(number)
        collabify.finetune(folders("original"), task="sst2", data=glue, out=out, seed=seed, **SHORT)
        found.append(weights(out))
    assert equal(found[0], found[1])
    assert not equal(found[0], found[2])


@NEW_HEAD
def test_bfloat16_trains_float32_weights(
    folders: Callable[[str], str], glue: str, tmp_path: Path
) -> None:
    call: dict[str, Any] = {"task": "sst2", "data": glue, **FAST}
    report = collabify.finetune(
        folders("cp-sparse"), out=tmp_path / "o", precision="bfloat16", **call
    )
    assert report.options["precision"] == "bf16"
    assert report.scores[-1]["validation"]["accuracy"] > 0.9
    tensors = weights(tmp_path / "o")
    assert {t.dtype for name, t in tensors.items() if "channels" not in name} == {torch.float32}
    report = collabify.finetune(folders("cp-sparse"), out=tmp_path / "p", **call)
    assert report.options["precision"] == "fp32", "nothing of the first run stays"


# Images.


@PREPARED
@NEW_HEAD
@pytest.mark.parametrize(
    ("kind", "conversion"),
    [("vit", None), ("dinov2", LOW["cp"] | {"channels": CHANNELS}), ("deit", LOW["tucker"])],
)
def test_images_are_learned(kind: str, conversion: Any, tmp_path: Path) -> None:
    source = write_model(tmp_path / "m", kind, conversion)
    write_images(tmp_path / "images", {"train": 96, "test": 32})
    out = tmp_path / "out"
    report = collabify.finetune(
        str(source), image_data=str(tmp_path / "images"), out=out, **(FAST | {"epochs": 6})
    )
    assert report.scores[-1]["test"]["accuracy"] > 0.9
    assert report.task == "image-classification"
    assert (report.labels, report.examples, report.evaluated) == (("blue", "red"), 96, 32)
    model = AutoModelForImageClassification.from_pretrained(out)
    assert model.config.id2label == {0: "blue", 1: "red"}


@PREPARED
@NEW_HEAD
def test_slices_and_the_first_five_guesses(tmp_path: Path) -> None:
    source = write_model(tmp_path / "m", "vit")
    labels = tuple("abcdefg")
    write_images(tmp_path / "images", {"train": 42}, labels)
    report = collabify.finetune(
        str(source),
        image_data=str(tmp_path / "images"),
        split="train[:50%]",
        eval_split="train[50%:]",
        out=tmp_path / "out",
        **(FAST | {"epochs": 1}),
    )
    assert (report.examples, report.evaluated) == (21, 21)
    scores = report.scores[-1]["train"]
    assert 0 <= scores["accuracy"] <= scores["top_5_accuracy"] <= 1


# What is refused.

BAD = [
    ({"task": "rtee"}, OptionError, "task='rtee' must be one of cola, sst2"),
    ({"task": None}, OptionError, "one of them must say what to train for"),
    ({"image_data": "x"}, OptionError, "one of them must say what to train for"),
    ({"split": "train"}, OptionError, "split='train' is for image data"),
    ({"task": None, "image_data": "x"}, OptionError, "data='.*' says where a task is"),
    ({"epochs": 0}, OptionError, "epochs=0 must be at least 1. Raise --epochs"),
    ({"batch_size": 0}, OptionError, "batch_size=0 must be at least 1. Raise --batch-size"),
    ({"max_length": 0}, OptionError, "max_length=0 must be at least 1"),
    ({"limit": 0}, OptionError, "limit=0 must be at least 1"),
    ({"learning_rate": 0.0}, OptionError, "learning_rate=0.0 must be above 0"),
    ({"learning_rate": float("inf")}, OptionError, "learning_rate=inf must be above 0 and finite"),
    ({"seed": -1}, OptionError, "seed=-1 must be in"),
    ({"only": "heads"}, OptionError, "only='heads' must be one of all, attention"),
    ({"precision": "int8"}, OptionError, "precision='int8' must be one of fp32"),
    ({"alpha": 0.0}, OptionError, "alpha=0.0 says how to learn from a teacher, and there is none"),
    ({"hidden_states": True}, OptionError, "hidden_states=True says how .*--hidden-states"),
    ({"teacher": "x", "alpha": 1.5}, OptionError, r"alpha=1.5 must be in \[0, 1\]"),
    ({"teacher": "x", "temperature": 0.0}, OptionError, "temperature=0.0 must be above 0"),
    ({"device": "tpu"}, OptionError, "device='tpu' must be cpu, cuda or mps"),
    (
        {"report_to": ["carrier-pigeon"]},
        OptionError,
        "report_to='carrier-pigeon' must be",
    ),
    ({"data": "/nowhere"}, OptionError, "data='/nowhere' must be a data set's folder"),
    ({"task": "cola"}, OptionError, "no configuration 'cola'. There are: "),
]


@pytest.mark.parametrize(("options", "error", "match"), BAD, ids=[str(b[0]) for b in BAD])
def test_bad_options_are_refused_before_anything_is_made(
    options: dict[str, Any],
    error: type[Exception],
    match: str,
    folders: Callable[[str], str],
    glue: str,
    tmp_path: Path,
) -> None:
    call: dict[str, Any] = {"task": "sst2", "data": glue, "out": tmp_path / "o"} | options
    with pytest.raises(error, match=match) as raised:
        collabify.finetune(folders("original"), **call)
    assert "\n" not in str(raised.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_that_is_not_there(
    folders: Callable[[str], str], glue: str, tmp_path: Path
) -> None:
    with pytest.raises(OptionError, match="device='cuda' must be one that torch can use here"):
        collabify.finetune(
            folders("original"), task="sst2", data=glue, out=tmp_path / "o", device="cuda"
        )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_float16_on_a_cpu(folders: Callable[[str], str], glue: str, tmp_path: Path) -> None:
    call: dict[str, Any] = {"task": "sst2", "data": glue, "out": tmp_path / "o", **SHORT}
    with pytest.raises(OptionError, match="precision='fp16' cannot be had here"):
        collabify.finetune(folders("original"), precision="fp16", **call)


def test_the_wrong_kind_of_data(folders: Callable[[str], str], glue: str, tmp_path: Path) -> None:
    vit = write_model(tmp_path / "m", "vit")
    with pytest.raises(OptionError, match=r"takes images, and the data are texts.*--image-data"):
        collabify.finetune(str(vit), task="sst2", data=glue, out=tmp_path / "o")
    with pytest.raises(OptionError, match=r"takes texts, and the data are images.*--task"):
        collabify.finetune(folders("original"), image_data="x", out=tmp_path / "o")


def test_bad_images(tmp_path: Path, glue: str) -> None:
    source = str(write_model(tmp_path / "m", "vit"))
    write_images(tmp_path / "images", {"train": 4})
    call: dict[str, Any] = {"out": tmp_path / "o", "image_data": str(tmp_path / "images")}
    with pytest.raises(OptionError, match=r"scored on what it was trained on, 'train'. Name other"):
        collabify.finetune(source, **call)
    with pytest.raises(OptionError, match=r"no split 'half'. There are: train"):
        collabify.finetune(source, eval_split="half", **call)
    with pytest.raises(OptionError, match=r"no column of images. There are: sentence"):
        collabify.finetune(source, out=tmp_path / "o", image_data=f"{glue}:sst2")
    with pytest.raises(OptionError, match="must be a data set's folder"):
        collabify.finetune(source, out=tmp_path / "o", image_data=str(tmp_path / "nothing"))


@NEW_HEAD
def test_an_image_processor_is_used_where_there_is_one(tmp_path: Path) -> None:
    source = write_model(tmp_path / "m", "vit")
    write_images(tmp_path / "images", {"train": 4, "test": 4})
    call: dict[str, Any] = {"image_data": str(tmp_path / "images"), **FAST}
    with pytest.warns(CollabifyWarning, match=r"\(no preprocessor_config.json: resized to 8 x 8"):
        plain = collabify.finetune(str(source), out=tmp_path / "a", **call)
    size = {"height": 8, "width": 8}
    transformers.ViTImageProcessor(size=size, image_mean=[9.0] * 3).save_pretrained(source)
    other = collabify.finetune(str(source), out=tmp_path / "b", **call)
    assert (tmp_path / "b" / "preprocessor_config.json").is_file()
    assert plain.scores[0]["loss"] != pytest.approx(other.scores[0]["loss"], abs=1e-3)


@PREPARED
@NEW_HEAD
def test_an_image_that_cannot_be_read(tmp_path: Path) -> None:
    source = str(write_model(tmp_path / "m", "vit"))
    write_images(tmp_path / "images", {"train": 4, "test": 4})
    (tmp_path / "images" / "train" / "red" / "0.png").write_bytes(b"no image")
    with pytest.raises(OptionError, match=r"Row [0-3] of .* cannot be read as an image"):
        collabify.finetune(source, out=tmp_path / "o", image_data=str(tmp_path / "images"))


def test_data_without_what_a_task_needs(folders: Callable[[str], str], tmp_path: Path) -> None:
    write_task(tmp_path / "data", "sst2", {"train": 8})
    call: dict[str, Any] = {"data": str(tmp_path / "data"), "out": tmp_path / "o"}
    with pytest.raises(OptionError, match=r"no split 'validation'. There are: train"):
        collabify.finetune(folders("original"), task="sst2", **call)
    write_task(tmp_path / "two", "sst2", {"train": 8, "validation": 8})
    (tmp_path / "two" / "sst2").rename(tmp_path / "two" / "cola")
    readme = tmp_path / "two" / "README.md"
    readme.write_text(readme.read_text().replace("sst2", "rte").replace("path: rte", "path: cola"))
    with pytest.raises(OptionError, match=r"no column 'sentence1', 'sentence2'. There are: sen"):
        collabify.finetune(
            folders("original"), task="rte", data=str(tmp_path / "two"), out=tmp_path / "o"
        )


def test_labels_outside_of_the_task(folders: Callable[[str], str], tmp_path: Path) -> None:
    write_task(tmp_path / "d", "sst2", {"train": 8, "validation": 8}, names=("a", "b"))
    with pytest.raises(LabelError, match=r"\(a, b\) must be those of the task"):
        collabify.finetune(
            folders("original"), task="sst2", data=str(tmp_path / "d"), out=tmp_path / "o"
        )


def test_the_folder_is_not_overwritten_unless_asked(
    folders: Callable[[str], str], glue: str, tmp_path: Path
) -> None:
    source = write_model(tmp_path / "m")
    with pytest.raises(OutputError, match="exists and is not empty"):
        collabify.finetune(folders("original"), task="sst2", data=glue, out=source)
    with pytest.raises(OutputError, match="holds the model"):
        collabify.finetune(str(source), task="sst2", data=glue, out=source, overwrite=True)
    assert names_of_hidden(tmp_path) == []
