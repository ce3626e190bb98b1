"""Talking heads, general bilinear attention and block terms: one family, equal where it must be."""

import re
from itertools import pairwise
from typing import Any

import pytest
import torch
from conftest import HEAD_DIM, HEADS, KEY_SIZE, QUERY_SIZE
from tiny_models import FORMS, LOW, TINY, factors, run, sources
from tolerances import TOLERANCES, assert_close
from torch import Tensor, nn

from collabify import convert, find_attention
from collabify.attention import GeneralBilinearAttention
from collabify.decompose import (
    BlockFactors,
    CPFactors,
    fit_block_term,
    fit_cp,
    fit_head_svd,
    fit_own_heads,
)
from collabify.decompose.head_svd import head_triplets
from collabify.errors import OptionError, RankError
from collabify.forms import HeadForms
from collabify.report import conversion_table

BASE, WIDTH = 2, 7


def randn(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def stack(factors: BlockFactors) -> HeadForms:
    """Heads that are exactly such a mix."""
    w_q = factors.as_cp.head_mixing()[..., None] * factors.query
    w_k = factors.key.expand(len(w_q), -1, -1)
    return HeadForms(w_q, w_k, torch.zeros_like(w_k[:, 0]), 0.3)


# --- block terms -------------------------------------------------------------------------------


def test_a_planted_mix_is_found(generator: torch.Generator) -> None:
    query, key = randn(generator, BASE * WIDTH, 23), randn(generator, BASE * WIDTH, 29)
    planted = BlockFactors(query, key, randn(generator, 5, BASE), 5)
    found = fit_block_term(stack(planted), BASE, WIDTH, iterations=400, tolerance=0.0)
    assert found.factors.relative_error(stack(planted)) < TOLERANCES["recovered"]


def test_blocks_of_one_are_a_cp(forms: HeadForms) -> None:
    """cp with rank R is talking heads with R base heads of width one."""
    cp = fit_cp(forms, 9).factors
    assert isinstance(cp, CPFactors)
    blocks = BlockFactors(cp.query, cp.key, cp.mixing, HEADS)
    assert torch.equal(blocks.dense(), cp.dense())
    x, y = torch.ones(QUERY_SIZE).double(), torch.eye(KEY_SIZE).double()
    assert torch.equal(blocks.key_term(x), cp.key_term(x))
    assert_close(blocks.logits(x[None, None], y[None]), cp.logits(x[None, None], y[None]), "exact")
    found = fit_block_term(forms, 9, 1, iterations=300, tolerance=1e-6)
    assert found.relative_error < fit_cp(forms, 9, iterations=300).relative_error * 1.05


def test_the_heads_are_block_terms_of_themselves(forms: HeadForms) -> None:
    found = fit_block_term(forms, HEADS, HEAD_DIM)
    assert (found.errors, found.converged) == ((0.0,), True)
    assert isinstance(found.factors, BlockFactors)
    assert torch.equal(found.factors.query, forms.w_q.flatten(0, 1))
    assert found.factors.mixing is not None
    assert torch.equal(found.factors.mixing, torch.eye(HEADS).double())
    alone = fit_own_heads(forms, HEAD_DIM).factors
    assert isinstance(alone, BlockFactors)
    assert alone.mixing is None
    assert_close(alone.dense(), forms.dense(), "exact")


def test_heads_of_their_own_keep_their_strongest_triplets(forms: HeadForms) -> None:
    found = fit_own_heads(forms, 2)
    values, left, right = head_triplets(forms)
    expected = [
        sum(values[h, n] * torch.outer(left[h, n], right[h, n]) for n in (0, 1)) for h in range(3)
    ]
    assert_close(found.factors.dense(), torch.stack(expected), "rounding")
    assert found.relative_error == pytest.approx(found.factors.relative_error(forms))


@pytest.mark.parametrize(("base", "width"), [(1, 4), (2, 3), (3, 2), (4, 3), (7, 2)])
def test_mixing_never_loses_to_heads_apart(base: int, width: int, forms: HeadForms) -> None:
    found = fit_block_term(forms, base, width)
    assert isinstance(found.factors, BlockFactors)
    assert found.factors.query.shape == (base * width, QUERY_SIZE)
    assert found.factors.key.shape == (base * width, KEY_SIZE)
    assert found.factors.mixing is not None
    assert found.factors.mixing.shape == (HEADS, base)
    for before, after in pairwise(found.errors[1:]):
        assert after**2 <= before**2 + 2 * TOLERANCES["float32 squares"]  # precision changes
    assert found.relative_error == pytest.approx(found.factors.relative_error(forms), rel=1e-6)
    assert found.factors.query.dtype == torch.float64
    if base == HEADS:
        apart = fit_own_heads(forms, width)
        assert found.relative_error < apart.relative_error
    if base * width <= forms.full_rank:
        shared = fit_cp(forms, base * width)  # the same, untied
        assert found.relative_error > shared.relative_error * (1 - 1e-3)


def test_heads_that_repeat_one_another_need_one_base_head(generator: torch.Generator) -> None:
    w_q, w_k = randn(generator, 1, 3, 11), randn(generator, 1, 3, 13)
    weights = torch.tensor([1.0, -2.0, 0.5, 3.0]).double()[:, None, None]
    forms = HeadForms(weights * w_q, w_k.expand(4, -1, -1), torch.zeros(4, 13).double(), 1.0)
    assert fit_block_term(forms, 1, 3).relative_error < TOLERANCES["recovered"]
    assert fit_head_svd(forms, 3).relative_error > 0.3


def test_heads_of_zeros_are_no_trouble() -> None:
    forms = HeadForms(
        *(torch.zeros(3, 4, 11).double() for _ in range(2)), torch.zeros(3, 11).double(), 1.0
    )
    found = fit_block_term(forms, 2, 3)
    assert found.relative_error == 0
    assert found.factors.dense().abs().max() == 0


# --- modules -----------------------------------------------------------------------------------


def attend(site: Any, x: Tensor, allowed: Tensor) -> tuple[Tensor, Tensor]:
    """A layer as general bilinear attention."""
    mask = torch.zeros(len(x), 1, 1, x.shape[1]).double().masked_fill(~allowed[:, None, None], -1e9)
    with torch.no_grad():
        output, probs = site.general_bilinear()(x, mask)
    return output, probs


@pytest.mark.parametrize("name", ["bert", "albert-groups", "distilbert", "vit-no-bias", "vit-wide"])
@pytest.mark.parametrize("form", ["as trained", "uneven", *LOW])
def test_every_form_is_general_bilinear_attention(name: str, form: str) -> None:
    """Each layer, run forwards, against the full forms that its factors stand for."""
    tiny = TINY[name]
    model = tiny.build(dtype=torch.float64)
    model.set_attn_implementation("eager")
    batch = tiny.batch(model)
    allowed = sources(model, batch)
    if form == "uneven":  # four base heads, three heads, two value heads, all of other widths
        uneven = {
            "base_heads": 4,
            "dk": 20 if name == "vit-wide" else 12,
            "value_heads": 2,
            "dv": 14,
        }
        convert(model, method="talking-heads", calibration="none", **uneven)
    elif form != "as trained":
        convert(model, **LOW[form])
    seen: list[tuple[Any, Tensor, Tensor, Tensor]] = []
    for site in find_attention(model):

        def hook(_: Any, args: Any, kwargs: Any, result: Any, site: Any = site) -> None:
            seen.append((site, args[0] if args else kwargs["hidden_states"], *result))

        site.module.register_forward_hook(hook, with_kwargs=True)
    with torch.no_grad():
        model(**batch)
    assert seen
    for site, x, output, probs in seen:
        whole, expected = attend(site, x, allowed)
        assert_close(probs, expected, "reference")
        if "Albert" in type(site.module).__name__:
            whole = site.module.LayerNorm(x + whole)
        elif site.name.endswith(".self"):
            output = site.output(output)
        assert_close(output[allowed], whole[allowed], "reference")


def test_a_general_form_starts_others(generator: torch.Generator) -> None:
    general = GeneralBilinearAttention(
        randn(generator, HEADS, 11, 11),
        randn(generator, HEADS, 11),
        randn(generator, HEADS, 11, 5),
        randn(generator, 5),
        0.25,
    )
    heads = general.head_forms()
    assert torch.equal(heads.dense(), general.forms.detach())
    exact = fit_head_svd(heads, heads.full_rank).factors
    assert_close(exact.dense(), general.forms.detach(), "exact")
    output, probs = general(randn(generator, 2, 3, 11))
    assert output.shape == (2, 3, 5)
    assert_close(probs.sum(-1), torch.ones(2, HEADS, 3).double(), "exact")


@pytest.mark.parametrize("kernel", ["eager", "sdpa"])
@pytest.mark.parametrize("projections", [None, "logits", "weights", "both"])
def test_inserted_projections_change_nothing(projections: Any, kernel: str) -> None:
    tiny = TINY["bert"]
    model = tiny.build(dtype=torch.float64)
    model.set_attn_implementation(kernel)
    batch = tiny.batch(model)
    with torch.no_grad():
        before = run(model, batch)
        report = convert(model, method="talking-heads", projections=projections)
        assert_close(run(model, batch), before, "exact")
    module: Any = find_attention(model)[0].module
    assert (module.logits_mixing is None) == (projections == "weights")
    assert (module.weights_mixing is None) == (projections == "logits")
    for layer in report.layers:
        assert layer.relative_error == pytest.approx(0, abs=TOLERANCES["gram"])
        assert layer.value_error == (None if projections == "logits" else 0)


def test_heads_talk_once_trained() -> None:
    """Where P_l and P_w are no identities, a head's logits and probabilities reach another."""
    tiny = TINY["bert"]
    model = tiny.build(dtype=torch.float64)
    convert(model, method="talking-heads")
    module: Any = find_attention(model)[0].module
    x = torch.randn(2, 5, 24, generator=torch.Generator().manual_seed(3)).double()
    with torch.no_grad():
        context, probs = module(x)
        module.logits_mixing[2, 0] += 0.5
        after = module(x)[1]
        assert torch.equal(probs[:, :2], after[:, :2])
        assert (probs[:, 2] - after[:, 2]).abs().max() > 1e-2
        module.logits_mixing[2, 0] -= 0.5
        module.weights_mixing[1, 2] += 0.5
        mixed = module(x)[0] - context
        value = module.value(x)[..., 8:16]
    assert_close(mixed[..., 8:16], 0.5 * probs[:, 2] @ value, "reference")
    assert mixed[..., :8].abs().max() < TOLERANCES["exact"]
    assert mixed[..., 16:].abs().max() < TOLERANCES["exact"]


@pytest.mark.parametrize("kernel", ["eager", "sdpa"])
def test_tokens_can_decide_who_talks(kernel: str) -> None:
    """x2l, m2l, x2w and m2w against the equations, with loops."""
    tiny = TINY["bert"]
    model = tiny.build(dtype=torch.float64)
    model.set_attn_implementation(kernel)
    convert(
        model,
        dynamic=True,
        value_heads=2,
        base_heads=2,
        method="talking-heads",
        **{"calibration": "none"},
    )
    module: Any = find_attention(model)[0].module
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name in ("x2l", "m2l", "x2w", "m2w"):
            getattr(module, name).copy_(
                torch.randn(getattr(module, name).shape, generator=generator)
            )
        x = torch.randn(1, 4, 24, generator=generator).double()
        context, probs = module(x)
        q = module.query(x).view(4, 2, -1)
        k = module.key(x)[..., :-3].view(4, 2, -1)
        content = module.key(x)[0, :, -3:]
        v = module.value(x).view(4, 2, -1)
        logits = torch.zeros(3, 4, 4).double()
        for h in range(3):
            for t in range(4):
                for s in range(4):
                    mix = (
                        module.logits_mixing[h] + module.x2l[h] @ x[0, t] + module.m2l[h] @ x[0, s]
                    )
                    logits[h, t, s] = mix @ (q[t] * k[s]).sum(-1) + content[s, h]
        expected = (logits * module.scaling).softmax(-1)
        assert_close(probs[0], expected, "reference")
        for t in range(4):
            for n in range(2):
                total = sum(
                    (module.weights_mixing[n] + module.x2w[n] @ x[0, t] + module.m2w[n] @ x[0, s])
                    @ expected[:, t, s]
                    * v[s, n]
                    for s in range(4)
                )
                assert_close(context[0, t].view(2, -1)[n], total, "reference")


def test_terms_of_tokens_are_small_and_of_the_seed() -> None:
    found = []
    for seed in (0, 0, 1):
        model = TINY["bert"].build()
        convert(model, method="talking-heads", dynamic=True, calibration="none", seed=seed)
        found.append(find_attention(model)[1].module.x2w.detach())  # type: ignore[union-attr]
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])
    variance = float(found[0].square().mean())
    assert variance == pytest.approx(1e-2 / (3 * 24), rel=0.3)


def test_no_two_terms_of_tokens_are_the_same() -> None:
    """Neither of two layers, nor of two seeds."""
    found = []
    for seed in range(4):
        model = TINY["bert"].build()
        convert(model, method="talking-heads", dynamic=True, calibration="none", seed=seed)
        for site in find_attention(model):
            terms = (getattr(site.module, name) for name in ("x2l", "m2l", "x2w", "m2w"))
            found += [float(term.detach().flatten()[0]) for term in terms]
    assert len(set(found)) == len(found) == 4 * 2 * 4


def test_the_table_says_what_a_head_reads() -> None:
    for options, said in (
        ({"method": "talking-heads", "projections": "weights", "dk": 12}, "its own"),
        ({"method": "talking-heads", "base_heads": 2, "dk": 12}, "2 base heads"),
        ({"dk": 12, "channels": "all"}, "all"),
    ):
        report = convert(TINY["bert"].build(), calibration="none", **options)
        heads, rows = conversion_table(report)
        assert {row[heads.index("per head")] for row in rows} == {said}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("projections", ["weights", "both"])
def test_other_kernels_are_refused_where_probabilities_are_mixed(projections: str) -> None:
    tiny = TINY["bert"]
    model = tiny.build()
    convert(model, method="talking-heads", projections=projections, calibration="none")
    model.set_attn_implementation("flex_attention")
    with pytest.raises(NotImplementedError, match="Use the attention implementation 'sdpa'"):
        model(**tiny.batch(model))


def test_logits_are_the_same_through_a_kernel() -> None:
    """P_l alone as heads of width n d, for kernels that spare the memory of the logits."""
    tiny = TINY["bert"]
    model = tiny.build(dtype=torch.float64)
    convert(model, **LOW["talking-heads"] | {"value_heads": None})
    x = torch.randn(2, 5, 24, generator=torch.Generator().manual_seed(3)).double()
    for site in find_attention(model):
        module: Any = site.module
        q, k = module.query(x), module.key(x)
        query, key = module.scores(q, k)
        assert_close(query @ key.mT, module.logits(x, q, k), "exact")


def test_dropout_acts_after_the_mixing() -> None:
    """Where one value head reads two heads alike, dropout takes both of a pair or neither."""
    model = TINY["bert"].build(attention_dropout=0.5, dtype=torch.float64).train()
    convert(model, method="talking-heads", calibration="none")
    module: Any = find_attention(model)[0].module
    x = torch.randn(1, 6, 24, generator=torch.Generator().manual_seed(3)).double()
    with torch.no_grad():
        module.weights_mixing.copy_(torch.tensor([[1, 1, 0], [0, 1, 0], [0, 0, 1]]))
        module.value.weight.copy_(torch.eye(24))
        module.value.bias.zero_()
        probs = module(x)[1]
        torch.manual_seed(7)
        context = module(x)[0]
        mixed = torch.stack([probs[:, 0] + probs[:, 1], probs[:, 1], probs[:, 2]], dim=1)
        torch.manual_seed(7)
        dropped = nn.functional.dropout(mixed, 0.5)
    value = x.view(1, 6, 3, 8).transpose(1, 2)
    assert_close(context, (dropped @ value).transpose(1, 2).flatten(2), "reference")


def test_gradients_reach_what_tokens_decide() -> None:
    model = TINY["vit"].build().train()
    convert(model, method="talking-heads", dynamic=True, calibration="none")
    output = run(model, TINY["vit"].batch(model))
    (output * torch.randn_like(output)).sum().backward()
    for label, factor in factors(model).items():
        assert factor.grad is not None, label
        assert factor.grad.isfinite().all(), label


# --- what is asked for -------------------------------------------------------------------------

REFUSED: list[tuple[type[Exception], dict[str, Any], str]] = [
    (OptionError, {"dk": 8, "base_heads": 2}, "base_heads=2 goes with method='talking-heads' only"),
    (OptionError, {"dk": 8, "dynamic": True}, "dynamic=True goes with method='talking-heads'"),
    (OptionError, {"method": "talking-heads", "base_heads": 0}, "base_heads=0 must be at least 1"),
    (OptionError, {"method": "talking-heads", "base_width": 0}, "base_width=0 must be at least 1"),
    (
        OptionError,
        {"method": "talking-heads", "solver": "tensorly"},
        "solver='tensorly' has no method 'talking-heads'",
    ),
    (OptionError, {"method": "talking-heads", "kept": 0.5}, "not 'talking-heads'. Use --dk."),
    (OptionError, {"method": "talking-heads", "error": 0.5}, "error=0.5 goes with our solver of"),
    (
        OptionError,
        {"method": "talking-heads", "channels": 4},
        "channels=4 goes with method='cp' or 'head-svd'",
    ),
    (
        OptionError,
        {"method": "talking-heads", "projections": "weights", "base_heads": 2},
        "base_heads=2 goes with a logits projection",
    ),
    (
        OptionError,
        {"method": "talking-heads", "projections": "logits", "value_heads": 2},
        "value_heads=2 goes with a weights projection",
    ),
    (
        RankError,
        {"method": "talking-heads", "dk": 10, "base_heads": 3},
        "dk=10 must be 12 for 3 base heads of 4",
    ),
    (RankError, {"method": "talking-heads", "dk": 25}, "dk=25 must be between 1 and 24"),
    (
        RankError,
        {"method": "talking-heads", "dk": 23, "base_heads": 5},
        "dk=23 must be 20 for 5 base heads of 4",
    ),
    (
        RankError,
        {"method": "talking-heads", "dk": 24, "base_heads": 50},
        "base_heads=50 must be at most 24",
    ),
    (
        RankError,
        {"method": "talking-heads", "dk": 8, "base_heads": 2, "base_width": 3},
        "dk=8 must be 6 for 2 base heads of 3",
    ),
    (
        RankError,
        {"method": "talking-heads", "base_heads": 5},
        "base_heads=5 of 8 channels each are 40, above the 24 of",
    ),
    (
        RankError,
        {"method": "talking-heads", "base_heads": 1, "base_width": 25},
        "base_width=25 must be at most 24, the inputs of",
    ),
    (
        OptionError,
        {"method": "talking-heads", "channels": "all"},
        "channels='all' goes with method='cp' or 'head-svd' only",
    ),
    (
        RankError,
        {"method": "talking-heads", "projections": "weights", "base_width": 9},
        "base_heads=3 of base_width=9 are 27, above the 24 of",
    ),
]


@pytest.mark.parametrize(("kind", "options", "message"), REFUSED)
def test_what_does_not_fit_is_refused(
    kind: type[Exception], options: dict[str, Any], message: str
) -> None:
    model = TINY["bert"].build()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(kind, match=re.escape(message)):
        convert(model, calibration="none", **options)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_dry_run_counts_what_a_run_makes() -> None:
    for form in FORMS:
        for options in (LOW[form], TINY["bert"].full(form)):
            model = TINY["bert"].build()
            said = convert(model, **options, dry_run=True)
            done = convert(model, **options)
            for counted in ("query_key", "attention", "model"):
                assert getattr(said, counted) == getattr(done, counted), form
            assert done.model.after == sum(p.numel() for p in model.parameters())
            for site, layer in zip(find_attention(model), said.layers, strict=True):
                assert layer.rank == site.query.out_features
