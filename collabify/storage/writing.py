"""What goes into a model's folder: weights, companions, and the report of what was done."""

import errno
import json
import platform
import shutil
import warnings
from importlib.metadata import version
from pathlib import Path

from huggingface_hub import snapshot_download
from safetensors import SafetensorError
from transformers import PreTrainedModel

from collabify.errors import CollabifyWarning, first_line
from collabify.results import ConversionReport
from collabify.storage.records import inherited, write_record
from collabify.storage.source import Source, leads_out

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
        Written as ``collabify.json``, with what the source's says of its fine-tuning and its card
        of its licence.
    """
    try:
        model.save_pretrained(folder)
    except SafetensorError as error:
        raise OSError(errno.EIO, first_line(error)) from error
    if source is not None:
        _copy_companions(source, folder)
    if report is not None:
        record = inherited(source) | json.loads(report.to_json())
        write_record(folder, record)


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
                if leads_out(path, root):
                    warnings.warn(
                        f"{path.relative_to(root).as_posix()!r} of {source.name!r} is a link to "
                        f"{str(path.resolve())!r}, outside of it, and is left out. "
                        "Copy it yourself if it belongs to the model.",
                        CollabifyWarning,
                        stacklevel=3,
                    )
                    continue
                target.parent.mkdir(exist_ok=True)
                shutil.copyfile(path, target)


def versions() -> dict[str, str]:
    """Versions of collabify and of the packages that a conversion's numbers depend on."""
    named = ("collabify", "tensorly", "torch", "transformers")
    return {"python": platform.python_version(), **{name: version(name) for name in named}}
