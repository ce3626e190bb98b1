"""Healing: only what a conversion made is trained, it helps or changes nothing, and it resumes."""

import copy
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_models import HEADS, LOW, TINY, VOCABULARY, Tiny, factors
from tolerances import TOLERANCES
from torch import Tensor, nn
from transformers import AutoModel
from typer.testing import CliRunner

import collabify
from collabify.cli.app import app
from collabify.data import CalibrationData, load_calibration
from collabify.drift import measure_drift
from collabify.errors import (
    AlreadyConvertedError,
    CheckpointError,
    CollabifyWarning,
    NonFiniteError,
    OptionError,
)
from collabify.healing import new_parameters, relative, squares

CHANNELS = 5
CONVERSIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "cp-sparse": ("bert", LOW["cp"] | {"channels": CHANNELS}),
    "cp-all": ("bert", LOW["cp"] | {"channels": "all"}),
    "head-svd": ("distilbert", LOW["head-svd"]),
    "tucker": ("roberta", LOW["tucker"] | {"dk": 7}),
    "tucker-heads": ("albert-inner", LOW["tucker-heads"]),
    "vit": ("vit", LOW["cp"]),
}
FAST: dict[str, Any] = {"steps": 20, "batch_size": 6, "learning_rate": 1e-2}


def data(tiny: Tiny, batches: int = 6) -> CalibrationData:
    """Random inputs, padded; two batches are held out."""
    generator = torch.Generator().manual_seed(5)
    found = []
    for _ in range(batches + 2):
        if tiny.is_vision:
            found.append({"pixel_values": torch.randn(6, 3, 8, 8, generator=generator)})
            continue
        ids = torch.randint(5, VOCABULARY, (6, 11), generator=generator)
        mask = torch.ones_like(ids)
        mask[1, 7:] = 0
        mask[4, 3:] = 0
        found.append({"input_ids": ids.masked_fill(mask == 0, 1), "attention_mask": mask})
    return CalibrationData(
        tuple(found[:-2]), tuple(found[-2:]), "random", True, 6 * batches, 66 * batches
    )


def pair(name: str = "cp-sparse", **options: Any) -> tuple[Any, Any, CalibrationData]:
    """A model as converted, its original, and data."""
    kind, conversion = CONVERSIONS[name]
    original = TINY[kind].build(**options)
    converted = copy.deepcopy(original)
    collabify.convert(converted, **conversion)
    return converted, original, data(TINY[kind])


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(
        torch.equal(a[name], b[name]) and a[name].dtype == b[name].dtype for name in a
    )


def interrupt_after(step: int) -> Callable[[str, int, int, str], None]:
    def progress(stage: str, done: int, total: int, note: str) -> None:
        if stage == "Healing" and done == step:
            raise KeyboardInterrupt

    return progress


@pytest.mark.parametrize("name", CONVERSIONS)
def test_loss_and_drift_fall_and_only_new_parameters_change(name: str) -> None:
    converted, original, seen = pair(name)
    before, teacher = values(converted), values(original)
    drift = measure_drift(original, converted, seen.held_out)
    buffers = {name: buffer.clone() for name, buffer in converted.named_buffers()}
    new = {id(parameter) for parameter in factors(converted).values()}
    report = collabify.heal(converted, original, calibration=seen, **FAST)
    assert report.kept
    assert report.loss_after < 0.96 * report.loss_before
    assert report.drift_before == drift
    assert report.drift_after == measure_drift(original, converted, seen.held_out)
    assert report.drift_after.hidden_cosine > drift.hidden_cosine
    assert report.drift_after.hidden_error < drift.hidden_error
    assert report.drift_after.attention < drift.attention
    after = converted.state_dict()
    for parameter_name, parameter in converted.named_parameters():
        changed = not torch.equal(after[parameter_name], before[parameter_name])
        assert changed == (id(parameter) in new), parameter_name
    assert equal(buffers, dict(converted.named_buffers()))
    assert equal(teacher, values(original))
    assert report.parameters == sum(p.numel() for p in factors(converted).values())


def test_content_rows_are_trained() -> None:
    converted, original, seen = pair("cp-all")
    before = values(converted)
    collabify.heal(converted, original, calibration=seen, **FAST)
    name = "encoder.layer.0.attention.self.key.weight"
    rows = converted.state_dict()[name][-HEADS:] != before[name][-HEADS:]
    assert rows.any(dim=1).all()


def test_a_model_with_a_head_keeps_it() -> None:
    tiny = TINY["bert"]
    original = tiny.build(headed=True)
    converted = copy.deepcopy(original)
    collabify.convert(converted, **LOW["cp"])
    report = collabify.heal(converted, original, calibration=data(tiny), **FAST)
    assert report.kept
    assert torch.equal(converted.classifier.weight, original.classifier.weight)


def test_only_converted_layers_are_trained() -> None:
    original = TINY["bert"].build()
    converted = copy.deepcopy(original)
    collabify.convert(converted, layers=[1], **LOW["cp"])
    report = collabify.heal(converted, original, calibration=data(TINY["bert"]), **FAST)
    assert report.kept
    first, second = (layer.attention.self for layer in converted.encoder.layer)
    assert torch.equal(first.query.weight, original.encoder.layer[0].attention.self.query.weight)
    assert report.parameters == sum(
        p.numel() for p in (second.query.weight, second.key.weight, second.mixing)
    )


@pytest.mark.parametrize("fails", [False, True])
def test_flags_modes_gradients_and_generators_are_restored(fails: bool) -> None:
    converted, original, seen = pair(dropout=0.3)
    converted.train()
    converted.encoder.layer[0].eval()
    original.embeddings.train()
    next(converted.parameters()).requires_grad_(False)
    query = converted.encoder.layer[1].attention.self.query.weight
    gradient = query.grad = torch.ones_like(query)

    def flags() -> Any:
        return [
            ([p.requires_grad for p in m.parameters()], [x.training for x in m.modules()])
            for m in (converted, original)
        ]

    before, state = flags(), torch.get_rng_state()
    if fails:
        with pytest.raises(KeyboardInterrupt):
            collabify.heal(
                converted, original, calibration=seen, progress=interrupt_after(3), **FAST
            )
    else:
        collabify.heal(converted, original, calibration=seen, **FAST)
    assert flags() == before
    assert query.grad is gradient
    assert torch.equal(torch.get_rng_state(), state)
    assert [p.grad for p in original.parameters()] == [None] * len(list(original.parameters()))


def test_dropout_is_off_while_healing() -> None:
    without, original, seen = pair()
    collabify.heal(without, original, calibration=seen, **FAST)
    dropped, teacher, _ = pair(dropout=0.5, attention_dropout=0.5)
    collabify.heal(dropped.train(), teacher.train(), calibration=seen, **FAST)
    assert equal(values(without), values(dropped))


def test_a_learning_rate_that_diverges_leaves_the_model_as_it_was() -> None:
    converted, original, seen = pair()
    before = values(converted)
    storage = [parameter.data_ptr() for parameter in converted.parameters()]
    report = collabify.heal(
        converted, original, calibration=seen, **FAST | {"learning_rate": 1e3, "steps": 12}
    )
    assert not report.kept
    assert report.best_step == 0
    assert report.loss_after == report.loss_before
    assert report.drift_after == report.drift_before
    assert max(loss for _, loss in report.curve) > 2 * report.loss_before
    assert equal(before, values(converted))
    assert storage == [parameter.data_ptr() for parameter in converted.parameters()]


def test_a_better_loss_with_a_worse_end_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    converted, original, seen = pair()
    before = values(converted)
    drifts = [measure_drift(original, converted, seen.held_out)]
    drifts.append(type(drifts[0])(0.99, drifts[0].hidden_error * 1.01, 0.0))
    queue = iter(drifts)
    monkeypatch.setattr("collabify.healing.measure_drift", lambda *_: next(queue))
    report = collabify.heal(converted, original, calibration=seen, **FAST)
    assert min(loss for _, loss in report.curve) < report.loss_before
    assert not report.kept
    assert report.drift_after == drifts[0]
    assert equal(before, values(converted))


def test_a_step_whose_last_layer_is_worse_than_the_start_is_not_the_best(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    converted, original, seen = pair()
    found = iter([(1.0, 0.5), (0.2, 0.6), (0.4, 0.4), (0.3, 0.51), (float("nan"), 0.1)])
    monkeypatch.setattr("collabify.healing.held_out_loss", lambda *_: next(found))
    report = collabify.heal(converted, original, calibration=seen, **FAST | {"steps": 4})
    assert report.kept
    assert (report.best_step, report.loss_after) == (2, 0.4)


def test_the_best_step_is_kept() -> None:
    converted, original, seen = pair()
    report = collabify.heal(
        converted, original, calibration=seen, **FAST | {"learning_rate": 0.3, "steps": 10}
    )
    assert [step for step, _ in report.curve] == list(range(11))
    assert report.curve[0] == (0, report.loss_before)
    assert report.kept
    assert (report.best_step, report.loss_after) in report.curve
    assert 0 < report.best_step < 10
    again = collabify.heal(
        converted, original, calibration=seen, **FAST | {"learning_rate": 1e-9, "steps": 1}
    )
    assert again.loss_before == report.loss_after


def test_a_loss_that_is_not_finite_names_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    converted, original, seen = pair()
    before = values(converted)
    calls: list[int] = []

    def broken(sums: Tensor) -> Tensor:
        calls.append(1)
        return relative(sums) * (float("nan") if sums.requires_grad and len(calls) > 4 else 1.0)

    monkeypatch.setattr("collabify.healing.relative", broken)
    with pytest.raises(NonFiniteError, match=r"The loss is nan at step 3 of 20; .*as it was"):
        collabify.heal(converted, original, calibration=seen, **FAST)
    assert equal(before, values(converted))
    assert all(p.requires_grad for p in converted.parameters())


def test_the_same_seed_gives_the_same_model() -> None:
    healed = []
    for seed in (3, 3, 4):
        converted, original, seen = pair()
        torch.manual_seed(len(healed))
        collabify.heal(converted, original, calibration=seen, seed=seed, **FAST)
        healed.append(values(converted))
    assert equal(healed[0], healed[1])
    assert not equal(healed[0], healed[2])


@pytest.mark.parametrize("step", [1, 7, 8, 20])
def test_an_interrupted_run_goes_on_to_the_same_end(step: int, tmp_path: Path) -> None:
    whole, original, seen = pair()
    expected = collabify.heal(whole, original, calibration=seen, **FAST)
    converted, _, _ = pair()
    before, state = values(converted), tmp_path / ".state"
    options: dict[str, Any] = {"calibration": seen, "state": state} | FAST
    with pytest.raises(KeyboardInterrupt, match=f"after step {step} of 20; .*same command again"):
        collabify.heal(converted, original, progress=interrupt_after(step), **options)
    assert equal(before, values(converted))
    steps = []
    report = collabify.heal(
        converted, original, progress=lambda *seen: steps.append(seen[1]), **options
    )
    assert report.resumed_at == step
    assert steps == list(range(step + 1, 21))
    assert report.curve == expected.curve
    assert (report.drift_after, report.best_step) == (expected.drift_after, expected.best_step)
    assert equal(values(whole), values(converted))


def test_an_interrupted_step_is_taken_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, original, seen = pair()
    collabify.heal(whole, original, calibration=seen, **FAST)
    converted, _, _ = pair()
    options: dict[str, Any] = {"calibration": seen, "state": tmp_path / ".state"} | FAST
    step, count = torch.optim.Adam.step, []

    def torn(self: Any, *args: Any, **kwargs: Any) -> Any:
        count.append(1)
        result = step(self, *args, **kwargs)
        if len(count) == 8:
            raise KeyboardInterrupt
        return result

    with monkeypatch.context() as patch:
        patch.setattr(torch.optim.Adam, "step", torn)
        with pytest.raises(KeyboardInterrupt):
            collabify.heal(converted, original, **options)
    report = collabify.heal(converted, original, **options)
    assert report.resumed_at == 6
    assert equal(values(whole), values(converted))


def test_other_options_start_over_and_say_so(tmp_path: Path) -> None:
    whole, original, seen = pair()
    collabify.heal(whole, original, calibration=seen, **FAST | {"steps": 10})
    converted, _, _ = pair()
    options: dict[str, Any] = {"calibration": seen, "state": tmp_path / ".state"} | FAST
    with pytest.raises(KeyboardInterrupt):
        collabify.heal(converted, original, progress=interrupt_after(7), **options)
    with pytest.warns(CollabifyWarning, match="another steps, samples: starting over"):
        report = collabify.heal(converted, original, **options | {"steps": 10})
    assert report.resumed_at is None
    assert equal(values(whole), values(converted))
    with pytest.warns(CollabifyWarning, match="another steps, samples, model: starting over"):
        collabify.heal(converted, original, **options)


def test_a_damaged_state_is_named(tmp_path: Path) -> None:
    converted, original, seen = pair()
    before, state = values(converted), tmp_path / ".state"
    options: dict[str, Any] = {"calibration": seen, "state": state} | FAST
    with pytest.raises(KeyboardInterrupt):
        collabify.heal(converted, original, progress=interrupt_after(7), **options)
    (state / "optimizer.bin").write_bytes(b"damaged")
    with pytest.raises(CheckpointError, match=r"\.state' holds a run .* Delete it to start over"):
        collabify.heal(converted, original, **options)
    assert equal(before, values(converted))


def test_masked_tokens_do_not_count() -> None:
    converted, original, seen = pair()
    batch = seen.batches[0]
    mask = batch["attention_mask"].bool()
    losses, other = [], []
    for padding in (1, 9):
        ids = batch["input_ids"].masked_fill(~mask, padding)
        with torch.no_grad():
            old, new = (
                model(ids, attention_mask=mask, output_hidden_states=True).hidden_states[1:]
                for model in (original, converted)
            )
        losses.append(relative(squares(old, new, mask)))
        other.append(relative(squares(old, new, None)))
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-5, atol=0)
    assert abs(other[0] - other[1]) > 1e-3 * other[0]


def test_the_loss_is_the_formula() -> None:
    generator = torch.Generator().manual_seed(2)
    old, new = (torch.randn(4, 2, 3, 5, generator=generator, dtype=torch.double) for _ in range(2))
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]]).bool()
    over = under = 0.0
    for layer in range(4):
        for b, t in [(b, t) for b in range(2) for t in range(3) if mask[b, t]]:
            over += float(((old - new)[layer, b, t] ** 2).sum())
            under += float((old[layer, b, t] ** 2).sum())
    found = float(relative(squares(list(old), list(new), mask)))
    assert found == pytest.approx(over / under, rel=1e-12)


@pytest.mark.parametrize("name", ["cp-sparse", "vit"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_trained_in_full_and_stays_half(name: str, dtype: torch.dtype) -> None:
    converted, original, seen = pair(name, dtype=dtype)
    teacher = original.float()
    before, others = values(converted), values(teacher)
    report = collabify.heal(converted, teacher, calibration=seen, **FAST)
    assert report.kept
    after = values(converted)
    assert {value.dtype for value in after.values() if value.is_floating_point()} == {dtype}
    new = factors(converted)
    assert sum(not torch.equal(after[n], before[n]) for n in after) == len(new)
    assert equal(others, values(teacher))


def test_what_is_not_converted_is_refused() -> None:
    original = TINY["bert"].build()
    with pytest.raises(CheckpointError, match=r"None of the attention layers .*Convert it first"):
        collabify.heal(original, copy.deepcopy(original), calibration=data(TINY["bert"]))
    with pytest.raises(CheckpointError, match="BertModel was converted"):
        new_parameters(original)


def _wider() -> Any:
    config = TINY["bert"].config()
    config.intermediate_size = 31
    return AutoModel.from_config(config)


def _deeper() -> Any:
    config = TINY["bert"].config()
    config.num_hidden_layers = 3
    return AutoModel.from_config(config)


@pytest.mark.parametrize(
    ("teacher", "error", "message"),
    [
        (lambda: TINY["roberta"].build(), CheckpointError, r"\(roberta, 2 layers .*\(bert, 2"),
        (_deeper, CheckpointError, r"\(bert, 3 layers of 3 heads, width 24\) .*Change --teacher"),
        (_wider, CheckpointError, r"'encoder.layer.0.intermediate.dense.weight' .*\(31, 24\)"),
        (lambda: pair()[0], AlreadyConvertedError, "must be the original"),
    ],
)
def test_a_wrong_teacher_is_refused(
    teacher: Callable[[], Any], error: type[Exception], message: str
) -> None:
    converted, _, seen = pair()
    before = values(converted)
    with pytest.raises(error, match=message):
        collabify.heal(converted, teacher(), calibration=seen, **FAST)
    assert equal(before, values(converted))


def test_a_teacher_with_other_weights_warns() -> None:
    converted, original, seen = pair()
    with torch.no_grad():
        original.encoder.layer[1].output.dense.weight[0, 0] += 1
    with pytest.warns(CollabifyWarning, match=r"^1 parameters .*'encoder.layer.1.output.dense"):
        collabify.heal(converted, original, calibration=seen, **FAST | {"steps": 1})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 0}, "steps=0 must be at least 1. Raise --steps."),
        ({"batch_size": 0}, "batch_size=0 must be at least 1. Raise --batch-size."),
        ({"learning_rate": 0.0}, "learning_rate=0.0 must be above 0 and finite"),
        ({"learning_rate": float("nan")}, "learning_rate=nan must be above 0 and finite"),
        ({"calibration": "none"}, "leaves nothing to heal on"),
        ({"samples": 1}, "samples=1 must be at least 2"),
        ({"calibration": CalibrationData((), (), "nothing", True, 0, 0)}, "needs both"),
    ],
)
def test_options_are_checked(options: dict[str, Any], message: str) -> None:
    converted, original, _ = pair()
    with pytest.raises(OptionError, match=re.escape(message)):
        collabify.heal(converted, original, **options)


def test_weights_that_are_not_finite_are_refused() -> None:
    converted, original, seen = pair()
    with torch.no_grad():
        original.encoder.layer[1].attention.self.query.weight[0, 0] = float("inf")
    with pytest.raises(NonFiniteError, match=r"encoder.layer.1.attention.self.query.weight"):
        collabify.heal(converted, original, calibration=seen)


# The command


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """An original and its conversion, with files beside it."""
    source, out = tmp_path / "original", tmp_path / "converted"
    TINY["bert"].build(headed=True).save_pretrained(source)
    (source / "LICENSE").write_text("Of the original.")
    outcome = run("convert", source, "--dk", 10, "--iterations", 3, "--out", out, *QUICK)
    assert outcome.exit_code == 0, outcome.stderr
    (out / "README.md").write_text("Mine.")
    (out / "more").mkdir()
    (out / "more" / "notes.txt").write_text("Mine too.")
    return source, out


QUICK = ("--samples", 32, "--max-length", 12)
STEPS = (*QUICK, "--steps", 20, "--batch-size", 8, "--learning-rate", 1e-2)


def run(*arguments: object) -> Any:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_heal_replaces_the_model_and_keeps_what_lies_beside_it(folders: tuple[Path, Path]) -> None:
    source, out = folders
    before = contents(out)
    outcome = run("heal", out, *STEPS)
    assert outcome.exit_code == 0, outcome.stderr
    after = contents(out)
    changed = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    assert changed == {"model.safetensors", "collabify.json"}
    record, old = (json.loads(each["collabify.json"]) for each in (after, before))
    healing = record.pop("healing")
    assert record == old
    assert healing["kept"]
    assert healing["teacher"] == str(source)
    assert healing["loss_after"] < healing["loss_before"]
    assert healing["options"]["seed"] == 0
    assert healing["versions"]["torch"] == torch.__version__
    assert [path.name for path in out.parent.iterdir() if path.name.startswith(".")] == []
    healed = AutoModel.from_pretrained(out)
    read = {"samples": 32, "max_length": 12, "batch_size": 8, "processor": str(out)}
    batches = load_calibration("synthetic", healed.config, **read).held_out
    original = AutoModel.from_pretrained(source)
    shutil.copytree(out, out.parent / "unhealed")  # the loaded model still reads its own file
    (out.parent / "unhealed" / "model.safetensors").write_bytes(before["model.safetensors"])
    unhealed = AutoModel.from_pretrained(out.parent / "unhealed")
    drift = [measure_drift(original, model, batches).hidden_error for model in (unhealed, healed)]
    for found, when in zip(drift, ("before", "after"), strict=True):
        reported = healing[f"drift_{when}"]["hidden_error"]
        assert found == pytest.approx(reported, rel=TOLERANCES["gradient"])
    assert drift[1] < drift[0]
    cosine = f"{healing['drift_before']['hidden_cosine']:.4f}"
    shown = re.search(r"hidden states, cosine +(\S+) +(\S+)", outcome.stdout)
    assert shown is not None
    assert shown[1] == cosine
    assert re.search(r"20 steps, \d+ seconds, [\d,]+ parameters, on synthetic", outcome.stdout)
    assert f"Kept the best, step {healing['best_step']}." in outcome.stdout


def test_heal_out_leaves_the_model_and_prints_only_json(folders: tuple[Path, Path]) -> None:
    source, out = folders
    before = contents(out)
    target = out.parent / "healed"
    outcome = run("heal", out, *STEPS, "--out", target, "--json")
    assert outcome.exit_code == 0, outcome.stderr
    report = json.loads(outcome.stdout)
    assert contents(out) == before
    assert (target / "LICENSE").read_text() == "Of the original."
    assert json.loads((target / "collabify.json").read_text())["healing"] == report
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (target, out))
    assert ours.keys() == theirs.keys()
    again = run("heal", out, *STEPS, "--out", target)
    assert again.exit_code == 1
    assert "exists and is not empty" in again.stderr
    assert run("heal", out, *STEPS, "--out", target, "--overwrite").exit_code == 0
    over = run("heal", out, *STEPS, "--out", source, "--overwrite")
    assert over.exit_code == 1
    assert "would be lost" in over.stderr


def test_heal_that_wins_nothing_writes_nothing(folders: tuple[Path, Path]) -> None:
    _, out = folders
    before = contents(out)
    outcome = run("heal", out, *STEPS, "--learning-rate", 1e3)
    assert outcome.exit_code == 0, outcome.stderr
    assert "Nothing was won" in outcome.stdout
    assert f"{out} is as it was." in outcome.stdout
    assert contents(out) == before
    assert [path.name for path in out.parent.iterdir() if path.name.startswith(".")] == []


def test_heal_resumes_after_an_interruption(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from collabify import healing

    _, out = folders
    before, original = contents(out), healing.heal

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs | {"progress": interrupt_after(7)})

    whole = out.parent / "whole"
    assert run("heal", out, *STEPS, "--out", whole).exit_code == 0
    monkeypatch.setattr(healing, "heal", interrupted)
    outcome = run("heal", out, *STEPS)
    assert outcome.exit_code == 130
    assert re.fullmatch(
        r"Interrupted after step 7 of 20; .* same command again .*\n", outcome.stderr
    )
    assert outcome.stdout == ""
    assert contents(out) == before
    monkeypatch.undo()
    outcome = run("heal", out, *STEPS)
    assert outcome.exit_code == 0, outcome.stderr
    assert "20 steps, resumed after 7, " in outcome.stdout
    assert contents(out)["model.safetensors"] == contents(whole)["model.safetensors"]
    assert [path.name for path in out.parent.iterdir() if path.name.startswith(".")] == []


def test_heal_says_what_is_missing(folders: tuple[Path, Path]) -> None:
    source, out = folders
    hidden = source.rename(source.with_name("elsewhere"))
    outcome = run("heal", out, *STEPS)
    assert outcome.exit_code == 1
    assert re.fullmatch(
        r"Error: .* was converted from .*original', which cannot .*--teacher MODEL\n",
        outcome.stderr,
    )
    assert run("heal", out, *STEPS, "--teacher", hidden).exit_code == 0
    (out / "collabify.json").unlink()
    outcome = run("heal", out, *STEPS)
    assert outcome.exit_code == 1
    assert re.fullmatch(r"Error: .* has no collabify.json .*--teacher MODEL\n", outcome.stderr)
    (out / "collabify.json").write_text("{")
    outcome = run("heal", out, *STEPS)
    assert outcome.exit_code == 1
    assert re.fullmatch(r"Error: .*collabify.json' cannot be read .*\n", outcome.stderr)


def test_heal_errors_are_one_line(folders: tuple[Path, Path]) -> None:
    source, out = folders
    for code, message, arguments in (
        (1, "None of the attention layers", (source,)),
        (2, "steps=0 must be at least 1", (out, "--steps", 0)),
        (2, "learning_rate=-1.0 must be above 0", (out, "--learning-rate", -1)),
        (2, "--out is missing", ("nobody/nothing",)),
        (1, "'nobody/nothing' is neither", ("nobody/nothing", "--out", out.parent / "new")),
        (1, "converted before", (out, "--teacher", out)),
    ):
        before = contents(out)
        outcome = run("heal", *arguments)
        assert (outcome.exit_code, outcome.stdout) == (code, ""), outcome.stderr
        assert message in outcome.stderr
        assert outcome.stderr.count("\n") == 1
        assert contents(out) == before


@pytest.mark.slow
def test_two_processes_share_the_work(folders: tuple[Path, Path]) -> None:
    _, out = folders
    # With --cpu accelerate starts a second process by mpirun only; heal is on the CPU anyhow.
    command = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu"]
    command += ["--num_processes", "2", "--num_machines", "1", "--mixed_precision", "no"]
    command += ["-m", "collabify", "heal", str(out), *map(str, STEPS), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["options"]["processes"] == 2
    assert report["kept"]
    assert json.loads((out / "collabify.json").read_text())["healing"] == report
    assert [path.name for path in out.parent.iterdir() if path.name.startswith(".")] == []
