"""Models that load where collabify is not installed: ``modeling_collabify.py`` and ``auto_map``.

    AutoModel*.from_pretrained(DIR, trust_remote_code=True)

The file is the same for every model. It is made of collabify's own modules, so that it computes the
same bits; it is written anew whenever a model is saved or pushed, and never read.
"""

import json
import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PretrainedConfig
from transformers.models.auto import modeling_auto

from collabify.bundling import bundle
from collabify.errors import CheckpointError
from collabify.hub import CONFIG_FILE
from collabify.modelcard import MODELING_FILE, is_standalone
from collabify.models import supported_model_types

_MODULES = (
    *("errors", "config", "forms"),
    *("decompose.factors", "decompose.values"),
    *(
        "attention.ops",
        "attention.base",
        "attention.collaborative",
        "attention.talking_heads",
        "attention.tucker",
    ),
    *("attention", "models.refusal", "models.adapter"),
    *("models.albert", "models.bert", "models.distilbert", "models.vit", "models"),
    *("models.loading", "models.remote"),
)
_NOTE = """\
Attention heads that share what they have in common, without collabify.

Made by collabify out of its own modules; the same file serves every converted model. Licence:
Apache-2.0. transformers loads it for AutoModel*.from_pretrained(..., trust_remote_code=True); where
collabify is installed, import collabify instead."""


@cache
def modeling() -> str:
    """The source of ``modeling_collabify.py``."""
    roots = {"__getattr__", "forward"}  # and what transformers calls of a class
    roots |= {"from_pretrained", "is_custom_code", "_load_pretrained_model"}
    return bundle(_MODULES, roots, first="models.requirement", note=_NOTE)


def with_auto_map(config: Mapping[str, Any]) -> dict[str, Any]:
    """A ``config.json`` whose classes transformers takes from ``modeling_collabify.py``.

    Raises
    ------
    CheckpointError
        Where it is of no architecture that collabify converts.
    """
    named = config.get("model_type")
    if named not in supported_model_types():
        raise CheckpointError(
            f"model_type={named!r} in {CONFIG_FILE} must be one that collabify converts "
            f"({', '.join(supported_model_types())}). Convert the model again."
        )
    kind = type(AutoConfig.for_model(named))
    module = MODELING_FILE.removesuffix(".py")
    classes = {auto: f"{module}.{name}" for auto, name in sorted(_classes(kind).items())}
    return {**config, "auto_map": classes}


def _classes(kind: type[PretrainedConfig]) -> dict[str, str]:
    """Transformers' classes for models of a kind, by the Auto class that leads to them."""
    found: dict[str, str] = {}
    for name, auto in vars(modeling_auto).items():
        mapping = getattr(auto, "_model_mapping", None) if name.startswith("Auto") else None
        if name == "AutoModelForCausalLM" or mapping is None or kind not in mapping:
            continue  # decoders are not supported
        classes = mapping[kind]
        first = classes[0] if isinstance(classes, tuple) else classes
        found[name] = first.__name__
    return found


def add_code(folder: Path) -> None:
    """Let the converted model in ``folder`` load without collabify; the code is there first."""
    path = folder / CONFIG_FILE
    config = with_auto_map(json.loads(path.read_text(encoding="utf-8")))
    _write(folder / MODELING_FILE, modeling())
    _write(path, json.dumps(config, indent=2, sort_keys=True) + "\n")


def _write(path: Path, content: str) -> None:
    """Write a file, whole or not at all."""
    new = path.with_name(f".{path.name}-{os.getpid()}")
    try:
        new.write_text(content, encoding="utf-8")
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)


def keep_standalone(folder: Path) -> None:
    """The same, where the configuration that was just saved there asks for it."""
    if is_standalone(json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))):
        add_code(folder)
