"""``collabify bench``: what a model costs to hold and to run, beside its original."""

import warnings
from dataclasses import replace
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from collabify.cli.common import (
    Device,
    DtypeName,
    Json,
    Model,
    Record,
    Revision,
    check_revision,
    load_model,
    print_table,
    progress_bar,
    record_each,
    reported,
)
from collabify.errors import CollabifyError, CollabifyWarning, ModelNotFoundError

if TYPE_CHECKING:
    from collabify.speeds import BenchReport
    from collabify.storage import Source


class AttentionName(StrEnum):
    """Choices of ``--attention``."""

    EAGER = "eager"
    SDPA = "sdpa"


@reported
def bench(
    model: Model,
    baseline: Annotated[
        str | None,
        typer.Option(
            metavar="ORIGINAL",
            help="What MODEL is compared with. (default: what its record says it was made from)",
        ),
    ] = None,
    revision: Revision = None,
    batch_size: Annotated[
        list[int] | None,
        typer.Option(metavar="B ...", help="Texts or images at once. (default: 1 8)"),
    ] = None,
    length: Annotated[
        list[int] | None, typer.Option(metavar="T ...", help="Tokens. (default: 32 128)")
    ] = None,
    repeats: Annotated[
        int, typer.Option(metavar="N", help="Rounds for each shape, in which both run once.")
    ] = 15,
    threads: Annotated[
        int | None, typer.Option(metavar="N", help="Of the CPU. (default: what torch takes)")
    ] = None,
    attention: Annotated[
        AttentionName | None, typer.Option(help="Of both models. (default: MODEL's, sdpa)")
    ] = None,
    dtype: Annotated[
        DtypeName, typer.Option(help="Of both models; auto: as MODEL was saved.")
    ] = DtypeName.AUTO,
    device: Device = None,
    record: Record = False,
    json: Json = False,
) -> None:
    """Measure parameters, bytes, and the latency of the whole MODEL beside its original's.

    Both run by turns, every batch size at every length. On CUDA the memory of a pass is told too.
    """
    from collabify.benchmark import bench as run
    from collabify.recording import recordable

    check_revision(model, revision)
    place = recordable(model) if record else None
    loaded, source = load_model(model, dtype.value, device, revision)
    original, origin = _original(loaded, source, baseline)
    with progress_bar(quiet=json) as show:
        report = run(
            loaded,
            original,
            repeats=repeats,
            threads=threads,
            attention=None if attention is None else attention.value,
            progress=show,
            **({"batch_sizes": batch_size} if batch_size else {}),
            **({"lengths": length} if length else {}),
        )
    report = replace(
        report,
        model=source.record,
        baseline=None if origin is None else origin.record,
        original=original is not None and baseline is None and not _is_converted(original),
    )
    if json:
        typer.echo(report.to_json())
    else:
        _print(report)
    record_each([] if place is None else [(place, report)], quiet=json)


def _is_converted(model: Any) -> bool:
    from collabify.models import find_attention

    return any(site.converted for site in find_attention(model))


def _original(
    model: Any, source: "Source", baseline: str | None
) -> "tuple[Any, Source] | tuple[None, None]":
    """The baseline: the one named, or what a converted model's record says it was made from."""
    from collabify.benchmark import check_alike
    from collabify.storage import load_like, read_record

    if baseline is not None:
        return load_like(model, baseline)
    if not _is_converted(model):
        return None, None
    try:
        record = read_record(source)
        name, revision = record.get("source"), record.get("revision")
        if name is None or name.startswith("./"):  # a folder of the machine that pushed it
            raise ModelNotFoundError("its record does not name it.")
        original, origin = load_like(model, name, revision=revision)
        check_alike(model, original)
    except CollabifyError as error:
        warnings.warn(
            f"The original of {source.name!r} cannot be compared with: {error} "
            "Name it: --baseline MODEL",
            CollabifyWarning,
            stacklevel=2,
        )
        return None, None
    return original, origin


def _print(report: "BenchReport") -> None:
    from collabify.scoreboard import bench_notes, latency_table, size_table

    print_table(*size_table(report))
    print_table(*latency_table(report))
    for note in bench_notes(report):
        typer.echo(note)
