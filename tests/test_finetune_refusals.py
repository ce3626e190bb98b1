"""Fine-tuning on images, and what it refuses."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from finetune_cases import (
    CHANNELS,
    NEW_HEAD,
    PREPARED,
    SHORT,
    names_of_hidden,
)
from tiny_models import LOW
from tiny_tasks import FAST, write_images, write_model, write_task
from transformers import (
    AutoModelForImageClassification,
)

import collabify
from collabify.errors import (
    CollabifyWarning,
    LabelError,
    OptionError,
    OutputError,
)

pytestmark = pytest.mark.usefixtures("offline")


# Images.


@PREPARED
@NEW_HEAD
@pytest.mark.parametrize(
    ("kind", "conversion"),
    [("vit", None), ("dinov2", LOW["cp"] | {"channels": CHANNELS}), ("deit", LOW["tucker"])],
)
def test_images_are_learned(kind: str, conversion: Any, tmp_path: Path) -> None:
    source = write_model(tmp_path / "m", kind, conversion)
    write_images(tmp_path / "images", {"train": 96, "test": 32})
    out = tmp_path / "out"
    report = collabify.finetune(
        str(source), image_data=str(tmp_path / "images"), out=out, **(FAST | {"epochs": 6})
    )
    assert report.scores[-1]["test"]["accuracy"] > 0.9
    assert report.task == "image-classification"
    assert (report.labels, report.examples, report.evaluated) == (("blue", "red"), 96, 32)
    model = AutoModelForImageClassification.from_pretrained(out)
    assert model.config.id2label == {0: "blue", 1: "red"}


@PREPARED
@NEW_HEAD
def test_slices_and_the_first_five_guesses(tmp_path: Path) -> None:
    source = write_model(tmp_path / "m", "vit")
    labels = tuple("abcdefg")
    write_images(tmp_path / "images", {"train": 42}, labels)
    report = collabify.finetune(
        str(source),
        image_data=str(tmp_path / "images"),
        split="train[:50%]",
        eval_split="train[50%:]",
        out=tmp_path / "out",
        **(FAST | {"epochs": 1}),
    )
    assert (report.examples, report.evaluated) == (21, 21)
    scores = report.scores[-1]["train"]
    assert 0 <= scores["accuracy"] <= scores["top_5_accuracy"] <= 1


# What is refused.

BAD = [
    ({"task": "rtee"}, OptionError, "task='rtee' must be one of cola, sst2"),
    ({"task": None}, OptionError, "one of them must say what to train for"),
    ({"image_data": "x"}, OptionError, "one of them must say what to train for"),
    ({"split": "train"}, OptionError, "split='train' is for image data"),
    ({"task": None, "image_data": "x"}, OptionError, "data='.*' says where a task is"),
    ({"epochs": 0}, OptionError, "epochs=0 must be at least 1. Raise --epochs"),
    ({"batch_size": 0}, OptionError, "batch_size=0 must be at least 1. Raise --batch-size"),
    ({"max_length": 0}, OptionError, "max_length=0 must be at least 1"),
    ({"limit": 0}, OptionError, "limit=0 must be at least 1"),
    ({"learning_rate": 0.0}, OptionError, "learning_rate=0.0 must be above 0"),
    ({"learning_rate": float("inf")}, OptionError, "learning_rate=inf must be above 0 and finite"),
    ({"seed": -1}, OptionError, "seed=-1 must be in"),
    ({"only": "heads"}, OptionError, "only='heads' must be one of all, attention"),
    ({"precision": "int8"}, OptionError, "precision='int8' must be one of fp32"),
    ({"alpha": 0.0}, OptionError, "alpha=0.0 says how to learn from a teacher, and there is none"),
    ({"hidden_states": True}, OptionError, "hidden_states=True says how .*--hidden-states"),
    ({"teacher": "x", "alpha": 1.5}, OptionError, r"alpha=1.5 must be in \[0, 1\]"),
    ({"teacher": "x", "temperature": 0.0}, OptionError, "temperature=0.0 must be above 0"),
    ({"device": "tpu"}, OptionError, "device='tpu' must be cpu, cuda or mps"),
    (
        {"report_to": ["carrier-pigeon"]},
        OptionError,
        "report_to='carrier-pigeon' must be",
    ),
    ({"data": "/nowhere"}, OptionError, "data='/nowhere' must be a data set's folder"),
    ({"task": "cola"}, OptionError, "no configuration 'cola'. There are: "),
]


@pytest.mark.parametrize(("options", "error", "match"), BAD, ids=[str(b[0]) for b in BAD])
def test_bad_options_are_refused_before_anything_is_made(
    options: dict[str, Any],
    error: type[Exception],
    match: str,
    folders: Callable[[str], str],
    glue: str,
    tmp_path: Path,
) -> None:
    call: dict[str, Any] = {"task": "sst2", "data": glue, "out": tmp_path / "o"} | options
    with pytest.raises(error, match=match) as raised:
        collabify.finetune(folders("original"), **call)
    assert "\n" not in str(raised.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_that_is_not_there(
    folders: Callable[[str], str], glue: str, tmp_path: Path
) -> None:
    with pytest.raises(OptionError, match="device='cuda' must be one that torch can use here"):
        collabify.finetune(
            folders("original"), task="sst2", data=glue, out=tmp_path / "o", device="cuda"
        )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_float16_on_a_cpu(folders: Callable[[str], str], glue: str, tmp_path: Path) -> None:
    call: dict[str, Any] = {"task": "sst2", "data": glue, "out": tmp_path / "o", **SHORT}
    with pytest.raises(OptionError, match="precision='fp16' cannot be had here"):
        collabify.finetune(folders("original"), precision="fp16", **call)


def test_the_wrong_kind_of_data(folders: Callable[[str], str], glue: str, tmp_path: Path) -> None:
    vit = write_model(tmp_path / "m", "vit")
    with pytest.raises(OptionError, match=r"takes images, and the data are texts.*--image-data"):
        collabify.finetune(str(vit), task="sst2", data=glue, out=tmp_path / "o")
    with pytest.raises(OptionError, match=r"takes texts, and the data are images.*--task"):
        collabify.finetune(folders("original"), image_data="x", out=tmp_path / "o")


def test_bad_images(tmp_path: Path, glue: str) -> None:
    source = str(write_model(tmp_path / "m", "vit"))
    write_images(tmp_path / "images", {"train": 4})
    call: dict[str, Any] = {"out": tmp_path / "o", "image_data": str(tmp_path / "images")}
    with pytest.raises(OptionError, match=r"scored on what it was trained on, 'train'. Name other"):
        collabify.finetune(source, **call)
    with pytest.raises(OptionError, match=r"no split 'half'. There are: train"):
        collabify.finetune(source, eval_split="half", **call)
    with pytest.raises(OptionError, match=r"no column of images. There are: sentence"):
        collabify.finetune(source, out=tmp_path / "o", image_data=f"{glue}:sst2")
    with pytest.raises(OptionError, match="must be a data set's folder"):
        collabify.finetune(source, out=tmp_path / "o", image_data=str(tmp_path / "nothing"))


@NEW_HEAD
def test_an_image_processor_is_used_where_there_is_one(tmp_path: Path) -> None:
    source = write_model(tmp_path / "m", "vit")
    write_images(tmp_path / "images", {"train": 4, "test": 4})
    call: dict[str, Any] = {"image_data": str(tmp_path / "images"), **FAST}
    with pytest.warns(CollabifyWarning, match=r"\(no preprocessor_config.json: resized to 8 x 8"):
        plain = collabify.finetune(str(source), out=tmp_path / "a", **call)
    size = {"height": 8, "width": 8}
    transformers.ViTImageProcessor(size=size, image_mean=[9.0] * 3).save_pretrained(source)
    other = collabify.finetune(str(source), out=tmp_path / "b", **call)
    assert (tmp_path / "b" / "preprocessor_config.json").is_file()
    assert plain.scores[0]["loss"] != pytest.approx(other.scores[0]["loss"], abs=1e-3)


@PREPARED
@NEW_HEAD
def test_an_image_that_cannot_be_read(tmp_path: Path) -> None:
    source = str(write_model(tmp_path / "m", "vit"))
    write_images(tmp_path / "images", {"train": 4, "test": 4})
    (tmp_path / "images" / "train" / "red" / "0.png").write_bytes(b"no image")
    with pytest.raises(OptionError, match=r"Row [0-3] of .* cannot be read as an image"):
        collabify.finetune(source, out=tmp_path / "o", image_data=str(tmp_path / "images"))


def test_data_without_what_a_task_needs(folders: Callable[[str], str], tmp_path: Path) -> None:
    write_task(tmp_path / "data", "sst2", {"train": 8})
    call: dict[str, Any] = {"data": str(tmp_path / "data"), "out": tmp_path / "o"}
    with pytest.raises(OptionError, match=r"no split 'validation'. There are: train"):
        collabify.finetune(folders("original"), task="sst2", **call)
    write_task(tmp_path / "two", "sst2", {"train": 8, "validation": 8})
    (tmp_path / "two" / "sst2").rename(tmp_path / "two" / "cola")
    readme = tmp_path / "two" / "README.md"
    readme.write_text(readme.read_text().replace("sst2", "rte").replace("path: rte", "path: cola"))
    with pytest.raises(OptionError, match=r"no column 'sentence1', 'sentence2'. There are: sen"):
        collabify.finetune(
            folders("original"), task="rte", data=str(tmp_path / "two"), out=tmp_path / "o"
        )


def test_labels_outside_of_the_task(folders: Callable[[str], str], tmp_path: Path) -> None:
    write_task(tmp_path / "d", "sst2", {"train": 8, "validation": 8}, names=("a", "b"))
    with pytest.raises(LabelError, match=r"\(a, b\) must be those of the task"):
        collabify.finetune(
            folders("original"), task="sst2", data=str(tmp_path / "d"), out=tmp_path / "o"
        )


def test_the_folder_is_not_overwritten_unless_asked(
    folders: Callable[[str], str], glue: str, tmp_path: Path
) -> None:
    source = write_model(tmp_path / "m")
    with pytest.raises(OutputError, match="exists and is not empty"):
        collabify.finetune(folders("original"), task="sst2", data=glue, out=source)
    with pytest.raises(OutputError, match="holds the model"):
        collabify.finetune(str(source), task="sst2", data=glue, out=source, overwrite=True)
    assert names_of_hidden(tmp_path) == []
