"""Models of two tasks, and what the tests of recording look up."""

import json
from pathlib import Path
from typing import Any

import pytest
from hub_cases import QUICK, done
from tiny_tasks import write_model, write_task

BENCH = ("--repeats", 4, "--batch-size", 2, "--length", 9)


def make_root(root: Path) -> Path:
    """Tasks, originals for two of them, and what became of those."""
    for task in ("sst2", "rte"):
        write_task(root / "secret" / "glue", task, {"train": 32, "validation": 21})
        original = write_model(root / "secret" / task, num_labels=2)
        done("convert", original, *QUICK, "--out", root / f"{task}-small")
    (root / "texts.txt").write_text("\n".join(f"w{i} w{i + 1} w3" for i in range(25)))
    return root


def go_offline(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    """Data sets are prepared under ``cache``, and nothing is asked of the Hub."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", cache)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(cache))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def record_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "collabify.json").read_text())
    return found


def glue(root: Path, model: object, *more: object) -> Any:
    data = ("--data", root / "secret" / "glue", "--resamples", 50)
    return done("eval", "glue", model, "--task", "sst2", *data, "--record", *more)


def card_of(folder: Path) -> str:
    text: str = json.loads(done("push", folder, "me/made", "--dry-run", "--json").stdout)["readme"]
    return text


def cells(card: str, first: str) -> list[str]:
    """Of the one row of a table that begins so."""
    (row,) = [line for line in card.splitlines() if line.startswith(f"| {first} |")]
    return [cell.strip() for cell in row.strip("|").split("|")]
