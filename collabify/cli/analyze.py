"""``collabify analyze``: how redundant the heads are, and what rank to choose."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from collabify.cli import common as options
from collabify.cli.common import check_revision, load_model, print_table, progress_bar, reported

if TYPE_CHECKING:
    from collabify.mixing import MixingReport
    from collabify.spectra import AnalysisReport


@reported
def analyze(
    model: options.Model,
    revision: options.Revision = None,
    layer: options.Layers = None,
    energy: Annotated[
        list[float],
        typer.Option(metavar="E ...", help="Shares of energy, each in (0, 1]."),
    ] = [0.9, 0.95, 0.99],  # noqa: B006 (typer copies it)
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write a figure, .png, .svg or .pdf: the paper's Figure 1, or of a converted "
            "model heat maps of its mixing.",
        ),
    ] = None,
    calibration: options.Calibration = "synthetic",
    samples: options.Samples = 256,
    max_length: options.MaxLength = 128,
    seed: options.Seed = 0,
    json: options.Json = False,
    device: options.Device = None,
) -> None:
    """Show how much the attention heads of MODEL repeat one another.

    Counts the principal directions of the query-key products: of each head alone, of their sum W_Q
    W_Kᵀ, and of all heads together, which is what bounds a shared rank. Suggests a --dk for
    `collabify convert`.

    Of a model that was converted, shows how its heads mix what they share; of the options, only
    --layer, --plot and --json count then.
    """
    from collabify.analysis import analyze as run
    from collabify.mixing import is_converted, mixing_report
    from collabify.report import check_figure_path, save_figure, spectra_figure

    check_revision(model, revision)
    if plot is not None:
        check_figure_path(plot)
    loaded, source = load_model(model, "auto", device, revision)
    if is_converted(loaded):
        mixings = replace(
            mixing_report(loaded, layers=layer), source=source.record, revision=source.revision
        )
        _print_mixings(mixings, plot, json=json)
        return
    with progress_bar(quiet=json) as show:
        report = run(
            loaded,
            layers=layer,
            levels=energy,
            calibration=calibration,
            samples=samples,
            max_length=max_length,
            processor=source.location,
            seed=seed,
            progress=show,
        )
    report = replace(report, source=source.record, revision=source.revision)
    if plot is not None:
        save_figure(lambda: spectra_figure(report), plot)
    if json:
        typer.echo(report.to_json())
    else:
        _print(report, plot)


def _print_mixings(report: "MixingReport", plot: Path | None, *, json: bool) -> None:
    if plot is not None:
        from collabify.mixing_figure import mixing_figure
        from collabify.report import save_figure

        save_figure(lambda: mixing_figure(report), plot)
    if json:
        typer.echo(report.to_json())
        return
    for mixing in report.mixings:
        typer.echo(mixing.words())
    typer.echo(report.reading())
    if plot is not None:
        typer.echo(f"Figure: {plot}")


def _print(report: "AnalysisReport", plot: Path | None) -> None:
    from collabify.report import analysis_table, percent

    levels = ", ".join(percent(level) for level in report.levels)
    typer.echo(f"Directions for {levels} of the energy (sum of squared singular values)")
    typer.echo("")
    typer.echo("Of the weights:")
    print_table(*analysis_table(report, report.layers))
    if report.calibrated:
        typer.echo(f"Where tokens really move ({report.calibration}):")
        print_table(*analysis_table(report, report.calibrated))
    typer.echo(report.reading())
    if report.suggested_dk < report.full_rank:
        typer.echo(
            f"Suggested: --dk {report.suggested_dk} of {report.full_rank} "
            f"({percent(report.suggestion_energy)} of the energy with heads kept apart; "
            "shared channels keep more)."
        )
    else:
        typer.echo(
            f"No --dk below {report.full_rank} keeps "
            f"{percent(report.suggestion_energy)} of the energy."
        )
    if plot is not None:
        typer.echo(f"Figure: {plot}")
