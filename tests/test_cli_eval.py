"""``collabify eval`` as a user runs it: exit code, text and JSON, on success and on each error."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from glue_data import VOCABULARY, rows_of, write_glue, write_vocabulary
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import (
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    ViTConfig,
    ViTForImageClassification,
    ViTImageProcessor,
)
from typer.testing import CliRunner

import collabify
from collabify.cli.app import app
from collabify.cli.common import progress_bar, spread
from collabify.data.glue import TASKS

LABELS = [0, 1, 1, 0, 1, 1, 1, 0, 1, 1, 1]


class Outcome:
    def __init__(self, result: Any) -> None:
        self.code, self.out, self.err = result.exit_code, result.stdout, result.stderr

    @property
    def json(self) -> Any:
        return json.loads(self.out)


def run(*arguments: object) -> Outcome:
    result = CliRunner().invoke(app, spread([str(argument) for argument in arguments]))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return Outcome(result)


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def save_bert(folder: Path, cls: Any, **options: Any) -> Any:
    torch.manual_seed(11)
    config = BertConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=24,
        num_hidden_layers=2,
        num_attention_heads=3,
        intermediate_size=29,
        max_position_embeddings=37,
        initializer_range=0.5,
        **options,
    )
    model = cls(config).eval()
    model.save_pretrained(folder)
    write_vocabulary(folder)
    return model


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models for rte and stsb, each converted too, and one without a head."""
    root = tmp_path_factory.mktemp("models")
    save_bert(root / "bare", BertModel)
    for task, count in (("rte", 2), ("stsb", 1)):
        names = dict(enumerate(TASKS[task].label_names or ("LABEL_0",)))
        model = save_bert(
            root / task,
            BertForSequenceClassification,
            num_labels=count,
            id2label=names,
            label2id={name: n for n, name in names.items()},
        )
        collabify.convert(model, dk=8, calibration="none", iterations=2)
        model.save_pretrained(root / f"{task}-small")
        write_vocabulary(root / f"{task}-small")
    return root


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    tasks = {
        "rte": {"validation": rows_of("rte", LABELS)},
        "stsb": {"validation": rows_of("stsb", [2, 1, 0, 1, 2, 0, 1])},
    }
    return write_glue(tmp_path_factory.mktemp("glue"), tasks)


def test_glue_prints_what_a_loop_over_the_rows_finds(models: Path, data: str) -> None:
    outcome = run("eval", "glue", models / "rte", "--task", "rte", "--data", data, "--json")
    assert outcome.code == 0, outcome.err
    (scores,) = outcome.json["tasks"]
    model = BertForSequenceClassification.from_pretrained(models / "rte").eval()
    tokenizer: Any = AutoTokenizer.from_pretrained(models / "rte")
    rows = rows_of("rte", LABELS)
    hits = 0
    for first, second, label in zip(
        rows["sentence1"], rows["sentence2"], rows["label"], strict=True
    ):
        with torch.no_grad():
            logits = model(**tokenizer(first, second, return_tensors="pt")).logits
        hits += int(logits.argmax()) == label
    assert scores["scores"][0]["value"] == pytest.approx(hits / len(LABELS))
    assert scores["examples"] == len(LABELS)
    assert scores["label_order"] == "names"
    assert scores["implementation"] == "collabify's own"
    assert scores["model"] == str(models / "rte")


def test_glue_compares_several_tasks_with_a_baseline(models: Path, data: str) -> None:
    command = ["eval", "glue", f"{models}/{{task}}-small", "--baseline", f"{models}/{{task}}"]
    options = ["--data", data, "--resamples", 20]
    outcome = run(*command, "--task", "stsb,rte", *options)
    assert outcome.code == 0, outcome.err
    for part in ("STS-B", "RTE", "mean of 2", "model", "baseline", "difference", "95 % interval"):
        assert part in outcome.out
    assert outcome.out.index("STS-B") < outcome.out.index("RTE")
    assert "Mean of tasks: 2 of 9" in outcome.out
    assert "The paper's mean: 3 of its 11 numbers" in outcome.out
    assert outcome.err == ""
    record = run(*command, "--task", "all", *options, "--json").json
    again = run(*command, "--task", "rte", "--task", "stsb", *options, "--json").json
    assert record["tasks"] == again["tasks"]
    rte = record["tasks"][1]
    assert rte["baseline"] == str(models / "rte")
    score = rte["scores"][0]
    assert score["difference"] == pytest.approx(score["value"] - score["baseline"])


def test_glue_options_reach_the_evaluation(models: Path, data: str) -> None:
    options = ["--limit", 4, "--seed", 3, "--max-length", 6, "--batch-size", 2, "--device", "cpu"]
    outcome = run(
        "eval", "glue", models / "rte", "--task", "rte", "--data", data,
        "--split", "validation[:6]", *options, "--json",
    )  # fmt: skip
    assert outcome.json["tasks"][0]["examples"] == 4
    assert outcome.json["tasks"][0]["split"] == "validation[:6]"
    kept = outcome.json["options"]
    assert (kept["limit"], kept["seed"], kept["max_length"], kept["batch_size"]) == (4, 3, 6, 2)


@pytest.mark.parametrize(
    ("change", "code", "message"),
    [
        ({"--task": "mnlix"}, 2, "task='mnlix' must be one of cola, sst2"),
        ({"--task": ","}, 2, "Give --task"),
        ({"--task": "qqp"}, 2, "There are: rte, stsb"),
        ({"--split": "test"}, 2, "has no split 'test'. There are: validation"),
        ({"--data": "/no/such"}, 2, "data='/no/such' must be a data set's folder"),
        ({"--limit": "0"}, 2, "limit=0 must be at least 1"),
        ({"--batch-size": "0"}, 2, "batch_size=0 must be at least 1"),
        ({"--max-length": "3"}, 2, "max_length=3 must be at least 5"),
        ({"--resamples": "1"}, 2, "resamples=1 must be at least 2"),
        ({"--seed": "-1"}, 2, r"seed=-1 must be in \[0, 2\^32\)"),
        ({"--device": "abacus"}, 2, "device='abacus' must be one that torch can use"),
        ({"--baseline": "/no/such/model"}, 1, "is neither a folder nor a model"),
        ({"MODEL": "bare"}, 1, "Make one: collabify finetune MODEL --task rte --out DIR"),
        ({"MODEL": "stsb"}, 1, "head has 1 label .* task 'rte' has 2"),
        ({"MODEL": "rte", "--task": "stsb"}, 1, "head has 2 labels and task 'stsb' predicts"),
        ({"MODEL": "{task}x"}, 1, "is neither a folder nor a model that the Hub could give"),
    ],
)
def test_glue_refuses_in_one_line(
    models: Path, data: str, change: dict[str, str], code: int, message: str
) -> None:
    options = {"--task": "rte", "--data": data} | change
    model = models / options.pop("MODEL", "rte")
    outcome = run("eval", "glue", model, *(part for pair in options.items() for part in pair))
    assert outcome.code == code, outcome.err
    assert re.search(message, outcome.err), outcome.err
    assert outcome.err.count("\n") == 1
    assert outcome.out == ""


def test_every_tasks_model_is_looked_for_before_one_is_scored(
    models: Path, data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(models / "stsb", tmp_path / "stsb")  # none for rte
    monkeypatch.setattr("collabify.evaluation.evaluate_glue", None)  # would raise a TypeError
    outcome = run("eval", "glue", tmp_path / "{task}", "--task", "all", "--data", data)
    assert (outcome.code, outcome.out) == (1, "")
    assert f"'{tmp_path / 'rte'}' is neither a folder nor" in outcome.err
    for which in ([models / "rte"], [models / "{task}", "--baseline", models / "rte"]):
        outcome = run("eval", "glue", *which, "--task", "rte,stsb", "--data", data)
        assert outcome.code == 2
        assert "is one model and there are 2 tasks (stsb, rte)" in outcome.err
        assert "Put {task} where its name stands" in outcome.err


def test_a_swapped_label_map_is_no_bad_model(models: Path, data: str, tmp_path: Path) -> None:
    """The head's rows and the names are swapped together: the same score."""
    shutil.copytree(models / "rte", tmp_path / "swapped")
    model = BertForSequenceClassification.from_pretrained(tmp_path / "swapped")
    with torch.no_grad():
        for parameter in model.classifier.parameters():
            parameter.copy_(parameter.flip(0))
    model.config.id2label = {0: "not_entailment", 1: "entailment"}
    model.config.label2id = {"not_entailment": 0, "entailment": 1}
    model.save_pretrained(tmp_path / "swapped")
    same = run(
        "eval", "glue", tmp_path / "swapped", "--baseline", models / "rte",
        "--task", "rte", "--data", data, "--json",
    ).json["tasks"][0]["scores"][0]  # fmt: skip
    assert same["difference"] == 0
    assert same["difference_interval"] == [0, 0]


def without(source: Path, folder: Path, part: str) -> Path:
    """A copy of a model without the weights whose names have ``part``."""
    shutil.copytree(source, folder)
    tensors = load_file(folder / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if part not in name}
    assert len(kept) < len(tensors)
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_a_head_without_weights_is_not_scored(models: Path, data: str, tmp_path: Path) -> None:
    headless = without(models / "rte", tmp_path / "headless", "classifier")
    glue = ["--task", "rte", "--data", data]
    drift = ["--data", "synthetic", "--samples", 4, "--max-length", 9]
    for command in (
        ["eval", "glue", headless, *glue],
        ["eval", "glue", models / "rte", "--baseline", headless, *glue],
        ["eval", "drift", headless, "--baseline", models / "rte", *drift],
    ):
        outcome = run(*command)
        assert (outcome.code, outcome.out) == (1, "")
        assert "no weights for its head (classifier.bias, classifier.weight)" in outcome.err
    pooled = without(models / "bare", tmp_path / "no-pooler", "pooler")
    outcome = run("eval", "drift", pooled, "--baseline", pooled, *drift)
    assert outcome.code == 0, outcome.err


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pictures of two classes, and a ViT that was made for them."""
    root = tmp_path_factory.mktemp("images")
    for label, name in enumerate(("ant", "bee")):
        for split, count in (("train", 2), ("validation", 3)):
            folder = root / "photos" / split / name
            folder.mkdir(parents=True)
            for number in range(count):
                colour = (40 * number, 200 * label, 90)
                Image.new("RGB", (8, 8), colour).save(folder / f"{number}.png")
    torch.manual_seed(5)
    config = ViTConfig(
        hidden_size=24,
        num_hidden_layers=2,
        num_attention_heads=3,
        intermediate_size=29,
        image_size=8,
        patch_size=4,
        initializer_range=0.4,
        id2label={0: "Bee", 1: "Ant"},
        label2id={"Bee": 0, "Ant": 1},
    )
    ViTForImageClassification(config).save_pretrained(root / "vit")
    ViTImageProcessor(size={"height": 8, "width": 8}).save_pretrained(root / "vit")
    return root


def test_image_scores_a_folder_of_pictures(images: Path) -> None:
    command = ["eval", "image", images / "vit", "--data", images / "photos"]
    outcome = run(*command, "--baseline", images / "vit", "--json")
    assert outcome.code == 0, outcome.err
    record = outcome.json
    model = ViTForImageClassification.from_pretrained(images / "vit").eval()
    processor = ViTImageProcessor.from_pretrained(images / "vit")
    hits = 0
    for path in sorted((images / "photos" / "validation").rglob("*.png")):
        with torch.no_grad(), Image.open(path) as picture:
            logits = model(**processor(picture, return_tensors="pt")).logits
        hits += model.config.id2label[int(logits.argmax())].lower() == path.parent.name
    (score,) = record["scores"]
    assert score["value"] == pytest.approx(hits / 6)
    assert score["difference"] == 0
    assert (record["examples"], record["classes"], record["split"]) == (6, 2, "validation")
    text = run(*command, "--split", "train", "--limit", 3).out
    assert "top-1" in text
    assert "No top-5: with 2 classes it says nothing." in text
    assert "3 images of 2 classes" in text
    assert "Images for the" not in text


def test_image_says_where_a_model_has_no_processor(images: Path, tmp_path: Path) -> None:
    folder = tmp_path / "vit"
    shutil.copytree(images / "vit", folder)
    (folder / "preprocessor_config.json").unlink()
    text = run("eval", "image", folder, "--data", images / "photos").out
    assert "Images for the model: no preprocessor_config.json: resized to 8 x 8" in text


@pytest.mark.parametrize(
    ("change", "code", "message"),
    [
        ({"--split": "test"}, 2, "has no split 'test'"),
        ({"--data": "/no/such"}, 2, "data='/no/such' must be a data set's folder"),
        ({"--limit": "0"}, 2, "limit=0 must be at least 1"),
        ({"--batch-size": "0"}, 2, "batch_size=0"),
        ({"--seed": "-1"}, 2, "seed=-1 must be in [0, 2^32). Change --seed."),
        ({"--baseline": "/no/such/model"}, 1, "is neither a folder nor a model"),
    ],
)
def test_image_refuses_in_one_line(
    images: Path, change: dict[str, str], code: int, message: str
) -> None:
    options = {"--data": str(images / "photos")} | change
    arguments = (part for pair in options.items() for part in pair)
    outcome = run("eval", "image", images / "vit", *arguments)
    assert (outcome.code, outcome.out) == (code, ""), outcome.err
    assert message in outcome.err
    assert outcome.err.count("\n") == 1


def test_image_names_a_damaged_picture(images: Path, tmp_path: Path) -> None:
    shutil.copytree(images / "photos", tmp_path / "photos")
    (tmp_path / "photos" / "validation" / "bee" / "1.png").write_bytes(b"no image")
    outcome = run("eval", "image", images / "vit", "--data", tmp_path / "photos")
    assert (outcome.code, outcome.out) == (2, "")
    assert re.search(r"Row 4 of .*:validation cannot be read as an image", outcome.err)


def test_image_refuses_a_model_of_texts(models: Path, images: Path) -> None:
    outcome = run("eval", "image", models / "rte", "--data", images / "photos")
    assert outcome.code == 1
    assert "has no image classification head" in outcome.err


def test_drift_needs_no_labels(models: Path, tmp_path: Path) -> None:
    texts = tmp_path / "texts.txt"
    texts.write_text("\n".join("a " * n + "b" for n in range(24)))
    command = ["eval", "drift", models / "rte-small", "--baseline", models / "rte"]
    outcome = run(*command, "--data", texts, "--samples", 16, "--json")
    assert outcome.code == 0, outcome.err
    record = outcome.json
    assert record["samples"] == record["predictions"] == 24
    assert record["hidden_cosine"] < 1
    assert record["divergence"] > 0
    assert 0 <= record["agreement"] <= 1
    text = run(*command, "--data", "synthetic", "--samples", 4, "--max-length", 9).out
    assert "same predictions" in text
    assert "nats" in text
    bare = ["eval", "drift", models / "bare", "--baseline", models / "bare"]
    assert "no head that classifies" in run(*bare, "--data", texts).out


@pytest.mark.parametrize(
    ("change", "code", "message"),
    [
        ({"--data": "no/such:a:b:c:d"}, 2, "has 5 parts"),
        ({"--samples": "1"}, 2, "samples=1 must be at least 2"),
        ({"--baseline": "stsb"}, 1, "head has 2 labels .* and the baseline has 1"),
    ],
)
def test_drift_refuses_in_one_line(
    models: Path, change: dict[str, str], code: int, message: str
) -> None:
    options = {"--data": "synthetic", "--baseline": "rte", "--max-length": "7"} | change
    options["--baseline"] = str(models / options["--baseline"])
    arguments = (part for pair in options.items() for part in pair)
    outcome = run("eval", "drift", models / "rte", *arguments)
    assert (outcome.code, outcome.out) == (code, ""), outcome.err
    assert re.search(message, outcome.err), outcome.err
    assert outcome.err.count("\n") == 1


@pytest.mark.parametrize("name", ["glue", "image", "drift"])
def test_every_way_of_evaluating_has_help(name: str) -> None:
    outcome = run("eval", name, "--help")
    assert outcome.code == 0
    assert "MODEL" in outcome.out
    assert name in run("eval", "--help").out


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys; sys.argv = ['collabify', 'eval', 'glue', '--help']\n"
        "from collabify.cli.app import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'transformers', 'datasets', 'evaluate', 'scipy', 'sklearn', 'numpy'}\n"
        "print('loaded:', sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert "loaded: []" in done.stdout


def test_a_progress_bar_shows_rate_and_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal:
        encoding = "utf-8"

        def __init__(self) -> None:
            self.text = ""

        def write(self, text: str) -> int:
            self.text += text
            return len(text)

        def flush(self) -> None:
            pass

        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("TERM", "xterm")
    ticks = iter(range(100_000))
    monkeypatch.setattr("rich.console.monotonic", lambda: float(next(ticks)))
    with progress_bar(quiet=False) as show:
        for done in (1, 20, 40, 60):
            show("rte validation", done, 100, "")
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", terminal.text)
    assert "60/100" in plain
    assert re.search(r"\d+\.\d/s +\d:\d\d:\d\d", plain), plain
