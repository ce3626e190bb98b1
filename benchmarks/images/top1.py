"""Top-1 accuracy of an image classifier before and after conversion, on Fashion-MNIST.

    python benchmarks/images/top1.py MODEL --images FOLDER --work DIR

Writes top1.json. FOLDER holds Fashion-MNIST as it is published, in four idx files (Debian's package
dataset-fashion-mnist has them). MODEL (dinov2-small) gets a head and is fine-tuned on --train
images; that original is converted at D/2 and D/3 (a) on the weights alone with all channels, (b)
calibrated on 256 training images, and with --heal (c) healed on 1024. Scored on --test images, with
95 % intervals of the difference to the original. Images are 112 x 112: 64 patches and a class
token. Models stay in DIR; what is there is not made again.
"""

import argparse
import gzip
import json
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import BitImageProcessor

import collabify
from collabify.storage import load as load_model
from collabify.storage import output_folder, quiet, save, versions

CLASSES = [
    "t-shirt",
    "trouser",
    "pullover",
    "dress",
    "coat",
    "sandal",
    "shirt",
    "sneaker",
    "bag",
    "boot",
]
WAYS: dict[str, dict[str, Any]] = {
    "a weights only": {"calibration": "none", "channels": "all"},
    "b calibrated": {"samples": 256},
}
SIDE = 112


def write_images(source: Path, target: Path, split: str, prefix: str, number: int) -> None:
    """The first images of a split, in a folder for each class."""
    with gzip.open(source / f"{prefix}-images-idx3-ubyte.gz") as file:
        pixels = file.read()[16:]
    with gzip.open(source / f"{prefix}-labels-idx1-ubyte.gz") as file:
        labels = file.read()[8:]
    for index in range(number):
        folder = target / split / CLASSES[labels[index]]
        folder.mkdir(parents=True, exist_ok=True)
        one = pixels[784 * index : 784 * (index + 1)]
        Image.frombytes("L", (28, 28), one).save(folder / f"{index:05}.png")


def prepare(given: argparse.Namespace) -> tuple[Path, str]:
    """The fine-tuned original's folder, and that of the images."""
    images, original = given.work / "images", given.work / "original"
    if not images.is_dir():
        write_images(given.images, images, "train", "train", given.train)
        write_images(given.images, images, "test", "t10k", given.test)
    if not original.is_dir():
        base, size = given.work / "base", {"height": SIDE, "width": SIDE}
        model, source = load_model(given.model)
        with output_folder(base, overwrite=True) as folder:
            save(model, folder, source=source)
            BitImageProcessor(
                do_resize=True,
                size=size,
                do_center_crop=False,
                image_mean=[0.485, 0.456, 0.406],
                image_std=[0.229, 0.224, 0.225],
            ).save_pretrained(folder)
        collabify.finetune(
            str(base),
            image_data=str(images),
            out=original,
            epochs=given.epochs,
            learning_rate=given.learning_rate,
        )
    return original, str(images)


def main() -> None:
    """Make the models, score them, write top1.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--images", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--train", type=int, default=4000)
    parser.add_argument("--test", type=int, default=2000)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--heal", type=int, default=0, metavar="STEPS")
    parser.add_argument("--learning-rate", type=float, default=5e-5)
    given = parser.parse_args()
    quiet()
    torch.manual_seed(0)
    original, images = prepare(given)
    rows: list[dict[str, Any]] = []
    baseline, source = load_model(str(original))
    for share in (2, 3):
        ways = dict(WAYS)
        if given.heal:
            ways["c healed"] = {"samples": 1024, "heal": given.heal}
        for way, options in ways.items():
            out = given.work / f"{way} D{share}"
            if not out.is_dir():
                model, _ = load_model(str(original))
                options = {"calibration": str(Path(images) / "train")} | options
                dk = model.config.hidden_size // share
                report = collabify.convert(model, dk=dk, processor=str(original), **options)
                with output_folder(out) as folder:
                    save(model, folder, source=source, report=report)
            model, _ = load_model(str(out))
            scores = collabify.evaluate_image(model, images, split="test", baseline=baseline)
            record = scores.to_dict()
            rows.append({"way": way, "share": f"D/{share}", "scores": record["scores"]})
            print(json.dumps(rows[-1]), flush=True)
    names = ("train", "test", "epochs", "learning_rate", "heal")
    result = {"model": Path(given.model).name, "versions": versions(), "side": SIDE}
    result |= {"options": {name: getattr(given, name) for name in names}, "rows": rows}
    out = Path(__file__).parent / "top1.json"
    out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
