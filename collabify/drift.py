"""How far a converted model moved from its original, measured without labels.

hidden_cosine  mean over real tokens of cos(h, h~)
hidden_error   |h - h~| / |h|
attention      mean over layers, heads and real targets of sum_s |p - p~| / 2, of the probabilities
               as the softmax gives them: before P_w, which mixes them afterwards
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from collabify.calibration import evaluate, on_device
from collabify.results import Drift


def measure_drift(
    original: nn.Module, converted: nn.Module, batches: Sequence[Mapping[str, Any]]
) -> Drift:
    """Run both models over the same batches.

    Parameters
    ----------
    original, converted
        transformers models of one architecture; their attention implementation is set to ``eager``
        for the while, the one that returns probabilities.
    batches
        Keyword arguments of the models. What an ``attention_mask`` masks does not count.
    """
    cosine = squared = difference = variation = 0.0
    tokens = targets = 0
    with eager(original), eager(converted), torch.inference_mode():
        for batch in on_device(batches, original):
            old, new = (
                evaluate(base_model(model), batch, output_attentions=True)
                for model in (original, converted)
            )
            mask = batch.get("attention_mask")
            h, g = (_real(o.last_hidden_state, mask).cpu().double() for o in (old, new))
            cosine += float(nn.functional.cosine_similarity(h, g, dim=-1).sum())
            squared += float(h.square().sum())
            difference += float((h - g).square().sum())
            tokens += len(h)
            for p, q in zip(old.attentions, new.attentions, strict=True):
                distance = (p - q).abs().sum(-1).cpu().double().mean(1) / 2  # b t
                variation += float(_real(distance, mask).sum())
                targets += len(h)
    return Drift(cosine / tokens, (difference / squared) ** 0.5, variation / targets)


def base_model(model: nn.Module) -> nn.Module:
    """The encoder without its head."""
    return getattr(model, "base_model", model)


def shadow(model: nn.Module) -> nn.Module:
    """The model as it is, to compare with once it is rewritten: its modules, but no new numbers."""
    memo: dict[int, Any] = {id(each): each for each in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, memo)


def _real(x: Tensor, mask: Tensor | None) -> Tensor:
    """The rows of real tokens, ``[n, ...]``."""
    return x.flatten(0, 1) if mask is None else x[mask.bool().to(x.device)]


@contextmanager
def eager(model: Any) -> Iterator[None]:
    """The model with eager attention, which returns probabilities; then as it was."""
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(before)
