"""BERT and the encoders that copied its attention: ``attention.self.{query,key,value}``, ``attention.output.dense``."""

from typing import cast

from torch import Tensor, nn

from collabify.attention import Layout
from collabify.models.adapter import Adapter


def _finish(module: nn.Module, hidden_states: Tensor, context: Tensor) -> Tensor:
    return context  # the output projection belongs to the parent


def _output(base_model: nn.Module, name: str) -> nn.Linear:
    return cast(nn.Linear, base_model.get_submodule(name.removesuffix("self") + "output.dense"))


ADAPTER = Adapter(
    attention_classes={
        "bert": "transformers.models.bert.modeling_bert:BertSelfAttention",
        "camembert": "transformers.models.camembert.modeling_camembert:CamembertSelfAttention",
        "electra": "transformers.models.electra.modeling_electra:ElectraSelfAttention",
        "roberta": "transformers.models.roberta.modeling_roberta:RobertaSelfAttention",
        "xlm-roberta": "transformers.models.xlm_roberta.modeling_xlm_roberta:XLMRobertaSelfAttention",
    },
    layout=Layout("query", "key", "value", "dropout", _finish),
    num_heads="num_attention_heads",
    output=_output,
)
