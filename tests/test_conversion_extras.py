"""Drift without a second model, healing within a conversion, indices that follow the weights."""

import copy
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
import transformers
from tiny_models import HEAD_DIM, HEADS, TINY
from tolerances import TOLERANCES

from collabify import convert, find_attention, heal
from collabify.data import load_calibration
from collabify.drift import measure_drift
from collabify.drift import shadow as shadow_of
from collabify.errors import OptionError, RankError, UnsupportedModelError
from collabify.planning import Request
from collabify.sensitivity import SMALLEST, sensitivities
from collabify.sharing import share
from collabify.spaces import calibrate


@pytest.mark.parametrize("name", ["bert", "albert", "vit"])
def test_a_shadow_is_the_original_without_its_numbers(name: str) -> None:
    model = TINY[name].build()
    whole, shadow = copy.deepcopy(model), shadow_of(model)
    data = load_calibration("synthetic", model.config, samples=16, max_length=11)
    report = convert(model, dk=5, calibration=data)
    assert {p.data_ptr() for p in whole.parameters()}.isdisjoint(
        p.data_ptr() for p in shadow.parameters()
    )
    kept = {p.data_ptr() for p in model.parameters()}
    assert len(kept & {p.data_ptr() for p in shadow.parameters()}) > len(kept) / 2
    drift = measure_drift(shadow, model, data.held_out)
    assert drift == measure_drift(whole, model, data.held_out) == report.drift
    assert drift.hidden_error > 1e-3
    assert not any(site.converted for site in find_attention(shadow))


def test_convert_heals_on_its_own_data() -> None:
    model, other = TINY["bert"].build(), TINY["bert"].build()
    options = {"dk": 5, "samples": 32, "max_length": 11}
    # tiny weights: what 20 steps win is little
    plain, report = convert(other, **options), convert(model, **options, heal=20)
    healing = report.healing
    assert healing is not None
    assert healing.kept
    assert healing.steps == 20
    assert plain.drift is not None
    assert report.drift == healing.drift_after
    assert healing.drift_before.hidden_error == pytest.approx(plain.drift.hidden_error, rel=1e-4)
    assert healing.drift_after.hidden_error < 0.997 * healing.drift_before.hidden_error
    record = report.to_dict()
    assert record["healing"]["steps"] == record["options"]["heal"] == 20
    assert plain.to_dict()["healing"] is None


def test_a_dry_run_looks_at_the_calibration_source(tmp_path: Path) -> None:
    model = TINY["bert"].build()
    with pytest.raises(OptionError, match="nowhere"):
        convert(model, dk=5, calibration=str(tmp_path / "nowhere.txt"), dry_run=True)


@pytest.mark.parametrize(("dk", "kept"), [(7, 3), (HEADS * HEAD_DIM - 1, HEAD_DIM)])
def test_loaded_channels_are_the_ones_that_are_read(dk: int, kept: int) -> None:
    """Other weights, whichever way they come, are read by their own channels."""
    models = [TINY["bert"].build() for _ in range(2)]
    for seed, model in enumerate(models):
        for p in model.parameters():
            p.data += torch.randn(p.shape, generator=torch.Generator().manual_seed(seed))
        convert(model, dk=dk, channels=kept, calibration="none", iterations=2)
    one, other = models
    channels = [find_attention(model)[0].module.channels for model in models]
    assert not torch.equal(*channels)
    batch = {"input_ids": torch.tensor([[1, 2, 3, 4, 5]])}
    with torch.no_grad():
        called = torch.func.functional_call(other, one.state_dict(), kwargs=batch)
        assert torch.equal(called.last_hidden_state, one(**batch).last_hidden_state)
    other.load_state_dict(one.state_dict(), assign=True)
    with torch.no_grad():
        for model in (other, copy.deepcopy(one), copy.deepcopy(one).double().to(one.dtype)):
            assert torch.equal(*(m(**batch).last_hidden_state for m in (model, one)))


def test_a_layer_whose_attention_changes_nothing_is_not_sensitive() -> None:
    model = TINY["bert"].build()
    model.encoder.layer[0].attention.output.dense.weight.data.zero_()
    before = {name: p.clone() for name, p in model.state_dict().items()}
    data = load_calibration("synthetic", model.config, samples=32, max_length=11)
    sites = find_attention(model)
    spaces = calibrate(model, sites, data, None)
    found = sensitivities(model, sites, spaces.inputs, data.batches)
    assert found == [SMALLEST, 1.0]
    assert all(torch.equal(before[name], p) for name, p in model.state_dict().items())
    options = {"kept": 0.7, "multiple": 1, "dry_run": True}
    ranks = [layer.rank for layer in convert(model, calibration=data, **options).layers]
    alone = [layer.rank for layer in convert(model, calibration="none", **options).layers]
    assert ranks[0] < alone[0]
    assert ranks[1] > alone[1]


def test_sequential_calibrates_each_layer_on_the_converted_ones_before_it() -> None:
    model, other = TINY["bert"].build(), TINY["bert"].build()
    data = load_calibration("synthetic", model.config, samples=32, max_length=11)
    options = {"dk": 4, "calibration": data}
    report, plain = convert(model, sequential=True, **options), convert(other, **options)
    first, second = (
        [
            torch.equal(a, b)
            for a, b in zip(
                *(find_attention(m)[index].module.state_dict().values() for m in (model, other)),
                strict=True,
            )
        ]
        for index in (0, 1)
    )
    assert all(first)
    assert not all(second)
    assert report.options["sequential"]
    # The second layer as converted alone on the states that the first one now gives.
    half = TINY["bert"].build()
    convert(half, layers=[0], **options)
    spaces = calibrate(half, find_attention(half)[1:], data, None)
    request = Request(4, None, None, "cp", None, None, "factored", 200, 1e-4, 8)
    site = find_attention(half)[1]
    factors, _, alone = share(site, request.plan([site]).layers[0], spaces, request, 0, None)
    assert torch.equal(factors.query.float(), find_attention(model)[1].query.weight)
    assert alone.calibrated_error == report.layers[1].calibrated_error
    assert plain.layers[1].calibrated_error != report.layers[1].calibrated_error
    with pytest.raises(OptionError, match="sequential needs data"):
        convert(half, dk=4, calibration="none", sequential=True)


PARTS = ("embeddings", "encoder.layer.0", "encoder.layer.1", "pooler")


@pytest.mark.parametrize("offloaded", [PARTS, ("encoder.layer.1",)])
def test_a_converted_model_is_loaded_from_disk_as_it_runs(
    tmp_path: Path, offloaded: tuple[str, ...]
) -> None:
    model = TINY["bert"].build()
    convert(model, dk=7, channels=3, calibration="none", iterations=2)
    model.save_pretrained(tmp_path / "model")
    places = {part: "disk" if part in offloaded else "cpu" for part in PARTS}
    loaded = transformers.AutoModel.from_pretrained(
        tmp_path / "model", device_map=places, offload_folder=str(tmp_path / "weights")
    )
    batch = {"input_ids": torch.tensor([[1, 2, 3, 4, 5]])}
    with torch.no_grad():
        found = loaded(**batch).last_hidden_state
        assert torch.equal(found, model.eval()(**batch).last_hidden_state)


@pytest.mark.parametrize("name", ["bert", "albert", "vit"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_what_fails_late_leaves_the_model_as_it_was(
    name: str, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = TINY[name].build()
    data = load_calibration("synthetic", model.config, samples=16, max_length=11)
    before = dict(model.named_parameters()), model.config, [type(m) for m in model.modules()]

    def fail(*_: Any) -> None:
        assert all(site.converted for site in find_attention(model))
        raise error

    monkeypatch.setattr("collabify.conversion.measure_drift", fail)
    with pytest.raises(error):
        convert(model, dk=5, calibration=data)
    parameters, config, types = before
    after = dict(model.named_parameters())
    assert after.keys() == parameters.keys()
    assert all(after[key] is parameters[key] for key in parameters)
    assert model.config is config
    assert [type(m) for m in model.modules()] == types
    assert not hasattr(find_attention(model)[0].module, "mixing")
    monkeypatch.undo()
    convert(model, dk=5, calibration=data)


def test_a_config_that_asks_for_tuples_is_converted() -> None:
    model = TINY["bert"].build()
    model.config.return_dict = False
    report = convert(model, kept=0.7, samples=32, max_length=11, multiple=1)
    assert report.drift is not None


def test_gradients_of_a_half_precision_model_survive_healing() -> None:
    model, original = (TINY["bert"].build().bfloat16() for _ in range(2))
    convert(model, dk=5, samples=16, max_length=11)
    batch = {"input_ids": torch.tensor([[1, 2, 3, 4, 5]])}
    model.train()(**batch).last_hidden_state.square().sum().backward()
    gradients = {
        name: (p.grad, p.grad.clone()) for name, p in model.named_parameters() if p.grad is not None
    }
    with torch.no_grad():
        heal(model, original, samples=16, max_length=11, steps=2)
    assert model.training
    assert len(gradients) > 5
    for name, parameter in model.named_parameters():
        assert parameter.dtype == torch.bfloat16
        assert parameter.requires_grad
        if name in gradients:
            assert parameter.grad is gradients[name][0]
            assert torch.equal(parameter.grad, gradients[name][1])
    assert model(**batch).last_hidden_state.dtype == torch.bfloat16


def test_sensitivities_do_not_depend_on_half_precision() -> None:
    """Squares of what a large model's states differ by do not fit into float16."""
    model = TINY["bert"].build()
    model.encoder.layer[1].output.LayerNorm.weight.data *= 3e3
    found = []
    for dtype in (torch.float32, torch.float16):
        again = copy.deepcopy(model).to(dtype)
        data = load_calibration("synthetic", again.config, samples=32, max_length=11)
        spaces = calibrate(again, find_attention(again), data, None)
        found.append(sensitivities(again, find_attention(again), spaces.inputs, data.batches))
    assert found[1] == pytest.approx(found[0], rel=0.2)


@pytest.mark.parametrize(
    "options",
    [
        {"method": "tucker", "head_rank": 1},
        {"solver": "tensorly"},
        {"method": "tucker", "solver": "tensorly"},
    ],
)
def test_an_error_that_cannot_be_promised_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=r"error=0\.1 goes with our solver of cp"):
        convert(TINY["bert"].build(), error=0.1, calibration="none", **options)


@pytest.mark.parametrize("method", ["cp", "head-svd", "tucker"])
@pytest.mark.parametrize("error", [0.1, 0.3, 0.5])
def test_the_error_allowed_is_never_exceeded(method: Any, error: float) -> None:
    """One head has nearly everything, evenly over its channels: it needs them all."""
    model = TINY["bert"].build()
    for site in find_attention(model):
        for part in (site.query, site.key):
            heads = part.weight.data.view(HEADS, HEAD_DIM, -1)
            heads[:1] = torch.linalg.qr(heads[0].T).Q.T
            heads[1:] *= 0.1
    options = {"calibration": "none", "multiple": 1, "iterations": 5, "method": method}
    if error**2 < 1 / HEAD_DIM and method != "tucker":
        with pytest.raises(RankError, match=f"must be at least .* keep {HEAD_DIM - 1} channels"):
            convert(model, error=error, **options)
        options["channels"] = HEAD_DIM
    report = convert(model, error=error, **options)
    assert report.error is not None
    assert report.error <= error + TOLERANCES["gram"]


@pytest.mark.parametrize("offloads", [False, True])
def test_a_model_that_accelerate_has_placed_is_refused(offloads: bool) -> None:
    model = TINY["bert"].build()
    if offloads:
        accelerate.cpu_offload(model)
    else:
        accelerate.dispatch_model(model, {"": "cpu"}, force_hooks=True)
    with pytest.raises(UnsupportedModelError, match="was placed by accelerate"):
        convert(model, dk=5, calibration="none")
