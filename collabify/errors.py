"""Every error that collabify raises on purpose.

A message is one line and names the value, the bound, the place and the way out, in that order. Each
error is a ``CollabifyError`` and also the builtin that it specialises, so that both ``except``
clauses read naturally.
"""


class CollabifyError(Exception):
    """Base of all errors that collabify raises on purpose."""


class OptionError(CollabifyError, ValueError):
    """An option has a value that no model could accept, or options contradict each other."""


class RankError(CollabifyError, ValueError):
    """A rank is outside what the heads of a layer allow."""


class LayerError(CollabifyError, IndexError):
    """A layer that the model does not have."""


class UnsupportedModelError(CollabifyError, TypeError):
    """The model's attention is not a fixed bilinear form per head, or no adapter knows it."""


class AlreadyConvertedError(CollabifyError, ValueError):
    """The model's attention was converted before."""


class NonFiniteError(CollabifyError, ValueError):
    """A weight is NaN or infinite."""


class ModelNotFoundError(CollabifyError, FileNotFoundError):
    """The model is neither a readable folder nor a reachable Hub id."""


class CheckpointError(CollabifyError, ValueError):
    """A checkpoint's files are there but cannot be used."""


class LabelError(CollabifyError, ValueError):
    """The labels of a model and those of data do not fit each other."""


class OutputError(CollabifyError, OSError):
    """The output cannot be written."""


class HubError(CollabifyError, OSError):
    """The Hub cannot be reached, or does not do what was asked."""


class CollabifyWarning(UserWarning):
    """Something that works, but that a user should know."""


def first_line(error: BaseException) -> str:
    """The first line of an error, for a message of one line."""
    return str(error).strip().split("\n", 1)[0].strip().rstrip(".")
