"""Converted models in Python: ``save_pretrained`` and ``push_to_hub`` take the record along.

transformers offers no hook for what else belongs to a model, so a converted model's class becomes a
subclass of the class that it had, under the same name, with these two methods. Everything else of
``push_to_hub`` is transformers' own: names, tokens, branches, pull requests.
"""

import json
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

from huggingface_hub import metadata_load
from transformers import PreTrainedModel

from collabify.errors import CheckpointError, CollabifyWarning, HubError
from collabify.hub import CARD_FILE, CONFIG_FILE, RECORD_FILE, download, is_ours
from collabify.modelcard import model_card, public
from collabify.storage.records import inherited, read_record, unmeasured, write_record
from collabify.storage.source import Source
from collabify.storage.standalone import keep_standalone
from collabify.storage.writing import versions


class Carried:
    """The methods that a converted model gains; never built directly, see :func:`carry`."""

    original: type[PreTrainedModel]

    def __reduce_ex__(self, protocol: Any) -> Any:
        # The class is made at run time, so pickle is told how to make it again.
        return _blank, (self.original,), self.__dict__

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        """As transformers does, with ``collabify.json``, and its own code where it had that."""
        cast(Any, super()).save_pretrained(save_directory, *args, **kwargs)
        folder, record = Path(save_directory), _record(self)
        if kwargs.get("is_main_process", True) and folder.is_dir():
            keep_standalone(folder)
            if record:
                write_record(folder, record)
            else:
                (folder / RECORD_FILE).unlink(missing_ok=True)  # of the model that was there

    def _upload_modified_files(self, working_dir: Any, repo_id: str, *args: Any, **kw: Any) -> Any:
        """As transformers does, with a card of ours where it would leave its empty one."""
        folder, record = Path(working_dir), _record(self)
        there = download(repo_id, CARD_FILE, token=kw.get("token"))
        if record and (there is None or is_ours(there)):
            write_record(folder, public(record))
            config = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
            tags = (metadata_load(folder / CARD_FILE) or {}).get("tags") or ()
            card = model_card(record, config, repo=repo_id, tags=tags)
            (folder / CARD_FILE).write_text(card, encoding="utf-8")
        return cast(Any, super())._upload_modified_files(working_dir, repo_id, *args, **kw)


def carry(model: Any, record: Mapping[str, Any] | None = None) -> None:
    """Let a converted model take its record along.

    Parameters
    ----------
    model
        A model of transformers; any other module is left alone.
    record
        Of the conversion just done; by default what lies where the model was loaded from.
    """
    if not isinstance(model, PreTrainedModel):
        return
    if not isinstance(model, Carried):
        model.__class__ = _carrying(type(model))
    source = _source(model)
    if record is not None:
        said: dict[str, Any] = {"source": None if source is None else source.record}
        said |= {"revision": None if source is None else source.revision, "versions": versions()}
        given = {name: value for name, value in record.items() if value or name not in said}
        vars(model)[_NAME] = said | given
    elif source is not None and source.is_folder:
        with suppress(CheckpointError):  # told when it is saved
            vars(model)[_NAME] = _read(source)  # now: the folder may change


def note(model: Any, name: str, value: Mapping[str, Any]) -> None:
    """Put more into the record that a model takes along."""
    if isinstance(model, Carried):
        vars(model)[_NAME] = {**_record(model), name: dict(value)}


_NAME = "_collabify_record"


def _record(model: Any) -> dict[str, Any]:
    """What the model takes along, complete; what is on the Hub is looked for when it is needed."""
    source = _source(model)
    if _NAME not in vars(model):
        vars(model)[_NAME] = {} if source is None else _had(_read, source)
    record = cast(dict[str, Any], vars(model)[_NAME])
    if not record or "base" in record:
        return record
    vars(model)[_NAME] = {"base": {}, **_had(inherited, source), **record}
    return cast(dict[str, Any], vars(model)[_NAME])


def _read(source: Source) -> dict[str, Any]:
    """The record without what was measured: nothing tells whether these are still the weights."""
    return unmeasured(read_record(source))


def _had(read: Callable[[Any], dict[str, Any]], source: Source | None) -> dict[str, Any]:
    """What can be read; a model is whole without it, so that loading and saving never fail."""
    try:
        return read(source)
    except (CheckpointError, HubError) as error:
        warnings.warn(f"{error} It is saved without that.", CollabifyWarning, stacklevel=4)
        return {}


def _source(model: Any) -> Source | None:
    """Where a model was loaded from, if it was."""
    name = getattr(model.config, "_name_or_path", None)
    return Source(name, name, getattr(model.config, "_commit_hash", None)) if name else None


_CLASSES: dict[type, type] = {}


def _carrying(original: type[PreTrainedModel]) -> type:
    """The class of a converted ``original``, made once."""
    if original not in _CLASSES:
        same = {name: getattr(original, name) for name in ("__module__", "__qualname__", "__doc__")}
        _CLASSES[original] = type(
            original.__name__, (Carried, original), {"original": original, **same}
        )
    return _CLASSES[original]


def _blank(original: type[PreTrainedModel]) -> Any:
    """An instance for unpickling."""
    cls: Any = _carrying(original)
    return cls.__new__(cls)
