"""Fine-tune on GLUE, convert, heal, compare: the paper's protocol, one task after another.

    python examples/glue_table.py MODEL FOLDER [--task T ...] [--data PATH] [--dk N ...] [--limit N]

FOLDER takes the models; those that are there already are not made again.
"""

import argparse
from pathlib import Path

from transformers import AutoModelForSequenceClassification, AutoTokenizer, DataCollatorWithPadding

import collabify
from collabify.data.glue import encode, load_task


def main() -> None:
    """Run every task at every rank and print the scores with their 95 % intervals."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--task", nargs="+", default=["rte"])
    parser.add_argument("--data", help="Hub id or folder (default: nyu-mll/glue)")
    parser.add_argument("--dk", type=int, nargs="+", default=[192, 128])
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60, help="of healing")
    parser.add_argument("--limit", type=int, help="examples of every split at most")
    given = parser.parse_args()
    common = {"data": given.data, "limit": given.limit}
    for task in given.task:
        if not (tuned := given.folder / f"{task}-original").is_dir():
            collabify.finetune(given.model, out=tuned, task=task, epochs=given.epochs, **common)
        original = AutoModelForSequenceClassification.from_pretrained(tuned)
        tokenizer = AutoTokenizer.from_pretrained(tuned)
        rows = load_task(task, given.data, "train").shuffle(seed=0)
        rows = rows.select(range(min(1024, given.limit or 1024, len(rows))))
        features = encode(rows, task, tokenizer, original.config)
        collate = DataCollatorWithPadding(tokenizer)
        inputs = [collate(features[n : n + 32]) for n in range(0, len(features), 32)]
        for dk in given.dk:
            ways = {"weights only": "none", "calibrated": inputs, "calibrated and healed": inputs}
            for way, calibration in ways.items():
                model = AutoModelForSequenceClassification.from_pretrained(tuned)
                healing = {"heal": given.steps} if way.endswith("healed") else {}
                collabify.convert(model, dk=dk, calibration=calibration, samples=256, **healing)
                scores = collabify.evaluate_glue(
                    model, task, baseline=original, processor=tokenizer, **common
                )
                for score in scores.tasks[0].scores:
                    low, high = score.difference_interval or (float("nan"),) * 2
                    print(
                        f"{task} {score.metric}: {score.baseline:.4f} -> {score.value:.4f} "
                        f"(difference {low:+.4f} to {high:+.4f}), D̃k = {dk}, {way}"
                    )


if __name__ == "__main__":
    main()
