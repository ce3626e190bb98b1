"""Supported architectures, one file each; :func:`find_attention` finds a model's attention layers.

A new architecture is one file with an ``ADAPTER`` and one line in ``ADAPTERS``.
"""

from typing import Any

from torch import nn

from collabify.attention import SharedAttention
from collabify.errors import UnsupportedModelError
from collabify.models import albert, bert, distilbert, vit
from collabify.models.adapter import Adapter, AttentionSite, check_projections
from collabify.models.refusal import reason_against

__all__ = ["ADAPTERS", "AttentionSite", "find_attention", "supported_model_types"]

ADAPTERS: tuple[Adapter, ...] = (albert.ADAPTER, bert.ADAPTER, distilbert.ADAPTER, vit.ADAPTER)


def supported_model_types() -> tuple[str, ...]:
    """Every ``config.model_type`` that has an adapter, sorted."""
    return tuple(sorted(kind for adapter in ADAPTERS for kind in adapter.attention_classes))


def find_attention(model: nn.Module) -> tuple[AttentionSite, ...]:
    """The distinct attention layers of a transformers model, in order.

    Parameters
    ----------
    model
        A ``PreTrainedModel`` of a supported architecture, with or without a head.

    Raises
    ------
    UnsupportedModelError
        Where the attention is not a fixed bilinear form per head, or the architecture has no
        adapter.
    """
    config: Any = getattr(model, "config", None)
    kind = getattr(config, "model_type", None)
    if kind is None:
        raise UnsupportedModelError(
            f"{type(model).__name__} is not a transformers model: it has no config.model_type. "
            f"Supported: {', '.join(supported_model_types())}."
        )
    against = reason_against(model)
    if against is not None:
        place, reason = against
        raise UnsupportedModelError(
            f"{place!r} of model_type={kind!r} {reason}. "
            f"Supported: {', '.join(supported_model_types())}."
        )
    adapter = next((a for a in ADAPTERS if kind in a.attention_classes), None)
    if adapter is None:
        raise UnsupportedModelError(
            f"collabify has no adapter for model_type={kind!r}. "
            f"Supported: {', '.join(supported_model_types())}."
        )
    return _sites(getattr(model, "base_model", model), adapter, kind)


def _sites(base_model: nn.Module, adapter: Adapter, kind: str) -> tuple[AttentionSite, ...]:
    cls = adapter.attention_class(kind)
    sites: list[AttentionSite] = []
    for name, module in base_model.named_modules():  # each distinct module once
        if isinstance(module, cls):
            if hasattr(module, "set_factors") and not isinstance(module, SharedAttention):
                raise UnsupportedModelError(
                    f"{name!r} was built by the modeling_collabify.py of its model. Import "
                    "collabify before loading it, or load it without trust_remote_code."
                )
            check_projections(name, module, adapter.layout)
            output = adapter.output(name)
            projection = base_model.get_submodule(output)
            sites.append(AttentionSite(len(sites), name, module, adapter, output, projection))
    if not sites:
        raise UnsupportedModelError(
            f"{type(base_model).__name__} of model_type={kind!r} holds no {cls.__name__}. "
            f"Supported: {', '.join(supported_model_types())}, as transformers builds them."
        )
    return tuple(sites)
