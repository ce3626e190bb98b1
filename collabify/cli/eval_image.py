"""``collabify eval image``: top-1 and top-5 accuracy."""

from dataclasses import replace
from typing import Annotated

import typer

from collabify.cli.common import (
    Baseline,
    BatchSize,
    Device,
    Json,
    Limit,
    Model,
    Record,
    Resamples,
    Revision,
    Seed,
    check_revision,
    load_model,
    print_scores,
    progress_bar,
    record_each,
    reported,
)


@reported
def image(
    model: Model,
    data: Annotated[
        str,
        typer.Option(
            metavar="DATA",
            help="A data set (NAME or NAME:CONFIG), or a folder with a folder of images a class.",
            show_default=False,
        ),
    ],
    revision: Revision = None,
    split: Annotated[
        str | None,
        typer.Option(metavar="SPLIT", help="(default: the first of validation, test, train)"),
    ] = None,
    baseline: Baseline = None,
    batch_size: BatchSize = 32,
    limit: Limit = None,
    resamples: Resamples = 1000,
    seed: Seed = 0,
    device: Device = None,
    record: Record = False,
    json: Json = False,
) -> None:
    """Score MODEL, an image classifier, and with --baseline the difference, with 95 % intervals."""
    from collabify.evaluation import evaluate_image
    from collabify.recording import recordable
    from collabify.scoreboard import image_notes, image_table

    check_revision(model, revision)
    place = recordable(model) if record else None
    loaded, source = load_model(model, "auto", device, revision, strict=True)
    other, origin = None, None
    if baseline is not None:
        other, origin = load_model(baseline, "auto", device, strict=True)
    with progress_bar(quiet=json) as show:
        report = evaluate_image(
            loaded,
            data,
            split=split,
            batch_size=batch_size,
            limit=limit,
            baseline=other,
            resamples=resamples,
            seed=seed,
            progress=show,
        )
    named = None if origin is None else origin.record
    report = replace(report, model=source.record, baseline=named)
    if json:
        typer.echo(report.to_json())
    else:
        print_scores(*image_table(report))
        for note in image_notes(report):
            typer.echo(note)
    record_each([] if place is None else [(place, report)], quiet=json)
