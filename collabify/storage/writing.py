"""What goes into a model's folder: weights, companions, and the report of what was done."""

import errno
import json
import platform
import shutil
from importlib.metadata import version
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from safetensors import SafetensorError
from transformers import PreTrainedModel

from collabify.errors import CheckpointError, first_line
from collabify.results import ConversionReport
from collabify.storage.source import Source

REPORT_FILE = "collabify.json"

# What makes a model usable beside its weights: tokenizer, image processor, generation,
# sentence-transformers, licence.
COMPANIONS = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "bpe.codes",
    "preprocessor_config.json",
    "processor_config.json",
    "generation_config.json",
    "modules.json",
    "sentence_*_config.json",
    "config_sentence_transformers.json",
    "[0-9]_*/*",
    "LICENSE*",
    "NOTICE*",
)


def save(
    model: PreTrainedModel,
    folder: Path,
    *,
    source: Source | None = None,
    report: ConversionReport | None = None,
) -> None:
    """Write a model, the files that travel with it and the report of its conversion into a folder.

    Parameters
    ----------
    model
        Converted or not.
    folder
        Where to; it should be one that :func:`output_folder` gave.
    source
        Where tokenizer, image processor and the like are copied from.
    report
        Written as ``collabify.json``, with what the source's says of its fine-tuning.
    """
    try:
        model.save_pretrained(folder)
    except SafetensorError as error:
        raise OSError(errno.EIO, first_line(error)) from error
    if source is not None:
        _copy_companions(source, folder)
    if report is not None:
        record = json.loads(report.to_json())
        before = {} if source is None else read_record(source)
        if "finetuning" in before:
            record["finetuning"] = before["finetuning"]
        (folder / REPORT_FILE).write_text(json.dumps(record, indent=2) + "\n")


def _copy_companions(source: Source, folder: Path) -> None:
    """Copy what makes the model usable, byte for byte; what the model wrote itself stays."""
    if source.is_folder:
        root = Path(source.location)
    else:
        root = Path(
            snapshot_download(
                source.location, revision=source.revision, allow_patterns=list(COMPANIONS)
            )
        )
    for pattern in COMPANIONS:
        for path in root.glob(pattern):
            target = folder / path.relative_to(root)
            if path.is_file() and not target.exists():
                target.parent.mkdir(exist_ok=True)
                shutil.copyfile(path, target)


def read_record(source: Source) -> dict[str, Any]:
    """What a model's ``collabify.json`` says; nothing where there is none.

    Raises
    ------
    CheckpointError
        Where it cannot be read.
    """
    path = Path(source.location) / REPORT_FILE
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{str(path)!r} cannot be read ({first_line(error)}). Put it right or delete it."
        ) from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{str(path)!r} must hold a JSON object. Put it right or delete it.")
    return found


def versions() -> dict[str, str]:
    """Versions of collabify and of the packages that a conversion's numbers depend on."""
    named = ("collabify", "tensorly", "torch", "transformers")
    return {"python": platform.python_version(), **{name: version(name) for name in named}}
