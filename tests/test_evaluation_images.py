"""Evaluating on images, on models that know the answers."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from glue_data import (
    KnowingForSequenceClassification,
)
from PIL import Image
from tiny_models import TINY
from torch import nn
from transformers import (
    ViTConfig,
    ViTImageProcessor,
)

from collabify.errors import LabelError, OptionError
from collabify.evaluation import evaluate_image
from collabify.scoreboard import image_notes

Knowing = KnowingForSequenceClassification
ENTAILMENT = ("entailment", "not_entailment")
# Labels of 13 rows with a majority, so that a swapped order cannot score half.
LABELS = [0, 1, 1, 0, 1, 1, 1, 0, 1, 1, 1, 0, 1]


pytestmark = pytest.mark.usefixtures("offline")


# Images: class n is a picture of one brightness; the head of the model below reads that.
CLASSES = ("ant", "bee", "cat", "dog", "eel", "fox", "gnu")


def write_images(folder: Path, classes: tuple[str, ...], each: int = 3) -> str:
    for label, name in enumerate(classes):
        (folder / name).mkdir(parents=True)
        for number in range(each):
            level = np.full((8, 8, 3), 10 + 30 * label, np.uint8)
            Image.fromarray(level).save(folder / name / f"{number}.png")
    return str(folder)


class LookingForImageClassification(nn.Module):
    """Scores classes by how near the picture's brightness is to theirs, in its own order."""

    def __init__(self, names: tuple[str, ...], order: tuple[int, ...], shift: int = 0) -> None:
        super().__init__()
        self.config: Any = ViTConfig(
            image_size=8,
            patch_size=4,
            id2label=dict(enumerate(names)),
            label2id={name: n for n, name in enumerate(names)},
        )
        levels = torch.tensor([10.0 + 30 * (n + shift) for n in order]) / 255
        self.levels = nn.Parameter(levels)

    def forward(self, pixel_values: Any) -> Any:
        mean = pixel_values.mean((1, 2, 3))[:, None]
        return type("Output", (), {"logits": -((mean - self.levels) ** 2)})


PROCESSOR: Any = ViTImageProcessor(
    size={"height": 8, "width": 8}, image_mean=[0, 0, 0], image_std=[1, 1, 1]
)


def looking(names: tuple[str, ...] = CLASSES, **options: Any) -> Any:
    order = tuple(CLASSES.index(name) for name in names)
    return LookingForImageClassification(names, order, **options)


def test_images_of_a_folder_are_scored_by_the_names_of_their_classes(tmp_path: Path) -> None:
    data = write_images(tmp_path / "photos", CLASSES)
    backwards = CLASSES[::-1]
    report = evaluate_image(
        looking(), data, baseline=looking(backwards), processor=PROCESSOR, batch_size=4
    )
    assert [(s.metric, s.value, s.baseline) for s in report.scores] == [
        ("top-1", 1.0, 1.0),
        ("top-5", 1.0, 1.0),
    ]
    assert (report.examples, report.classes, report.split) == (21, 7, "train")
    assert report.label_order == "names"


def test_top_5_counts_the_first_five(tmp_path: Path) -> None:
    data = write_images(tmp_path / "photos", CLASSES, each=1)
    # Reads every picture as one class darker; of the brightest picture nothing is left to prefer.
    report = evaluate_image(looking(shift=3), data, processor=PROCESSOR, resamples=20)
    top1, top5 = report.scores
    # Picture n lies at n; class m at m + 3. Class n is at distance 3: those within 2 come first.
    nearer = [sum(abs(m + 3 - n) < 3 for m in range(7)) for n in range(7)]
    ties = [sum(abs(m + 3 - n) == 3 and m != n for m in range(7)) for n in range(7)]
    assert top1.value == pytest.approx(
        sum(n + t < 1 for n, t in zip(nearer, ties, strict=True)) / 7
    )
    assert top5.value == pytest.approx(
        sum(n + t < 5 for n, t in zip(nearer, ties, strict=True)) / 7
    )
    assert top1.value < top5.value < 1
    assert json.loads(report.to_json())["scores"][1]["metric"] == "top-5"


def test_few_classes_have_no_top_5(tmp_path: Path) -> None:
    data = write_images(tmp_path / "photos", CLASSES[:5])
    report = evaluate_image(looking(CLASSES[:5]), data, processor=PROCESSOR, limit=6)
    assert [score.metric for score in report.scores] == ["top-1"]
    assert report.examples == 6
    assert "No top-5: with 5 classes it says nothing." in image_notes(report)


def test_folders_with_splits(tmp_path: Path) -> None:
    write_images(tmp_path / "photos" / "train", CLASSES[:3])
    data = write_images(tmp_path / "photos" / "test", CLASSES[:3], each=2).removesuffix("/test")
    model = looking(CLASSES[:3])
    assert evaluate_image(model, data, processor=PROCESSOR).split == "test"
    assert evaluate_image(model, data, processor=PROCESSOR, split="train").examples == 9
    with pytest.raises(OptionError, match=r"has no split 'dev'. There are: "):
        evaluate_image(model, data, processor=PROCESSOR, split="dev")


def test_images_that_cannot_be_scored(tmp_path: Path) -> None:
    data = write_images(tmp_path / "photos", CLASSES[:3])
    with pytest.raises(LabelError, match=r"head has 7 labels .* has 3"):
        evaluate_image(looking(), data, processor=PROCESSOR)
    with pytest.raises(LabelError, match=r"must be those of .*photos"):
        evaluate_image(looking(("ant", "bee", "dog")), data, processor=PROCESSOR)
    with pytest.raises(LabelError, match=r"no image classification head.*--image-data"):
        evaluate_image(TINY["vit"].build(), data, processor=PROCESSOR)
    with pytest.raises(OptionError, match="nowhere' must be a data set's folder, a folder of"):
        evaluate_image(looking(), str(tmp_path / "nowhere"))
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.csv").write_text("x,label\nhello,1\n")
    with pytest.raises(OptionError, match=r"no column of images. There are: x \(Value\), label"):
        evaluate_image(looking(), str(tmp_path / "texts"))
    (tmp_path / "flat").mkdir()
    Image.new("RGB", (8, 8)).save(tmp_path / "flat" / "1.png")
    with pytest.raises(OptionError, match=r"no column of class labels. There are: image \(Image\)"):
        evaluate_image(looking(), str(tmp_path / "flat"))


def test_classes_without_names_are_not_taken_for_named_ones(tmp_path: Path) -> None:
    data = write_images(tmp_path / "photos", ("0", "1", "2"))
    with pytest.raises(LabelError, match=r"no names \(0, 1, 2\) .* head do \(ant, bee, cat\)"):
        evaluate_image(looking(CLASSES[:3]), data, processor=PROCESSOR)
    unnamed = LookingForImageClassification(("LABEL_0", "LABEL_1", "LABEL_2"), (0, 1, 2))
    named = LookingForImageClassification(("0", "1", "2"), (0, 1, 2))
    report = evaluate_image(unnamed, data, processor=PROCESSOR, baseline=named)
    assert (report.label_order, report.nameless) == ("position", ("model", "data"))
    assert "No class names in the model's config, the data: positions were taken." in (
        image_notes(report)
    )
    assert evaluate_image(named, data, processor=PROCESSOR).nameless == ()
