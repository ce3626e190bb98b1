"""Labels by name: which output of a head stands for which label of the data.

order[label of the data] = output of the head,        logits[:, order] is in the data's order
"""

from collections.abc import Mapping, Sequence
from typing import Any

from collabify.errors import LabelError


def label_order(names: Sequence[str], config: Any, place: str) -> tuple[int, ...]:
    """The head's output for each label of the data, by names and not by luck.

    Names are compared without regard to case and to ``-``, ``_`` and spaces. Generic names
    (``LABEL_0``, or plain numbers) say nothing, and then positions decide.

    Parameters
    ----------
    names
        Of the data's labels, in order.
    config
        The config of a model with a head.
    place
        What the labels belong to, for the error: ``task 'rte'``.

    Raises
    ------
    LabelError
        Where the model's head has another number of labels, or labels of other names.
    """
    head = head_names(config)
    if len(head) != len(names):
        raise LabelError(
            f"The model's head has {len(head)} {'label' if len(head) == 1 else 'labels'} "
            f"({_listed(head)}) and {place} has {len(names)} ({_listed(names)}). "
            "Give a model for this task, or make one: collabify finetune"
        )
    if not ordered_by_name(names, config):
        return tuple(range(len(names)))
    ours, theirs = [plain(name) for name in names], [plain(name) for name in head]
    if ours == theirs:
        return tuple(range(len(names)))
    if sorted(ours) != sorted(theirs) or len(set(ours)) < len(ours):
        raise LabelError(
            f"The model's labels ({_listed(head)}) must be those of {place} ({_listed(names)}), "
            "in any order. Give a model for this task, or put id2label in its config.json right."
        )
    return tuple(theirs.index(name) for name in ours)


def head_names(config: Any) -> list[str]:
    """The names of a head's outputs, in order."""
    return [str(config.id2label[output]) for output in sorted(config.id2label)]


def ordered_by_name(names: Sequence[str], config: Any) -> bool:
    """Whether :func:`label_order` goes by names; where one side has none, it goes by position.

    Numbers are names too where both sides have the same ones: folders sort ``10`` before ``2``.
    """
    head = head_names(config)
    if names and same_names(names, head):
        return True
    return not (generic(names) or generic(head))


def check_named(names: Sequence[str], config: Any, place: str) -> None:
    """Refuse data whose classes only have numbers for a head whose classes have names.

    Raises
    ------
    LabelError
        Where nothing says which number stands for which name.
    """
    head = head_names(config)
    if generic(names) and not generic(head) and not same_names(names, head):
        raise LabelError(
            f"The classes of {place} have no names ({_listed(names)}) and those of the model's "
            f"head do ({_listed(head)}): nothing says which is which. Name the classes of the data "
            "as the model's, or make a model for them: collabify finetune"
        )


def nameless(names: Sequence[str], configs: Mapping[str, Any]) -> tuple[str, ...]:
    """Who lacks the names by which outputs would be found; none where all go by name.

    Parameters
    ----------
    names
        Of the data's labels; generic ones are told of as ``data``.
    configs
        Of models, by what they are called.
    """
    unnamed = [who for who, config in configs.items() if not ordered_by_name(names, config)]
    lacking = [who for who in unnamed if generic(head_names(configs[who]))]
    return (*lacking, "data") if unnamed and generic(names) else tuple(lacking)


def generic(names: Sequence[str]) -> bool:
    """Whether names only count: ``LABEL_0, LABEL_1, ...`` or ``0, 1, ...``."""
    return all(
        name.upper() in (f"LABEL_{output}", str(output)) for output, name in enumerate(names)
    )


def check_range(labels: Sequence[int | None], names: Sequence[str], place: str) -> None:
    """Refuse labels that are none.

    Raises
    ------
    LabelError
        Where the data's labels are hidden (-1), or outside of the names.
    """
    for row, label in enumerate(labels):
        if label == -1:
            raise hidden(row, place)
        if label is None or not 0 <= label < len(names):
            raise LabelError(
                f"Row {row} of {place} has the label {label}; it must be between 0 and "
                f"{len(names) - 1} ({_listed(names)}). Put the data right."
            )


def hidden(row: int, place: str) -> LabelError:
    """The error for data whose labels are not told."""
    return LabelError(
        f"Row {row} of {place} has the label -1: its labels are hidden, as in GLUE's test splits. "
        "Give a split with labels, such as validation."
    )


def same_names(first: Sequence[str], second: Sequence[str]) -> bool:
    """Whether two lists hold the same names, in any order."""
    return sorted(map(plain, first)) == sorted(map(plain, second))


def plain(name: str) -> str:
    """A name as it is compared."""
    return name.strip().casefold().replace("-", "_").replace(" ", "_")


def _listed(names: Sequence[str], most: int = 6) -> str:
    """A few names, and how many more."""
    more = f", ... {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
