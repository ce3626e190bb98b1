"""Channels per head, ranks across layers, and what a plan refuses."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from tiny_models import HEAD_DIM, HEADS, TINY, WIDTH
from tolerances import TOLERANCES, assert_close

from collabify import convert, find_attention
from collabify.decompose import CPFactors, fit_cp, fit_head_svd
from collabify.decompose.budget import pooled_strengths, ranks_for_error, ranks_within
from collabify.decompose.support import eliminate
from collabify.errors import OptionError, RankError
from collabify.forms import HeadForms

GRAM = TOLERANCES["gram"]


@pytest.mark.parametrize(("rank", "channels"), [(7, 3), (11, 4), (13, 5), (3, 4)])
def test_each_head_keeps_its_channels(rank: int, channels: int, forms: HeadForms) -> None:
    found = fit_cp(forms, rank, channels=channels, iterations=60)
    factors = found.factors
    assert isinstance(factors, CPFactors)
    assert factors.channels is not None
    assert factors.mixing.shape == factors.channels.shape == (3, min(channels, rank))
    assert all(len(set(kept)) == len(kept) for kept in factors.channels.tolist())
    error = (factors.dense() - forms.dense()).norm() / forms.dense().norm()
    assert found.relative_error == pytest.approx(float(error), abs=GRAM)
    assert found.relative_error <= fit_head_svd(forms, rank, channels=channels).relative_error
    assert found.relative_error >= fit_cp(forms, rank, iterations=400).relative_error - 1e-3
    assert factors.num_parameters == rank * (17 + 19) + 3 * min(channels, rank)


def test_refitting_beats_cutting(forms: HeadForms) -> None:
    dense = fit_cp(forms, 7, iterations=30).factors
    assert isinstance(dense, CPFactors)
    cut = dense.keep(3).relative_error(forms)
    assert fit_cp(forms, 7, channels=3, iterations=60).relative_error < 0.9 * cut


@pytest.mark.parametrize("noise", [0.0, 0.01, 0.1])
@pytest.mark.parametrize("channels", [None, 7])
def test_heads_that_repeat_one_another(
    noise: float, channels: int | None, generator: torch.Generator
) -> None:
    """One-hot starts are a saddle there: each distinct triplet must be taken once, not per head."""
    common = torch.randn(2, 1, 8, 23, generator=generator, dtype=torch.float64)
    own = noise * torch.randn(2, 5, 8, 23, generator=generator, dtype=torch.float64)
    w_q, w_k = common + own
    forms = HeadForms(w_q, w_k, torch.zeros(5, 23, dtype=torch.float64), 1.0)
    errors = [fit_cp(forms, rank, channels=channels).relative_error for rank in (8, 12, 24, 32)]
    one_head_less = fit_head_svd(forms, 35, channels=7).relative_error if channels else 0.0
    assert errors[0] < one_head_less + 1.6 * noise + 0.01
    slack = 0.01 if channels is None else 0.06  # few channels: a search over supports
    assert all(after < before + slack for before, after in pairwise(errors))


def test_full_width_is_exact_with_a_head_s_own_channels(forms: HeadForms) -> None:
    assert fit_cp(forms, 15, channels=5).relative_error < GRAM


def test_head_svd_with_channels_caps_every_head(forms: HeadForms) -> None:
    factors = fit_head_svd(forms, 6, channels=2).factors
    assert isinstance(factors, CPFactors)
    assert (factors.head_mixing() != 0).sum(1).tolist() == [2, 2, 2]


@pytest.mark.parametrize(
    ("dk", "given", "kept"),
    [
        (10, None, HEAD_DIM - 1),
        (5, None, 5),
        (HEADS * HEAD_DIM, None, HEAD_DIM),
        (HEADS * (HEAD_DIM - 1) + 1, None, HEAD_DIM),
        (10, 4, 4),
        (10, "all", None),
    ],
)
def test_default_channels_make_a_head_as_wide_as_its_values(
    dk: int, given: Any, kept: int | None
) -> None:
    model = TINY["bert"].build()
    dry = convert(model, dk=dk, channels=given, calibration="none", dry_run=True)
    report = convert(model, dk=dk, channels=given, calibration="none", iterations=2)
    assert {layer.channels for layer in report.layers} == {kept}
    assert {layer.channels for layer in dry.layers} == {kept}
    module = find_attention(model)[0].module
    q, k = torch.randn(2, 5, dk), torch.randn(2, 5, dk + HEADS)
    with torch.no_grad():
        query, key = module.scores(q, k)
    width = dk + HEADS if kept is None else max(kept + 1, HEAD_DIM)
    assert query.shape == key.shape == (2, HEADS, 5, width)


def strengths() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    values = (torch.rand(length, generator=generator) * size for length, size in ((23, 9), (31, 1)))
    return [v.double().sort(descending=True).values for v in values]


@pytest.mark.parametrize("budget", [100, 150, 201, 400])
def test_no_other_ranks_keep_more_within_the_budget(budget: int) -> None:
    costs, found = [5, 5], ranks_within(strengths(), [5, 5], budget, smallest=1, multiple=1)
    assert sum(c * r for c, r in zip(costs, found, strict=True)) <= budget

    def kept(ranks: list[int]) -> float:
        return sum(float(s[:r].sum()) for s, r in zip(strengths(), ranks, strict=True))

    others = [[a, b] for a in range(1, 24) for b in range(1, 32) if 5 * (a + b) <= budget]
    assert kept(found) == pytest.approx(max(map(kept, others)))
    assert found[0] > found[1] or budget == 400, "the layer with the stronger logits gets more"


def test_ranks_are_multiples_or_all_there_is() -> None:
    for budget in (90, 120, 10**6):
        for rank, length in zip(ranks_within(strengths(), [1, 1], budget), (23, 31), strict=True):
            assert rank % 8 == 0 or rank == length
    assert ranks_within(strengths(), [1, 1], 10**6) == [23, 31]


@pytest.mark.parametrize("error", [0.05, 0.2, 0.3])
def test_error_is_kept_with_the_fewest_ranks(error: float) -> None:
    both = torch.cat(strengths())
    ranks = ranks_for_error(strengths(), error, smallest=1, multiple=1)
    lost = sum(float(s[r:].sum()) for s, r in zip(strengths(), ranks, strict=True))
    assert lost <= error**2 * float(both.sum())
    tail = both.sort().values.cumsum(0)
    assert sum(ranks) == len(both) - int((tail <= error**2 * both.sum()).sum())


def test_strengths_are_in_logits() -> None:
    values = torch.tensor([[3.0, 1.0], [2.0, 0.5]])
    pooled, beyond = pooled_strengths(values, 0.5)
    assert_close(pooled, torch.tensor([2.25, 1, 0.25, 0.0625]), "rounding")
    assert beyond == 0


def test_strengths_beyond_a_head_s_channels_are_lost_and_counted() -> None:
    pooled, beyond = pooled_strengths(torch.tensor([[1.0, 3.0], [2.0, 0.5]]), 0.5, 1)
    assert_close(pooled, torch.tensor([2.25, 1]), "rounding")
    assert beyond == pytest.approx(0.25 + 0.0625)
    both = [torch.tensor([4.0, 1.0]), torch.tensor([4.0, 1.0])]
    assert ranks_for_error(both, 0.5, smallest=1, multiple=1) == [1, 1]
    assert ranks_for_error(both, 0.5, smallest=1, multiple=1, unreachable=0.7) == [2, 1]


def test_kept_chooses_ranks_across_layers() -> None:
    model = TINY["bert"].build()
    model.encoder.layer[1].attention.self.query.weight.data *= 0.05
    report = convert(model, kept=0.7, multiple=1, calibration="none", iterations=3)
    ranks = [layer.rank for layer in report.layers]
    assert ranks[0] > ranks[1]
    assert 0.6 < report.query_key.kept <= 0.7
    for site, rank in zip(find_attention(model), ranks, strict=True):
        assert site.query.weight.shape == (rank, WIDTH)


def test_error_chooses_ranks_that_keep_it() -> None:
    model = TINY["bert"].build()
    report = convert(model, error=0.3, multiple=1, calibration="none", iterations=20)
    assert report.mean_relative_error is not None
    assert 0.1 < report.mean_relative_error < 0.3


@pytest.mark.parametrize("kept", [0.45, 0.6, 0.75, 0.9, 0.97, 1.0])
@pytest.mark.parametrize("channels", [None, 4, "all"])
def test_kept_is_spent_and_never_exceeded(kept: float, channels: Any) -> None:
    model = TINY["bert"].build()
    report = convert(
        model, kept=kept, channels=channels, multiple=1, calibration="none", dry_run=True
    )
    part = report.query_key
    assert part.after <= kept * part.before
    largest = HEADS * (channels if isinstance(channels, int) else HEAD_DIM)
    step = 2 * WIDTH + HEADS  # what one more channel in a layer costs at most
    spent = part.after > kept * part.before - step - HEADS * len(report.layers)
    assert spent or all(layer.rank == largest for layer in report.layers)


@pytest.mark.parametrize("channels", [None, 3])
def test_the_error_asked_for_is_kept_in_logits(channels: int | None) -> None:
    model = TINY["bert"].build()
    forms = [site.read() for site in find_attention(model)]
    report = convert(model, error=0.6, channels=channels, calibration="none", multiple=1)
    lost = whole = 0.0
    for heads, layer in zip(forms, report.layers, strict=True):
        energy = float(heads.dense().square().sum()) * heads.scale**2
        lost += energy * (layer.relative_error or 0) ** 2
        whole += energy
        assert layer.energy == pytest.approx(energy)
    assert report.error == pytest.approx((lost / whole) ** 0.5)
    assert 0.3 < report.error < 0.6


def test_elimination_drops_what_a_head_misses_least() -> None:
    """Two channels that say nearly the same have large weights, and one of them can go."""
    generator = torch.Generator().manual_seed(3)
    query, key = (torch.randn(5, size, generator=generator).double() for size in (17, 19))
    query[1], key[1] = query[0] + 0.01 * query[1], key[0].clone()
    mixing = torch.tensor([[9.0, -8.0, 0.5, 0.5, 0.5], [0.5, 0.5, 9.0, 1.0, 1.0]]).double()
    dense = CPFactors(query, key, mixing).dense()
    left, values, right = torch.linalg.svd(dense, full_matrices=False)
    w_q, w_k = (left * values[:, None]).mT[:, :5], right[:, :5]
    forms = HeadForms(w_q, w_k, torch.zeros(2, 19).double(), 1.0)
    found = eliminate(CPFactors(query, key, mixing), forms, 4)
    assert found.channels is not None
    assert len({0, 1} & set(found.channels[0].tolist())) == 1, "by size both would have stayed"
    assert {2, 3, 4} < set(found.channels[0].tolist())
    by_size = CPFactors(query, key, mixing).keep(4).relative_error(forms)
    assert found.relative_error(forms) < 0.2 * by_size


@pytest.mark.parametrize(
    ("options", "kind", "said"),
    [
        ({}, OptionError, "no size given"),
        ({"dk": 5, "kept": 0.5}, OptionError, "dk and kept given"),
        ({"kept": 1.5}, OptionError, "kept=1.5 must be above 0 and at most 1"),
        ({"kept": 0.05}, RankError, "kept=0.05 must be at least"),
        ({"error": 0.01, "channels": 1}, RankError, "error=0.01 must be at least 0."),
        ({"dk": 9, "heal": 0}, OptionError, "heal=0 must be at least 1"),
        ({"dk": 9, "heal": 5}, OptionError, "heal=5 needs data, and calibration='none' has none"),
        ({"error": 1.0}, OptionError, "error=1.0 must be above 0 and below 1"),
        ({"kept": 0.5, "method": "tucker"}, OptionError, "not 'tucker'"),
        ({"kept": 0.5, "multiple": 0}, OptionError, "round=0 must be at least 1"),
        ({"dk": 9, "channels": 0}, OptionError, "channels=0 must be at least 1"),
        ({"dk": 9, "channels": 2}, RankError, "channels=2 must be at least 3"),
        ({"dk": 9, "channels": 4, "method": "tucker"}, OptionError, "channels=4 goes with"),
        ({"dk": 9, "channels": 4, "solver": "tensorly"}, OptionError, "channels=4 goes with"),
    ],
)
def test_plans_that_are_refused(options: dict[str, Any], kind: Any, said: str) -> None:
    model = TINY["bert"].build()
    before = {name: p.clone() for name, p in model.named_parameters()}
    with pytest.raises(kind, match=f"^{said}|{said}") as caught:
        convert(model, calibration="none", **options)
    assert "\n" not in str(caught.value)
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters())
