"""Tiny random models of every supported architecture, made so that mistakes show.

Weights and biases are large (peaked attention, a content bias that matters), heads are 3 of width 8
in a layer of width 24, batches are padded on both sides.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from collabify.models import find_attention

HEADS, HEAD_DIM, WIDTH, VOCABULARY, LENGTH = 3, 8, 24, 41, 7
LOW_RANK, LOW_HEAD_RANK = 10, 2

# Each form as convert() takes it, at full width and (with LOW) below; fitted to the weights alone.
NONE: Mapping[str, Any] = {"calibration": "none"}
FORMS: Mapping[str, dict[str, Any]] = {
    "cp": {"method": "cp", **NONE},
    "cp-all": {"method": "cp", "channels": "all", **NONE},
    "head-svd": {"method": "head-svd", **NONE},
    "tucker": {"method": "tucker", **NONE},
    "tucker-heads": {"method": "tucker", "head_rank": HEADS, **NONE},
    "talking-heads": {"method": "talking-heads", **NONE},
    "talking-weights": {"method": "talking-heads", "projections": "weights", **NONE},
    "values": {"method": "head-svd", "dv": HEADS * HEAD_DIM, **NONE},
    "value-heads": {"method": "cp", "value_heads": HEADS, **NONE},
}
LOWER: Mapping[str, dict[str, Any]] = {
    "tucker-heads": {"head_rank": LOW_HEAD_RANK},
    "talking-heads": {"base_heads": 2, "value_heads": 2},
    "talking-weights": {"dk": 9, "value_heads": 4, "dv": 12},
    "values": {"dv": 13},
    "value-heads": {"value_heads": 2},
}
LOW: Mapping[str, dict[str, Any]] = {
    name: form | {"dk": LOW_RANK, "iterations": 3} | LOWER.get(name, {})
    for name, form in FORMS.items()
}
# So few channels a head that its query and key are filled up to the width of its values.
LOW = {**LOW, "cp-few": LOW["cp"] | {"channels": 4}}


@dataclass(frozen=True)
class Tiny:
    """One architecture: its configuration, its class with a head, and what a reader should find."""

    kind: str
    headed: str
    sites: tuple[str, ...]
    dropouts: tuple[str, str]
    options: Mapping[str, Any] = field(default_factory=dict)
    head_dim: int = HEAD_DIM

    @property
    def is_vision(self) -> bool:
        return "image_size" in self.options

    def config(self, *, attention_dropout: float = 0.0, dropout: float = 0.0) -> Any:
        shares = dict(zip(self.dropouts, (attention_dropout, dropout), strict=True))
        return transformers.AutoConfig.for_model(self.kind, **self.options, **shares)

    def build(
        self, *, headed: bool = False, dtype: torch.dtype = torch.float32, **drop: Any
    ) -> Any:
        """The model in eval mode; the same weights for the same arguments."""
        config = self.config(**drop)
        with torch.random.fork_rng():
            torch.manual_seed(13)
            if headed:
                model = getattr(transformers, self.headed)(config)
            else:
                model = transformers.AutoModel.from_config(config)
            for name, parameter in model.named_parameters():
                if name.endswith("bias"):
                    nn.init.normal_(parameter, std=0.5)
        return model.to(dtype).eval()

    def batch(self, model: Any) -> dict[str, Tensor]:
        """Inputs in the dtype of ``model``: images, or token ids padded on the right and left."""
        generator = torch.Generator().manual_seed(17)
        if self.is_vision:
            return {"pixel_values": torch.randn(3, 3, 8, 8, generator=generator).to(model.dtype)}
        ids = torch.randint(5, VOCABULARY, (3, LENGTH), generator=generator)
        mask = torch.ones_like(ids)
        mask[1, 4:] = 0
        mask[2, :2] = 0
        return {"input_ids": ids.masked_fill(mask == 0, 1), "attention_mask": mask}

    def full_rank(self, method: str) -> int:
        channels = HEADS * self.head_dim
        return min(channels, WIDTH) if method == "tucker" else channels

    def full(self, form: str) -> dict[str, Any]:
        """Options of :func:`collabify.convert` at which ``form`` is exact."""
        values = {"dv": HEADS * self.head_dim} if "dv" in FORMS[form] else {}
        return FORMS[form] | {"dk": self.full_rank(FORMS[form]["method"])} | values


def run(model: Any, batch: Mapping[str, Tensor], **options: Any) -> Tensor:
    """Hidden states (or logits) of the real positions, stacked."""
    output = model(**batch, **options)[0]
    if "attention_mask" in batch and output.ndim == 3:
        return output[batch["attention_mask"] == 1]
    return output.flatten(0, -2)


def sources(model: Any, batch: Mapping[str, Tensor]) -> Tensor:
    """Positions that may be attended to, ``[b, s]``."""
    if "attention_mask" in batch:
        return batch["attention_mask"] == 1
    with torch.no_grad():
        return torch.ones(model(**batch)[0].shape[:2], dtype=torch.bool)


def factors(model: Any) -> dict[str, nn.Parameter]:
    """The parameters that a conversion made, by name."""
    found = {}
    for site in find_attention(model):
        parts = {"query": site.query.weight, "key": site.key.weight}
        parts |= dict(site.module.named_parameters(recurse=False))
        if site.values_converted:
            parts |= {f"value.{name}": part for name, part in site.value.named_parameters()}
            parts |= {"output": site.output.weight}
        found |= {f"{site.name}.{name}": parameter for name, parameter in parts.items()}
    return found


def aligned(model: Any) -> Any:
    """The model with every parameter in memory of its own.

    Loaded ones lie at any byte of the mapped file, and torch's kernels start differently there.
    """
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    return model


def assert_same(one: Any, other: Any, batch: dict[str, Tensor]) -> None:
    """Both have the same parameters and outputs, bit for bit."""
    for name, value in one.state_dict().items():
        assert torch.equal(value, other.state_dict()[name]), name
    with torch.no_grad():
        assert torch.equal(run(aligned(one).eval(), batch), run(aligned(other).eval(), batch))


def layers(pattern: str, count: int = 2) -> tuple[str, ...]:
    return tuple(pattern.format(index) for index in range(count))


_SIZES = {
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "intermediate_size": 29,
    "initializer_range": 0.4,
}
_TEXT = _SIZES | {"vocab_size": VOCABULARY, "max_position_embeddings": 23, "pad_token_id": 1}
_VISION = _SIZES | {"image_size": 8, "patch_size": 4}
_DROPOUTS = ("attention_probs_dropout_prob", "hidden_dropout_prob")
_BERT = layers("encoder.layer.{}.attention.self")
_VIT = layers("layers.{}.attention")
_ALBERT = "encoder.albert_layer_groups.{}.albert_layers.{}.attention"
_DISTILBERT = {
    "dim": WIDTH,
    "n_layers": 2,
    "n_heads": HEADS,
    "hidden_dim": 29,
    "initializer_range": 0.4,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 23,
    "pad_token_id": 1,
}


def _albert(**options: int) -> dict[str, Any]:
    return _TEXT | {"embedding_size": 11, "num_hidden_layers": 3, **options}


TINY: Mapping[str, Tiny] = {
    "bert": Tiny("bert", "BertForSequenceClassification", _BERT, _DROPOUTS, _TEXT),
    "roberta": Tiny("roberta", "RobertaForMaskedLM", _BERT, _DROPOUTS, _TEXT),
    "xlm-roberta": Tiny("xlm-roberta", "XLMRobertaForTokenClassification", _BERT, _DROPOUTS, _TEXT),
    "camembert": Tiny("camembert", "CamembertForMaskedLM", _BERT, _DROPOUTS, _TEXT),
    "electra": Tiny(
        "electra", "ElectraForPreTraining", _BERT, _DROPOUTS, _TEXT | {"embedding_size": 11}
    ),
    "distilbert": Tiny(
        "distilbert",
        "DistilBertForMaskedLM",
        layers("transformer.layer.{}.attention"),
        ("attention_dropout", "dropout"),
        _DISTILBERT,
    ),
    "albert": Tiny("albert", "AlbertForMaskedLM", (_ALBERT.format(0, 0),), _DROPOUTS, _albert()),
    "albert-groups": Tiny(
        "albert",
        "AlbertForSequenceClassification",
        (_ALBERT.format(0, 0), _ALBERT.format(1, 0)),
        _DROPOUTS,
        _albert(num_hidden_groups=2),
    ),
    "albert-inner": Tiny(
        "albert",
        "AlbertForTokenClassification",
        (_ALBERT.format(0, 0), _ALBERT.format(0, 1)),
        _DROPOUTS,
        _albert(inner_group_num=2),
    ),
    "vit": Tiny("vit", "ViTForImageClassification", _VIT, _DROPOUTS, _VISION),
    "vit-no-bias": Tiny(
        "vit", "ViTForImageClassification", _VIT, _DROPOUTS, _VISION | {"qkv_bias": False}
    ),
    # heads times their width below and above the layer's width
    "vit-narrow": Tiny(
        "vit", "ViTForImageClassification", _VIT, _DROPOUTS, _VISION | {"head_dim": 5}, 5
    ),
    "vit-wide": Tiny(
        "vit", "ViTForMaskedImageModeling", _VIT, _DROPOUTS, _VISION | {"head_dim": 11}, 11
    ),
    "deit": Tiny("deit", "DeiTForImageClassification", _VIT, _DROPOUTS, _VISION),
    "dinov2": Tiny(
        "dinov2",
        "Dinov2ForImageClassification",
        layers("encoder.layer.{}.attention"),
        _DROPOUTS,
        _VISION | {"mlp_ratio": 2},
    ),
}

# The forms that came later differ in what all architectures have in common: some models will do.
_SOME = ("bert", "albert-groups", "distilbert", "vit", "vit-no-bias", "vit-wide")
_LATER = ("talking-heads", "talking-weights", "values", "value-heads")


def pairs(forms: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Models and forms to test together."""
    return [(n, form) for n in TINY for form in forms if form not in _LATER or n in _SOME]
