"""Solvers: a layer's heads in, shared factors out.

    fit_cp(forms, rank), fit_tucker(forms, rank), fit_head_svd(forms, rank) -> Decomposition

Pure functions; the model is not touched here.
"""

from collabify.decompose.cp import fit_cp
from collabify.decompose.factors import (
    CPFactors,
    Decomposition,
    Factors,
    TuckerFactors,
    empty_factors,
)
from collabify.decompose.head_svd import fit_head_svd, head_triplets
from collabify.decompose.tucker import fit_tucker

__all__ = [
    "CPFactors",
    "Decomposition",
    "Factors",
    "TuckerFactors",
    "empty_factors",
    "fit_cp",
    "fit_head_svd",
    "fit_tucker",
    "head_triplets",
]
