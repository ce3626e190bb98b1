"""The value side: fewer channels of what heads hand on, and value heads that several read."""

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
from collabify.calibration import Moments, collect_attended, collect_moments
from collabify.decompose import ValueFactors, ValueForms, fit_values, value_strengths
from collabify.decompose.mixed_values import fit_mixed_values
from collabify.drift import eager
from collabify.errors import CheckpointError, OptionError, RankError, UnsupportedModelError
from collabify.healing.checks import new_parameters

INPUT, OUTPUT, WIDTH, TOKENS = 11, 13, 5, 400


def randn(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


@pytest.fixture
def values(generator: torch.Generator) -> ValueForms:
    return ValueForms(
        randn(generator, HEADS, WIDTH, INPUT),
        randn(generator, HEADS, WIDTH),
        randn(generator, HEADS, WIDTH, OUTPUT),
        randn(generator, OUTPUT),
    )


@pytest.fixture
def attended(generator: torch.Generator) -> Tensor:
    """What heads attend to: means, a spread that is not round, and something in common."""
    spread = randn(generator, INPUT, INPUT) * torch.linspace(0.05, 2, INPUT)
    common, own = (randn(generator, n, TOKENS, INPUT) for n in (1, HEADS))
    return (common + own) @ spread + 2 * randn(generator, HEADS, 1, INPUT)


def contexts(values: ValueForms, attended: Tensor) -> Tensor:
    """``[token, c]``."""
    each = torch.einsum("hni,hei->hne", attended, values.value) + values.bias[:, None]
    return torch.cat(list(each), dim=-1)


def moments(x: Tensor) -> Moments:
    return Moments(len(x), x.mean(0), torch.cov(x.T, correction=0))


def whole(values: ValueForms, attended: Tensor) -> Tensor:
    """The layer's output, ``[token, o]``."""
    output = contexts(values, attended) @ values.output.flatten(0, 1)
    return output if values.output_bias is None else output + values.output_bias


def reduced(factors: ValueFactors, attended: Tensor) -> Tensor:
    """The same of factors, head by head."""
    total = torch.zeros(TOKENS, OUTPUT, dtype=torch.float64)
    if factors.output_bias is not None:
        total = total + factors.output_bias
    for n, row in enumerate(factors.value):
        if factors.rows is not None:
            head = attended[int(factors.rows[n]) // WIDTH]
        else:
            assert factors.mixing is not None
            width = len(factors.value) // len(factors.mixing)
            head = torch.einsum("h,hni->ni", factors.mixing[n // width], attended)
        value = head @ row
        if factors.bias is not None:
            total_weight = (
                1.0 if factors.mixing is None else float(factors.mixing[n // width].sum())
            )
            value = value + factors.bias[n] * total_weight
        total = total + value[:, None] * factors.output[:, n]
    return total


def relative(after: Tensor, before: Tensor) -> float:
    """Error of an output about its mean."""
    return float((after - before).norm() / (before - before.mean(0)).norm())


def test_all_channels_are_exact(values: ValueForms, attended: Tensor) -> None:
    for seen in (None, moments(contexts(values, attended))):
        factors, error = fit_values(values, seen, HEADS * WIDTH, has_bias=True)
        assert error < TOLERANCES["recovered"]
        after = reduced(factors, attended)
        assert relative(after, whole(values, attended)) < TOLERANCES["recovered"]


@pytest.mark.parametrize("channels", [1, 4, 7, 11, 14])
def test_the_error_is_that_of_the_output(
    channels: int, values: ValueForms, attended: Tensor
) -> None:
    seen = moments(contexts(values, attended))
    factors, error = fit_values(values, seen, channels, has_bias=True)
    assert factors.value.shape == (channels, INPUT)
    assert factors.output.shape == (OUTPUT, channels)
    assert relative(reduced(factors, attended), whole(values, attended)) == pytest.approx(
        error, rel=1e-4
    )
    offset = (reduced(factors, attended) - whole(values, attended)).mean(0)
    assert offset.abs().max() < 1e-6, "the output's bias takes up what the means make"


def test_outputs_are_least_squares_on_what_is_kept(values: ValueForms, attended: Tensor) -> None:
    seen = moments(contexts(values, attended))
    factors, _ = fit_values(values, seen, 8, has_bias=True)
    assert factors.rows is not None
    assert factors.bias is not None
    heads = (factors.rows // WIDTH).tolist()
    columns = [attended[h] @ row for h, row in zip(heads, factors.value, strict=True)]
    kept = torch.stack(columns, dim=1)
    target = whole(values, attended)
    kept, target = kept - kept.mean(0), target - target.mean(0)
    best = torch.linalg.lstsq(kept, target).solution
    assert_close(factors.output.T, best, "recovered")


def test_data_and_freedom_among_heads_both_help(values: ValueForms, attended: Tensor) -> None:
    """Beside the weights alone, and beside as many channels for every head."""
    before, seen = whole(values, attended), moments(contexts(values, attended))
    errors = {}
    for name, said in (("weights", None), ("data", seen)):
        factors, _ = fit_values(values, said, 9, has_bias=True)
        errors[name] = relative(reduced(factors, attended), before)
    even = torch.zeros(())
    covariance = seen.covariance.view(HEADS, WIDTH, HEADS, WIDTH)
    for h in range(HEADS):
        own = torch.linalg.eigh(covariance[h, :, h])
        root = (own.eigenvectors * own.eigenvalues.sqrt()) @ own.eigenvectors.T
        even = even + torch.linalg.svdvals(root @ values.output[h])[3:].square().sum()
    assert errors["data"] < 0.7 * errors["weights"]
    assert errors["data"] < float(even.sqrt() / (before - before.mean(0)).norm() * TOKENS**0.5)


def test_strengths_bound_what_is_lost(values: ValueForms, attended: Tensor) -> None:
    seen = moments(contexts(values, attended))
    strengths = value_strengths(values, seen)
    assert strengths.shape == (HEADS * WIDTH,)
    assert torch.equal(strengths, strengths.sort(descending=True).values)
    heads = contexts(values, attended).view(TOKENS, HEADS, WIDTH)
    apart = torch.einsum("nhe,heo->hno", heads - heads.mean(0), values.output)
    own = apart.square().sum((1, 2)) / TOKENS
    assert float(strengths.sum()) == pytest.approx(float(own.sum()), rel=1e-3)


def test_dead_and_few_contexts_are_no_trouble(values: ValueForms) -> None:
    few = torch.zeros(3, HEADS * WIDTH).double()
    few[1, 2] = 1.0
    for seen in (moments(few), moments(torch.zeros(2, HEADS * WIDTH).double())):
        factors, error = fit_values(values, seen, 4, has_bias=True)
        assert all(t.isfinite().all() for t in (factors.value, factors.output))
        assert error < TOLERANCES["recovered"]


def test_without_an_output_bias_nothing_is_folded(values: ValueForms, attended: Tensor) -> None:
    bare = ValueForms(values.value, torch.zeros_like(values.bias), values.output, None)
    seen = moments(contexts(bare, attended))
    factors, error = fit_values(bare, seen, 9, has_bias=False)
    assert (factors.bias, factors.output_bias) == (None, None)
    before = whole(bare, attended)
    found = float((reduced(factors, attended) - before).norm() / before.norm())
    assert found == pytest.approx(error, rel=1e-4)


# --- value heads that several heads read -------------------------------------------------------


def stats(attended: Tensor) -> Moments:
    centred = attended - attended.mean(1, keepdim=True)
    covariance = torch.einsum("hni,hnj->ij", centred, centred) / (TOKENS * HEADS)
    return Moments(TOKENS, attended.mean(1), covariance)


def test_value_heads_are_exact_as_they_are(values: ValueForms) -> None:
    factors, error = fit_mixed_values(values, None, HEADS, WIDTH, has_bias=True)
    assert error == 0
    assert torch.equal(factors.value, values.value.flatten(0, 1))
    assert torch.equal(factors.output, values.output.flatten(0, 1).T)
    assert factors.mixing is not None
    assert torch.equal(factors.mixing, torch.eye(HEADS).double())


@pytest.mark.parametrize(("count", "width"), [(1, 5), (2, 5), (2, 3), (3, 3), (4, 2)])
def test_constants_are_exact(count: int, width: int, values: ValueForms, attended: Tensor) -> None:
    for said in (None, stats(attended)):
        factors, error = fit_mixed_values(values, said, count, width, has_bias=True)
        assert factors.value.shape == (count * width, INPUT)
        assert factors.mixing is not None
        assert factors.mixing.shape == (count, HEADS)
        assert 0 < error < 1
        if said is not None:
            offset = (reduced(factors, attended) - whole(values, attended)).mean(0)
            assert offset.abs().max() < 1e-6


def test_planted_value_heads_are_found(generator: torch.Generator, attended: Tensor) -> None:
    value, output = randn(generator, 2, 3, INPUT), randn(generator, 2, 3, OUTPUT)
    mix = randn(generator, HEADS, 2)
    planted = ValueForms(
        torch.cat([mix[:, n, None, None] * value[n] for n in range(2)], dim=1),
        torch.zeros(HEADS, 6).double(),
        torch.cat([output[n].expand(HEADS, -1, -1) for n in range(2)], dim=1),
        torch.zeros(OUTPUT).double(),
    )
    factors, error = fit_mixed_values(
        planted, stats(attended), 2, 3, has_bias=False, iterations=400, tolerance=0.0
    )
    assert error < TOLERANCES["recovered"]
    assert relative(reduced(factors, attended[:, :, :]), _planted(planted, attended)) < 1e-4


def _planted(values: ValueForms, attended: Tensor) -> Tensor:
    maps = torch.einsum("hei,heo->hio", values.value, values.output)
    return torch.einsum("hni,hio->no", attended, maps)


# --- calibration -------------------------------------------------------------------------------


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
