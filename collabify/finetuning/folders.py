"""The folders of a fine-tuning: the one that it makes, and the one that keeps its progress.

DIR, .DIR-finetuning/run.json, .DIR-finetuning/checkpoint-N
"""

import json
import shutil
from pathlib import Path
from typing import Any

from collabify.errors import CheckpointError, OptionError, OutputError, first_line
from collabify.finetuning.trainer import checkpoint_step, last_checkpoint
from collabify.healing import is_main_process
from collabify.storage import (
    Source,
    check_not_source,
    inherited,
    output_folder,
    save,
    unmeasured,
    write_record,
)
from collabify.training_record import FinetuneReport

RUN_FILE = "run.json"


def work_folder(target: Path) -> Path:
    """Where the checkpoints of what will be ``target`` lie."""
    return target.with_name(f".{target.name}-finetuning")


def check_output(target: Path, model: str, work: Path, *, resume: bool, overwrite: bool) -> None:
    """Refuse what could not be written at the end, before anything takes time.

    Raises
    ------
    OutputError
        Where ``target`` is in use, or an interrupted run waits for a decision.
    """
    with output_folder(target, overwrite=overwrite, keep=False):
        pass
    check_not_source(target, model)
    found = last_checkpoint(work)
    if found is not None and not resume and not overwrite:
        raise OutputError(
            f"{str(work)!r} holds a run that was interrupted, up to step {checkpoint_step(found)}. "
            "Go on with --resume, or start over with --overwrite."
        )


def open_work(work: Path, run: dict[str, Any], *, resume: bool) -> Path | None:
    """The folder of the checkpoints, made new or that of the same run; the last one in it.

    Raises
    ------
    OptionError
        Where the run to go on with was another.
    CheckpointError
        Where what is there cannot be read.
    """
    found = last_checkpoint(work) if resume else None
    if found is None:
        if is_main_process():
            shutil.rmtree(work, ignore_errors=True)
            work.mkdir(parents=True)
            (work / RUN_FILE).write_text(json.dumps(run, indent=2) + "\n", encoding="utf-8")
        return None
    try:
        before = json.loads((work / RUN_FILE).read_text(encoding="utf-8"))
        differ = [name for name in (before | run) if before.get(name) != run.get(name)]
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(
            f"{str(work)!r} holds a run that was interrupted, and cannot be read "
            f"({first_line(error)}). Start over with --overwrite instead of --resume."
        ) from error
    if differ:
        name = differ[0]
        raise OptionError(
            f"{name}={run.get(name)!r} must be {before.get(name)!r}, as in the run to go on with "
            f"({', '.join(differ)} differ). Start over with --overwrite instead of --resume."
        )
    return found


def write(
    model: Any,
    source: Source,
    record: dict[str, Any],
    target: Path,
    report: FinetuneReport,
    *,
    overwrite: bool,
) -> None:
    """The model, its companions, and the report beside the source's own record."""
    with output_folder(target, overwrite=overwrite) as folder:
        save(model, folder, source=source)
        told = json.loads(report.to_json())
        if "finetuning" in record:
            told["before"] = record["finetuning"]
        write_record(folder, {**inherited(source), **unmeasured(record), "finetuning": told})
