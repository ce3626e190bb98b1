"""``collabify finetune``: train for a task, with labels, or a teacher too."""

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from collabify.cli.common import (
    Json,
    MaxLength,
    Model,
    Revision,
    Seed,
    check_revision,
    print_table,
    progress_bar,
    reported,
)

if TYPE_CHECKING:
    from collabify.training_record import FinetuneReport


class OnlyName(StrEnum):
    """Choices of ``--only``."""

    ALL = "all"
    ATTENTION = "attention"


@reported
def finetune(
    model: Model,
    out: Annotated[
        Path, typer.Option(metavar="DIR", help="Where to write the model.", show_default=False)
    ],
    revision: Revision = None,
    task: Annotated[
        str | None,
        typer.Option(
            metavar="T", help="cola, sst2, mrpc, stsb, qqp, mnli, qnli, rte or wnli, of GLUE."
        ),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            metavar="PATH", help="Hub id or folder with GLUE's layout. (default: nyu-mll/glue)"
        ),
    ] = None,
    image_data: Annotated[
        str | None,
        typer.Option(
            metavar="DATASET|FOLDER",
            help="Instead of --task: labelled images, or a folder with a folder for each label.",
        ),
    ] = None,
    split: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Of --image-data, to train on. (default: train)"),
    ] = None,
    eval_split: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Of --image-data, to score. (default: validation, or test)"
        ),
    ] = None,
    epochs: Annotated[int, typer.Option(metavar="N", help="Passes over the data.")] = 3,
    learning_rate: Annotated[
        float, typer.Option(metavar="R", help="At the start; it falls to nothing.")
    ] = 2e-5,
    batch_size: Annotated[
        int, typer.Option(metavar="B", help="Examples that a process reads in a step.")
    ] = 32,
    max_length: MaxLength = 128,
    only: Annotated[
        OnlyName,
        typer.Option(help="attention: only what a conversion made, and the head."),
    ] = OnlyName.ALL,
    teacher: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="Follow this fine-tuned model's outputs as well."),
    ] = None,
    alpha: Annotated[
        float | None,
        typer.Option(metavar="A", help="The teacher's share of the loss, 0 to 1. (default: 0.5)"),
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(metavar="T", help="Divides both models' logits. (default: 2)")
    ] = None,
    hidden_states: Annotated[
        bool, typer.Option("--hidden-states", help="Follow the teacher's hidden states too.")
    ] = False,
    seed: Seed = 0,
    limit: Annotated[
        int | None, typer.Option(metavar="N", help="Examples of every split at most.")
    ] = None,
    precision: Annotated[
        str,
        typer.Option(metavar="fp32|fp16|bf16", help="Of the products; weights stay in float32."),
    ] = "fp32",
    device: Annotated[
        str | None, typer.Option(metavar="DEVICE", help="cpu, cuda or mps. (default: a GPU if any)")
    ] = None,
    report_to: Annotated[
        list[str] | None,
        typer.Option(metavar="TRACKER", help="tensorboard, wandb, ...; may be repeated."),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from an interrupted run's last checkpoint.")
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a model that is in DIR already.")
    ] = False,
    json: Json = False,
) -> None:
    """Train for a task; the defaults are those of the paper.

    A head that does not fit the task's labels is made anew. Ctrl-C leaves a checkpoint: the same
    command with --resume goes on. `accelerate launch -m collabify finetune ...` uses several GPUs.
    """
    from collabify.finetuning import finetune as run
    from collabify.healing import is_main_process
    from collabify.storage import quiet

    check_revision(model, revision)
    quiet()
    try:
        with progress_bar(quiet=json or not is_main_process()) as show:
            report = run(
                model,
                out=out,
                revision=revision,
                task=task,
                data=data,
                image_data=image_data,
                split=split,
                eval_split=eval_split,
                epochs=epochs,
                learning_rate=learning_rate,
                batch_size=batch_size,
                max_length=max_length,
                only=only.value,
                teacher=teacher,
                alpha=alpha,
                temperature=temperature,
                hidden_states=hidden_states,
                seed=seed,
                limit=limit,
                precision=precision,
                device=device,
                report_to=report_to or (),
                resume=resume,
                overwrite=overwrite,
                progress=show,
            )
    except KeyboardInterrupt as error:
        if not error.args:
            raise
        if is_main_process():
            typer.echo(str(error), err=True)
        raise typer.Exit(130) from None
    if not is_main_process():
        return
    if json:
        typer.echo(report.to_json())
    else:
        _print(report, out)


def _print(report: "FinetuneReport", out: Path) -> None:
    last = report.scores[-1]
    columns = [
        (split, metric)
        for split, found in last.items()
        if isinstance(found, dict)
        for metric in found
    ]
    several = len({split for split, _ in columns}) > 1
    heads = [f"{split} {metric}" if several else metric for split, metric in columns]
    rows = [
        (str(epoch["epoch"]), f"{epoch['loss']:.4f}", *(f"{epoch[s][m]:.4f}" for s, m in columns))
        for epoch in report.scores
    ]
    print_table(("epoch", "training loss", *heads), rows)
    resumed = "" if report.resumed_at is None else f", resumed after {report.resumed_at}"
    typer.echo(
        f"{report.steps} steps{resumed}, {report.seconds:.0f} seconds, {report.parameters:,} "
        f"parameters, on {report.examples} examples of {report.data}; "
        f"scored on {report.evaluated}."
    )
    if report.new_head is not None:
        typer.echo(f"The head is new: {report.new_head}.")
    if report.teacher is not None:
        typer.echo(f"Taught by {report.teacher}.")
    typer.echo(f"Saved to {out}.")
