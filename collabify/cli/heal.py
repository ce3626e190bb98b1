"""``collabify heal``: recover what a conversion lost, without labels."""

import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from collabify.cli import common as options
from collabify.cli.common import load_model, print_table, progress_bar, reported
from collabify.errors import ModelNotFoundError, OptionError

if TYPE_CHECKING:
    from collabify.results import HealingReport
    from collabify.storage import Source

# What save_pretrained writes anew; everything else in the folder stays.
_WEIGHTS = ("model*.safetensors", "model.safetensors.index.json", "pytorch_model*")


@reported
def heal(
    model: Annotated[
        str,
        typer.Argument(metavar="DIR", help="A converted model.", show_default=False),
    ],
    teacher: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL", help="The original. (default: what DIR says it was converted from)"
        ),
    ] = None,
    calibration: options.Calibration = "synthetic",
    samples: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Calibration samples. (default: a quarter of what all steps read, at most 1024)",
        ),
    ] = None,
    max_length: options.MaxLength = 128,
    steps: Annotated[int, typer.Option(metavar="N", help="Steps of Adam.")] = 150,
    batch_size: Annotated[
        int, typer.Option(metavar="B", help="Samples that a process reads in a step.")
    ] = 32,
    learning_rate: Annotated[
        float,
        typer.Option(metavar="R", help="The peak of one cycle; lowered where too high."),
    ] = 1e-3,
    seed: options.Seed = 0,
    device: options.Device = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR2", help="Where to write the healed model. (default: DIR)"),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a model that is in DIR2 already.")
    ] = False,
    json: options.Json = False,
) -> None:
    """Recover what a conversion lost, without labels.

    Trains only what the conversion made, so that hidden states match the original's. After Ctrl-C
    the same command goes on where it stopped. `accelerate launch -m collabify heal ...` uses
    several GPUs.
    """
    from collabify.healing import heal as run
    from collabify.healing import is_main_process, new_parameters
    from collabify.info import describe
    from collabify.storage import (
        check_not_source,
        output_folder,
        read_record,
        recover,
        resolved,
        versions,
    )

    recover(Path(model))
    target = _target(model, out)
    in_place = out is None or target == Path(model).resolve()
    if in_place:
        describe(model)  # refuses what is damaged before it is no model's folder to write to
    with output_folder(target, overwrite=overwrite or in_place, keep=False):
        pass  # refuses before anything takes time
    loaded, source = load_model(model, "auto", device)
    new_parameters(loaded)  # refuses what was not converted before its original is looked for
    record = read_record(source)
    original, origin = _load_teacher(model, teacher, record, device)
    if not in_place:
        check_not_source(target, origin.name)
    state = target.with_name(f".{target.name}-healing")
    try:
        with progress_bar(quiet=json or not is_main_process()) as show:
            report = run(
                loaded,
                original,
                calibration=calibration,
                samples=samples,
                max_length=max_length,
                steps=steps,
                batch_size=batch_size,
                learning_rate=learning_rate,
                seed=seed,
                processor=source.location,
                state=state,
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
    report = replace(
        report,
        teacher=origin.record,
        versions=versions(),
        options=report.options | {"calibration": resolved(calibration), "device": device or "cpu"},
    )
    if report.kept or not in_place:
        _save(loaded, source, target, record, report, in_place=in_place, overwrite=overwrite)
    shutil.rmtree(state, ignore_errors=True)
    if json:
        typer.echo(report.to_json())
    else:
        _print(report, target, calibration, written=report.kept or not in_place)


def _target(model: str, out: Path | None) -> Path:
    """The folder to write."""
    if out is None and not Path(model).is_dir():
        raise OptionError(
            f"--out is missing: {model!r} is not a folder that could be written. "
            "Say where the healed model goes."
        )
    return (out or Path(model)).resolve()


def _load_teacher(
    model: str, teacher: str | None, record: Mapping[str, Any], device: str | None
) -> tuple[Any, "Source"]:
    """The original, from ``--teacher``, or from where the record says and as it was then."""
    if teacher is not None:
        return load_model(teacher, "auto", device)
    name, revision = record.get("source"), record.get("revision")
    if name is None:
        raise ModelNotFoundError(
            f"{model!r} has no collabify.json that names the model it was converted from. "
            "Name it: --teacher MODEL"
        )
    try:
        return load_model(name, "auto", device, revision)
    except ModelNotFoundError as error:
        at = "" if revision is None else f" at revision {revision!r}"
        raise ModelNotFoundError(
            f"{model!r} was converted from {name!r}{at}, which cannot be found from here. "
            "Say where it is: --teacher MODEL"
        ) from error


def _save(
    model: Any,
    source: "Source",
    target: Path,
    record: Mapping[str, Any],
    report: "HealingReport",
    *,
    in_place: bool,
    overwrite: bool,
) -> None:
    """Write the model, all that lies beside it, and the record with the report in it."""
    from collabify.storage import output_folder, save, unmeasured, write_record

    with output_folder(target, overwrite=overwrite or in_place) as folder:
        if in_place:
            only_top = shutil.ignore_patterns(*_WEIGHTS)

            def ignore(inside: str, names: list[str]) -> set[str]:
                return only_top(inside, names) if Path(inside) == target else set()

            shutil.copytree(target, folder, symlinks=True, ignore=ignore, dirs_exist_ok=True)
        save(model, folder, source=source)
        write_record(folder, {**unmeasured(record), "healing": report.to_dict()})


def _print(report: "HealingReport", target: Path, calibration: str, *, written: bool) -> None:
    from collabify.report import percent, went_back

    old, new = report.drift_before, report.drift_after
    rows = [
        ("loss, all layers", f"{report.loss_before:.5f}", f"{report.loss_after:.5f}"),
        ("hidden states, cosine", f"{old.hidden_cosine:.4f}", f"{new.hidden_cosine:.4f}"),
        ("hidden states, error", f"{old.hidden_error:.4f}", f"{new.hidden_error:.4f}"),
        ("attention moved by", *(percent(round(d.attention, 3)) for d in (old, new))),
    ]
    print_table(("on held-out samples", "before", "after"), rows)
    resumed = "" if report.resumed_at is None else f", resumed after {report.resumed_at}"
    typer.echo(
        f"{report.steps} steps{resumed}, {report.seconds:.0f} seconds, "
        f"{report.parameters:,} parameters, on {report.calibration}."
    )
    if report.went_back:
        typer.echo(went_back(report))
    if not report.kept:
        typer.echo("Nothing was won: no step was better on held-out samples. The model stays.")
    else:
        typer.echo(f"Kept the best, step {report.best_step}.")
    if calibration == "synthetic":
        typer.echo("Real data heals better than synthetic input: --calibration FILE")
    typer.echo(f"Saved to {target}." if written else f"{target} is as it was.")
