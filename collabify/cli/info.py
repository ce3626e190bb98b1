"""``collabify info``: what a model is, in one screen."""

import typer

from collabify.cli.common import Json, Model, Revision, check_revision, print_table, reported


@reported
def info(model: Model, revision: Revision = None, json: Json = False) -> None:
    """Say what MODEL is, without loading its weights: form, ranks, parameters, drift, scores.

    Of a model on the Hub only small files are downloaded.
    """
    from collabify.info import describe, info_table
    from collabify.storage import quiet

    check_revision(model, revision)
    quiet()
    found = describe(model, revision)
    if json:
        typer.echo(found.to_json())
    else:
        print_table(("", ""), info_table(found), text=2)
