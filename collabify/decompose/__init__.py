"""Solvers: a layer's heads in, shared factors out.

    fit_cp(forms, rank), fit_tucker(forms, rank), fit_head_svd(forms, rank),
    fit_block_term(forms, base_heads, width) -> Decomposition
    fit_values(forms, contexts, channels) -> ValueFactors, error

Pure functions; the model is not touched here.
"""

from collabify.decompose.block_term import fit_block_term, fit_own_heads
from collabify.decompose.cp import fit_cp
from collabify.decompose.factors import (
    BlockFactors,
    CPFactors,
    Decomposition,
    Factors,
    TuckerFactors,
    empty_factors,
)
from collabify.decompose.head_svd import fit_head_svd, head_triplets
from collabify.decompose.tucker import fit_tucker
from collabify.decompose.values import (
    ValueFactors,
    ValueForms,
    empty_values,
    fit_values,
    value_strengths,
)

__all__ = [
    "BlockFactors",
    "CPFactors",
    "Decomposition",
    "Factors",
    "TuckerFactors",
    "ValueFactors",
    "ValueForms",
    "empty_factors",
    "empty_values",
    "fit_block_term",
    "fit_cp",
    "fit_head_svd",
    "fit_own_heads",
    "fit_tucker",
    "fit_values",
    "head_triplets",
    "value_strengths",
]
