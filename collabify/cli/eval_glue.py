"""``collabify eval glue``: the paper's table for a fine-tuned model, and for its baseline."""

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from collabify.cli.common import (
    Baseline,
    BatchSize,
    Device,
    Json,
    Limit,
    MaxLength,
    Record,
    Resamples,
    Revision,
    Seed,
    load_model,
    print_scores,
    progress_bar,
    record_each,
    reported,
)

if TYPE_CHECKING:
    from collabify.scores import GlueScores

_TASK = "{task}"


@reported
def glue(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A fine-tuned model: a folder or a Hub id; {task} in it stands for the task.",
            show_default=False,
        ),
    ],
    task: Annotated[
        list[str],
        typer.Option(
            metavar="T",
            help="cola, sst2, mrpc, stsb, qqp, mnli, qnli, rte, wnli; several with commas or "
            "options; all: those that the data have.",
            show_default=False,
        ),
    ],
    revision: Revision = None,
    data: Annotated[
        str | None,
        typer.Option(
            metavar="DATA", help="A folder or Hub id laid out as GLUE. (default: nyu-mll/glue)"
        ),
    ] = None,
    split: Annotated[
        str | None, typer.Option(metavar="SPLIT", help="(default: validation; of mnli both)")
    ] = None,
    baseline: Baseline = None,
    batch_size: BatchSize = 32,
    max_length: MaxLength = 128,
    limit: Limit = None,
    resamples: Resamples = 1000,
    seed: Seed = 0,
    device: Device = None,
    record: Record = False,
    json: Json = False,
) -> None:
    """Score MODEL on tasks of GLUE, and with --baseline the difference, with 95 % intervals."""
    from collabify.evaluation import evaluate_glue
    from collabify.recording import recordable
    from collabify.storage import check_device

    check_device(device)
    names = [name.strip() for given in task for name in given.split(",") if name.strip()]
    tasks = _check_models(model, baseline, names, data, revision)
    places = {each: recordable(model.replace(_TASK, each)) for each in tasks if record}
    with progress_bar(quiet=json) as show:
        report = evaluate_glue(
            _loader(model, device, revision),
            names,
            data=data,
            split=split,
            batch_size=batch_size,
            max_length=max_length,
            limit=limit,
            baseline=None if baseline is None else _loader(baseline, device, None),
            resamples=resamples,
            seed=seed,
            progress=show,
        )
    report = _named(report, model, baseline)
    if json:
        typer.echo(report.to_json())
    else:
        _print(report)
    alone = {t: tuple(each for each in report.tasks if each.task == t) for t in places}
    record_each([(places[t], replace(report, tasks=alone[t])) for t in places], quiet=json)


def _named(report: "GlueScores", model: str, baseline: str | None) -> "GlueScores":
    """The same report with the names that were given, as they hold from anywhere."""
    from collabify.storage import locate

    def of(name: str | None, task: str) -> str | None:
        return None if name is None else locate(name.replace(_TASK, task)).record

    tasks = (
        replace(each, model=of(model, each.task), baseline=of(baseline, each.task))
        for each in report.tasks
    )
    return replace(report, tasks=tuple(tasks))


def _check_models(
    model: str, baseline: str | None, names: list[str], data: str | None, revision: str | None
) -> list[str]:
    """The tasks; refuses models that are not there, of any task, before one is evaluated."""
    from collabify.data.glue import find_tasks
    from collabify.errors import OptionError
    from collabify.storage import check_revision, find, quiet

    quiet()
    tasks = [each.name for each in find_tasks(names, data)]
    for option, name in (("MODEL", model), ("baseline", baseline)):
        if name is not None and _TASK not in name and len(tasks) > 1:
            raise OptionError(
                f"{option}={name!r} is one model and there are {len(tasks)} tasks "
                f"({', '.join(tasks)}), each with a head of its own. "
                f"Put {_TASK} where its name stands, or give one task."
            )
    for name, at in ((model, revision), (baseline, None)):
        for each in dict.fromkeys(name.replace(_TASK, task) for task in tasks if name is not None):
            check_revision(each, at)
            find(each, at)
    return tasks


def _loader(name: str, device: str | None, revision: str | None) -> Callable[[str], Any]:
    return lambda task: load_model(
        name.replace(_TASK, task), "auto", device, revision, strict=True
    )[0]


def _print(report: "GlueScores") -> None:
    from collabify.scoreboard import glue_notes, glue_table

    print_scores(*glue_table(report))
    for note in glue_notes(report):
        typer.echo(note)
