"""``collabify eval drift``: how far a model is from its original, without labels."""

from dataclasses import replace
from typing import Annotated

import typer

from collabify.cli.common import (
    BatchSize,
    Device,
    Json,
    MaxLength,
    Model,
    Record,
    Revision,
    Seed,
    check_revision,
    load_model,
    print_table,
    progress_bar,
    record_each,
    reported,
)


@reported
def drift(
    model: Model,
    baseline: Annotated[
        str, typer.Option(metavar="ORIGINAL", help="What MODEL was made from.", show_default=False)
    ],
    data: Annotated[
        str,
        typer.Option(
            metavar="SOURCE",
            help="A text file, a folder of images, a data set (NAME[:CONFIG[:SPLIT[:COLUMN]]]) or "
            "'synthetic'.",
            show_default=False,
        ),
    ],
    revision: Revision = None,
    samples: Annotated[int, typer.Option(metavar="N", help="Samples to read.")] = 256,
    batch_size: BatchSize = 16,
    max_length: MaxLength = 128,
    seed: Seed = 0,
    device: Device = None,
    record: Record = False,
    json: Json = False,
) -> None:
    """Measure how far MODEL is from its original: hidden states, attention, predictions."""
    from collabify.evaluation import evaluate_drift
    from collabify.recording import recordable
    from collabify.scoreboard import drift_notes, drift_table

    check_revision(model, revision)
    place = recordable(model) if record else None
    loaded, own = load_model(model, "auto", device, revision, strict=True)
    original, source = load_model(baseline, "auto", device, strict=True)
    with progress_bar(quiet=json) as show:
        report = evaluate_drift(
            loaded,
            original,
            data,
            samples=samples,
            batch_size=batch_size,
            max_length=max_length,
            seed=seed,
            processor=source.location,
            progress=show,
        )
    report = replace(report, model=own.record, baseline=source.record)
    if json:
        typer.echo(report.to_json())
    else:
        print_table(*drift_table(report))
        for note in drift_notes(report):
            typer.echo(note)
    record_each([] if place is None else [(place, report)], quiet=json)
