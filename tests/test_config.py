"""The record of a conversion in ``config.json``: there and back, and refused by name."""

import json
from dataclasses import FrozenInstanceError
from typing import Any

import pytest

from collabify.config import FORMAT_VERSION, ConversionConfig, LayerConfig
from collabify.errors import CheckpointError

LAYERS = (
    LayerConfig(0, "collaborative", 13),
    LayerConfig(3, "tucker", 7),
    LayerConfig(5, "tucker", 11, head_rank=2),
)


def record(**changes: Any) -> dict[str, Any]:
    """What json makes of a sound record, with changes."""
    sound: dict[str, Any] = json.loads(json.dumps(ConversionConfig(LAYERS).to_dict()))
    return sound | changes


def layer(**changes: Any) -> dict[str, Any]:
    return {"index": 4, "form": "collaborative", "rank": 13, "head_rank": None} | changes


def test_round_trip_through_json() -> None:
    assert ConversionConfig.from_dict(record()) == ConversionConfig(LAYERS)
    assert ConversionConfig.from_dict(record()).to_dict() == record()


def test_record_names_its_writer_and_version() -> None:
    assert record()["quant_method"] == "collabify"
    assert record()["version"] == FORMAT_VERSION == 1
    assert record()["layers"][2] == {
        "index": 5,
        "form": "tucker",
        "rank": 11,
        "head_rank": 2,
        "channels": None,
        "base_heads": None,
        "values": None,
        "value_heads": None,
        "dynamic": False,
    }


def test_keys_that_transformers_adds_are_ignored() -> None:
    assert ConversionConfig.from_dict(record(modules_to_not_convert=None)).layers == LAYERS


def test_older_records_without_head_rank_load() -> None:
    short = [{"index": 0, "form": "tucker", "rank": 7}]
    assert ConversionConfig.from_dict(record(layers=short)).layers[0].head_rank is None


def test_records_are_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        LAYERS[0].rank = 2


@pytest.mark.parametrize("version", [2, 0, "1", None])
def test_unknown_version_is_refused(version: object) -> None:
    with pytest.raises(CheckpointError, match=rf"^version={version!r} must be 1 .*Install"):
        ConversionConfig.from_dict(record(version=version))


def test_missing_version_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"^version=None must be 1"):
        ConversionConfig.from_dict({"layers": []})


@pytest.mark.parametrize(
    ("layers", "named"),
    [
        (None, "NoneType"),
        (3, "int"),
        ([3], "LayerConfig"),
        ([layer(width=2)], "width"),
        ([{"index": 0, "form": "tucker"}], "rank"),
    ],
)
def test_damaged_layers_are_refused(layers: object, named: str) -> None:
    with pytest.raises(CheckpointError, match=rf"is damaged \(.*{named}.*\)\. Convert"):
        ConversionConfig.from_dict(record(layers=layers))


def test_record_without_layers_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"is damaged \('layers'\)"):
        ConversionConfig.from_dict({"version": FORMAT_VERSION})


def test_unknown_form_is_refused() -> None:
    forms = "collaborative, tucker, talking-heads"
    message = rf"^form='tensor-train' must be one of {forms} for layer 4\. Install"
    with pytest.raises(CheckpointError, match=message):
        ConversionConfig.from_dict(record(layers=[layer(form="tensor-train")]))
