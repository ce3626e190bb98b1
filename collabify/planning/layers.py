"""Which layers a conversion takes, whether they can be taken, and what is counted of them."""

from collections.abc import Sequence

import torch
from torch import nn

from collabify.config import ConversionConfig
from collabify.errors import (
    AlreadyConvertedError,
    LayerError,
    NonFiniteError,
    UnsupportedModelError,
)
from collabify.models import AttentionSite, find_attention
from collabify.results import ParameterCount


def select(
    sites: Sequence[AttentionSite], layers: Sequence[int] | None
) -> tuple[AttentionSite, ...]:
    """The layers asked for, in the model's order, of a model that was not converted before.

    Raises
    ------
    LayerError, AlreadyConvertedError
        Where a layer is not there, or has a shared form.
    UnsupportedModelError
        Where accelerate has placed the model's parts.
    """
    for index in layers or ():
        if not 0 <= index < len(sites):
            raise LayerError(
                f"layer={index} must be between 0 and {len(sites) - 1}: "
                f"the model has {len(sites)} distinct attention layers. Change --layer."
            )
    chosen = tuple(site for site in sites if layers is None or site.index in layers)
    if not chosen:
        raise LayerError(f"layers={layers!r} must name at least one layer. Leave it out for all.")
    for site in sites:
        if hasattr(site.module, "_hf_hook") or site.query.weight.is_meta:
            raise UnsupportedModelError(
                f"{site.name!r} was placed by accelerate (device_map), whose hooks run the old "
                "attention. Load the model on one device, convert it, save it, and place that."
            )
        if site.converted:
            raise AlreadyConvertedError(
                f"{site.name!r} was converted before. Take the original model instead."
            )
    return chosen


def check_finite(model: nn.Module) -> None:
    """Refuse a model with NaN or infinite weights, and name the first.

    Raises
    ------
    NonFiniteError
    """
    for name, parameter in model.named_parameters():
        bad = int((~torch.isfinite(parameter)).sum())
        if bad:
            raise NonFiniteError(
                f"{bad} of the {parameter.numel()} numbers of {name!r} are NaN or infinite; "
                "all must be finite. "
                "Take a checkpoint from before training diverged."
            )


def count(
    model: nn.Module, sites: Sequence[AttentionSite], plan: ConversionConfig
) -> tuple[ParameterCount, ParameterCount, ParameterCount]:
    """Parameters of query-key, attention and the whole model before and after."""
    everything = find_attention(model)
    query_key = sum(site.query_key_parameters for site in everything)
    value_output = sum(site.value_output_parameters for site in everything)
    whole = sum(parameter.numel() for parameter in model.parameters())
    change = values_change = 0
    for site, layer in zip(sites, plan.layers, strict=True):
        after = site.empty_factors(layer).num_parameters + site.num_heads * site.width
        change += after - site.query_key_parameters
        values = site.empty_values(layer)
        if values is not None:
            values_change += values.num_parameters - site.value_output_parameters
    both = change + values_change
    return (
        ParameterCount(query_key, query_key + change),
        ParameterCount(query_key + value_output, query_key + value_output + both),
        ParameterCount(whole, whole + both),
    )
