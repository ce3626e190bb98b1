"""The contract of every decomposition, and what each of them promises besides."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from itertools import pairwise

import pytest
import tensorly
import torch
from tensorly.cp_tensor import CPTensor, cp_to_tensor
from tensorly.tucker_tensor import tucker_to_tensor
from tolerances import TOLERANCES, assert_close

from collabify.config import Form, LayerConfig
from collabify.decompose import (
    BlockFactors,
    CPFactors,
    Decomposition,
    Factors,
    TuckerFactors,
    empty_factors,
    fit_cp,
    fit_head_svd,
    fit_tucker,
)
from collabify.decompose.als import WINDOW
from collabify.decompose.cp import balance
from collabify.decompose.oracle import as_tensorly, fit_cp_tensorly, fit_tucker_tensorly
from collabify.forms import HeadForms

HEADS, HEAD_DIM, QUERY_SIZE, KEY_SIZE = 3, 5, 17, 19
FULL_RANK = HEADS * HEAD_DIM
ROUNDING, GRAM = TOLERANCES["rounding"], TOLERANCES["gram"]
RANKS = (2, 3, 5, 7, 11, 13)  # below the full one


@dataclass(frozen=True)
class Solver:
    """A solver under its test name, and what is true of it.

    ``exact``: at full rank the error vanishes, which neither a random start nor a compressed head
    mode promises. ``sweeps``: it iterates. ``ours``: its tolerance is a share of the error.
    """

    fit: Callable[..., Decomposition]
    form: Form
    head_rank: int | None = None
    exact: bool = True
    sweeps: bool = True
    ours: bool = True


SOLVERS = {
    "head-svd": Solver(
        lambda forms, rank, **_: fit_head_svd(forms, rank), "collaborative", sweeps=False
    ),
    "cp": Solver(fit_cp, "collaborative"),
    "tucker": Solver(fit_tucker, "tucker"),
    "tucker-heads": Solver(partial(fit_tucker, head_rank=2), "tucker", head_rank=2, exact=False),
    "cp-tensorly": Solver(fit_cp_tensorly, "collaborative", exact=False, ours=False),
    "tucker-tensorly": Solver(fit_tucker_tensorly, "tucker", ours=False),
    "tucker-heads-tensorly": Solver(
        partial(fit_tucker_tensorly, head_rank=2), "tucker", head_rank=2, exact=False, ours=False
    ),
}
every_solver = pytest.mark.parametrize("solver", SOLVERS.values(), ids=SOLVERS.keys())
exact_solvers = [pytest.param(s, id=name) for name, s in SOLVERS.items() if s.exact]
sweeping_solvers = [pytest.param(s, id=name) for name, s in SOLVERS.items() if s.sweeps]


def randn(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def head_forms(w_q: torch.Tensor, w_k: torch.Tensor) -> HeadForms:
    return HeadForms(w_q, w_k, torch.zeros_like(w_k[:, 0]), scale=0.5)


def dense_error(forms: HeadForms, factors: Factors) -> float:
    truth = forms.dense()
    return float((factors.dense() - truth).norm() / truth.norm())


def tensors(factors: Factors) -> dict[str, torch.Tensor]:
    values = {field.name: getattr(factors, field.name) for field in fields(factors)}
    return {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}


def unfolding(stack: torch.Tensor, axis: int) -> torch.Tensor:
    return stack.movedim(axis, 0).flatten(1)


def tail(matrix: torch.Tensor, rank: int) -> float:
    """Eckart-Young: no matrix of this rank is nearer, as a share of the Frobenius norm."""
    values = torch.linalg.svdvals(matrix)
    return float(values[rank:].norm() / values.norm())


def planted(solver: Solver, generator: torch.Generator, rank: int = HEAD_DIM) -> HeadForms:
    """Forms that are exactly of the solver's form, A^T core[h] B."""
    a, b = randn(generator, rank, QUERY_SIZE), randn(generator, rank, KEY_SIZE)
    if not solver.sweeps:  # head-svd: five triplets, shared out among the heads
        cores = torch.diag_embed(torch.eye(HEADS, dtype=torch.float64)[:, [0, 0, 1, 2, 2]])
    elif solver.form == "collaborative":
        cores = torch.diag_embed(randn(generator, HEADS, rank))
    else:
        seeds = randn(generator, solver.head_rank or HEADS, rank, rank)
        cores = torch.einsum("ha,arc->hrc", randn(generator, HEADS, len(seeds)), seeds)
    return head_forms(cores.mT @ a, b.expand(HEADS, -1, -1))


def random_factors(kind: str, generator: torch.Generator) -> Factors:
    """Factors that are no optimum of anything: neither orthonormal nor balanced."""
    query, key = randn(generator, 7, QUERY_SIZE), randn(generator, 7, KEY_SIZE)
    if kind == "cp":
        return CPFactors(query, key, randn(generator, HEADS, 7))
    if kind == "blocks":
        query, key = randn(generator, 8, QUERY_SIZE), randn(generator, 8, KEY_SIZE)
        return BlockFactors(query, key, randn(generator, HEADS, 2), HEADS)
    key = randn(generator, 11, KEY_SIZE)  # nothing in the form wants both ranks equal
    if kind == "tucker":
        return TuckerFactors(query, key, randn(generator, HEADS, 7, 11))
    return TuckerFactors(query, key, randn(generator, 2, 7, 11), randn(generator, HEADS, 2))


# --- the factors -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["cp", "blocks", "tucker", "tucker-heads"])
def test_factors_need_no_stack(kind: str, forms: HeadForms, generator: torch.Generator) -> None:
    """Norms, errors, logits and tensorly's own reconstruction, against a slow dense stack."""
    factors, truth = random_factors(kind, generator), forms.dense()
    stack = torch.zeros_like(truth)
    for head in range(HEADS):
        if kind == "cp":
            core = torch.diag(factors.mixing[head])
        elif kind == "blocks":
            core = torch.diag(factors.mixing[head][[0, 0, 0, 0, 1, 1, 1, 1]])
        elif kind == "tucker":
            core = factors.core[head]
        else:
            core = sum(m * c for m, c in zip(factors.mixing[head], factors.core, strict=True))
        stack[head] = factors.query.T @ core @ factors.key
    assert_close(factors.dense(), stack, "rounding")
    assert_close(factors.squared_norm(), stack.square().sum(), "rounding")
    assert_close(factors.inner(forms), (stack * truth).sum(), "rounding")
    expected = float((stack - truth).norm() / truth.norm())
    assert factors.relative_error(forms) == pytest.approx(expected, rel=ROUNDING)
    assert factors.num_parameters == sum(tensor.numel() for tensor in tensors(factors).values())

    x, y = randn(generator, 2, 11, QUERY_SIZE), randn(generator, 2, 13, KEY_SIZE)
    logits = torch.einsum("bti,hij,bsj->bhts", x, stack, y)
    assert_close(factors.logits(x, y), logits, "rounding")

    with tensorly.backend_context("pytorch"):
        container = as_tensorly(factors)
        to_tensor = cp_to_tensor if isinstance(container, CPTensor) else tucker_to_tensor
        assert_close(to_tensor(container), stack, "rounding")


# --- the contract ------------------------------------------------------------------------------


@every_solver
def test_recovers_a_planted_truth(solver: Solver, generator: torch.Generator) -> None:
    forms = planted(solver, generator)
    found = solver.fit(forms, HEAD_DIM, iterations=500, tolerance=0.0)
    assert dense_error(forms, found.factors) < TOLERANCES["recovered"]
    for factor, source in ((found.factors.query, forms.w_q), (found.factors.key, forms.w_k)):
        rows = torch.linalg.svd(source.flatten(0, 1)).Vh[:HEAD_DIM]  # the planted subspace
        outside = factor - factor @ rows.T @ rows
        assert outside.norm() < TOLERANCES["recovered"] * factor.norm()


@pytest.mark.parametrize("name", ["cp", "cp-tensorly"])
def test_cp_recovers_the_planted_channels(name: str, generator: torch.Generator) -> None:
    """CP is unique up to order and sign, so that more than the subspace is to be found."""
    forms = planted(SOLVERS[name], generator)
    found = SOLVERS[name].fit(forms, HEAD_DIM, iterations=500, tolerance=0.0).factors
    for factor, truth in ((found.query, forms.w_q[0]), (found.key, forms.w_k[0])):
        unit, wanted = (torch.nn.functional.normalize(rows, dim=1) for rows in (factor, truth))
        cosines = (wanted @ unit.T).abs()
        assert cosines.max(1).values.min() > 1 - TOLERANCES["recovered"]
        assert sorted(cosines.argmax(1).tolist()) == list(range(HEAD_DIM))


@every_solver
def test_error_falls_with_rank(solver: Solver, forms: HeadForms) -> None:
    errors = [dense_error(forms, solver.fit(forms, rank).factors) for rank in RANKS]
    assert all(low < high for high, low in pairwise(errors))


@pytest.mark.parametrize("solver", exact_solvers)
def test_error_vanishes_at_full_rank(solver: Solver, forms: HeadForms) -> None:
    found = solver.fit(forms, FULL_RANK)
    assert dense_error(forms, found.factors) < ROUNDING
    assert found.relative_error < GRAM
    assert found.converged
    if solver.ours:  # the start is exact and says so
        assert found.sweeps == 0


@every_solver
@pytest.mark.parametrize("rank", RANKS)
def test_never_beats_the_eckart_young_bound(solver: Solver, rank: int, forms: HeadForms) -> None:
    stack = forms.dense()
    mixed = rank if solver.form == "collaborative" else solver.head_rank or HEADS
    ranks = (mixed, rank, rank)
    bound = max(tail(unfolding(stack, axis), r) for axis, r in enumerate(ranks))
    assert dense_error(forms, solver.fit(forms, rank).factors) > bound - ROUNDING


@pytest.mark.parametrize("solver", sweeping_solvers)
@pytest.mark.parametrize("rank", RANKS)
def test_no_sweep_raises_the_error(solver: Solver, rank: int, forms: HeadForms) -> None:
    found = solver.fit(forms, rank, tolerance=0.0)
    assert found.sweeps == len(found.errors) - 1 > 0
    squares = torch.tensor(found.errors, dtype=torch.float64).square()  # what Gram matrices see
    assert squares.diff().max() < (
        TOLERANCES["float32 squares"] if solver.fit is fit_cp else ROUNDING
    )


@every_solver
def test_same_seed_same_factors(solver: Solver, forms: HeadForms) -> None:
    first, second = (solver.fit(forms, 7, iterations=20) for _ in range(2))
    assert first.errors == second.errors
    for name, tensor in tensors(first.factors).items():
        assert torch.equal(tensor, tensors(second.factors)[name])


@every_solver
@pytest.mark.parametrize("rank", [2, 7, 13])
def test_reported_error_is_the_dense_one(solver: Solver, rank: int, forms: HeadForms) -> None:
    found = solver.fit(forms, rank, iterations=20)
    expected = dense_error(forms, found.factors)
    assert found.relative_error == pytest.approx(expected, abs=GRAM)
    assert found.factors.relative_error(forms) == pytest.approx(expected, abs=GRAM)


@every_solver
def test_float32_in_float32_out(solver: Solver, forms: HeadForms) -> None:
    single = head_forms(forms.w_q.float(), forms.w_k.float())
    found = solver.fit(single, 7, iterations=20)
    assert {tensor.dtype for tensor in tensors(found.factors).values()} == {torch.float32}
    assert found.relative_error == pytest.approx(
        dense_error(single, found.factors), abs=TOLERANCES["float32 gram"]
    )
    double = solver.fit(forms, 7, iterations=20)
    assert found.relative_error == pytest.approx(
        double.relative_error, abs=TOLERANCES["float32 gram"]
    )
    widened = found.factors.to(torch.float64)
    assert type(widened) is type(found.factors)
    for name, tensor in tensors(widened).items():
        assert tensor.dtype == torch.float64
        assert torch.equal(tensor, tensors(found.factors)[name].double())


@every_solver
def test_shapes_are_those_that_a_checkpoint_expects(solver: Solver, forms: HeadForms) -> None:
    rank = 7
    layer = LayerConfig(0, solver.form, rank, solver.head_rank)
    empty = empty_factors(layer, num_heads=HEADS, query_size=QUERY_SIZE, key_size=KEY_SIZE)
    fitted = solver.fit(forms, rank, iterations=2).factors
    shapes = [{n: t.shape for n, t in tensors(f).items()} for f in (empty, fitted)]
    assert type(empty) is type(fitted)
    assert shapes[0] == shapes[1]
    assert {tensor.device.type for tensor in tensors(empty).values()} == {"meta"}
    cores = solver.head_rank or HEADS
    core = HEADS * rank if solver.form == "collaborative" else cores * rank**2
    heads = HEADS * solver.head_rank if solver.head_rank else 0
    expected = rank * (QUERY_SIZE + KEY_SIZE) + core + heads
    assert empty.num_parameters == fitted.num_parameters == expected


@pytest.mark.parametrize("solver", sweeping_solvers)
def test_converged_is_honest(solver: Solver, forms: HeadForms) -> None:
    cut_short = solver.fit(forms, 7, iterations=1, tolerance=0.0)
    assert (cut_short.sweeps, cut_short.converged) == (1, False)
    enough = solver.fit(forms, 7, iterations=500, tolerance=1e-2)
    assert enough.converged
    assert 0 < enough.sweeps < 500
    if solver.fit is fit_cp:  # the average of the last sweeps decides, in each phase
        before, last = enough.errors[-WINDOW - 1], enough.errors[-1]
        assert before - last <= WINDOW * 1e-2 * last
    elif solver.ours:
        gains = -torch.tensor(enough.errors).diff() / torch.tensor(enough.errors[:-1])
        assert gains[-1] <= 1e-2
        assert (gains[:-1] > 1e-2).all()  # not a sweep too many


@every_solver
@pytest.mark.parametrize("rank", [7, 13, FULL_RANK])
@pytest.mark.parametrize("case", ["duplicate", "zero"])
def test_deficient_heads(solver: Solver, case: str, rank: int, forms: HeadForms) -> None:
    """No NaN, and exact where the method is: two distinct heads need no more than two cores."""
    w_q, w_k = forms.w_q.clone(), forms.w_k.clone()
    w_q[1], w_k[1] = (w_q[0], w_k[0]) if case == "duplicate" else (0 * w_q[1], w_k[1])
    deficient = head_forms(w_q, w_k)
    found = solver.fit(deficient, rank)
    assert all(tensor.isfinite().all() for tensor in tensors(found.factors).values())
    assert torch.tensor(found.errors).isfinite().all()
    if (solver.exact and rank == FULL_RANK) or (solver.head_rank and rank > 2 * HEAD_DIM):
        assert dense_error(deficient, found.factors) < ROUNDING
        assert found.converged


@every_solver
@pytest.mark.parametrize("rank", [1, 7, FULL_RANK])
def test_a_layer_of_zeros(solver: Solver, rank: int, forms: HeadForms) -> None:
    nothing = head_forms(forms.w_q, forms.w_k * 0)
    found = solver.fit(nothing, rank)
    assert torch.equal(found.factors.dense(), nothing.dense())
    assert set(found.errors) == {0.0}
    assert found.converged


# --- head-svd ----------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [*RANKS, FULL_RANK])
def test_head_svd_keeps_the_strongest_triplets(rank: int, forms: HeadForms) -> None:
    factors = fit_head_svd(forms, rank).factors
    assert torch.equal(factors.mixing.sum(0), torch.ones(rank, dtype=torch.float64))
    assert set(factors.mixing.unique().tolist()) <= {0.0, 1.0}
    u, values, v_t = torch.linalg.svd(forms.dense(), full_matrices=False)
    least = values.flatten().sort(descending=True).values[rank - 1]
    kept = torch.where(values >= least, values, 0.0)
    expected = torch.einsum("hid,hd,hdj->hij", u, kept, v_t)
    assert_close(factors.dense(), expected, "rounding")
    owners = factors.mixing.argmax(0)
    assert torch.equal(owners, owners.sort().values)  # a head's channels stay together


# --- cp ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("iterations", [1, 100])
@pytest.mark.parametrize("rank", RANKS)
def test_cp_starts_at_the_head_svd_and_improves(
    rank: int, iterations: int, forms: HeadForms
) -> None:
    start = dense_error(forms, fit_head_svd(forms, rank).factors)
    found = fit_cp(forms, rank, iterations=iterations)
    assert found.errors[0] == pytest.approx(start, abs=GRAM)
    assert dense_error(forms, found.factors) < start


def assert_balanced(factors: Factors) -> None:
    assert_close(factors.query.norm(dim=1), factors.key.norm(dim=1), "rounding")
    assert_close(factors.mixing.norm(dim=0), torch.ones_like(factors.mixing[0]), "rounding")


def test_balance_changes_lengths_and_not_the_stack(generator: torch.Generator) -> None:
    uneven = random_factors("cp", generator)
    uneven.query[:] *= torch.logspace(-3, 3, 7, dtype=torch.float64)[:, None]
    even = balance(uneven)
    assert_close(even.dense(), uneven.dense(), "rounding")
    assert_balanced(even)
    uneven.query[1], uneven.key[3], uneven.mixing[:, 5] = 0, 0, 0  # dead channels stay dead
    even = balance(uneven)
    assert all(tensor.isfinite().all() for tensor in tensors(even).values())
    assert_close(even.dense(), uneven.dense(), "rounding")


@pytest.mark.parametrize("name", ["head-svd", "cp", "cp-tensorly"])
def test_cp_factors_come_balanced(name: str, forms: HeadForms) -> None:
    assert_balanced(SOLVERS[name].fit(forms, 7, iterations=3).factors)


# --- tucker ------------------------------------------------------------------------------------


@pytest.mark.parametrize("head_rank", [None, 1, 2])
@pytest.mark.parametrize("rank", RANKS)
def test_tucker_is_orthonormal_with_the_best_cores(
    rank: int, head_rank: int | None, forms: HeadForms
) -> None:
    found = fit_tucker(forms, rank, head_rank=head_rank)
    factors = found.factors
    mixing = torch.eye(HEADS, dtype=torch.float64) if factors.mixing is None else factors.mixing
    for basis in (factors.query, factors.key, mixing.T):
        eye = torch.eye(len(basis), dtype=torch.float64)
        assert_close(basis @ basis.T, eye, "rounding")
    best = torch.einsum("ha,ri,hij,cj->arc", mixing, factors.query, forms.dense(), factors.key)
    assert_close(factors.core, best, "rounding")
    stack = forms.dense()  # HOSVD loses no more than its three truncations together
    ranks = ((0, len(mixing.T)), (1, rank), (2, rank))
    tails = sum(tail(unfolding(stack, axis), kept) ** 2 for axis, kept in ranks)
    assert found.errors[0] ** 2 < tails + ROUNDING


# --- tensorly ----------------------------------------------------------------------------------


@pytest.mark.parametrize("head_rank", [None, 2])
@pytest.mark.parametrize("rank", RANKS)
def test_tucker_agrees_with_tensorly(rank: int, head_rank: int | None, forms: HeadForms) -> None:
    options = {"head_rank": head_rank, "iterations": 500, "tolerance": 1e-9}
    ours, theirs = (fit(forms, rank, **options) for fit in (fit_tucker, fit_tucker_tensorly))
    assert dense_error(forms, ours.factors) == pytest.approx(
        dense_error(forms, theirs.factors), abs=TOLERANCES["same optimum"]
    )


@pytest.mark.parametrize("rank", RANKS)
def test_cp_is_not_worse_than_tensorly(rank: int, forms: HeadForms) -> None:
    ours, theirs = (fit(forms, rank, iterations=200) for fit in (fit_cp, fit_cp_tensorly))
    assert (
        dense_error(forms, ours.factors)
        < dense_error(forms, theirs.factors) + TOLERANCES["cp minima"]
    )


def test_tensorly_draws_from_its_seed_and_keeps_its_backend(forms: HeadForms) -> None:
    before = tensorly.get_backend()
    state = torch.get_rng_state()
    first, other = (fit_cp_tensorly(forms, 3, iterations=2, seed=seed) for seed in (0, 1))
    assert not torch.equal(first.factors.query, other.factors.query)
    assert tensorly.get_backend() == before
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("head_rank", [None, 2])
def test_tensorly_takes_fewer_channels_than_heads(head_rank: int | None, forms: HeadForms) -> None:
    found = fit_tucker_tensorly(forms, 1, head_rank=head_rank)
    ours = fit_tucker(forms, 1, head_rank=head_rank)
    assert found.relative_error == pytest.approx(ours.relative_error, abs=TOLERANCES["cp minima"])
