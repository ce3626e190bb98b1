"""Models with the head that a task needs: the one that is there where it fits, else a new one."""

import warnings
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import transformers
from torch import nn

from collabify.data.base import Kind, fixed_size, model_kind
from collabify.data.labels import (
    check_named,
    generic,
    head_names,
    label_order,
    ordered_by_name,
    plain,
)
from collabify.errors import CheckpointError, CollabifyWarning, LabelError, OptionError
from collabify.healing import is_main_process, new_parameters
from collabify.models import find_attention
from collabify.storage import Source, find, read

_CLASSES: dict[Kind, str] = {
    "text": "AutoModelForSequenceClassification",
    "image": "AutoModelForImageClassification",
}
# transformers' Auto class takes the one of two heads, which is for inference only.
_TRAINED = {"deit": "DeiTForImageClassification"}


def _trained_class(config: Any, kind: Kind) -> Any:
    """The class of transformers, or its Auto class, that has a head to train."""
    return getattr(transformers, _TRAINED.get(config.model_type, _CLASSES[kind]))


@dataclass(frozen=True, eq=False)
class Headed:
    """A model ready to be trained for a task.

    Parameters
    ----------
    model
        In float32.
    order
        The head's output for each label of the task; empty for a regression.
    new_head
        Why its head is new; ``None``: it is the model's own.
    new_parameters
        Names of what was drawn at random.
    """

    model: Any
    order: tuple[int, ...]
    new_head: str | None
    new_parameters: tuple[str, ...]


def open_model(name: str, kind: Kind, revision: str | None = None) -> tuple[Source, Any]:
    """Find a model that reads ``kind``, without its weights.

    Parameters
    ----------
    name, revision
        As for :func:`collabify.storage.load`.
    kind
        What the data are.

    Raises
    ------
    OptionError
        Where it reads the other kind.
    """
    source, config = find(name, revision)
    found = model_kind(config)
    if found != kind:
        option = {"text": "--task", "image": "--image-data"}[found]
        raise OptionError(
            f"{name!r} (model_type={config.model_type!r}) takes {found}s, and the data are {kind}s."
            f" Train it with {option}, or give another model."
        )
    return source, config


def load_headed(
    source: Source, config: Any, kind: Kind, labels: Sequence[str] | None, place: str
) -> Headed:
    """Load a model with a head for ``labels``, and warn where the head is new.

    Parameters
    ----------
    source, config
        From :func:`open_model`; the configuration gets the labels' names.
    kind
        What the model reads.
    labels
        The labels' names in the data's order; ``None``: one number is to be predicted.
    place
        What the labels belong to: ``task 'rte'``.

    Raises
    ------
    CheckpointError
        Where the encoder lacks weights, or has them in other shapes than its config gives.
    """
    reason = _why_new(config, kind, labels, place)
    order = _take_labels(config, labels, place, anew=reason is not None)
    cls = _trained_class(config, kind)
    model, info = read(cls, source, config, dtype="float32", ignore_mismatched_sizes=True)
    mismatched = [key for key, *_ in info["mismatched_keys"]]
    new = {*info["missing_keys"], *mismatched}
    head = {name for name, _ in head_parameters(model)}
    if reason is None and new & head:
        reason = "its checkpoint has no weights for one"
    if reason is not None and not head <= new:
        _draw_head(model, config)
        new |= head
    if reason is not None:
        told = "" if labels is None else f" ({', '.join(labels)})"
        warn(f"{source.name!r} gets a new head for {place}{told}: {reason}.")
    others = sorted(new - head)
    if others:
        warn(f"{source.name!r} has no weights for {', '.join(others)}: they are new and random.")
    return Headed(model, order, reason, tuple(sorted(new)))


def warn(message: str) -> None:
    """Warn once, from the main process."""
    if is_main_process():
        warnings.warn(message, CollabifyWarning, stacklevel=4)


def _why_new(config: Any, kind: Kind, labels: Sequence[str] | None, place: str) -> str | None:
    """Why the model's head, if it has one, is of no use for the labels."""
    (name,) = (config.architectures or ("AutoModel",))[:1]
    suffix = _CLASSES[kind].removeprefix("AutoModel")
    if not name.endswith(suffix):
        return f"{name} has {'two, for inference only' if suffix in name else 'none'}"
    if labels is None:
        count = config.num_labels
        return None if count == 1 else f"its own has {count} labels, and one number is wanted"
    if config.num_labels == 1:
        return "its own predicts one number"
    try:
        check_named(labels, config, place)
        label_order(labels, config, place)
    except LabelError:
        own = ", ".join(head_names(config))
        return f"its own tells {own} apart"
    return None


def _take_labels(
    config: Any, labels: Sequence[str] | None, place: str, *, anew: bool
) -> tuple[int, ...]:
    """Write the labels' names into the configuration; the head's output for each of them."""
    if labels is None:
        config.num_labels, config.problem_type = 1, "regression"
        return ()
    config.problem_type = "single_label_classification"
    if anew or generic(head_names(config)):
        config.num_labels = len(labels)
        config.id2label = dict(enumerate(labels))
        config.label2id = {name: output for output, name in enumerate(labels)}
    return label_order(labels, config, place)


def head_parameters(model: Any) -> list[tuple[str, nn.Parameter]]:
    """What lies outside of the encoder, by name."""
    inside = f"{model.base_model_prefix}."
    return [(name, p) for name, p in model.named_parameters() if not name.startswith(inside)]


def _draw_head(model: Any, config: Any) -> None:
    """Give the model the head of a new model of its class."""
    original = deepcopy(config)
    original.__dict__.pop("quantization_config", None)
    fresh = type(model)(original)
    model.load_state_dict({n: p.detach() for n, p in head_parameters(fresh)}, strict=False)


def choose_trained(headed: Headed, only: str) -> int:
    """Freeze what is not to be trained; how many numbers are left to train.

    Parameters
    ----------
    headed
        The model; with ``attention`` it learns in what a conversion made, in its head, and in what
        its checkpoint did not have.
    only
        ``all`` or ``attention``.

    Raises
    ------
    OptionError
        Where nothing of the model was converted.
    """
    model = headed.model
    if only == "attention":
        if not any(site.converted for site in find_attention(model)):
            raise OptionError(
                "only='attention' trains what a conversion made, and no layer of this "
                f"{type(model).__name__} was converted. Convert it first, or leave out --only."
            )
        model.requires_grad_(False)
        named = dict(model.named_parameters())
        drawn = [named[name] for name in headed.new_parameters if name in named]
        for parameter in (*new_parameters(model), *dict(head_parameters(model)).values(), *drawn):
            parameter.requires_grad_(True)
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def load_teacher(
    name: str,
    student: Headed,
    kind: Kind,
    labels: Sequence[str] | None,
    *,
    hidden_states: bool = False,
) -> Any:
    """A fine-tuned model whose outputs (and hidden states) mean what the student's mean.

    Raises
    ------
    LabelError
        Where it has no head, or one of other labels or of another order.
    CheckpointError
        Where it reads other inputs than the student, or has hidden states of another shape.
    """
    source, config = find(name)
    ours = student.model.config
    size = ("image_size",) if kind == "image" and fixed_size(ours) else ()
    for reads in ("model_type", "vocab_size", "num_channels", *size):
        _check_same(reads, name, config, ours, "it reads what the student reads. Change --teacher.")
    for shape in ("hidden_size", "num_hidden_layers", "patch_size") if hidden_states else ():
        way_out = "hidden states are compared. Change --teacher, or leave out --hidden-states."
        _check_same(shape, name, config, ours, way_out)
    _check_outputs(name, config, ours, kind, labels)
    auto: Any = getattr(transformers, _CLASSES[kind])
    model, info = read(auto, source, config, dtype="float32")
    if info["missing_keys"]:
        raise CheckpointError(
            f"The teacher {name!r} has no weights for {', '.join(sorted(info['missing_keys']))}. "
            "Download or copy it again, or change --teacher."
        )
    return model.requires_grad_(False).eval()


def _check_same(field: str, name: str, config: Any, ours: Any, why: str) -> None:
    old, new = getattr(config, field, None), getattr(ours, field, None)
    if old != new:
        raise CheckpointError(f"{field}={old!r} of the teacher {name!r} must be {new!r}: {why}")


def _check_outputs(
    name: str, config: Any, ours: Any, kind: Kind, labels: Sequence[str] | None
) -> None:
    suffix = _CLASSES[kind].removeprefix("AutoModel")
    found = (config.architectures or ("AutoModel",))[0]
    if suffix not in found:
        raise LabelError(
            f"The teacher {name!r} is a {found}, which has no head; it must be a model that was "
            "fine-tuned for this task. Change --teacher, or train it first: collabify finetune"
        )
    if labels is None and config.num_labels == 1:
        return
    theirs, own = head_names(config), head_names(ours)
    if list(map(plain, theirs)) == list(map(plain, own)):
        return
    if labels is not None and len(theirs) == len(own) and not ordered_by_name(own, config):
        warn(f"The labels of {name!r} have no names; they are taken to be {', '.join(own)}.")
    else:
        raise LabelError(
            f"The labels of the teacher {name!r} ({', '.join(theirs)}) must be the student's, in "
            f"the same order ({', '.join(own)}). Change --teacher."
        )
