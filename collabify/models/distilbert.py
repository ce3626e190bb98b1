"""DistilBERT: ``attention.{q,k,v,out}_lin``."""

from typing import Any, cast

from torch import Tensor, nn

from collabify.attention import Layout
from collabify.models.adapter import Adapter


def _finish(module: Any, hidden_states: Tensor, context: Tensor) -> Tensor:
    return cast(Tensor, module.out_lin(context))


def _output(base_model: nn.Module, name: str) -> nn.Linear:
    return cast(nn.Linear, base_model.get_submodule(f"{name}.out_lin"))


ADAPTER = Adapter(
    attention_classes={
        "distilbert": "transformers.models.distilbert.modeling_distilbert:DistilBertSelfAttention"
    },
    layout=Layout("q_lin", "k_lin", "v_lin", "dropout", _finish),
    num_heads="n_heads",
    output=_output,
)
