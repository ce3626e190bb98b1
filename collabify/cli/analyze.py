"""``collabify analyze``: how redundant the heads are, and what rank to choose."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from collabify.cli.common import (
    Device,
    Json,
    Layers,
    Model,
    load_model,
    print_table,
    progress_bar,
    reported,
)

if TYPE_CHECKING:
    from collabify.results import AnalysisReport


@reported
def analyze(
    model: Model,
    layer: Layers = None,
    energy: Annotated[
        list[float],
        typer.Option(metavar="E ...", help="Shares of energy, each in (0, 1]."),
    ] = [0.9, 0.95, 0.99],  # noqa: B006 (typer copies it)
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the paper's Figure 1: .png, .svg or .pdf."),
    ] = None,
    json: Json = False,
    device: Device = None,
) -> None:
    """Show how much the attention heads of MODEL repeat one another.

    Counts the principal directions of the query-key products: of each head alone, of their sum W_Q
    W_Kᵀ, and of all heads together, which is what bounds a shared rank. Suggests a --dk for
    `collabify convert`.
    """
    from collabify.conversion import analyze as run
    from collabify.models import find_attention
    from collabify.report import check_figure_path, save_figure

    if plot is not None:
        check_figure_path(plot)
    loaded, source = load_model(model, "auto", device)
    with progress_bar("Analyzing", quiet=json) as advance:
        total = len(layer or find_attention(loaded))
        report = run(
            loaded, layers=layer, levels=energy, progress=lambda done: advance(total, done.name)
        )
    report = replace(report, source=source.name, revision=source.revision)
    if plot is not None:
        save_figure(report, plot)
    if json:
        typer.echo(report.to_json())
    else:
        _print(report, plot)


def _print(report: "AnalysisReport", plot: Path | None) -> None:
    from collabify.report import analysis_table, percent

    levels = ", ".join(percent(level) for level in report.levels)
    typer.echo(f"Directions for {levels} of the energy (sum of squared singular values)")
    print_table(*analysis_table(report))
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
