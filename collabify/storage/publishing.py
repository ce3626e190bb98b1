"""What of a model's folder goes to the Hub, checked before anything is sent.

DIR -> weights, config, tokenizer or processor, figures, collabify.json, README.md
"""

import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from collabify.config import QUANT_METHOD, ConversionConfig
from collabify.errors import CheckpointError, CollabifyWarning, ModelNotFoundError, first_line
from collabify.hub import CARD_FILE, CONFIG_FILE, RECORD_FILE, Content, is_ours
from collabify.modelcard import MODELING_FILE, is_standalone, model_card, public
from collabify.storage.headers import INDEX_FILE, WEIGHTS_FILE, headers
from collabify.storage.loading import load
from collabify.storage.reading import read_object
from collabify.storage.records import MEASURED, read_record
from collabify.storage.source import Source, leads_out
from collabify.storage.standalone import add_code, modeling, with_auto_map
from collabify.storage.weights import of_these_weights, weights_digest
from collabify.storage.writing import COMPANIONS

FIGURES = ("*.png", "*.svg", "*.pdf", "figures/*")


@dataclass(frozen=True, eq=False)
class Package:
    """What a push would send.

    Parameters
    ----------
    files
        Paths on disk or contents, by their path in the repository.
    card
        Whose README.md it is: ``generated``, or ``folder`` where somebody wrote it.
    left_out
        What else is in the folder.
    """

    files: dict[str, Content]
    card: str
    left_out: tuple[str, ...]

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes of every file, by its path in the repository."""
        return {
            name: len(content) if isinstance(content, bytes) else content.stat().st_size
            for name, content in self.files.items()
        }


def package(folder: Path, repo: str, *, standalone: bool = False) -> Package:
    """Collect what of a converted model's folder goes into the repository ``repo``.

    A README.md that is not one of ours, unchanged, is somebody's own and goes as it is.

    Parameters
    ----------
    folder
        Of a converted model.
    repo
        ``user/name``.
    standalone
        Send the code along with which it loads without collabify; it also goes where the folder has
        it, but always as collabify makes it.

    Raises
    ------
    ModelNotFoundError
        Where it is no model's folder, or has no weights in safetensors.
    CheckpointError
        Where the model was not converted, its files are damaged or do not load, or a link leads out
        of the folder.

    Warns
    -----
    CollabifyWarning
        Where something was measured of other weights, which is left out.
    """
    config = read_config(folder)
    check_converted(folder, config)
    source = Source(str(folder), str(folder))
    weights = headers(source).files
    record = _of_these(folder, read_record(source), weights)
    load(str(folder.resolve()))  # nobody else could, where this cannot
    names = sorted(
        path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()
    )
    found = {path for pattern in _PATTERNS for path in folder.glob(pattern) if path.is_file()}
    files: dict[str, Content] = {CONFIG_FILE: folder / CONFIG_FILE}
    files |= {name: folder / name for name in weights}
    if weights != (WEIGHTS_FILE,):
        files[INDEX_FILE] = folder / INDEX_FILE
    files |= {path.relative_to(folder).as_posix(): path for path in sorted(found)}
    for name in files:
        _check_inside(folder, name)
    if standalone or is_standalone(config):
        config = with_auto_map(config)
        files[CONFIG_FILE] = (json.dumps(config, indent=2, sort_keys=True) + "\n").encode()
        files[MODELING_FILE] = modeling().encode()
    if record:
        files[RECORD_FILE] = (json.dumps(public(record), indent=2) + "\n").encode()
    card = "generated"
    if CARD_FILE in names and not is_ours(folder / CARD_FILE):
        card, files[CARD_FILE] = "folder", folder / CARD_FILE
    else:
        files[CARD_FILE] = _card(folder, record, config, repo, sentences="modules.json" in names)
    left_out = tuple(name for name in names if name not in files)
    return Package(files, card, left_out)


def _of_these(folder: Path, record: dict[str, Any], files: tuple[str, ...]) -> dict[str, Any]:
    """The record without what was measured of other weights than these, and a word of it."""
    if not any(record.get(name) for name in MEASURED):
        return record
    kept, lost = of_these_weights(record, weights_digest(folder, files))
    if lost:
        warnings.warn(
            f"{str(folder)!r} holds other weights than {lost} of the measurements in its "
            f"{RECORD_FILE}, which are left out. Measure again: collabify eval ... --record",
            CollabifyWarning,
            stacklevel=3,
        )
    return kept


def write_standalone(folder: str | Path) -> None:
    """Let a saved model load where collabify is not installed.

    ``modeling_collabify.py`` is written there, and named in ``config.json``, for
    ``AutoModel*.from_pretrained(folder, trust_remote_code=True)``.

    Parameters
    ----------
    folder
        Of a converted model.

    Raises
    ------
    ModelNotFoundError
        Where it is no model's folder.
    CheckpointError
        Where the model was not converted, or its configuration cannot be read.
    """
    folder = Path(folder)
    check_converted(folder, read_config(folder))
    add_code(folder)


_PATTERNS = (*COMPANIONS, *FIGURES)


def read_config(folder: Path) -> dict[str, Any]:
    """A folder's ``config.json``.

    Raises
    ------
    ModelNotFoundError
        Where there is none.
    CheckpointError
        Where it cannot be read.
    """
    if not (folder / CONFIG_FILE).is_file():
        raise ModelNotFoundError(
            f"{str(folder)!r} has no {CONFIG_FILE}. Give a folder that collabify convert wrote."
        )
    return parse_config(folder / CONFIG_FILE)


def parse_config(path: Path) -> dict[str, Any]:
    """A ``config.json``.

    Raises
    ------
    CheckpointError
        Where it cannot be read.
    """
    try:
        return read_object(path)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{str(path)!r} cannot be read ({first_line(error)}). Make or copy the model again."
        ) from error


def conversion_of(config: Mapping[str, Any]) -> ConversionConfig | None:
    """What ``config.json`` says was converted; ``None``: nothing was.

    Raises
    ------
    CheckpointError
        Where it was written by a later collabify, or is damaged.
    """
    record = config.get("quantization_config")
    if not isinstance(record, dict) or record.get("quant_method") != QUANT_METHOD:
        return None
    return ConversionConfig.from_dict(record)


def check_converted(folder: Path, config: Mapping[str, Any]) -> None:
    """Refuse a model that was not converted.

    Raises
    ------
    CheckpointError
    """
    if conversion_of(config) is None:
        raise CheckpointError(
            f"{str(folder)!r} holds a model that was not converted. Convert it first: collabify "
            "convert, or push it as it is: hf upload"
        )


def _check_inside(folder: Path, name: str) -> None:
    """Refuse a link to what is not the model's: it would be made public."""
    if leads_out(folder / name, folder):
        raise CheckpointError(
            f"{name!r} of {str(folder)!r} is a link to {str((folder / name).resolve())!r}, outside "
            "of it, and would be sent. Delete it, or put a copy in its place."
        )


def _card(
    folder: Path,
    record: Mapping[str, Any],
    config: Mapping[str, Any],
    repo: str,
    *,
    sentences: bool,
) -> bytes:
    if not record:
        raise CheckpointError(
            f"{str(folder)!r} has no {RECORD_FILE}, of which its card is written. "
            f"Convert the model again, or write a {CARD_FILE} there."
        )
    return model_card(record, config, repo=repo, sentences=sentences).encode()
