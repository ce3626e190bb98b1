"""Attention modules: the factorisations run forwards."""

from collabify.attention.base import Layout, SharedAttention, replace_values, rewrite
from collabify.attention.bilinear import GeneralBilinearAttention
from collabify.attention.collaborative import CollaborativeAttention
from collabify.attention.talking_heads import TalkingHeadsAttention
from collabify.attention.tucker import TuckerAttention
from collabify.decompose.factors import BlockFactors, CPFactors, Factors, TuckerFactors

__all__ = [
    "FORMS",
    "CollaborativeAttention",
    "GeneralBilinearAttention",
    "Layout",
    "SharedAttention",
    "TalkingHeadsAttention",
    "TuckerAttention",
    "replace_values",
    "rewrite",
]

FORMS: dict[type[Factors], type[SharedAttention]] = {
    BlockFactors: TalkingHeadsAttention,
    CPFactors: CollaborativeAttention,
    TuckerFactors: TuckerAttention,
}
