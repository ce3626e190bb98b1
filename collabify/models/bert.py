"""BERT and its copies: ``attention.self.{query,key,value}``, ``attention.output.dense``."""

from torch import Tensor, nn

from collabify.attention import Layout
from collabify.models.adapter import Adapter


def _finish(module: nn.Module, hidden_states: Tensor, context: Tensor) -> Tensor:
    return context  # the output projection belongs to the parent


def _output(name: str) -> str:
    return name.removesuffix("self") + "output.dense"


_MODELING = "transformers.models.{0}.modeling_{0}:{1}SelfAttention"

ADAPTER = Adapter(
    attention_classes={
        "bert": _MODELING.format("bert", "Bert"),
        "camembert": _MODELING.format("camembert", "Camembert"),
        "electra": _MODELING.format("electra", "Electra"),
        "roberta": _MODELING.format("roberta", "Roberta"),
        "xlm-roberta": _MODELING.format("xlm_roberta", "XLMRoberta"),
    },
    layout=Layout("query", "key", "value", "dropout", _finish),
    num_heads="num_attention_heads",
    head_dim="attention_head_size",
    output=_output,
)
