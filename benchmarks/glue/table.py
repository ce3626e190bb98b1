"""The paper's table for MODEL: fine-tuned, then converted, healed, and fine-tuned again.

    python benchmarks/glue/table.py MODEL --data FOLDER --work DIR [--task T ...]

Writes table.json.

Every task: MODEL is fine-tuned; that original is converted at D̃k = D, D/2, D/3 and D/6 (a) on the
weights alone with all channels, the published method at the right scale, (b) calibrated on 256 of
the task's training examples, (c) so and healed on 1024 of them. Rows 'again' fine-tune (a), (b) and
(c) at the ranks of --again a second time, for one epoch of --again-examples. Models stay in DIR:
what is there is not made again, so several tasks can be prepared at once (--prepare), and a run
that was stopped goes on. Scores are of the validation splits, with 95 % intervals of the difference
to the original, paired by example.
"""

import argparse
import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, DataCollatorWithPadding
from transformers.modeling_outputs import SequenceClassifierOutput

import collabify
from collabify.data.glue import encode, load_task
from collabify.storage import load as load_model
from collabify.storage import output_folder, quiet, save, versions

WAYS = {
    "a weights only": {"calibration": "none", "channels": "all"},
    "b calibrated": {},
    "c healed": {"heal": True},
}
SAMPLES = {"sst2": 8000}  # the others are small


def inputs(folder: Path, task: str, data: str) -> list[Any]:
    """Training examples as ready batches of 32."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    config = AutoModelForSequenceClassification.from_pretrained(folder).config
    rows = load_task(task, data, "train").shuffle(seed=0).select(range(1024))
    features, collate = encode(rows, task, tokenizer, config), DataCollatorWithPadding(tokenizer)
    return [collate(features[start : start + 32]) for start in range(0, len(features), 32)]


def convert(original: Path, out: Path, dk: int, way: str, ready: list[Any], steps: int) -> None:
    """One converted model, in its folder."""
    options: dict[str, Any] = {"calibration": ready, "samples": 256} | WAYS[way]
    heals = options.pop("heal", False)
    teacher, source = load_model(str(original))
    model, _ = load_model(str(original))
    report = collabify.convert(model, dk=dk, **options)
    if heals:
        collabify.heal(model, teacher, calibration=ready, samples=992, steps=steps)
    with output_folder(out) as folder:
        save(model, folder, source=source, report=report)


def prepare(given: argparse.Namespace, task: str) -> None:
    """All models of one task that are not there yet."""
    common = {"task": task, "data": given.data, "epochs": given.epochs}
    common |= {"learning_rate": given.learning_rate, "limit": SAMPLES.get(task)}
    original = given.work / task / "original"
    if not original.is_dir():
        collabify.finetune(given.model, out=original, **common)
    ready = inputs(original, task, given.data)
    width = load_model(str(original))[0].config.hidden_size
    for share in given.share:
        for way in WAYS if share > 1 else ("b calibrated",):
            out = given.work / task / f"{way} D{share}"
            if not out.is_dir():
                convert(original, out, width // share, way, ready, given.steps)
            print(task, share, way, flush=True)
    second = common | {"epochs": 1, "limit": given.again_examples}
    for share in given.again:
        for way in WAYS if share > 1 else ("b calibrated",):
            out = given.work / task / f"{way} D{share} again"
            if not out.is_dir():
                collabify.finetune(str(given.work / task / f"{way} D{share}"), out=out, **second)
            print(task, share, way, "again", flush=True)


def remembering(model: Any, kept: Path) -> Any:
    """The model with the logits of every batch that it has seen, in this run or before."""
    known: dict[str, Any] = torch.load(kept) if kept.is_file() else {}
    forward = model.forward

    def look_up(**batch: Any) -> SequenceClassifierOutput:
        key = hashlib.sha256(batch["input_ids"].numpy().tobytes()).hexdigest()
        if key not in known:
            known[key] = forward(**batch).logits
            torch.save(known, kept)
        return SequenceClassifierOutput(logits=known[key])

    model.forward = look_up
    return model


def evaluate(given: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for every kind of model, over all tasks."""
    names = ["original"]
    for share in given.share:
        for way in WAYS if share > 1 else ("b calibrated",):
            names += [f"{way} D{share}"] + [f"{way} D{share} again"] * (share in given.again)
    rows = []

    def model(task: str, name: str) -> Any:
        folder = given.work / task / name
        return remembering(load_model(str(folder))[0].eval(), folder / "logits.pt")

    for name in names:
        scores = collabify.evaluate_glue(
            lambda task, name=name: model(task, name),
            given.task,
            data=given.data,
            baseline=lambda task: model(task, "original"),
            processor=str(given.work / given.task[0] / "original"),
        )
        record = scores.to_dict()
        for task in record["tasks"]:  # folders of this machine
            del task["model"], task["baseline"]
        rows.append({"model": name, "tasks": record["tasks"], "averages": record["averages"]})
        means = {a.score.metric: a.score.value for a in scores.averages}
        print(name, json.dumps(means), flush=True)
    return rows


def main() -> None:
    """Make the models, score them, write table.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--data", required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--task", nargs="+", default=["cola", "sst2", "mrpc", "stsb", "rte"])
    parser.add_argument("--share", type=int, nargs="+", default=[1, 2, 3, 6])
    parser.add_argument("--again", type=int, nargs="*", default=[2, 3, 6])
    parser.add_argument("--again-examples", type=int, default=2000, metavar="N", help="at most")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--learning-rate", type=float, default=5e-5)
    parser.add_argument("--steps", type=int, default=100, help="of healing")
    parser.add_argument("--prepare", action="store_true", help="make the models and stop")
    given = parser.parse_args()
    quiet()
    for task in given.task:
        prepare(given, task)
    if given.prepare:
        return
    names = ("epochs", "learning_rate", "steps", "again_examples")
    options = {name: getattr(given, name) for name in names} | {"limits": SAMPLES}
    result = {"model": Path(given.model).name, "versions": versions(), "options": options}
    result["rows"] = evaluate(given)
    out = Path(__file__).parent / "table.json"
    out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
