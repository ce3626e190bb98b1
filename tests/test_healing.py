"""Healing: only what a conversion made is trained, and it helps or changes nothing."""

import copy
import gc
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
from healing_cases import CONVERSIONS, FAST, data, equal, interrupt_after, pair, values
from tiny_models import HEADS, LOW, TINY, factors
from torch import Tensor, nn

import collabify
from collabify.drift import measure_drift
from collabify.errors import NonFiniteError
from collabify.healing import training
from collabify.healing.loss import batch_loss, relative, squares


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
    after_all = measure_drift(original, converted, seen.held_out)
    assert asdict(report.drift_before) == pytest.approx(asdict(drift), rel=1e-5)
    assert asdict(report.drift_after) == pytest.approx(asdict(after_all), rel=1e-5)
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
        converted, original, calibration=seen, **FAST | {"learning_rate": 1e8, "steps": 6}
    )
    assert not report.kept
    assert report.best_step == 0
    assert report.loss_after == report.loss_before
    assert report.drift_after == report.drift_before
    assert max(loss for _, loss in report.curve) > 2 * report.loss_before
    assert equal(before, values(converted))
    assert storage == [parameter.data_ptr() for parameter in converted.parameters()]


def test_a_learning_rate_that_is_too_high_is_lowered(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the run wins what it would lose at the rate that was asked for."""
    high: dict[str, Any] = FAST | {"learning_rate": 1.0, "steps": 40}
    reports = {}
    for lower in (training.LOWER, 1.0):
        monkeypatch.setattr(training, "LOWER", lower)
        converted, original, seen = pair()
        reports[lower] = collabify.heal(converted, original, calibration=seen, **high)
    lowered, same = reports.values()
    assert 1 <= len(lowered.went_back) < len(same.went_back)
    assert lowered.kept
    assert lowered.loss_after < 0.9 * lowered.loss_before
    assert lowered.loss_after < same.loss_after


def test_going_back_is_to_the_best_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values, rate and direction; the last judgement changes nothing."""
    converted, original, seen = pair()
    found = iter([(1.0, 1.0), (0.6, 0.6), (1.2, 1.2), (float("nan"), 1.0), (1.1, 1.1)])
    monkeypatch.setattr(training, "held_out_loss", lambda *_: next(found))
    rates, weights = [], []
    step = torch.optim.Adam.step

    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        rates.append(self.param_groups[0]["lr"])
        weights.append([p.detach().clone() for p in self.param_groups[0]["params"]])
        averages = [state["exp_avg"].abs().max() for state in self.state.values()]
        assert not averages or (max(averages) == 0) == (len(rates) in (3, 4))
        return step(self, *args, **kwargs)

    monkeypatch.setattr(torch.optim.Adam, "step", watched)
    report = collabify.heal(converted, original, calibration=seen, **FAST | {"steps": 4})
    plain = torch.optim.lr_scheduler.OneCycleLR(
        torch.optim.SGD([torch.zeros(1)]), FAST["learning_rate"], total_steps=4
    )
    expected = [float(plain.get_last_lr()[0])]
    for _ in range(3):
        plain.optimizer.step()
        plain.step()
        expected.append(float(plain.get_last_lr()[0]))
    scales = (1, 1, training.LOWER, training.LOWER**2)
    assert rates == pytest.approx([a * b for a, b in zip(expected, scales, strict=True)])
    assert all(map(torch.equal, weights[1], weights[2]))
    assert all(map(torch.equal, weights[1], weights[3]))
    assert (report.best_step, report.went_back) == (1, (2, 3))


def test_a_better_loss_with_a_worse_end_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    converted, original, seen = pair()
    before = values(converted)
    drifts = [measure_drift(original, converted, seen.held_out)]
    drifts.append(type(drifts[0])(0.99, drifts[0].hidden_error * 1.01, 0.0))
    queue = iter(drifts)
    monkeypatch.setattr("collabify.healing.method.measure_drift", lambda *_: next(queue))
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
    monkeypatch.setattr("collabify.healing.training.held_out_loss", lambda *_: next(found))
    report = collabify.heal(converted, original, calibration=seen, **FAST | {"steps": 4})
    assert report.kept
    assert (report.best_step, report.loss_after) == (2, 0.4)


def test_the_best_step_is_kept() -> None:
    converted, original, seen = pair()
    report = collabify.heal(
        converted, original, calibration=seen, **FAST | {"learning_rate": 0.2, "steps": 10}
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

    monkeypatch.setattr("collabify.healing.loss.relative", broken)
    with pytest.raises(NonFiniteError, match=r"The loss is nan at step 4 of 20, .*as it was"):
        collabify.heal(converted, original, calibration=seen, **FAST)
    assert equal(before, values(converted))
    assert all(p.requires_grad for p in converted.parameters())


def test_a_held_out_loss_that_is_not_finite_stops_it_before_the_first_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    converted, original, seen = pair()
    monkeypatch.setattr(training, "held_out_loss", lambda *_: (float("inf"), 1.0))
    with pytest.raises(NonFiniteError, match="loss is inf on held-out samples, before the first"):
        collabify.heal(converted, original, calibration=seen, **FAST)


@pytest.mark.parametrize("what", ["gradient", "loss"])
def test_what_overflows_once_is_undone(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of it stays in Adam."""
    converted, original, seen = pair()
    step, count = torch.optim.Adam.step, []

    def gradient(self: Any, *args: Any, **kwargs: Any) -> Any:
        count.append(1)
        for parameter in self.param_groups[0]["params"] if len(count) == 5 else ():
            parameter.grad.view(-1)[0] = float("nan")
        return step(self, *args, **kwargs)

    def loss(*args: Any) -> Tensor:
        count.append(1)
        return batch_loss(*args) * (float("inf") if len(count) == 5 else 1)

    if what == "gradient":
        monkeypatch.setattr(torch.optim.Adam, "step", gradient)
    else:
        monkeypatch.setattr(training, "batch_loss", loss)
    report = collabify.heal(converted, original, calibration=seen, **FAST)
    assert len(report.went_back) == 1
    assert report.best_step > 6
    assert report.loss_after < 0.9 * report.loss_before


def test_the_same_seed_gives_the_same_model() -> None:
    healed = []
    for seed in (3, 3, 4):
        converted, original, seen = pair()
        torch.manual_seed(len(healed))
        collabify.heal(converted, original, calibration=seen, seed=seed, **FAST)
        healed.append(values(converted))
    assert equal(healed[0], healed[1])
    assert not equal(healed[0], healed[2])


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


def test_ready_data_are_used_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    converted, original, seen = pair()
    reference, ready = copy.deepcopy(converted), {b["input_ids"].data_ptr() for b in seen.batches}
    pointers: list[int] = []

    def watched(student: nn.Module, teacher: nn.Module, batch: Any) -> Tensor:
        pointers.append(batch["input_ids"].data_ptr())
        return batch_loss(student, teacher, batch)

    monkeypatch.setattr("collabify.healing.training.batch_loss", watched)
    report = collabify.heal(converted, original, calibration=seen, steps=12, learning_rate=1e-2)
    assert set(pointers) == ready
    assert [pointers.count(pointer) for pointer in ready] == [2] * 6
    assert report.calibration == "random"
    expected = {"steps": 12, "learning_rate": 1e-2, "seed": 0, "samples": 36, "processes": 1}
    assert report.options == expected
    ignored: dict[str, Any] = {"samples": 3, "max_length": 5, "batch_size": 2, "processor": 17}
    again = collabify.heal(
        reference, original, calibration=seen, steps=12, learning_rate=1e-2, **ignored
    )
    assert again.options == expected
    assert again.drift_after == report.drift_after
    assert equal(values(converted), values(reference))


def visible() -> int:
    """Bytes of all memory that a tensor in Python holds."""
    found = {}
    for each in gc.get_objects():
        if isinstance(each, Tensor) and not each.is_meta:
            with suppress(RuntimeError):  # vmap and torch.compile leave some that have no memory
                block = each.untyped_storage()
                found[block.data_ptr()] = block.nbytes()
    return sum(found.values())


@pytest.mark.filterwarnings("ignore::FutureWarning")  # gc sees objects that others deprecate
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_is_two_models_optimiser_and_two_copies(dtype: torch.dtype) -> None:
    converted, original, seen = pair(dtype=dtype)
    new = sum(parameter.numel() for parameter in factors(converted).values())
    models = sum(p.nbytes for model in (converted, original) for p in model.parameters())
    gc.collect()
    before, during = visible(), []

    def progress(_stage: str, done: int, *_: Any) -> None:
        if done in (11, 17):
            during.append(visible())

    report = collabify.heal(converted, original, calibration=seen, progress=progress, **FAST)
    assert report.best_step > 0
    in_full = models * (4 // dtype.itemsize - 1)  # trained in float32
    start, best, gradients, adam = dtype.itemsize, 4, 4, 2 * 4
    least = in_full + new * (start + best + adam)
    for found in during:
        assert least <= found - before < least + new * gradients + 512


def test_drift_looks_at_few_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    converted, original, seen = pair()
    held_out = tuple(
        {name: torch.cat([value, value, value]) for name, value in batch.items()}
        for batch in seen.held_out
    )
    drift, rows = measure_drift(original, converted, held_out), []

    def watched(*arguments: Any) -> Any:
        rows.extend(len(batch["input_ids"]) for batch in arguments[2])
        return measure_drift(*arguments)

    monkeypatch.setattr("collabify.healing.method.measure_drift", watched)
    report = collabify.heal(
        converted, original, calibration=replace(seen, held_out=held_out), **FAST
    )
    assert rows == [4, 4, 4, 4, 2] * 4
    assert asdict(report.drift_before) == pytest.approx(asdict(drift), rel=1e-5)
