"""``collabify eval``: lists the ways of evaluating and nothing else."""

import typer

from collabify.cli import eval_drift, eval_glue, eval_image

app = typer.Typer(
    name="eval",
    help="Score MODEL: on GLUE, on labelled images, or against its original without labels.",
    no_args_is_help=True,
)
app.command("glue")(eval_glue.glue)
app.command("image")(eval_image.image)
app.command("drift")(eval_drift.drift)
