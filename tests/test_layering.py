"""Imports point down: a file imports only from lower layers, packages only where they belong."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "collabify"

# From the left of docs/design.md; a package's own base files come before their siblings.
LEVELS = {
    "errors": 0,
    "config": 1,
    "results": 1,
    "bootstrap": 2,
    "forms": 2,
    "training_record": 2,
    "metrics": 2,
    "scores": 2,
    "calibration": 3,
    "spectrum": 3,
    "modelcard.private": 3.0,
    "modelcard.metadata": 3.1,
    "modelcard.commands": 3.1,
    "modelcard.text": 3.2,
    "modelcard": 3.3,
    "hub": 4,
    "drift": 4,
    "decompose.factors": 3.0,
    "decompose.head_svd": 3.1,
    "decompose.support": 3.1,
    "decompose.cp": 3.2,
    "decompose.tucker": 3.2,
    "decompose.oracle": 3.3,
    "decompose.budget": 3.0,
    "decompose": 3.4,
    "attention.base": 4.0,
    "attention.collaborative": 4.1,
    "attention.tucker": 4.1,
    "attention": 4.2,
    "models.adapter": 5.0,
    "models.refusal": 5.0,
    "models.albert": 5.1,
    "models.bert": 5.1,
    "models.distilbert": 5.1,
    "models.vit": 5.1,
    "models": 5.2,
    "data.base": 5.0,
    "data.splits": 5.0,
    "data.labels": 5.0,
    "data.synthetic": 5.0,
    "data.text": 5.1,
    "data.images": 5.1,
    "data.dataset": 5.1,
    "data.glue": 5.2,
    "data.classes": 5.2,
    "data.sources": 5.2,
    "data.ready": 5.2,
    "data.loading": 5.3,
    "data": 5.4,
    "checkpoint": 7,
    "planning": 6,
    "storage.source": 6.0,
    "storage.folders": 6.0,
    "storage.loading": 6.1,
    "storage.headers": 6.1,
    "storage.records": 6.1,
    "storage.writing": 6.2,
    "storage.carried": 6.3,
    "storage.publishing": 6.3,
    "storage": 6.4,
    "installing": 6,
    "sensitivity": 6,
    "conversion": 8,
    "healing.borrowing": 7.0,
    "healing.checks": 7.0,
    "healing.loss": 7.0,
    "healing.run": 7.1,
    "healing.store": 7.2,
    "healing.training": 7.3,
    "healing.method": 7.4,
    "healing": 7.5,
    "finetuning.options": 9.0,
    "finetuning.heads": 9.0,
    "finetuning.trainer": 9.0,
    "finetuning.examples": 9.1,
    "finetuning.arguments": 9.1,
    "finetuning.folders": 9.1,
    "finetuning.run": 9.2,
    "finetuning": 9.3,
    "evaluation.heads": 8.0,
    "evaluation.predict": 8.0,
    "evaluation.compare": 8.0,
    "evaluation.glue": 8.1,
    "evaluation.image": 8.1,
    "evaluation.drift": 8.1,
    "evaluation": 8.2,
    "scoreboard": 9,
    "report": 9,
    "info": 9,
    "cli": 10.0,
    "cli.common": 10.1,
    "cli.analyze": 10.2,
    "cli.convert": 10.2,
    "cli.finetune": 10.2,
    "cli.heal": 10.2,
    "cli.info": 10.2,
    "cli.push": 10.2,
    "cli.eval_glue": 10.2,
    "cli.eval_image": 10.2,
    "cli.eval_drift": 10.2,
    "cli.eval": 10.3,
    "cli.app": 10.4,
    "__main__": 11,
    "": 12,  # collabify/__init__.py offers names from everywhere
}

# Package -> the modules that may import it; a module stands for what is under it.
HOMES = {
    "tensorly": ("decompose.oracle",),
    "transformers": ("attention", "models", "data", "checkpoint", "storage", "finetuning"),
    "datasets": ("data", "metrics"),
    "evaluate": ("metrics",),
    "scipy": ("bootstrap", "metrics"),
    "sklearn": ("metrics", "finetuning"),
    "huggingface_hub": ("storage", "hub", "modelcard", "cli.push"),
    "accelerate": ("healing", "finetuning"),
    "matplotlib": ("report",),
    "typer": ("cli",),
    "rich": ("cli",),
    "click": (),
}


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


def imported(path: Path) -> set[str]:
    """Every module that a file imports anywhere, functions included."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            names.add(node.module or "")
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


FILES = sorted(PACKAGE.rglob("*.py"))


def test_every_file_has_a_level() -> None:
    assert {module_name(path) for path in FILES} == set(LEVELS)


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_imports_point_down(path: Path) -> None:
    own = module_name(path)
    for name in imported(path):
        inner = name.removeprefix("collabify").removeprefix(".")
        if name.partition(".")[0] != "collabify" or inner not in LEVELS or inner in ("", own):
            continue
        same_package = inner.partition(".")[0] == own.partition(".")[0]
        level = float if same_package else int  # decimals order the files of one package
        assert level(LEVELS[inner]) < level(LEVELS[own]), f"{own} imports {inner}, not below it"


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_packages_stay_at_home(path: Path) -> None:
    name = module_name(path)
    for package in {module.partition(".")[0] for module in imported(path)} & set(HOMES):
        homes = HOMES[package]
        allowed = any(name == home or name.startswith(f"{home}.") for home in homes)
        assert allowed, f"{name} imports {package}, which belongs to {homes}"
