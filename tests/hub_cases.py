"""Models and a Hub that the tests of pushing and loading share."""

import json
from pathlib import Path
from typing import Any

from tiny_tasks import write_model
from typer.testing import CliRunner

from collabify.cli.app import app

CARD = "---\nlicense: mit\nlanguage: [en, de]\ndatasets: [someone/texts]\n---\n\n# The original\n"
QUICK = ("--dk", 10, "--iterations", 3, "--samples", 16, "--max-length", 12)


def cli(*arguments: object) -> Any:
    """The command's outcome; an error that is not told in a line is raised."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def done(*arguments: object) -> Any:
    result = cli(*arguments)
    assert result.exit_code == 0, result.stderr
    return result


def make(root: Path) -> Path:
    """A converted model with a head, a tokenizer, a licence in its record, and things beside it."""
    write_model(root / "secret" / "original", num_labels=2)
    (root / "secret" / "original" / "README.md").write_text(CARD)
    (root / "secret" / "texts.txt").write_text("\n".join(f"w{i} w{i + 1} w3" for i in range(25)))
    texts = root / "secret" / "texts.txt"
    made = root / "made"
    done("convert", root / "secret" / "original", *QUICK, "--calibration", texts, "--out", made)
    for name in ("notes.txt", "figure.png", "checkpoint-1/optimizer.pt", ".env"):
        (made / name).parent.mkdir(exist_ok=True)
        (made / name).write_text("of the user")
    return made


def files_of(folder: Path) -> dict[str, bytes]:
    """What a push of the folder as it is would put into a repository."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def record_of(files: dict[str, bytes]) -> dict[str, Any]:
    found = json.loads(files["collabify.json"])
    assert isinstance(found, dict)
    return found
