"""tensorly's own solvers on the dense stack: ``--solver tensorly``, and the oracle of the tests.

    parafac(forms[h, i, j], r)  ->  mixing[h, r], query[i, r], key[j, r]
    tucker(forms[h, i, j], (a, r, c))  ->  core[a, r, c], mixing[h, a], query[i, r], key[j, c]

They build the stack of h * i * j numbers and take their own starts, a random one for parafac. Their
tolerance is an absolute drop of the relative error, where ours is a share of it, and their history
begins after the first sweep. A layer of zeros, which they cannot normalise, is left to ours.

Reference: Kossaifi et al. 2019, TensorLy: Tensor Learning in Python.
"""

import warnings

import tensorly
import torch
from tensorly.cp_tensor import CPTensor
from tensorly.decomposition import parafac, tucker
from tensorly.tucker_tensor import TuckerTensor

from collabify.decompose.cp import balance
from collabify.decompose.factors import (
    BlockFactors,
    CPFactors,
    Decomposition,
    Factors,
    TuckerFactors,
)
from collabify.decompose.head_svd import fit_head_svd
from collabify.decompose.tucker import fit_tucker
from collabify.forms import HeadForms


def fit_cp_tensorly(
    forms: HeadForms, rank: int, *, iterations: int = 100, tolerance: float = 1e-4, seed: int = 0
) -> Decomposition:
    """Run ``parafac`` from a random start; parameters as :func:`collabify.decompose.cp.fit_cp`."""
    if not forms.squared_norms().any():
        return fit_head_svd(forms, rank)
    with tensorly.backend_context("pytorch"):
        (weights, (mixing, query, key)), errors = parafac(
            forms.dense(),
            rank,
            n_iter_max=iterations,
            tol=tolerance,
            init="random",
            random_state=seed,
            return_errors=True,
        )
    factors = balance(CPFactors(query.T.contiguous(), key.T.contiguous(), mixing * weights))
    return _outcome(forms, factors, errors, iterations)


def fit_tucker_tensorly(
    forms: HeadForms,
    rank: int,
    *,
    head_rank: int | None = None,
    iterations: int = 100,
    tolerance: float = 1e-4,
    seed: int = 0,
) -> Decomposition:
    """Run ``tucker`` (HOOI); parameters as :func:`collabify.decompose.tucker.fit_tucker`."""
    if not forms.squared_norms().any():
        return fit_tucker(forms, rank, head_rank=head_rank)
    heads = forms.num_heads if head_rank is None else head_rank
    with tensorly.backend_context("pytorch"), warnings.catch_warnings():
        # The head mode has more heads than rank * rank directions: tensorly says so and goes on.
        warnings.filterwarnings("ignore", message="Trying to compute SVD with n_eigenvecs")
        (core, (mixing, query, key)), errors = tucker(
            forms.dense(),
            (heads, rank, rank),
            n_iter_max=iterations,
            tol=tolerance,
            init="svd",
            random_state=seed,
            return_errors=True,
        )
    query, key = query.T.contiguous(), key.T.contiguous()
    if head_rank is None:
        factors = TuckerFactors(query, key, torch.einsum("ha,arc->hrc", mixing, core))
    else:
        factors = TuckerFactors(query, key, core.contiguous(), mixing.contiguous())
    return _outcome(forms, factors, errors, iterations)


def as_tensorly(factors: Factors) -> CPTensor | TuckerTensor:
    """The factors in a container of tensorly's, modes ordered head, query side, key side."""
    if isinstance(factors, BlockFactors):
        factors = factors.as_cp
    if isinstance(factors, CPFactors):
        return CPTensor((None, [factors.mixing, factors.query.T, factors.key.T]))
    if not isinstance(factors, TuckerFactors):
        raise TypeError(f"{type(factors).__name__} has no container in tensorly.")
    mixing = factors.mixing
    if mixing is None:
        mixing = torch.eye(len(factors.core), dtype=factors.core.dtype, device=factors.core.device)
    return TuckerTensor((factors.core, [mixing, factors.query.T, factors.key.T]))


def _outcome(
    forms: HeadForms, factors: Factors, errors: list[torch.Tensor], iterations: int
) -> Decomposition:
    """The history with our own final error, so that all solvers are measured alike."""
    history = [float(error) for error in errors]
    final = factors.relative_error(forms)
    return Decomposition(factors, (*history, final), converged=len(history) < iterations)
