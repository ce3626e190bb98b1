"""Attention modules: the factorisations run forwards."""

from collabify.attention.base import Layout, SharedAttention, rewrite
from collabify.attention.collaborative import CollaborativeAttention
from collabify.attention.tucker import TuckerAttention
from collabify.decompose.factors import CPFactors, Factors, TuckerFactors

__all__ = [
    "FORMS",
    "CollaborativeAttention",
    "Layout",
    "SharedAttention",
    "TuckerAttention",
    "rewrite",
]

FORMS: dict[type[Factors], type[SharedAttention]] = {
    CPFactors: CollaborativeAttention,
    TuckerFactors: TuckerAttention,
}
