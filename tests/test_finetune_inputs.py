"""Fine-tuning on what users have: other heads, other configs, other data than the usual ones."""

import warnings
from pathlib import Path
from typing import Any

import pytest
from finetune_cases import PREPARED, headed
from tiny_models import TINY
from tiny_tasks import FAST, write_images, write_model, write_task
from transformers import AutoConfig, DeiTForImageClassificationWithTeacher

import collabify
from collabify.errors import CheckpointError, CollabifyWarning, OptionError
from collabify.evaluation import evaluate_image
from collabify.finetuning.examples import open_task
from collabify.finetuning.heads import Headed
from collabify.storage import load

ONCE: dict[str, Any] = FAST | {"epochs": 1}


pytestmark = pytest.mark.usefixtures("offline")


@PREPARED
def test_numbered_classes_get_a_head_of_their_own(tmp_path: Path) -> None:
    source = headed(tmp_path / "m", ("airplane", "bird", "cat"), "vit")
    write_images(tmp_path / "images", {"train": 9, "test": 3}, ("0", "1", "2"))
    call: dict[str, Any] = {"image_data": str(tmp_path / "images"), **ONCE}
    with pytest.warns(CollabifyWarning, match="gets a new head .* airplane, bird, cat apart"):
        report = collabify.finetune(source, out=tmp_path / "o", **call)
    assert report.labels == ("0", "1", "2")


@PREPARED
def test_a_model_with_two_heads_gets_one(tmp_path: Path) -> None:
    config = TINY["deit"].config()
    config.id2label, config.label2id = {0: "blue", 1: "red"}, {"blue": 0, "red": 1}
    DeiTForImageClassificationWithTeacher(config).save_pretrained(tmp_path / "m")
    write_images(tmp_path / "images", {"train": 8, "test": 4})
    data = str(tmp_path / "images")
    call: dict[str, Any] = {"image_data": data, **ONCE}
    with pytest.warns(CollabifyWarning, match="WithTeacher has two, for inference only"):
        report = collabify.finetune(str(tmp_path / "m"), out=tmp_path / "o", **call)
    assert report.new_parameters == ("classifier.bias", "classifier.weight")
    assert type(load(str(tmp_path / "o"))[0]).__name__ == "DeiTForImageClassification"
    report = collabify.finetune(
        str(tmp_path / "o"), out=tmp_path / "p", teacher=str(tmp_path / "m"), **call
    )
    assert report.teacher == str(tmp_path / "m")
    two, _ = load(str(tmp_path / "m"))
    assert evaluate_image(two, data, resamples=2).examples == 4


@pytest.mark.parametrize(
    ("kind", "differs", "hidden", "match"),
    [
        ("bert", {"hidden_size": 48}, True, "hidden_size=48 of the teacher .* must be 24: hidden"),
        ("bert", {"num_hidden_layers": 3}, True, "num_hidden_layers=3 .* must be 2: hidden"),
        ("vit", {"image_size": 16}, False, "image_size=16 .* must be 8: it reads what"),
        ("vit", {"patch_size": 2}, True, "patch_size=2 .* must be 4: .*--hidden-states"),
    ],
)
def test_a_teacher_of_another_shape_is_refused(
    kind: str, differs: dict[str, int], hidden: bool, match: str, tmp_path: Path
) -> None:
    labels = ("blue", "red") if kind == "vit" else ("negative", "positive")
    source = headed(tmp_path / "m", labels, kind)
    teacher = headed(tmp_path / "t", labels, kind, **differs)
    if kind == "vit":
        write_images(tmp_path / "images", {"train": 4, "test": 4})
        data = {"image_data": str(tmp_path / "images")}
    else:
        write_task(tmp_path / "glue", "sst2", {"train": 8, "validation": 8})
        data = {"task": "sst2", "data": str(tmp_path / "glue")}
    options: dict[str, Any] = {**data, "hidden_states": hidden, **ONCE}
    with (
        pytest.raises(CheckpointError, match=match),
        warnings.catch_warnings(action="ignore", category=CollabifyWarning),
    ):
        collabify.finetune(source, out=tmp_path / "o", teacher=teacher, **options)


def test_a_damaged_record_is_found_before_the_training(tmp_path: Path) -> None:
    source = write_model(tmp_path / "m")
    (source / "collabify.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"collabify\.json"):
        collabify.finetune(str(source), task="sst2", data="/nowhere", out=tmp_path / "o")


@pytest.mark.parametrize("splits", [("train[:80%]", "train"), ("train", "train[80%:]")])
def test_a_slice_of_what_is_trained_on_is_not_scored(
    splits: tuple[str, str], tmp_path: Path
) -> None:
    source = headed(tmp_path / "m", ("blue", "red"), "vit")
    write_images(tmp_path / "images", {"train": 10})
    with pytest.raises(OptionError, match=r"scored on what it was trained on, 'train.* and 'train"):
        collabify.finetune(
            source,
            image_data=str(tmp_path / "images"),
            split=splits[0],
            eval_split=splits[1],
            out=tmp_path / "o",
        )


@pytest.mark.parametrize("also", ["output_hidden_states", "output_attentions"])
def test_a_config_that_asks_for_more_outputs(also: str, tmp_path: Path) -> None:
    labels = ("negative", "positive")
    write_task(tmp_path / "glue", "sst2", {"train": 32, "validation": 24})
    call: dict[str, Any] = {"task": "sst2", "data": str(tmp_path / "glue"), **ONCE}
    plain = collabify.finetune(headed(tmp_path / "m", labels), out=tmp_path / "o", **call)
    attention: dict[str, Any] = {also: True, "attn_implementation": "eager"}
    source = headed(tmp_path / "n", labels, **attention)
    report = collabify.finetune(source, out=tmp_path / "p", **call)
    assert report.scores[0]["validation"] == pytest.approx(plain.scores[0]["validation"], rel=1e-4)
    assert getattr(AutoConfig.from_pretrained(tmp_path / "p"), also)


def test_what_is_scored_is_sorted_by_length(tmp_path: Path) -> None:
    write_task(tmp_path / "glue", "sst2", {"train": 32, "validation": 24})
    source = headed(tmp_path / "m", ("negative", "positive"))
    examples = open_task("sst2", str(tmp_path / "glue"), None, 0)
    encoded = examples.encode(Headed(load(source)[0], (0, 1), None, ()), source, 16)
    lengths = [len(each["input_ids"]) for each in encoded.evaluation["validation"]]
    assert lengths == sorted(lengths, reverse=True)
    assert len(set(lengths)) == 3
    labels = [each["labels"] for each in encoded.evaluation["validation"]]
    assert sorted(labels) == sorted(examples.evaluation["validation"]["label"])
