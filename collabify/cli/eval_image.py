"""``collabify eval image``: top-1 and top-5 accuracy."""

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
    recorded,
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
    from collabify.recording import record as put
    from collabify.recording import recordable
    from collabify.scoreboard import image_notes, image_table

    check_revision(model, revision)
    place = recordable(model) if record else None
    loaded, _ = load_model(model, "auto", device, revision, strict=True)
    other = None if baseline is None else load_model(baseline, "auto", device, strict=True)[0]
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
    path = None if place is None else put(place, report)
    if json:
        typer.echo(report.to_json())
        return
    print_scores(*image_table(report))
    for note in image_notes(report):
        typer.echo(note)
    if path is not None:
        recorded(path)
