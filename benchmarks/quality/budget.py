"""One rank for all layers beside ranks chosen across layers, at equal query-key parameters.

    python benchmarks/quality/budget.py --glue FOLDER NAME=MODEL ...

Writes budget.json; rows of models that are not named stay. NAME is minilm-l6, bert-rxn or
dinov2-small (``tests/real_models.py`` makes the folders). Measured on input that was not calibrated
on: drift of hidden states and attention from the original's.
"""

import argparse
import copy
import json
from pathlib import Path
from typing import Any

import torch
from inputs import photographs, premises, reactions
from transformers import AutoTokenizer

import collabify
from collabify.drift import measure_drift
from collabify.storage import load, quiet, versions

SHARES = (2, 3, 4)  # D/2, D/3, D/4


def batches(
    name: str, model: str, glue: str, *, most: int = 256, size: int = 16
) -> tuple[list[Any], list[Any]]:
    """Ready batches to calibrate on, of ``most`` texts at most, and held-out ones."""
    if name == "dinov2-small":
        return tuple(
            [{"pixel_values": part} for part in pixels.split(size)] for pixels in photographs()
        )
    texts = premises(glue) if name == "minilm-l6" else reactions()
    tokenizer = AutoTokenizer.from_pretrained(model)
    options = {"padding": True, "truncation": True, "max_length": 128, "return_tensors": "pt"}
    made = []
    for part, limit in zip(texts, (most, 192), strict=True):
        rows = sorted(part[:limit], key=len)
        starts = range(0, len(rows), size)
        made.append([dict(tokenizer(rows[at : at + size], **options)) for at in starts])
    return made[0], made[1]


def main() -> None:
    """Run every model and write budget.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="+", metavar="NAME=MODEL")
    parser.add_argument("--glue", required=True)
    arguments = parser.parse_args()
    quiet()
    torch.manual_seed(0)
    out = Path(__file__).parent / "budget.json"
    there = json.loads(out.read_text())["rows"] if out.is_file() else []
    asked = {pair.split("=", 1)[0] for pair in arguments.models}
    rows: list[dict[str, Any]] = [row for row in there if row["model"] not in asked]
    for name, folder in (pair.split("=", 1) for pair in arguments.models):
        original, _ = load(folder)
        seen, held_out = batches(name, folder, arguments.glue)
        samples = sum(len(next(iter(batch.values()))) for batch in seen)
        for share in SHARES:
            kept = 1.0
            for choice in ("one rank", "chosen"):
                model = copy.deepcopy(original)
                size: dict[str, Any] = {"kept": kept}
                if choice == "one rank":
                    size = {"dk": original.config.hidden_size // share // 8 * 8}
                report = collabify.convert(model, calibration=seen, samples=samples, **size)
                kept = report.query_key.kept
                drift = measure_drift(original, model, held_out)
                row = {
                    "model": name,
                    "ranks": [layer.rank for layer in report.layers],
                    "choice": choice,
                    "share": f"D/{share}",
                    "kept_query_key": kept,
                    "calibrated_error": report.error,
                    "hidden_cosine": drift.hidden_cosine,
                    "hidden_error": drift.hidden_error,
                    "attention": drift.attention,
                }
                rows.append(row)
                print(json.dumps(row), flush=True)
        result = {"versions": versions(), "rows": rows}
        out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
