"""The folder that keeps a run's progress, so that it can go on after an interruption.

    FOLDER/N/    the N-th state, whole: what accelerate saves, and run.json, which run it is of
    FOLDER/new/  one that is being written

A state is renamed to its number when it is whole, and only then the one before it is deleted. All
of it is inside of the folder, so whatever interrupts the writing, nothing is left elsewhere.
"""

import hashlib
import json
import shutil
import warnings
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator  # type: ignore[import-untyped]
from torch import Tensor, nn

from collabify.data import CalibrationData
from collabify.errors import CheckpointError, CollabifyWarning, OutputError, first_line
from collabify.healing.run import Run

RUN_FILE = "run.json"


class Store:
    """A run's progress on disk; only the main process writes it.

    Parameters
    ----------
    folder
        Made when something is saved.
    accelerator
        Saves and loads optimizer, scheduler, generators and the run.
    record
        Which run it is: its options, and with :meth:`identify` what goes in.
    """

    def __init__(self, folder: Path, accelerator: Accelerator, record: dict[str, Any]) -> None:
        self.folder, self.accelerator, self.record = folder, accelerator, record
        self.resumable = False  # whether there is a state of this very run
        # Everything that changes is in the run, which is registered with the accelerator.
        accelerator.register_save_state_pre_hook(lambda models, weights, _: weights.clear())
        accelerator.register_load_state_pre_hook(lambda models, _: models.clear())

    def identify(self, model: nn.Module, teacher: nn.Module, data: CalibrationData) -> None:
        """Say which run this is: the models and what they read."""
        self.record["model"] = digest(model.parameters())
        self.record["teacher"] = digest(teacher.parameters())
        batches = (*data.batches, *data.held_out)
        self.record["calibration"] = digest(value for batch in batches for value in batch.values())

    def resume(self, run: Run) -> None:
        """Go on from where the same run stopped, if it did.

        Raises
        ------
        CheckpointError
            Where the state cannot be read.
        """
        self.accelerator.register_for_checkpointing(run)
        states = self._states()
        if not states:
            return
        try:
            record = json.loads((states[-1] / RUN_FILE).read_text())
            differ = [name for name in self.record if record.get(name) != self.record[name]]
            if not differ:
                self.accelerator.load_state(str(states[-1]))
                self.resumable = True
                return
        except Exception as error:  # torch.load raises nothing narrower for a damaged file
            raise CheckpointError(
                f"{str(self.folder)!r} holds a run that was interrupted, and cannot be read "
                f"({first_line(error)}). Delete it to start over."
            ) from error
        if self.accelerator.is_main_process:
            warnings.warn(
                f"The run that was interrupted had another {', '.join(differ)}: starting over.",
                CollabifyWarning,
                stacklevel=2,
            )

    def save(self) -> None:
        """Write the progress.

        Raises
        ------
        OutputError
            Where it cannot be written.
        """
        if self.accelerator.is_main_process:
            self._write()
        self.resumable = True

    def discard(self) -> None:
        """Forget the progress of a run that leads nowhere."""
        if self.accelerator.is_main_process:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _states(self) -> list[Path]:
        """The states that are whole, in order."""
        found = self.folder.iterdir() if self.folder.is_dir() else ()
        return sorted((each for each in found if each.name.isdecimal()), key=lambda p: int(p.name))

    def _write(self) -> None:
        old = self._states()
        new = self.folder / "new"
        shutil.rmtree(new, ignore_errors=True)
        try:
            self.accelerator.save_state(str(new))
            (new / RUN_FILE).write_text(json.dumps(self.record))
            new.rename(self.folder / str(1 + int(old[-1].name) if old else 1))
            for state in old:
                shutil.rmtree(state, ignore_errors=True)
        except (OSError, RuntimeError) as error:  # torch.save raises both
            raise OutputError(
                f"The progress of healing cannot be written to {str(self.folder)!r} "
                f"({first_line(error)}). Free space there."
            ) from error
        finally:
            shutil.rmtree(new, ignore_errors=True)
            with suppress(OSError):  # where a state is in it, it stays
                self.folder.rmdir()


def digest(tensors: Iterable[Tensor]) -> str:
    """A fingerprint of numbers."""
    found = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        found.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return found.hexdigest()
