"""The commands that make a model again, out of what was recorded of their options."""

import shlex
from collections.abc import Mapping
from typing import Any

# Options whose flags have other names; all others are spelled as they are recorded.
_FLAGS = {"tolerance": "--tol", "multiple": "--round", "layers": "--layer"}
# What says how a run went, not how it was asked for.
_RUN = ("processes",)


def commands(record: Mapping[str, Any], name: str) -> list[str]:
    """One command a step, in the order in which they ran.

    Parameters
    ----------
    record
        ``collabify.json``, of a converted model.
    name
        Of the folder to make.
    """
    source = _text(record.get("source"), "MODEL")
    tuned, healing = record.get("finetuning"), record.get("healing")
    after = tuned is not None and tuned.get("converted") is True
    steps = []
    if tuned is not None and not after:
        steps.append(_finetune(_text(tuned.get("source"), "MODEL"), tuned, source))
    out = f"{name}-converted" if after else name
    steps.append(_convert(source, record, out))
    asked = record.get("options") or {}
    if healing is not None and asked.get("heal") is None:
        options = {"teacher": healing.get("teacher"), **(healing.get("options") or {})}
        steps.append(_command("heal", out, options))
    if tuned is not None and after:
        steps.append(_finetune(out, tuned, name))
    return steps


def _convert(source: str, record: Mapping[str, Any], out: str) -> str:
    asked = {"method": record.get("method"), "solver": record.get("solver")}
    asked |= {"revision": record.get("revision")} | (record.get("options") or {})
    return _command("convert", source, asked | {"out": out})


def _finetune(source: str, tuned: Mapping[str, Any], out: str) -> str:
    asked = {"revision": tuned.get("revision"), "teacher": tuned.get("teacher")}
    asked |= tuned.get("options") or {}
    device = asked.get("device")
    if isinstance(device, str):
        asked["device"] = device.partition(":")[0]  # cuda:0 is what cuda became
    if "image_data" not in asked:
        asked = {"task": tuned.get("task")} | asked
    return _command("finetune", source, asked | {"out": out})


def _command(verb: str, model: str, options: Mapping[str, Any]) -> str:
    """``collabify VERB MODEL`` and every option that was given or has a default."""
    words = ["collabify", verb, model]
    for option, value in options.items():
        if value is None or value is False or option in _RUN:
            continue
        words.append(_FLAGS.get(option, f"--{option.replace('_', '-')}"))
        if value is not True:
            words += [str(each) for each in value] if isinstance(value, list) else [str(value)]
    return shlex.join(words)


def _text(value: object, otherwise: str) -> str:
    return value if isinstance(value, str) else otherwise
