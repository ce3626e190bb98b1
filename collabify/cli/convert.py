"""``collabify convert``: the main job."""

from contextlib import ExitStack
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from collabify.cli import common as options
from collabify.cli.common import check_revision, load_model, print_table, progress_bar, reported
from collabify.errors import OptionError

if TYPE_CHECKING:
    from collabify.results import ConversionReport


class MethodName(StrEnum):
    """Choices of ``--method``."""

    CP = "cp"
    TUCKER = "tucker"
    HEAD_SVD = "head-svd"
    TALKING_HEADS = "talking-heads"


class ProjectionsName(StrEnum):
    """Choices of ``--projections``."""

    LOGITS = "logits"
    WEIGHTS = "weights"
    BOTH = "both"


class SolverName(StrEnum):
    """Choices of ``--solver``."""

    FACTORED = "factored"
    TENSORLY = "tensorly"


@reported
def convert(
    model: options.Model,
    revision: options.Revision = None,
    dk: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Shared query-key channels, at most heads x head width (then exact).",
        ),
    ] = None,
    kept: Annotated[
        float | None,
        typer.Option(
            metavar="SHARE",
            help="Instead of --dk: share of the converted layers' query-key parameters, e.g. 0.5.",
        ),
    ] = None,
    error: Annotated[
        float | None,
        typer.Option(metavar="E", help="Instead of --dk: relative error allowed, e.g. 0.1."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where to write the converted model.")
    ] = None,
    method: Annotated[
        MethodName,
        typer.Option(
            help="cp: collaborative attention; tucker: a core per head; head-svd: heads kept "
            "apart; talking-heads: heads mix the logits of base heads."
        ),
    ] = MethodName.CP,
    channels: Annotated[
        str | None,
        typer.Option(
            metavar="K|all",
            help="Shared channels that a head keeps. (default: as fast as before, head width - 1)",
        ),
    ] = None,
    head_rank: Annotated[
        int | None,
        typer.Option(
            metavar="A", help="tucker: cores that the heads mix. (default: a core per head)"
        ),
    ] = None,
    base_heads: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="talking-heads: base heads that the heads mix. (default: all)"
        ),
    ] = None,
    base_width: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="D",
            help="talking-heads: channels of a base head. (default: what --dk leaves)",
        ),
    ] = None,
    projections: Annotated[
        ProjectionsName | None,
        typer.Option(
            help="talking-heads: mix logits before the softmax, weights after it, or both. "
            "(default: logits; both where no size is given)"
        ),
    ] = None,
    dynamic: Annotated[
        bool,
        typer.Option(
            "--dynamic",
            help="talking-heads: mixing depends on tokens, a little at first; for training.",
        ),
    ] = False,
    dv: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Channels of all values. (default: as they are)"),
    ] = None,
    kept_values: Annotated[
        float | None,
        typer.Option(
            metavar="SHARE",
            help="Instead of --dv: share of the parameters of values and outputs, e.g. 0.75.",
        ),
    ] = None,
    value_heads: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="Value heads that read mixed attention weights (P_w)."
        ),
    ] = None,
    calibration: options.Calibration = "synthetic",
    samples: options.Samples = 256,
    max_length: options.MaxLength = 128,
    solver: Annotated[
        SolverName,
        typer.Option(help="Ours on the factored heads, or tensorly's on the dense tensor."),
    ] = SolverName.FACTORED,
    iterations: Annotated[int, typer.Option(metavar="N", help="Sweeps at most.")] = 200,
    tol: Annotated[
        float,
        typer.Option(metavar="X", help="Stop when sweeps lower the error by less than this share."),
    ] = 1e-4,
    round_to: Annotated[
        int, typer.Option("--round", metavar="N", help="Ranks are multiples of this.")
    ] = 8,
    layer: options.Layers = None,
    sequential: Annotated[
        bool,
        typer.Option("--sequential", help="Calibrate each layer on what those before it give now."),
    ] = False,
    heal: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Steps of healing afterwards, on the same data. (default: none)",
        ),
    ] = None,
    dtype: Annotated[
        options.DtypeName, typer.Option(help="Of the converted model; auto: as saved.")
    ] = options.DtypeName.AUTO,
    device: options.Device = None,
    seed: options.Seed = 0,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be done, with exact parameter counts.")
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a model that is in DIR already.")
    ] = False,
    json: options.Json = False,
) -> None:
    """Rewrite the attention layers of MODEL so that their heads share query and key projections.

    The result in DIR is an ordinary transformers model: `import collabify`, then
    AutoModel*.from_pretrained(DIR).
    """
    from collabify.conversion import convert as run
    from collabify.storage import cast_to, check_not_source, output_folder, resolved, save, versions

    check_revision(model, revision)
    if out is None and not dry_run:
        raise OptionError("--out is missing: say where to write the model, or pass --dry-run.")
    with ExitStack() as stack:
        if out is not None:
            check_not_source(out, model)
            folder = stack.enter_context(output_folder(out, overwrite=overwrite, keep=not dry_run))
        loaded, source = load_model(model, "auto", device, revision)
        with progress_bar(quiet=json) as show:
            report = run(
                loaded,
                dk=dk,
                kept=kept,
                error=error,
                method=method.value,
                head_rank=head_rank,
                channels=_channels(channels),
                base_heads=base_heads,
                base_width=base_width,
                projections=None if projections is None else projections.value,
                dynamic=dynamic,
                dv=dv,
                kept_values=kept_values,
                value_heads=value_heads,
                calibration=calibration,
                samples=samples,
                max_length=max_length,
                processor=source.location,
                solver=solver.value,
                iterations=iterations,
                tolerance=tol,
                multiple=round_to,
                layers=layer,
                seed=seed,
                sequential=sequential,
                heal=heal,
                dry_run=dry_run,
                progress=show,
            )
        report = replace(
            report,
            source=source.record,
            revision=source.revision,
            versions=versions(),
            options=report.options
            | {"calibration": resolved(calibration)}
            | {"dtype": dtype.value, "device": device or "cpu"},
        )
        if not dry_run:
            cast_to(loaded, dtype.value)
            save(loaded, folder, source=source, report=report)
    if json:
        typer.echo(report.to_json())
    else:
        _print(report, out, calibration)


def _channels(given: str | None) -> "int | Literal['all'] | None":
    """A number of channels, or ``all``."""
    if given is None or given == "all":
        return given  # type: ignore[return-value]
    if not (given.isascii() and given.isdigit()):
        raise OptionError(f"channels={given!r} must be a whole number or 'all'. Change --channels.")
    return int(given)


def _print(report: "ConversionReport", out: Path | None, calibration: str) -> None:
    from collabify.report import conversion_table, parameter_table, percent, went_back

    print_table(*conversion_table(report), text=2)
    print_table(*parameter_table(report))
    if report.dry_run:
        typer.echo("Dry run: no factors were fitted, nothing was written.")
        return
    if report.calibration is None:
        typer.echo("Errors are of the weights alone; --calibration measures them on tokens.")
    else:
        typer.echo(f"Calibrated on {report.calibration}.")
    if report.error is not None:
        typer.echo(f"Error of the logits, all layers together: {report.error:.4f}.")
    healing = report.healing
    if healing is not None and healing.kept:
        before = healing.drift_before.hidden_cosine
        typer.echo(
            f"Healed on the same data for {healing.steps} steps: held-out hidden states agreed to "
            f"{before:.4f} before."
        )
    elif healing is not None:
        typer.echo(f"Healing for {healing.steps} steps won nothing on held-out samples.")
    if healing is not None and healing.went_back:
        typer.echo(went_back(healing))
    if report.drift is not None:
        typer.echo(
            f"On held-out samples: hidden states agree to {report.drift.hidden_cosine:.4f} "
            f"(cosine), attention moved by {percent(round(report.drift.attention, 3))}."
        )
    if calibration == "synthetic":
        typer.echo(
            "Synthetic input stands in for data; a few hundred real samples keep more of the model "
            "(README, What it costs): --calibration FILE"
        )
    typer.echo(f"Saved to {out}. To load it:")
    typer.echo("")
    typer.echo("    import collabify")
    typer.echo("    from transformers import AutoModel")
    typer.echo(f"    model = AutoModel.from_pretrained({str(out)!r})")
