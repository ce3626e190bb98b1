"""Moments, whitening and what is exact about them; calibrated conversion; drift."""

from typing import Any

import pytest
import torch
from tiny_models import HEADS, TINY, run
from tolerances import TOLERANCES, assert_close
from torch import Tensor, nn

from collabify import convert, find_attention
from collabify.calibration import Moments, MomentSum, Whitening, collect_moments
from collabify.decompose import fit_cp, fit_head_svd, fit_tucker
from collabify.drift import measure_drift
from collabify.errors import NonFiniteError
from collabify.forms import HeadForms

ROUNDING = TOLERANCES["rounding"]


def randn(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def space_of(tokens: Tensor, **options: float) -> Whitening:
    total = MomentSum(tokens)
    total.add(tokens)
    return Whitening.of(total.moments(), **options)


@pytest.fixture
def square_forms(generator: torch.Generator) -> HeadForms:
    """Heads of one width on both sides, as self-attention has them."""
    w_q, w_k, bias = randn(generator, 15, 17), randn(generator, 15, 17), randn(generator, 15)
    return HeadForms.from_projections(w_q, w_k, bias, num_heads=3, scale=0.4)


def test_streamed_moments_are_those_of_all_tokens(generator: torch.Generator) -> None:
    tokens = randn(generator, 101, 7) * torch.arange(1, 8) + 1e6  # a mean that would cancel
    total = MomentSum(tokens[:13])
    for part in tokens.split(13):
        total.add(part)
    found = total.moments()
    centred = tokens - tokens.mean(0)
    assert found.count == 101
    assert_close(found.mean / 1e6, tokens.mean(0) / 1e6, "rounding")
    assert_close(found.covariance, centred.T @ centred / 101, "gram")


def test_whitened_tokens_are_white(generator: torch.Generator) -> None:
    tokens = randn(generator, 500, 7) @ randn(generator, 7, 7) + 3
    space = space_of(tokens)
    assert_close(space.root @ space.inverse, torch.eye(7, dtype=torch.float64), "gram")
    white = (tokens - space.mean) @ space.inverse
    assert_close(white.T @ white / 500, torch.eye(7, dtype=torch.float64), "gram")


@pytest.mark.parametrize("case", ["dead channel", "fewer tokens than channels", "one token"])
def test_singular_covariances_are_normal_input(case: str, generator: torch.Generator) -> None:
    tokens = randn(generator, {"dead channel": 50, "one token": 1}.get(case, 4), 17)
    if case == "dead channel":
        tokens[:, 3] = 2
    space = space_of(tokens)
    assert torch.isfinite(space.root).all()
    assert torch.isfinite(space.inverse).all()
    values = torch.linalg.eigvalsh(space.root)
    assert values.min() >= 1e-3 * values.max() * (1 - 1e-6), "the floor: its root"


def test_whitened_error_is_the_error_of_the_logits(
    square_forms: HeadForms, generator: torch.Generator
) -> None:
    """|root E root|^2 is the mean square of centred logits over independent targets and sources."""
    tokens = randn(generator, 60, 17) @ randn(generator, 17, 17) + 1
    space = space_of(tokens)
    factors = fit_head_svd(square_forms, 6).factors
    error = square_forms.dense() - factors.dense()
    logits = torch.einsum("ti,hij,sj->hts", tokens, error, tokens)
    logits = logits - logits.mean(1, keepdim=True) - logits.mean(2, keepdim=True)
    logits = (
        logits + torch.einsum("ti,hij,sj->hts", tokens, error, tokens).mean((1, 2))[:, None, None]
    )
    white = torch.einsum("ij,hjk,kl->hil", space.root, error, space.root)
    assert_close(logits.square().mean((1, 2)).sqrt(), white.square().sum((1, 2)).sqrt(), "gram")


def softmax(forms: Any, content: Tensor, x: Tensor, y: Tensor) -> Tensor:
    logits = torch.einsum("ti,hij,sj->hts", x, forms, y) + (content @ y.T)[:, None]
    return logits.softmax(-1)


def test_centring_both_sides_is_exact_under_softmax(
    square_forms: HeadForms, generator: torch.Generator
) -> None:
    """Forms on centred targets and sources, the query mean in the content bias: the same probs."""
    x, y, mean = randn(generator, 5, 17), randn(generator, 6, 17), randn(generator, 17)
    dense, content = square_forms.dense(), square_forms.content
    expected = softmax(dense, content, x, y)
    folded = content + square_forms.key_term(mean)
    logits = torch.einsum("ti,hij,sj->hts", x - mean, dense, y - mean)
    assert_close((logits + (folded @ y.T)[:, None]).softmax(-1), expected, "rounding")
    assert (logits.softmax(-1) - expected).abs().max() > 1e-2, "without the content it is not"


@pytest.mark.parametrize("fit", [fit_cp, fit_tucker, fit_head_svd])
def test_key_terms_and_transforms(
    fit: Any, square_forms: HeadForms, generator: torch.Generator
) -> None:
    factors, x = fit(square_forms, 6).factors, randn(generator, 17)
    matrix = randn(generator, 17, 17)
    dense = factors.dense()
    assert_close(factors.key_term(x), torch.einsum("hij,i->hj", dense, x), "rounding")
    assert_close(
        factors.transformed(matrix).dense(),
        torch.einsum("ai,hab,bj->hij", matrix, dense, matrix),
        "rounding",
    )
    assert_close(
        square_forms.key_term(x), torch.einsum("hij,i->hj", square_forms.dense(), x), "rounding"
    )


@pytest.mark.parametrize("name", ["bert", "albert", "vit"])
def test_moments_of_a_model_leave_padding_out(name: str) -> None:
    model = TINY[name].build()
    batch = TINY[name].batch(model)
    sites = find_attention(model)
    layers = {site.name: site.module for site in sites}
    seen: dict[str, list[Tensor]] = {key: [] for key in layers}
    mask = batch.get("attention_mask")
    hooks = []
    for key, module in layers.items():

        def hook(_: nn.Module, args: Any, kwargs: Any, key: str = key) -> None:
            states = args[0] if args else kwargs["hidden_states"]
            seen[key].append(states.flatten(0, 1) if mask is None else states[mask == 1])

        hooks.append(module.register_forward_pre_hook(hook, with_kwargs=True))
    with torch.no_grad():
        model(**batch)
    for handle in hooks:
        handle.remove()
    model.train()
    moments = collect_moments(model, layers, [batch, batch])
    assert model.training
    for key, parts in seen.items():
        tokens = torch.cat(parts).double()
        assert moments[key].count == 2 * len(tokens)
        assert_close(moments[key].mean, tokens.mean(0), "exact")
        assert_close(moments[key].covariance, torch.cov(tokens.T, correction=0), "gradient")


def test_nan_activations_name_the_layer() -> None:
    model = TINY["bert"].build()
    site = find_attention(model)[1]
    model.encoder.layer[0].output.dense.bias.data[3] = float("inf")
    batch = TINY["bert"].batch(model)
    with pytest.raises(NonFiniteError, match=f"input of '{site.name}' is NaN or infinite"):
        collect_moments(model, {site.name: site.module}, [batch])


def batches(model: Any, count: int = 6) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(11)
    first = TINY["bert"].batch(model)
    return [
        first | {"input_ids": torch.randint(5, 40, first["input_ids"].shape, generator=generator)}
        for _ in range(count)
    ]


@pytest.mark.parametrize("method", ["cp", "tucker", "head-svd"])
@pytest.mark.parametrize("solver", ["factored", "tensorly"])
def test_calibration_keeps_more_of_the_model(method: Any, solver: Any) -> None:
    if (method, solver) == ("head-svd", "tensorly"):
        pytest.skip("refused: see test_refusals.py")
    original = TINY["bert"].build()
    data = batches(original)
    drifts = []
    for calibration in ("none", data):
        model = TINY["bert"].build()
        options = {"method": method, "solver": solver, "calibration": calibration}
        report = convert(model, dk=10, iterations=30, **options)
        drifts.append(measure_drift(original, model, data))
        calibrated = {layer.calibrated_error is not None for layer in report.layers}
        assert calibrated == {calibration != "none"}
    assert drifts[1].attention < drifts[0].attention
    assert drifts[1].hidden_error < drifts[0].hidden_error


def test_the_report_says_what_it_was_calibrated_on_and_what_moved() -> None:
    original, model = TINY["bert"].build(), TINY["bert"].build()
    report = convert(model, dk=10, iterations=5, samples=32)
    assert report.calibration is not None
    assert report.calibration.startswith("synthetic")
    assert report.drift is not None
    assert 0 < report.drift.attention < 1
    assert 0 < report.drift.hidden_cosine < 1
    none = convert(original, dk=10, iterations=5, calibration="none")
    assert (none.calibration, none.drift) == (None, None)


def test_drift_is_what_it_says() -> None:
    original, model = TINY["bert"].build(), TINY["bert"].build()
    data = batches(original, 2)
    same = measure_drift(original, model, data)
    assert same.hidden_cosine == pytest.approx(1, abs=ROUNDING)
    assert (same.hidden_error, same.attention) == (0, 0)
    convert(model, dk=6, calibration="none", iterations=2)
    found = measure_drift(original, model, data)
    states, probs = [], []
    for one in (original, model):
        one.set_attn_implementation("eager")
        with torch.no_grad():
            states.append(torch.cat([run(one, batch) for batch in data]))
            probs.append([one(**batch, output_attentions=True).attentions for batch in data])
    cosine = nn.functional.cosine_similarity(states[0], states[1], dim=-1).mean()
    assert found.hidden_cosine == pytest.approx(float(cosine), abs=TOLERANCES["exact"])
    distances = [
        (p - q).abs().sum(-1).transpose(1, 2)[batch["attention_mask"] == 1] / 2
        for batch, old, new in zip(data, *probs, strict=True)
        for p, q in zip(old, new, strict=True)
    ]
    assert distances[0].shape[-1] == HEADS
    expected = float(torch.cat(distances).mean())
    assert found.attention == pytest.approx(expected, abs=TOLERANCES["exact"])


def test_floor_is_a_share_of_the_largest_eigenvalue() -> None:
    covariance = torch.diag(torch.tensor([4.0, 1e-9], dtype=torch.float64))
    space = Whitening.of(Moments(9, torch.zeros(2, dtype=torch.float64), covariance), floor=0.01)
    assert_close(space.root.diagonal(), torch.tensor([2.0, 0.2], dtype=torch.float64), "rounding")
