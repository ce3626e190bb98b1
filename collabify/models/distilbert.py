"""DistilBERT: ``attention.{q,k,v,out}_lin``."""

from typing import Any, cast

from torch import Tensor

from collabify.attention import Layout
from collabify.models.adapter import Adapter


def _finish(module: Any, hidden_states: Tensor, context: Tensor) -> Tensor:
    return cast(Tensor, module.out_lin(context))


def _output(name: str) -> str:
    return f"{name}.out_lin"


ADAPTER = Adapter(
    attention_classes={
        "distilbert": "transformers.models.distilbert.modeling_distilbert:DistilBertSelfAttention"
    },
    layout=Layout("q_lin", "k_lin", "v_lin", "dropout", _finish),
    num_heads="n_heads",
    head_dim="attention_head_size",
    output=_output,
)
