"""What convert() refuses: by name, by reason, in one line, and before anything is changed."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from tiny_models import LOW, TINY, WIDTH
from torch import nn

from collabify import analyze, convert, find_attention, sharing
from collabify.errors import (
    AlreadyConvertedError,
    CollabifyError,
    LayerError,
    NonFiniteError,
    OptionError,
    RankError,
    UnsupportedModelError,
)

SUPPORTED = "albert, bert, camembert, deit, dinov2, distilbert, electra, roberta, vit, xlm-roberta"
LLM = {
    "vocab_size": 41,
    "hidden_size": 24,
    "intermediate_size": 29,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "head_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ENCODER = {key: LLM[key] for key in LLM if key not in ("num_key_value_heads", "head_dim")}
SMALL = {"vocab_size": 41, "d_model": 24, "d_ff": 29, "d_kv": 8, "num_layers": 1, "num_heads": 3}
BART = {
    f"{side}_{name}": value
    for side in ("encoder", "decoder")
    for name, value in (("layers", 1), ("attention_heads", 3), ("ffn_dim", 29))
}

# model_type, options of its configuration, where the reason is seen, the reason
REFUSED: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "modernbert": (
        "modernbert",
        ENCODER | {"cls_token_id": 1, "sep_token_id": 2},
        "rotary_emb",
        "rotates its queries and keys",
    ),
    "eurobert": ("eurobert", LLM, "rotary_emb", "rotates its queries and keys"),
    "llama": ("llama", LLM, "rotary_emb", "rotates its queries and keys"),
    "esm": (
        "esm",
        ENCODER | {"position_embedding_type": "rotary"},
        "rotary_embeddings",
        "rotates its queries and keys",
    ),
    "qwen3": ("qwen3", LLM, "layers.0.self_attn.q_norm", "normalises its queries or keys"),
    "gemma2": ("gemma2", LLM, "rotary_emb", "rotates its queries and keys"),
    "capped": (
        "bert",
        ENCODER | {"attn_logit_softcapping": 30.0},
        "softcapping",
        "caps its logits",
    ),
    "gpt_oss": (
        "gpt_oss",
        LLM | {"num_local_experts": 2, "num_experts_per_tok": 1},
        "layers.0.self_attn",
        "has attention sinks",
    ),
    "deberta": (
        "deberta",
        ENCODER | {"relative_attention": True, "pos_att_type": ["c2p"]},
        "config.relative_attention",
        "disentangled position terms",
    ),
    "deberta-v2": (
        "deberta-v2",
        ENCODER | {"relative_attention": True, "pos_att_type": ["p2c"]},
        "config.relative_attention",
        "disentangled position terms",
    ),
    "relative_key": (
        "bert",
        ENCODER | {"position_embedding_type": "relative_key"},
        "config.position_embedding_type='relative_key'",
        "adds relative position terms",
    ),
    "decoder": ("bert", ENCODER | {"is_decoder": True}, "config.is_decoder", "is a decoder"),
    "cross-attention": (
        "bert",
        ENCODER | {"is_decoder": True, "add_cross_attention": True},
        "config.is_decoder",
        "is a decoder",
    ),
    "t5": ("t5", SMALL, "config.is_encoder_decoder", "has cross-attention"),
    "bart": (
        "bart",
        BART | {"vocab_size": 41, "d_model": 24},
        "config.is_encoder_decoder",
        "has cross-attention",
    ),
    "gpt2": (
        "gpt2",
        {"vocab_size": 41, "n_embd": 24, "n_layer": 1, "n_head": 3},
        "model_type='gpt2'",
        "no adapter",
    ),
}


def snapshot(model: nn.Module) -> Any:
    """Everything that a refused conversion must leave as it was."""
    state = {name: (tensor, tensor.clone()) for name, tensor in model.state_dict().items()}
    modules = [(module, type(module), module.training) for module in model.modules()]
    config = model.config.to_dict() if hasattr(model, "config") else None
    return state, modules, config


def refuses(model: nn.Module, error: type[CollabifyError], *told: str, **options: Any) -> str:
    """Convert and be refused: the class, one line with all that is ``told``, nothing changed."""
    state, modules, config = snapshot(model)
    with pytest.raises(error) as caught:
        convert(model, **({"dk": 10} | options))
    assert caught.type is error
    message = str(caught.value)
    assert "\n" not in message
    for part in told:
        assert part in message
    assert [(module, type(module), module.training) for module in model.modules()] == modules
    assert model.state_dict().keys() == state.keys()
    for name, tensor in model.state_dict().items():
        kept, value = state[name]
        assert tensor.data_ptr() == kept.data_ptr(), name
        assert torch.equal(tensor.nan_to_num(7), value.nan_to_num(7)), name
    assert config == (model.config.to_dict() if config is not None else None)
    return message


@pytest.mark.parametrize("name", REFUSED)
def test_attention_that_is_no_fixed_bilinear_form(name: str) -> None:
    kind, options, place, reason = REFUSED[name]
    config = transformers.AutoConfig.for_model(kind, **options)
    model = transformers.AutoModel.from_config(config)
    told = f"Supported: {SUPPORTED}."
    message = refuses(model, UnsupportedModelError, place, reason, f"{kind!r}", told)
    with pytest.raises(UnsupportedModelError, match=re.escape(message)):
        analyze(model)


@pytest.mark.parametrize("name", ["bert", "distilbert", "albert", "vit", "dinov2"])
@pytest.mark.parametrize("part", ["query", "key", "value"])
def test_projections_that_are_wrapped(name: str, part: str) -> None:
    class Wrapped(nn.Module):
        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base, self.weight = base, base.weight

    model = TINY[name].build(headed=True)
    site = find_attention(model)[-1]
    leaf = getattr(site.adapter.layout, part)
    setattr(site.module, leaf, Wrapped(getattr(site.module, leaf)))
    told = (f"'{site.name}.{leaf}' is a Wrapped", "torch.nn.Linear", "Merge adapters")
    refuses(model, UnsupportedModelError, *told)


def test_quantised_projections() -> None:
    model = TINY["bert"].build()
    query = find_attention(model)[0].query
    query.weight = nn.Parameter(query.weight.detach().to(torch.int8), requires_grad=False)
    refuses(model, UnsupportedModelError, "attention.self.query'", "floating point", "undo quant")


def test_what_is_no_transformers_model() -> None:
    told = ("Sequential is not a transformers model", "config.model_type", SUPPORTED)
    refuses(nn.Sequential(nn.Linear(3, 3)), UnsupportedModelError, *told)


@pytest.mark.parametrize("change", ["all", "last"])
def test_converted_models(change: str) -> None:
    model = TINY["bert"].build()
    convert(model, dk=10, layers=None if change == "all" else [1])
    place = TINY["bert"].sites[0 if change == "all" else 1]
    refuses(model, AlreadyConvertedError, repr(place), "converted before", "original model")
    with pytest.raises(AlreadyConvertedError, match="original model"):
        analyze(model)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(
    "name", ["encoder.layer.1.attention.self.key.weight", "embeddings.LayerNorm.bias"]
)
def test_weights_that_are_not_finite(name: str, value: float) -> None:
    model = TINY["bert"].build()
    parameter = model.get_parameter(name)
    with torch.no_grad():
        parameter.view(-1)[[1, 5]] = value
    told = (f"2 of the {parameter.numel()} numbers of {name!r}", "NaN or infinite", "Take a check")
    refuses(model, NonFiniteError, *told)


BOUNDS: tuple[tuple[str, int, int], ...] = (
    ("bert", 24, 24),
    ("vit-narrow", 15, 15),
    ("vit-wide", 33, WIDTH),
)


@pytest.mark.parametrize(("name", "cp", "tucker"), BOUNDS)
@pytest.mark.parametrize("method", ["cp", "head-svd", "tucker"])
def test_ranks_out_of_bounds(name: str, cp: int, tucker: int, method: str) -> None:
    model = TINY[name].build()
    largest = tucker if method == "tucker" else cp
    place = repr(TINY[name].sites[0])
    for dk, way_out in ((0, "Raise --dk."), (-3, "Raise --dk."), (largest + 1, "Lower --dk.")):
        told = (f"dk={dk} must be between 1 and {largest} for {place} (3 heads of", way_out)
        refuses(model, RankError, *told, dk=dk, method=method)
    for dk in (1, largest):
        convert(model, dk=dk, method=method, dry_run=True)


@pytest.mark.parametrize("head_rank", [0, -1, 4])
def test_head_ranks_out_of_bounds(head_rank: int) -> None:
    told = (f"head_rank={head_rank} must be between 1 and 3", "attention.self'", "--head-rank")
    model = TINY["bert"].build()
    refuses(model, RankError, *told, method="tucker", head_rank=head_rank)


@pytest.mark.parametrize("layers", [[2], [-1], [0, 7]])
def test_layers_that_are_not_there(layers: list[int]) -> None:
    told = (f"layer={layers[-1]} must be between 0 and 1", "2 distinct attention layers", "--layer")
    refuses(TINY["bert"].build(), LayerError, *told, layers=layers)
    refuses(TINY["albert"].build(), LayerError, "between 0 and 0", layers=[1])


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"method": "svd"}, ("method='svd'", "cp, tucker, head-svd", "--method")),
        ({"solver": "als"}, ("solver='als'", "factored, tensorly", "--solver")),
        ({"head_rank": 2}, ("head_rank=2", "method='tucker' only, not 'cp'", "--head-rank")),
        ({"method": "head-svd", "head_rank": 2}, ("head_rank=2", "not 'head-svd'")),
        ({"method": "head-svd", "solver": "tensorly"}, ("'tensorly'", "'head-svd'", "--solver")),
        ({"iterations": 0}, ("iterations=0 must be at least 1", "Raise --iterations")),
        ({"tolerance": -0.1}, ("tolerance=-0.1 must be at least 0 and below 1", "--tol")),
        ({"tolerance": 1.0}, ("tolerance=1.0 must be",)),
        ({"tolerance": float("nan")}, ("tolerance=nan must be",)),
    ],
)
def test_options(options: dict[str, Any], told: tuple[str, ...]) -> None:
    # What a type checker would stop goes past beartype, as it does in a user's process.
    model = TINY["bert"].build()
    plain: Callable[..., Any] = getattr(convert, "__wrapped__", convert)
    options = {"dk": 10} | options
    state = snapshot(model)[1:]
    with pytest.raises(OptionError) as caught:
        plain(model, **options)
    assert "\n" not in str(caught.value)
    assert all(part in str(caught.value) for part in told)
    assert snapshot(model)[1:] == state


@pytest.mark.parametrize("level", [0.0, -0.5, 1.5, float("nan")])
def test_levels_that_are_no_shares(level: float) -> None:
    with pytest.raises(OptionError, match=f"energy={level} must be above 0 and at most 1"):
        analyze(TINY["bert"].build(), levels=(level,))


@pytest.mark.parametrize("stop", [RuntimeError, KeyboardInterrupt])
def test_a_conversion_that_breaks_off(stop: type[BaseException], monkeypatch: Any) -> None:
    """While the second layer is decomposed, the first is not rewritten yet."""
    model = TINY["bert"].build()
    state, modules, config = snapshot(model)
    done = []

    def breaks(forms: Any, rank: int, **options: Any) -> Any:
        if done:
            raise stop
        done.append(rank)
        return fit(forms, rank, **options)

    fit = sharing.fit_cp
    monkeypatch.setattr(sharing, "fit_cp", breaks)
    with pytest.raises(stop):
        convert(model, **LOW["cp"])
    assert done
    assert [(module, type(module), module.training) for module in model.modules()] == modules
    assert all(torch.equal(model.state_dict()[name], kept) for name, (_, kept) in state.items())
    assert model.config.to_dict() == config


def test_other_layers_of_a_converted_model_are_refused() -> None:
    """Else the second conversion's record would leave out the first one's layers."""
    model = TINY["bert"].build()
    convert(model, **LOW["cp"], layers=[0])
    with pytest.raises(AlreadyConvertedError, match="was converted before"):
        convert(model, **LOW["cp"], layers=[1])
