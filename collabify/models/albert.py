"""ALBERT: ``attention.{query,key,value,dense}`` with residual and norm; one module a group."""

from typing import Any, cast

from torch import Tensor

from collabify.attention import Layout
from collabify.models.adapter import Adapter


def _finish(module: Any, hidden_states: Tensor, context: Tensor) -> Tensor:
    output = module.output_dropout(module.dense(context))
    return cast(Tensor, module.LayerNorm(hidden_states + output))


def _output(name: str) -> str:
    return f"{name}.dense"


ADAPTER = Adapter(
    attention_classes={"albert": "transformers.models.albert.modeling_albert:AlbertAttention"},
    layout=Layout("query", "key", "value", "attention_dropout", _finish),
    num_heads="num_attention_heads",
    head_dim="attention_head_size",
    output=_output,
)
