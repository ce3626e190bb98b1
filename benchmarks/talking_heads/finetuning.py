"""Fine-tuning with inserted P_l and P_w, against the same fine-tuning without.

    python benchmarks/talking_heads/finetuning.py MODEL --data FOLDER --work DIR [--task T ...]

Writes finetuning.json. MODEL is fine-tuned on every task with every seed as it is, with identities
inserted before the softmax (P_l), after it (P_w) and at both places, by the same steps on the same
examples. Scores are of the validation splits; differences are to the first way, of the same seed.
Models are not kept; scores stay in DIR, so that a run that was stopped goes on.
"""

import argparse
import json
import shutil
import statistics
from pathlib import Path
from typing import Any

import collabify
from collabify.storage import load as load_model
from collabify.storage import output_folder, quiet, save, versions

WAYS: dict[str, dict[str, Any] | None] = {
    "original": None,
    "P_l": {"projections": "logits"},
    "P_w": {"projections": "weights"},
    "P_l and P_w": {"projections": "both"},
}


def prepared(given: argparse.Namespace, way: str) -> str:
    """MODEL with what is inserted."""
    options = WAYS[way]
    if options is None:
        return str(given.model)
    folder = given.work / way
    if not folder.is_dir():
        model, source = load_model(given.model)
        report = collabify.convert(model, method="talking-heads", calibration="none", **options)
        with output_folder(folder) as made:
            save(model, made, source=source, report=report)
    return str(folder)


def score(given: argparse.Namespace, task: str, way: str, seed: int) -> dict[str, float]:
    """Scores of the last epoch."""
    options = f"{given.epochs} {given.examples} {given.learning_rate:g}"
    kept = given.work / f"{task} {way} {seed} {options}.json"
    if not kept.is_file():
        out = given.work / "run"
        report = collabify.finetune(
            prepared(given, way),
            task=task,
            data=given.data,
            out=out,
            seed=seed,
            epochs=given.epochs,
            learning_rate=given.learning_rate,
            limit=given.examples,
            overwrite=True,
        )
        kept.write_text(json.dumps(report.scores[-1]["validation"]))
        shutil.rmtree(out)
    return {k: v for k, v in json.loads(kept.read_text()).items() if isinstance(v, float)}


def main() -> None:
    """Train, and write finetuning.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--data", required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--task", nargs="+", default=["sst2", "cola"])
    parser.add_argument("--way", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--examples", type=int, help="to train on, at most (default: all)")
    parser.add_argument("--learning-rate", type=float, default=5e-5)
    given = parser.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    quiet()
    rows = []
    for task in given.task:
        before: list[dict[str, float]] = []
        for way in given.way:
            found = [score(given, task, way, seed) for seed in range(given.seeds)]
            before = before or found
            row: dict[str, Any] = {"task": task, "way": way, "scores": found}
            for metric in found[0]:
                gains = [new[metric] - old[metric] for new, old in zip(found, before, strict=True)]
                spread = statistics.stdev(gains) if len(gains) > 1 else None
                row[metric] = {"gain": statistics.mean(gains), "spread": spread}
            rows.append(row)
            print(json.dumps(row), flush=True)
    names = ("epochs", "examples", "learning_rate", "seeds")
    options = {name: getattr(given, name) for name in names}
    result = {"model": Path(given.model).name, "versions": versions(), "options": options}
    out = Path(__file__).parent / "finetuning.json"
    out.write_text(json.dumps(result | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
