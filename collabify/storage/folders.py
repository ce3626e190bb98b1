"""Model folders: written whole or not at all.

with output_folder(out) as folder:
    save(model, folder, source=source)
"""

import errno
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from glob import escape
from pathlib import Path

from collabify.errors import CollabifyError, OutputError, first_line
from collabify.storage.reading import read_object


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
    recover(out)
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
            _swap(folder, out, scratch / _OLD)
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


def recover(out: Path) -> None:
    """Put back the folder ``out`` where a run was killed just as it replaced it."""
    out = out.resolve()
    mine = f".{escape(out.name)}-{_DRAWN}/{_OLD}"  # of out.name + "-2" it is longer
    for old in () if out.exists() else out.parent.glob(mine):
        old.rename(out)
        shutil.rmtree(old.parent, ignore_errors=True)
        return


_DRAWN = "?" * 8  # what mkdtemp adds
_OLD = "old"  # in a temporary folder: what was there before

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
        config = read_object(folder / "config.json")
    except (OSError, ValueError):
        return False
    weights = (*folder.glob("*.safetensors"), *folder.glob("pytorch_model*.bin"))
    return "model_type" in config and bool(weights)
