"""Fitting values and outputs: fewer channels, and value heads that several heads read."""

from dataclasses import replace

import pytest
import torch
from tiny_models import HEADS
from tolerances import TOLERANCES, assert_close
from torch import Tensor

from collabify.calibration import Moments
from collabify.decompose import ValueFactors, ValueForms, fit_values, value_strengths
from collabify.decompose.mixed_values import fit_mixed_values

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


def test_values_and_outputs_are_equally_long(values: ValueForms, attended: Tensor) -> None:
    """Whatever the inputs' and the outputs' units: healing steps are of one size."""
    for scale in (1e-3, 1.0, 1e3):
        given = replace(values, output=values.output * scale)
        seen = moments(contexts(values, attended))
        for factors, _ in (
            fit_values(given, seen, 8, has_bias=True),
            fit_mixed_values(given, None, 2, WIDTH, has_bias=True),
        ):
            assert_close(factors.value.norm(dim=1), factors.output.norm(dim=0), "recovered")


@pytest.mark.parametrize("channels", [12, HEADS * WIDTH])
def test_a_channel_that_says_nothing_can_be_trained(
    channels: int, values: ValueForms, attended: Tensor
) -> None:
    """Halves that are both zero could not."""
    output = values.output.clone()
    output[1] = 0
    seen = moments(contexts(values, attended))
    factors, _ = fit_values(replace(values, output=output), seen, channels, has_bias=True)
    lengths = factors.value.norm(dim=1)
    silent = factors.output.norm(dim=0) < 1e-6 * lengths
    assert silent.sum() >= channels - 2 * WIDTH
    assert lengths.min() > 1e-2 * lengths.max()


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
