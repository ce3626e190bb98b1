"""``collabify push``: to the Hub, with a model card."""

import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from collabify.cli.common import Json, print_table, reported

if TYPE_CHECKING:
    from collabify.hub import Pushed
    from collabify.storage import Package

_CARDS = {
    "generated": "Its card is written from collabify.json.",
    "folder": "README.md goes as it is in DIR: it was not written by collabify, or edited since.",
    "hub": "The card on the Hub was edited, and stays. Delete it there to have a new one.",
}


@reported
def push(
    model: Annotated[
        Path, typer.Argument(metavar="DIR", help="A converted model.", show_default=False)
    ],
    repo: Annotated[
        str,
        typer.Argument(metavar="USER/NAME", help="Where to, on the Hub.", show_default=False),
    ],
    private: Annotated[
        bool, typer.Option("--private", help="Make the repository private, if it is new.")
    ] = False,
    revision: Annotated[
        str | None,
        typer.Option(metavar="BRANCH", help="Push to this branch. (default: main)"),
    ] = None,
    message: Annotated[str | None, typer.Option(metavar="TEXT", help="Of the commit.")] = None,
    create_pr: Annotated[
        bool, typer.Option("--create-pr", help="Propose it in a pull request.")
    ] = False,
    standalone: Annotated[
        bool,
        typer.Option(
            "--standalone", help="With code of its own, to load where collabify is not installed."
        ),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the files and the card; send nothing.")
    ] = False,
    json: Json = False,
) -> None:
    """Push a converted model to the Hub: weights, config, tokenizer, record, card, in one commit.

    The token is that of `hf auth login`, or HF_TOKEN. After an interruption the same command goes
    on: what was uploaded is not sent twice.
    """
    from json import dumps

    from huggingface_hub.utils import enable_progress_bars  # type: ignore[attr-defined]

    from collabify.hub import check_name, check_ready, check_request
    from collabify.hub import push as send
    from collabify.storage import package, quiet

    quiet()
    if sys.stderr.isatty() and not json:
        enable_progress_bars()  # the transfer's own
    check_name(repo)
    check_request(revision, create_pr=create_pr)
    if not dry_run:
        check_ready(repo)
    found = package(model, repo, standalone=standalone)
    pushed = None
    if not dry_run:
        pushed = send(
            repo,
            found.files,
            card=found.card,
            private=private,
            revision=revision,
            message=message,
            create_pr=create_pr,
        )
    if json:
        record: dict[str, Any] = {
            "repo": repo,
            "files": found.sizes,
            "left_out": list(found.left_out),
        }
        record |= {"card": found.card, "readme": _text(found, "README.md"), "pushed": None}
        typer.echo(dumps(record | ({} if pushed is None else {"pushed": asdict(pushed)}), indent=2))
    else:
        _print(found, pushed)


def _text(found: "Package", name: str) -> str:
    content = found.files[name]
    text = content if isinstance(content, bytes) else content.read_bytes()
    return text.decode("utf-8", errors="replace")


def _print(found: "Package", pushed: "Pushed | None") -> None:
    from json import loads

    from collabify.modelcard import auto_class

    print_table(("file", "bytes"), [(name, f"{size:,}") for name, size in found.sizes.items()])
    if found.left_out:
        typer.echo(f"Left out: {', '.join(found.left_out)}.")
    typer.echo(_CARDS[found.card if pushed is None else pushed.card])
    if pushed is None:
        typer.echo("Dry run: nothing was sent. README.md:")
        typer.echo("")
        typer.echo(_text(found, "README.md"))
        return
    if pushed.deleted:
        typer.echo(f"Deleted there, of an earlier push: {', '.join(pushed.deleted)}.")
    if pushed.pull_request is not None:
        typer.echo(f"Proposed: {pushed.pull_request}")
        return
    typer.echo(f"Pushed: {pushed.url}")
    typer.echo("")
    typer.echo("    import collabify")
    cls = auto_class(loads(_text(found, "config.json")))
    typer.echo(f"    from transformers import {cls}")
    typer.echo(f"    model = {cls}.from_pretrained({pushed.repo!r})")
