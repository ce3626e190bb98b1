"""Fine-tuning on what users have: other heads, other configs, other data than the usual ones."""

from pathlib import Path
from typing import Any

import pytest
from tiny_tasks import FAST, write_images, write_model

import collabify
from collabify.errors import CollabifyWarning

ONCE: dict[str, Any] = FAST | {"epochs": 1}


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """No network, and no data left in the user's cache."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    cache = tmp_path_factory.getbasetemp() / "datasets"
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", cache)


def headed(folder: Path, labels: tuple[str, ...], kind: str = "bert", **config: Any) -> str:
    names = dict(enumerate(labels))
    ids = {name: number for number, name in names.items()}
    return str(write_model(folder, kind, id2label=names, label2id=ids, **config))


@pytest.mark.filterwarnings("ignore:Images are prepared for .* as best one can")
def test_numbered_classes_get_a_head_of_their_own(tmp_path: Path) -> None:
    source = headed(tmp_path / "m", ("airplane", "bird", "cat"), "vit")
    write_images(tmp_path / "images", {"train": 9, "test": 3}, ("0", "1", "2"))
    call: dict[str, Any] = {"image_data": str(tmp_path / "images"), **ONCE}
    with pytest.warns(CollabifyWarning, match="gets a new head .* airplane, bird, cat apart"):
        report = collabify.finetune(source, out=tmp_path / "o", **call)
    assert report.labels == ("0", "1", "2")
