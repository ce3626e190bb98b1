"""Spectra of the factored stack, against singular values of dense matrices."""

import json

import pytest
import torch
from tolerances import TOLERANCES, assert_close

from collabify.forms import HeadForms
from collabify.spectra import AnalysisReport, LayerSpectra, Spectrum, directions
from collabify.spectrum import layer_spectra, product_squares

QUERY_SIZE, KEY_SIZE = 17, 19
ROUNDING, GRAM = TOLERANCES["rounding"], TOLERANCES["gram"]


def random_forms(
    generator: torch.Generator, heads: int, head_dim: int, query_size: int, key_size: int
) -> HeadForms:
    w_q, w_k = (
        torch.randn(heads, head_dim, size, generator=generator, dtype=torch.float64)
        for size in (query_size, key_size)
    )
    return HeadForms(w_q, w_k, torch.zeros_like(w_k[:, 0]), scale=0.5)


@pytest.fixture(params=["narrow", "wide"])
def stack(request: pytest.FixtureRequest, generator: torch.Generator) -> HeadForms:
    """All heads together narrower, or wider, than the layer."""
    if request.param == "narrow":
        return random_forms(generator, 3, 5, QUERY_SIZE, KEY_SIZE)
    return random_forms(generator, 5, 7, 11, 13)


def cumulative(matrix: torch.Tensor, length: int) -> list[float]:
    """Shares of the squared singular values, from the dense matrix."""
    squares = torch.linalg.svdvals(matrix).square()
    shares: list[float] = (squares.cumsum(0) / squares.sum()).tolist()
    return shares[:length]


def centred(matrix: torch.Tensor) -> torch.Tensor:
    """As PCA does: each column, a variable, loses its mean over the rows, the samples."""
    return torch.stack([column - column.mean() for column in matrix.T], dim=1)


def near(shares: list[float], tolerance: float = ROUNDING) -> object:
    return pytest.approx(shares, rel=0, abs=tolerance)


def test_each_head_is_its_own_spectrum(stack: HeadForms) -> None:
    spectra = layer_spectra(stack)
    assert len(spectra.heads) == stack.num_heads
    for spectrum, form in zip(spectra.heads, stack.dense(), strict=True):
        assert spectrum.energy == near(cumulative(form, stack.head_dim))
        assert spectrum.variance == near(cumulative(centred(form), stack.head_dim))


def test_concatenated_is_the_sum_over_heads(stack: HeadForms) -> None:
    whole = stack.dense().sum(0)
    length = min(*whole.shape, stack.full_rank)
    spectrum = layer_spectra(stack).concatenated
    assert spectrum.energy == near(cumulative(whole, length))
    assert spectrum.variance == near(cumulative(centred(whole), length))


def test_sides_are_the_unfoldings(stack: HeadForms) -> None:
    """From Gram matrices: eigenvalues see half the digits, so the tolerance is theirs."""
    spectra = layer_spectra(stack)
    for side, axis in ((spectra.query_side, 1), (spectra.key_side, 2)):
        unfolded = stack.dense().movedim(axis, 0).flatten(1)
        assert side.energy == near(cumulative(unfolded, stack.full_rank), GRAM)
        assert side.variance is None


def test_triplets_pool_the_heads(stack: HeadForms) -> None:
    values = torch.linalg.svdvals(stack.dense())[:, : stack.head_dim].flatten()
    diagonal = torch.diag(values)  # its singular values are the pooled ones
    assert layer_spectra(stack).triplets.energy == near(cumulative(diagonal, stack.full_rank))


def test_product_squares_in_every_shape(generator: torch.Generator) -> None:
    for head_dim, query_size, key_size in ((5, 17, 19), (17, 5, 19), (19, 17, 5)):
        forms = random_forms(generator, 3, head_dim, query_size, key_size)
        expected = torch.linalg.svdvals(forms.dense())[:, :5].square()
        squares = product_squares(forms.w_q, forms.w_k)
        assert_close(squares, expected, "rounding")


def test_constant_rows_have_energy_but_no_variance(generator: torch.Generator) -> None:
    forms = random_forms(generator, 3, 5, QUERY_SIZE, KEY_SIZE)
    w_q = forms.w_q.clone()
    w_q[0, 0] += 100  # one strong direction that every query-side channel has alike
    spectra = layer_spectra(HeadForms(w_q, forms.w_k, forms.content, forms.scale))
    assert spectra.heads[0].variance is not None
    assert spectra.heads[0].energy[0] > 0.99
    assert spectra.heads[0].variance[0] < 0.6


def test_zero_head_and_zero_layer(generator: torch.Generator) -> None:
    forms = random_forms(generator, 3, 5, QUERY_SIZE, KEY_SIZE)
    w_q = forms.w_q.clone()
    w_q[1] = 0
    one = layer_spectra(HeadForms(w_q, forms.w_k, forms.content, forms.scale))
    assert one.heads[1] == Spectrum((1.0,) * 5, (1.0,) * 5)
    assert one.triplets.energy[9:] == near([1.0] * 6)
    none = layer_spectra(HeadForms(w_q * 0, forms.w_k, forms.content, forms.scale))
    for spectrum in (*none.heads, none.concatenated, none.query_side, none.key_side, none.triplets):
        assert set(spectrum.energy) == {1.0}
    assert none.together(0.99) == 1


def test_copies_of_a_head_need_one_heads_directions(generator: torch.Generator) -> None:
    one = random_forms(generator, 1, 5, QUERY_SIZE, KEY_SIZE)
    w_q, w_k, content = (t.expand(3, *t.shape[1:]) for t in (one.w_q, one.w_k, one.content))
    spectra = layer_spectra(HeadForms(w_q, w_k, content, 0.5), index=4, name="layer.4")
    assert (spectra.index, spectra.name) == (4, "layer.4")
    assert directions(spectra.query_side.energy, 1 - GRAM) == 5
    assert directions(spectra.key_side.energy, 1 - GRAM) == 5
    assert directions(spectra.triplets.energy, 1 - GRAM) == 15
    assert len(spectra.query_side.energy) == len(spectra.triplets.energy) == 15


@pytest.mark.parametrize(
    ("level", "expected"),
    [(0.1, 1), (0.5, 1), (0.500001, 2), (0.75, 2), (0.9, 3), (1.0, 4), (1.5, 4)],
)
def test_directions_is_the_first_to_reach_the_level(level: float, expected: int) -> None:
    assert directions((0.5, 0.75, 0.9375, 1.0), level) == expected


def spectra_of(query_side: Spectrum, key_side: Spectrum, *heads: Spectrum) -> LayerSpectra:
    unused = Spectrum((1.0,))
    return LayerSpectra(2, "layer.2", heads, unused, query_side, key_side, unused)


FAST, SLOW = Spectrum((0.9, 0.95, 0.99, 1.0)), Spectrum((0.25, 0.5, 0.75, 1.0))


def test_together_takes_the_side_that_needs_more() -> None:
    for sides in ((FAST, SLOW), (SLOW, FAST)):
        assert spectra_of(*sides, FAST).together(0.9) == 4
    assert spectra_of(FAST, FAST, SLOW).together(0.9) == 1


def test_heads_alone_is_the_mean_over_heads() -> None:
    layer = spectra_of(SLOW, SLOW, FAST, SLOW, SLOW)
    assert layer.heads_alone(0.9) == 3.0
    assert layer.heads_alone(0.5) == pytest.approx(5 / 3)


def test_reports_are_json_and_say_whether_sharing_pays() -> None:
    report = AnalysisReport(
        (spectra_of(FAST, FAST, SLOW, SLOW),), (0.9, 0.5), 8, 8, suggestion_energy=0.95
    )
    record = json.loads(report.to_json())
    side = record["layers"][0]["query_side"]
    assert side["directions"] == {"0.9": 1, "0.5": 1}
    assert side["energy"] == [0.9, 0.95, 0.99, 1.0]
    assert "variance" not in side
    assert record["reading"] == (
        "For 90% of the energy, heads alone need 4 of 4 directions each; "
        "together 1 of 4: sharing pays."
    )
    alike = AnalysisReport((spectra_of(SLOW, SLOW, FAST),), (0.9,), 4, 4, suggestion_energy=0.95)
    assert alike.reading().endswith("together 4 of 4: the heads have little in common.")


def test_variance_is_reported_beside_energy() -> None:
    record = Spectrum((0.5, 1.0), (0.25, 1.0)).to_dict([0.5])
    assert record == {
        "out_of": 2,
        "directions": {"0.5": 1},
        "energy": [0.5, 1.0],
        "variance_directions": {"0.5": 2},
        "variance": [0.25, 1.0],
    }
