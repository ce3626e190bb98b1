"""Fine-tuning: it learns a planted rule, resumes bit for bit, and changes only what it may."""

import errno
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from finetune_cases import (
    FORMS,
    NEW_HEAD,
    SHORT,
    equal,
    loss_and_accuracy,
    names_of_hidden,
    weights,
)
from tiny_models import LOW
from tiny_tasks import FAST, write_model
from transformers import (
    AutoModelForSequenceClassification,
    PreTrainedModel,
)

import collabify
from collabify.errors import (
    CheckpointError,
    CollabifyWarning,
    NonFiniteError,
    OptionError,
    OutputError,
)
from collabify.finetuning.trainer import COMPLETE

pytestmark = pytest.mark.usefixtures("offline")


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
            **(SHORT | {"learning_rate": 1e35}),
        )
    assert not (tmp_path / "o").exists()


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
