"""What a model can be scored on: the head that it has, by the name of its class.

BertForSequenceClassification -> classifies texts        BertModel -> nothing to score
"""

from typing import Any

from collabify.errors import LabelError

TEXT = "ForSequenceClassification"
IMAGE = "ForImageClassification"
_TAUGHT = "ForImageClassificationWithTeacher"  # DeiT's, with a head for its distillation token
TOKENS = ("ForTokenClassification", "ForMaskedLM")
_WORDS = {TEXT: "text classification", IMAGE: "image classification"}


def has_head(model: Any, *endings: str) -> bool:
    """Whether the model's class, or one that it derives from, has a name with such an ending."""
    if IMAGE in endings:
        endings = (*endings, _TAUGHT)
    return any(base.__name__.endswith(endings) for base in type(model).__mro__)


def check_head(model: Any, ending: str, task: str, command: str) -> None:
    """Refuse a model that has no head for a task.

    Parameters
    ----------
    model
        Of transformers.
    ending
        What its class should end in: :data:`TEXT` or :data:`IMAGE`.
    task
        For the error: ``task 'rte'``.
    command
        How to get a head.

    Raises
    ------
    LabelError
        Where the model's class is another.
    """
    if has_head(model, ending):
        return
    name = getattr(model.config, "_name_or_path", "") or "the model"
    raise LabelError(
        f"{name!r} is a {type(model).__name__}, which has no {_WORDS[ending]} head: there is "
        f"nothing to score on {task}. Make one: {command}"
    )
