"""The value side of whole models: fewer channels of what heads hand on."""

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tiny_models import HEADS, LOW, TINY, run, sources
from tolerances import TOLERANCES, assert_close
from torch import Tensor

from collabify import convert, find_attention, heal
from collabify.calibration import collect_attended, collect_moments
from collabify.drift import eager
from collabify.errors import CheckpointError, OptionError, RankError, UnsupportedModelError
from collabify.healing.checks import new_parameters

INPUT, OUTPUT, WIDTH, TOKENS = 11, 13, 5, 400


@pytest.mark.parametrize("name", ["bert", "albert", "vit"])
def test_what_heads_attend_to_is_seen(name: str) -> None:
    """Streamed moments against those of everything at once, padding apart."""
    tiny = TINY[name]
    model = tiny.build(dtype=torch.float64)
    batch = tiny.batch(model)
    real = sources(model, batch)
    seen: dict[str, list[Tensor]] = {}
    with eager(model), torch.no_grad():
        for site in find_attention(model):

            def hook(_: Any, args: Any, kwargs: Any, result: Any, name: str = site.name) -> None:
                x = args[0] if args else kwargs["hidden_states"]
                rows = torch.einsum("bhts,bsi->bhti", result[1], x).transpose(1, 2)[real]
                seen.setdefault(name, []).append(rows)  # n h i

            site.module.register_forward_hook(hook, with_kwargs=True)
        layers = {site.name: site.module for site in find_attention(model)}
        found = collect_attended(model, layers, [batch, batch])
    for site in find_attention(model):
        rows = torch.cat(seen[site.name]).transpose(0, 1)
        assert_close(found[site.name].mean, rows.mean(1), "rounding")
        centred = rows - rows.mean(1, keepdim=True)
        covariance = torch.einsum("hni,hnj->ij", centred, centred) / (centred.shape[1] * HEADS)
        assert_close(found[site.name].covariance, covariance, "rounding")


@pytest.mark.parametrize("name", ["bert", "albert", "distilbert", "vit"])
def test_data_make_the_model_better(name: str) -> None:
    tiny = TINY[name]
    model = tiny.build(dtype=torch.float64)
    batch = tiny.batch(model)
    found = {}
    for calibration in ("none", "data"):
        for how in ({"dv": 14}, {"value_heads": 2}):
            converted = copy.deepcopy(model)
            ready: Any = "none" if calibration == "none" else [batch] * 3
            report = convert(converted, method="head-svd", calibration=ready, **how)
            assert [layer.relative_error for layer in report.layers] == pytest.approx(
                [0] * len(report.layers), abs=TOLERANCES["gram"]
            )
            with torch.no_grad():
                distance = (run(converted, batch) - run(model, batch)).norm()
            found[calibration, *how] = float(distance)
    assert found["data", "dv"] < 0.5 * found["none", "dv"]
    assert found["data", "value_heads"] < found["none", "value_heads"]


def test_channels_are_chosen_across_layers() -> None:
    tiny = TINY["bert"]
    model = tiny.build()
    with torch.no_grad():  # the first layer says little
        find_attention(model)[0].output.weight *= 0.05
    before = sum(site.value_output_parameters for site in find_attention(model))
    report = convert(model, dk=10, kept_values=0.7, calibration=[tiny.batch(model)] * 3, multiple=2)
    first, second = (layer.values for layer in report.layers)
    assert first is not None
    assert second is not None
    assert first < second
    assert {first % 2, second % 2} == {0}
    after = sum(site.value_output_parameters for site in find_attention(model))
    assert 0.6 * before < after <= 0.7 * before
    assert report.attention.after == after + report.query_key.after


def test_healing_trains_values_too() -> None:
    tiny = TINY["bert"]
    original = tiny.build()
    model = copy.deepcopy(original)
    batches = [tiny.batch(model)] * 6
    convert(
        model, calibration=batches, **{k: v for k, v in LOW["values"].items() if k != "calibration"}
    )
    trained = {id(parameter) for parameter in new_parameters(model)}
    for site in find_attention(model):
        parts = (*site.value.parameters(), *site.output.parameters())
        assert all(id(parameter) in trained for parameter in parts)
    report = heal(model, original, calibration=batches, samples=18, steps=20, learning_rate=1e-3)
    assert report.kept
    assert report.loss_after < report.loss_before


REFUSED: list[tuple[type[Exception], dict[str, Any], str]] = [
    (OptionError, {"dv": 0}, "dv=0 must be at least 1. Raise --dv."),
    (OptionError, {"value_heads": 0}, "value_heads=0 must be at least 1. Raise --value-heads."),
    (OptionError, {"kept_values": 1.5}, "kept_values=1.5 must be above 0 and at most 1"),
    (OptionError, {"kept_values": 0.5, "dv": 8}, "dv=8 and kept_values=0.5 given"),
    (
        OptionError,
        {"kept_values": 0.5, "value_heads": 2},
        "kept_values=0.5 goes with heads that have values of their own",
    ),
    (RankError, {"dv": 25}, "dv=25 must be between 1 and 24"),
    (RankError, {"dv": 9, "value_heads": 2}, "dv=9 must be a multiple of 2"),
    (RankError, {"dv": 25, "value_heads": 3}, "dv=25 must be between 1 and 24"),
    (RankError, {"dv": 24, "value_heads": 50}, "value_heads=50 must be at most 24"),
    (RankError, {"dv": 23, "value_heads": 5}, "of 'encoder.layer.0.attention.self', such as 20."),
    (RankError, {"value_heads": 4}, "dv=32 must be between 1 and 24"),
    (RankError, {"kept_values": 0.01}, "kept_values=0.01 must be at least 0.3"),
    (RankError, {"kept_values": 0.4, "multiple": 16}, "kept_values=0.4 must be at least 0.6"),
    (OptionError, {"dk": None, "dv": 8, "method": "tucker"}, "no size given"),
]


@pytest.mark.parametrize(("kind", "options", "message"), REFUSED)
def test_what_does_not_fit_is_refused(
    kind: type[Exception], options: dict[str, Any], message: str
) -> None:
    model = TINY["bert"].build()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(kind, match=re.escape(message)):
        convert(model, **{"dk": 10, "calibration": "none"} | options)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_value_heads_are_no_wider_than_their_input() -> None:
    with pytest.raises(RankError, match="dv=33 in 1 value heads is 33 channels for each, above"):
        convert(TINY["vit-wide"].build(), dk=10, calibration="none", value_heads=1, dv=33)


def test_an_output_that_is_no_plain_projection_is_refused() -> None:
    model = TINY["bert"].build()
    model.encoder.layer[1].attention.output.dense = torch.nn.Identity()
    with pytest.raises(UnsupportedModelError, match="is a Identity, not a torch"):
        convert(model, dk=10, dv=12, calibration="none")


def test_all_channels_are_values_of_our_own(tmp_path: Path) -> None:
    """They are healed, and their loss in a checkpoint is noticed, as of fewer."""
    model = TINY["bert"].build()
    convert(model, dk=10, dv=24, calibration="none")
    assert all(site.values_converted for site in find_attention(model))
    trained = {id(parameter) for parameter in new_parameters(model)}
    assert id(find_attention(model)[1].output.weight) in trained
    model.save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    del state["encoder.layer.1.attention.output.dense.weight"]
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"attention\.output\.dense\.weight"):
        transformers.AutoModel.from_pretrained(tmp_path)


@pytest.mark.parametrize("options", [{"method": "talking-heads"}, {"dk": 24, "dv": 24}])
def test_nothing_new_lies_in_the_memory_of_the_old(options: dict[str, Any]) -> None:
    model = TINY["bert"].build(dtype=torch.float64)
    old = {parameter.data_ptr() for parameter in model.parameters()}
    convert(model, calibration="none", **options)
    assert not {parameter.data_ptr() for parameter in new_parameters(model)} & old


def test_what_was_frozen_stays_frozen() -> None:
    model = TINY["bert"].build()
    first, second = find_attention(model)
    first.value.requires_grad_(False)
    second.output.requires_grad_(False)
    convert(model, dk=10, value_heads=2, calibration="none")
    module: Any = first.module
    assert not first.value.weight.requires_grad
    assert not module.weights_mixing.requires_grad
    assert module.mixing.requires_grad
    assert first.output.weight.requires_grad
    assert second.value.weight.requires_grad
    assert not second.output.weight.requires_grad
    assert not second.output.bias.requires_grad


def test_values_are_as_wide_as_scores() -> None:
    """Kernels want queries, keys and values of one width, at full width too."""
    for dk in (10, 24):
        model = TINY["bert"].build()
        convert(model, dk=dk, dv=12, calibration="none")
        module: Any = find_attention(model)[0].module
        assert module.value_columns.shape == module.channels.shape == (3, 8 if dk == 10 else 9)


def test_means_need_a_bias_to_go_to() -> None:
    model = TINY["bert"].build()
    for site in find_attention(model):
        site.output.bias = None
    with pytest.raises(UnsupportedModelError, match="has no bias to take up what values have"):
        convert(model, dk=10, calibration="none", value_heads=2)
    convert(model, dk=10, calibration="none", dv=13)
    assert find_attention(model)[0].output.bias is None


def test_a_failure_undoes_values_too(monkeypatch: pytest.MonkeyPatch) -> None:
    model = TINY["bert"].build()
    batch = TINY["bert"].batch(model)
    with torch.no_grad():
        before = run(model, batch)
    sizes = [site.output.in_features for site in find_attention(model)]

    def fail(*_: Any) -> None:
        raise RuntimeError("late")

    monkeypatch.setattr("collabify.conversion.measure_drift", fail)
    with pytest.raises(RuntimeError, match="late"):
        convert(model, dk=10, dv=13, calibration=[batch] * 12, samples=24)
    assert [site.output.in_features for site in find_attention(model)] == sizes
    with torch.no_grad():
        assert torch.equal(run(model, batch), before)


def test_values_alone_leave_queries_and_keys_exact() -> None:
    report = convert(TINY["vit"].build(), dv=12, calibration="none")
    for layer in report.layers:
        assert (layer.rank, layer.values) == (24, 12)
        assert layer.relative_error == pytest.approx(0, abs=TOLERANCES["gram"])


def test_moments_of_contexts_come_with_those_of_inputs() -> None:
    tiny = TINY["albert"]
    model = tiny.build(dtype=torch.float64)
    (site,) = find_attention(model)
    batch = tiny.batch(model)
    found = collect_moments(model, {"contexts": site.output}, [batch])["contexts"]
    assert found.count == 3 * int(batch["attention_mask"].sum()), "three passes through one layer"
    assert found.covariance.shape == (24, 24)
