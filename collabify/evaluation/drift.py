"""How far a model is from its original, without labels: hidden states, attention, predictions.

agreement   share of predictions with argmax z = argmax z~
divergence  mean of KL(softmax z || softmax z~) = sum_l p_l (log p_l - log p~_l), in nats

Axes: n prediction, l label. z are the logits of the original, z~ those of the model.
"""

import os
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from collabify.calibration import evaluate, on_device
from collabify.data import load_calibration
from collabify.data.base import Batch
from collabify.data.labels import head_names, label_order
from collabify.drift import measure_drift
from collabify.errors import CollabifyWarning, LabelError
from collabify.evaluation.heads import IMAGE, TEXT, TOKENS, has_head
from collabify.evaluation.predict import Progress
from collabify.scores import DriftScores
from collabify.storage import versions


def evaluate_drift(
    model: Any,
    baseline: Any,
    data: object,
    *,
    samples: int = 256,
    batch_size: int = 16,
    max_length: int = 128,
    seed: int = 0,
    processor: object = None,
    progress: Progress | None = None,
) -> DriftScores:
    """Measure how far ``model`` is from ``baseline`` on data without labels.

    Parameters
    ----------
    model, baseline
        transformers models of one architecture, with or without heads.
    data
        As ``source`` of :func:`collabify.data.load_calibration`.
    samples
        Texts or images.
    batch_size
        Samples at once.
    max_length
        Tokens of a text at most.
    seed
        Of the order of the data.
    processor
        Tokenizer or image processor, or where to load it; by default the baseline's.
    progress
        ``(stage, done, total, note)``.

    Raises
    ------
    OptionError
        Where an option is out of bounds, or the data cannot be read.
    CheckpointError
        Where the tokenizer or image processor cannot be loaded.
    LabelError
        Where the models cannot be compared: other sizes, or heads with other labels.
    """
    start = time.perf_counter()
    check_comparable(model, baseline)
    with warnings.catch_warnings():
        # No covariance is taken here that few tokens could make singular.
        warnings.filterwarnings("ignore", r"\d+ calibration tokens are fewer", CollabifyWarning)
        loaded = load_calibration(
            data,
            baseline.config,
            samples=samples,
            max_length=max_length,
            batch_size=batch_size,
            seed=seed,
            processor=processor,
        )
    batches = (*loaded.batches, *loaded.held_out)
    drift = measure_drift(baseline, model, _Watched(batches, "hidden states", progress))
    heads = _comparable_heads(model, baseline)
    found = (
        _predictions(model, baseline, _Watched(batches, "predictions", progress)) if heads else None
    )
    agreement, divergence, count = found or (None, None, 0)
    return DriftScores(
        loaded.description,
        sum(next(iter(batch.values())).shape[0] for batch in batches),
        drift.hidden_cosine,
        drift.hidden_error,
        drift.attention,
        agreement,
        divergence,
        count,
        getattr(model.config, "_name_or_path", None) or None,
        getattr(baseline.config, "_name_or_path", None) or None,
        {
            "data": os.fspath(data) if isinstance(data, str | os.PathLike) else None,
            "samples": samples,
            "batch_size": batch_size,
            "max_length": max_length,
            "seed": seed,
        },
        time.perf_counter() - start,
        versions(),
    )


class _Watched(Sequence[Batch]):
    """Batches that tell how many of them were taken."""

    def __init__(self, batches: Sequence[Batch], stage: str, progress: Progress | None) -> None:
        self._batches, self._stage, self._progress = batches, stage, progress

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, index: Any) -> Any:
        return self._batches[index]

    def __iter__(self) -> Iterator[Batch]:
        for done, batch in enumerate(self._batches, start=1):
            yield batch
            if self._progress is not None:
                self._progress(self._stage, done, len(self), "")


def check_comparable(model: Any, baseline: Any) -> None:
    """Refuse two models of which neither can have been made from the other.

    Raises
    ------
    LabelError
        Naming the first size in which they differ.
    """
    for name in (
        "model_type",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "vocab_size",
        "image_size",
        "patch_size",
    ):
        ours, theirs = (getattr(each.config, name, None) for each in (model, baseline))
        if ours != theirs:
            raise LabelError(
                f"The model has {name}={ours!r} and the baseline has {theirs!r}; a model is only "
                "compared with what it was made from. Give that: --baseline MODEL"
            )


def _comparable_heads(model: Any, baseline: Any) -> bool:
    """Whether both classify the same things; a number or no head at all is no class."""
    for ending in (TEXT, IMAGE, *TOKENS):
        if has_head(model, ending) and has_head(baseline, ending):
            labels = max(model.config.num_labels, baseline.config.num_labels)
            return ending == "ForMaskedLM" or labels > 1
    return False


def _predictions(model: Any, baseline: Any, batches: Iterable[Batch]) -> tuple[float, float, int]:
    """Agreement, divergence, and over how many predictions."""
    order: Sequence[int] | None = None
    if not has_head(model, "ForMaskedLM"):
        order = label_order(head_names(baseline.config), model.config, "the baseline")
    same = divergence = 0.0
    count = 0
    with torch.inference_mode():
        for batch in on_device(batches, baseline):
            mask = batch.get("attention_mask")
            old = _real(evaluate(baseline, batch).logits, mask)
            new = _real(evaluate(model, next(iter(on_device([batch], model)))).logits, mask)
            agreed, diverged = compare_logits(old, new if order is None else new[:, list(order)])
            same, divergence, count = same + agreed, divergence + diverged, count + len(old)
    return same / count, divergence / count, count


def _real(logits: Tensor, mask: Tensor | None) -> Float[Tensor, "n l"]:
    """One row for each prediction: a sample, or a token that is not padding."""
    kept = logits if logits.ndim == 2 or mask is None else logits[mask.bool()]
    return kept.flatten(0, -2).cpu().double()


def compare_logits(old: Float[Tensor, "n l"], new: Float[Tensor, "n l"]) -> tuple[float, float]:
    """How many predictions are the same, and the sum of the divergences."""
    p, q = (nn.functional.log_softmax(logits, dim=-1) for logits in (old, new))
    same = old.argmax(-1) == new.argmax(-1)
    return float(same.sum()), float((p.exp() * (p - q)).sum())
