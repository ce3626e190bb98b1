"""Seconds of evaluating over those of a plain loop over the same batches, interleaved runs.

    python benchmarks/speed/evaluating.py MODEL --glue DATA [--task T] [--limit N] [--repeats N]

Writes evaluating.json. MODEL gets a random head (time does not depend on weights). Three ways take
turns: ``predict`` of collabify; a plain loop over the very batches that it makes, padded
beforehand; and a plain loop over batches in the order of the data, padded on the way, as most
scripts have it. Figures are medians of the pairwise ratios of a round, with quartiles.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from collabify.data.glue import TASKS, encode, load_task
from collabify.data.splits import sample
from collabify.evaluation import predict
from collabify.storage import locate, quiet, versions

HERE = Path(__file__).parent


def ways(
    model: Any, tokenizer: Any, features: list[Any], size: int
) -> dict[str, Callable[[], Any]]:
    """What is timed, by name."""
    for feature in features:
        feature.pop("labels")

    def pad(some: list[Any]) -> Any:
        return tokenizer.pad(some, return_tensors="pt")

    def chunks(rows: list[Any]) -> list[list[Any]]:
        return [rows[start : start + size] for start in range(0, len(rows), size)]

    longest_first = sorted(features, key=lambda feature: -len(feature["input_ids"]))
    ready = [dict(pad(chunk)) for chunk in chunks(longest_first)]

    def plain() -> list[Any]:
        with torch.inference_mode():
            return [model(**batch).logits for batch in ready]

    def unsorted() -> list[Any]:
        with torch.inference_mode():
            return [model(**pad(chunk)).logits for chunk in chunks(features)]

    return {
        "collabify": lambda: predict(
            model, features, pad, batch_size=size, progress=lambda *_: None
        ),
        "plain loop, the same batches": plain,
        "plain loop, order of the data": unsorted,
    }


def seconds(run: Run) -> float:
    """Of one run."""
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def main() -> None:
    """Run everything and write evaluating.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--glue", required=True)
    parser.add_argument("--task", default="stsb")
    parser.add_argument("--limit", type=int, default=512)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    quiet()
    location = locate(arguments.model).location
    model = AutoModelForSequenceClassification.from_pretrained(
        location, num_labels=TASKS[arguments.task].num_labels
    ).eval()
    tokenizer = AutoTokenizer.from_pretrained(location)
    rows = sample(load_task(arguments.task, arguments.glue), arguments.limit, 0)
    features = encode(rows, arguments.task, tokenizer, model.config)
    timed = ways(model, tokenizer, features, arguments.batch_size)
    for run in timed.values():
        run()
    rounds = [{name: seconds(run) for name, run in timed.items()} for _ in range(arguments.repeats)]
    result: dict[str, Any] = {
        "versions": versions(),
        "model": arguments.model,
        "task": arguments.task,
        "examples": len(features),
        "batch_size": arguments.batch_size,
        "threads": 1,
        "seconds": {name: statistics.median(r[name] for r in rounds) for name in timed},
    }
    for name in list(timed)[1:]:
        ratios = sorted(r["collabify"] / r[name] for r in rounds)
        quarter = len(ratios) // 4
        result[f"collabify over {name}"] = {
            "median": statistics.median(ratios),
            "quartiles": [ratios[quarter], ratios[-1 - quarter]],
        }
    (HERE / "evaluating.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
