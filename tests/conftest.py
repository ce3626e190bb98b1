"""Fixtures that several test files use."""

import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from data_cases import TEXTS, make_tokenizer
from filelock import FileLock
from finetune_cases import FORMS
from tiny_models import LOW, TINY
from tiny_tasks import write_model, write_task
from torch import Tensor

from collabify import convert
from collabify.forms import HeadForms

torch.set_num_threads(1)

# Distinct primes for every axis, so that a transposed result has the wrong shape.
HEADS, HEAD_DIM, QUERY_SIZE, KEY_SIZE = 3, 5, 17, 19


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(7)


@pytest.fixture
def forms(generator: torch.Generator) -> HeadForms:
    """Three heads that share some directions, so that there is something to find."""
    mix = torch.randn(HEADS * HEAD_DIM, 7, generator=generator, dtype=torch.float64)
    noise = 0.3
    w_q, w_k = (
        mix @ torch.randn(7, size, generator=generator, dtype=torch.float64)
        + noise * torch.randn(HEADS * HEAD_DIM, size, generator=generator, dtype=torch.float64)
        for size in (QUERY_SIZE, KEY_SIZE)
    )
    bias = torch.randn(HEADS * HEAD_DIM, generator=generator, dtype=torch.float64)
    return HeadForms.from_projections(w_q, w_k, bias, num_heads=HEADS, scale=HEAD_DIM**-0.5)


@pytest.fixture
def tokenizer() -> Any:
    return make_tokenizer()


@pytest.fixture
def bert() -> Any:
    return TINY["bert"].config()


@pytest.fixture
def vit() -> Any:
    return TINY["vit"].config()


@pytest.fixture
def data_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A folder in the Hub's layout: two configurations, one with two splits."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "set"
    (folder / "long").mkdir(parents=True)
    (folder / "README.md").write_text(
        "---\nconfigs:\n- config_name: long\n  data_files:\n"
        "  - {split: train, path: long/train.csv}\n  - {split: test, path: long/test.csv}\n"
        "- config_name: short\n  data_files:\n  - {split: train, path: short.csv}\n---\n"
    )
    for name, texts in (("train", TEXTS), ("test", TEXTS[:20])):
        lines = ["number,first,second", *(f"{i},{text},w3 {text}" for i, text in enumerate(texts))]
        (folder / "long" / f"{name}.csv").write_text("\n".join(lines))
    (folder / "short.csv").write_text("only\nw1\nw2\nw1\n\nw3\n")
    return str(folder)


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Any, Path, dict[str, Tensor]]:
    """A converted BERT with a head, its folder, a batch."""
    tiny = TINY["bert"]
    model = tiny.build(headed=True)
    convert(model, **LOW["cp"])
    model.save_pretrained(tmp_path / "model")
    return model, tmp_path / "model", tiny.batch(model)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Any], str]:
    """``(user/name, model) -> commit``: makes a model the newest of an offline Hub's cache."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    count = iter(range(10, 100))

    def push(name: str, model: Any) -> str:
        commit = f"{next(count)}" * 20
        folder = tmp_path / "hub" / f"models--{name.replace('/', '--')}"
        model.save_pretrained(folder / "snapshots" / commit)
        (folder / "snapshots" / commit / "vocab.txt").write_text(commit)
        (folder / ".no_exist" / commit).mkdir(parents=True)
        for absent in ("README.md", "collabify.json", "model.safetensors.index.json"):
            (folder / ".no_exist" / commit / absent).touch()
        (folder / "refs").mkdir(exist_ok=True)
        (folder / "refs" / "main").write_text(commit)
        return commit

    return push


def real_models() -> Path | None:
    """Folder with real pretrained models, from COLLABIFY_MODELS; see CONTRIBUTING.md."""
    folder = os.environ.get("COLLABIFY_MODELS")
    return Path(folder) if folder and Path(folder).is_dir() else None


@pytest.fixture(scope="session")
def real_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folder of a real model by name (see real_models.py), from COLLABIFY_MODELS or downloaded."""
    base = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent  # what the workers of one run share
    root = real_models() or base / "real_models"

    def fetch(name: str) -> None:
        if name == "dinov2-small" and find_spec("onnx") is None:
            pytest.skip("dinov2-small is built from an ONNX file: pip install onnx")
        failed = base / f"{name}.failed"
        if not failed.is_file():
            script = Path(__file__).with_name("real_models.py")
            command = [sys.executable, str(script), str(root), name]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode == 0:
                return
            said = [line for line in done.stderr.splitlines() if line.startswith("ERROR:")]
            if not said:  # anything but a download that failed
                raise RuntimeError(f"real_models.py {name} failed: {done.stderr}")
            failed.write_text(said[-1])
        pytest.skip(f"{name} could not be downloaded (pip: {failed.read_text()})")

    def folder(name: str) -> Path:
        if not (root / name).is_dir():  # one that is there is whole
            root.mkdir(exist_ok=True)
            with FileLock(root / f".{name}.lock"):
                if not (root / name).is_dir():
                    fetch(name)
        return root / name

    return folder


# Loads every folder of a directory in a process of its own; keeps the outputs, or what was raised.
LOADER = """
import sys, torch
from pathlib import Path
order, root, out = sys.argv[1:]
if order == "collabify first":
    import collabify
import transformers
from transformers import AutoConfig, AutoModel, BertModel
if order == "transformers first":
    import collabify
assert ("collabify" in sys.modules) == (order != "never")
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
torch.set_num_threads(1)
results = {}
for folder in sorted(Path(root).iterdir()):
    try:
        (name,) = AutoConfig.from_pretrained(folder).architectures
        with torch.no_grad():
            model = getattr(transformers, name).from_pretrained(folder)
            for parameter in model.parameters():  # see tiny_models.aligned()
                parameter.data = parameter.data.clone()
            results[folder.name] = model(**torch.load(folder / "batch.pt"))[0]
    except Exception as error:
        results[folder.name] = f"{type(error).__name__}: {error}"
torch.save(results, out)
"""


@pytest.fixture(scope="session")
def load_elsewhere(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[..., dict[str, dict[str, Any]]]:
    """``(root, *orders) -> outputs`` of the models in ``root`` on their ``batch.pt``.

    One fresh process for every order of imports: "collabify first", "transformers first", "never".
    """

    def load(root: Path, *orders: str) -> dict[str, dict[str, Any]]:
        out = tmp_path_factory.mktemp("outputs")
        children = [
            subprocess.Popen(
                [sys.executable, "-c", LOADER, order, root, out / f"{order}.pt"],
                cwd=out,  # so that collabify is the installed one, not a folder that lies here
            )
            for order in orders
        ]
        assert [child.wait(timeout=300) for child in children] == [0] * len(children)
        return {order: torch.load(out / f"{order}.pt") for order in orders}

    return load


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """No network, and no data left in the user's cache."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    cache = tmp_path_factory.getbasetemp() / "datasets"
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", cache)


@pytest.fixture(scope="session")
def glue(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Planted tasks in GLUE's layout."""
    root = tmp_path_factory.mktemp("glue")
    for task in ("sst2", "rte", "stsb"):
        write_task(root, task, {"train": 256, "validation": 64})
    both = {"validation_matched": 16, "validation_mismatched": 24}
    write_task(root, "mnli", {"train": 24, **both})
    return str(root)


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """A model's folder by its name in FORMS, made once."""
    root = tmp_path_factory.mktemp("models")

    def folder(name: str) -> str:
        kind, conversion = FORMS[name]
        if not (root / name).is_dir():
            write_model(root / name, kind, conversion)
        return str(root / name)

    return folder
