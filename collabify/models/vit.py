"""ViT and the vision encoders with its attention: ``attention.{q,k,v,o}_proj``."""

from typing import Any, cast

from torch import Tensor

from collabify.attention import Layout
from collabify.models.adapter import Adapter


def _finish(module: Any, hidden_states: Tensor, context: Tensor) -> Tensor:
    return cast(Tensor, module.o_proj(context))


def _output(name: str) -> str:
    return f"{name}.o_proj"


ADAPTER = Adapter(
    attention_classes={
        "deit": "transformers.models.deit.modeling_deit:DeiTAttention",
        "dinov2": "transformers.models.dinov2.modeling_dinov2:Dinov2Attention",
        "vit": "transformers.models.vit.modeling_vit:ViTAttention",
    },
    layout=Layout("q_proj", "k_proj", "v_proj", "attention_dropout", _finish),
    num_heads="num_attention_heads",
    head_dim="head_dim",
    output=_output,
)
