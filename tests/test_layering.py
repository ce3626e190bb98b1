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
    "spectra": 2,
    "bootstrap": 2,
    "bundling": 0,
    "forms": 2,
    "training_record": 2,
    "metrics": 2,
    "scores": 2,
    "speeds": 3,
    "calibration": 3,
    "spectrum": 3,
    "drift": 6,
    "decompose.factors": 5.0,
    "decompose.head_svd": 5.1,
    "decompose.support": 5.1,
    "decompose.als": 5.1,
    "decompose.cp": 5.2,
    "decompose.block_term": 5.3,
    "decompose.values": 5.1,
    "decompose.mixed_values": 5.4,
    "decompose.tucker": 5.2,
    "decompose.oracle": 5.3,
    "decompose.budget": 5.0,
    "decompose": 5.5,
    "attention.ops": 6.0,
    "attention.base": 6.1,
    "attention.bilinear": 6.0,
    "attention.collaborative": 6.2,
    "attention.talking_heads": 6.2,
    "attention.tucker": 6.2,
    "attention": 6.3,
    "models.adapter": 7.0,
    "models.refusal": 7.0,
    "models.albert": 7.1,
    "models.bert": 7.1,
    "models.distilbert": 7.1,
    "models.vit": 7.1,
    "models": 7.2,
    "models.loading": 7.3,
    "models.remote": 7.4,
    "models.requirement": 7.0,
    "data.base": 7.0,
    "data.splits": 7.0,
    "data.labels": 7.0,
    "data.synthetic": 7.0,
    "data.text": 7.1,
    "data.images": 7.1,
    "data.dataset": 7.1,
    "data.glue": 7.2,
    "data.classes": 7.2,
    "data.sources": 7.2,
    "data.ready": 7.2,
    "data.loading": 7.3,
    "data": 7.4,
    "checkpoint": 9,
    "planning.layers": 8.0,
    "planning.asked": 8.0,
    "planning.request": 8.05,
    "planning.values": 8.0,
    "planning": 8.1,
    "storage.source": 8.0,
    "storage.reading": 8.0,
    "storage.shape": 8.0,
    "storage.folders": 8.1,
    "storage.loading": 8.2,
    "storage.writing": 8.2,
    "storage": 8.4,
    "installing": 8,
    "sensitivity": 8,
    "spaces": 8,
    "talking": 8,
    "sharing": 9,
    "analysis": 10,
    "conversion": 10,
    "healing.borrowing": 9.0,
    "healing.checks": 9.0,
    "healing.loss": 9.0,
    "healing.run": 9.1,
    "healing.store": 9.2,
    "healing.training": 9.3,
    "healing.method": 9.4,
    "healing": 9.5,
    "finetuning.options": 11.0,
    "finetuning.heads": 11.0,
    "finetuning.trainer": 11.0,
    "finetuning.examples": 11.1,
    "finetuning.arguments": 11.1,
    "finetuning.folders": 11.1,
    "finetuning.run": 11.2,
    "finetuning": 11.3,
    "evaluation.heads": 10.0,
    "evaluation.predict": 10.0,
    "evaluation.compare": 10.0,
    "evaluation.glue": 10.1,
    "evaluation.image": 10.1,
    "evaluation.drift": 10.1,
    "evaluation": 10.2,
    "scoreboard": 11,
    "benchmark": 11,
    "recording": 11,
    "mixing": 10,
    "mixing_figure": 12,
    "report": 11,
    "modelcard.private": 3.0,
    "modelcard.measured": 3.0,
    "modelcard.metadata": 3.1,
    "modelcard.commands": 3.1,
    "modelcard.text": 3.2,
    "modelcard": 3.3,
    "hub": 4,
    "storage.headers": 8.1,
    "storage.standalone": 8.2,
    "storage.records": 8.1,
    "storage.weights": 8.2,
    "storage.carried": 8.3,
    "storage.publishing": 8.3,
    "info": 11,
    "cli.info": 13.2,
    "cli.push": 13.2,
    "cli": 13.0,
    "cli.common": 13.1,
    "cli.analyze": 13.2,
    "cli.bench": 13.2,
    "cli.convert": 13.2,
    "cli.finetune": 13.2,
    "cli.heal": 13.2,
    "cli.eval_glue": 13.2,
    "cli.eval_image": 13.2,
    "cli.eval_drift": 13.2,
    "cli.eval": 13.3,
    "cli.app": 13.4,
    "__main__": 14,
    "": 15,  # collabify/__init__.py offers names from everywhere
}

# Package -> the modules that may import it; a module stands for what is under it.
HOMES = {
    "tensorly": ("decompose.oracle",),
    "transformers": ("attention", "models", "data", "checkpoint", "storage", "finetuning"),
    "datasets": ("data", "metrics"),
    "evaluate": ("metrics",),
    "scipy": ("bootstrap", "metrics", "decompose.block_term", "mixing_figure"),
    "sklearn": ("metrics", "finetuning"),
    "huggingface_hub": ("storage", "hub", "modelcard", "cli.push"),
    "filelock": ("recording",),
    "accelerate": ("healing", "finetuning"),
    "matplotlib": ("report", "mixing_figure"),
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
