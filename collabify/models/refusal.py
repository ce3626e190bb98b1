"""Why a model cannot be converted: its attention is not one fixed bilinear form per head.

The reasons are read off the model's configuration and modules, so that they hold for architectures
nobody listed.
"""

from collections.abc import Iterable
from typing import Any

from torch import nn

_ROTARY = (
    "rotates its queries and keys (RoPE), so its heads are not fixed bilinear forms: "
    "what they compare depends on the distance of the tokens"
)
_NORMED = "normalises its queries or keys per head, so its scores are not bilinear in the tokens"
_DISENTANGLED = (
    "adds disentangled position terms to its scores (DeBERTa), "
    "which are not a form of the tokens alone"
)
_CAPPED = "caps its logits with a tanh, so its scores are not bilinear in the tokens"
_SINKS = "has attention sinks, learned logits beside those of the tokens"
_RELATIVE = "adds relative position terms to its scores, which are not a form of the tokens alone"
_DECODER = "is a decoder: causal attention and key-value caches are not supported yet"
_CROSS = "has cross-attention, which is not supported yet"

_MODULES = (
    (("rotary_emb", "rotary_embeddings", "rope", "rope_embeddings"), _ROTARY),
    (("q_norm", "k_norm", "query_norm", "key_norm", "q_layernorm", "k_layernorm"), _NORMED),
)


def reason_against(model: nn.Module) -> tuple[str, str] | None:
    """The first reason against converting ``model``, with the place where it was seen.

    Returns
    -------
    place, reason
        ``None`` where nothing speaks against it.
    """
    config: Any = model.config
    for name, module in model.named_modules():
        leaf = name.rpartition(".")[2]
        for leaves, reason in _MODULES:
            if leaf in leaves:
                return name, reason
        if "sinks" in module._parameters:
            return name, _SINKS
    for names, reason in (
        (("rope_parameters", "rope_theta", "rope_scaling", "rotary_emb_base"), _ROTARY),
        (("relative_attention", "pos_att_type"), _DISENTANGLED),
        (("attn_logit_softcapping",), _CAPPED),
        (("is_decoder",), _DECODER),
        (("add_cross_attention", "is_encoder_decoder"), _CROSS),
    ):
        seen = _first_set(config, names)
        if seen:
            return f"config.{seen}", reason
    position = getattr(config, "position_embedding_type", None) or "absolute"
    if position != "absolute":
        reason = _ROTARY if position == "rotary" else _RELATIVE
        return f"config.position_embedding_type={position!r}", reason
    return None


def _first_set(config: Any, names: Iterable[str]) -> str | None:
    return next((name for name in names if getattr(config, name, None)), None)
