"""What a conversion keeps of a reaction classifier and of an image encoder, without training.

    python benchmarks/quality/domains.py bert-rxn=MODEL dinov2-small=MODEL

Writes domains.json; rows of models that are not named stay. bert-rxn: share of held-out reactions
whose class, of 50, stays. dinov2-small: cosine of token features to the original's on held-out
photographs. ``tests/real_models.py`` makes the folders.
"""

import argparse
import copy
import json
from pathlib import Path
from typing import Any

import torch
from budget import batches

import collabify
from collabify.drift import measure_drift
from collabify.storage import load, quiet, versions


def classes(model: Any, held_out: list[Any]) -> torch.Tensor:
    """The class of every sample."""
    with torch.inference_mode():
        return torch.cat([model(**batch).logits.argmax(-1) for batch in held_out])


def main() -> None:
    """Run every model and write domains.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="+", metavar="NAME=MODEL")
    parser.add_argument("--share", type=int, nargs="+", default=[2, 3, 4], help="of D")
    arguments = parser.parse_args()
    quiet()
    torch.manual_seed(0)
    out = Path(__file__).parent / "domains.json"
    there = json.loads(out.read_text())["rows"] if out.is_file() else []
    asked = {pair.split("=", 1)[0] for pair in arguments.models}
    rows: list[dict[str, Any]] = [row for row in there if row["model"] not in asked]
    for name, folder in (pair.split("=", 1) for pair in arguments.models):
        original, _ = load(folder)
        seen, held_out = batches(name, folder, "")
        samples = sum(len(next(iter(batch.values()))) for batch in seen)
        before = classes(original, held_out) if name == "bert-rxn" else None
        for share in arguments.share:
            for calibration in ("none", "synthetic", "real"):
                model = copy.deepcopy(original)
                source: Any = seen if calibration == "real" else calibration
                dk = original.config.hidden_size // share // 8 * 8
                options = {} if calibration == "synthetic" else {"samples": samples}
                report = collabify.convert(model, dk=dk, calibration=source, **options)
                row: dict[str, Any] = {"model": name, "dk": dk, "calibration": calibration}
                row["kept_query_key"] = report.query_key.kept
                row["hidden_cosine"] = measure_drift(original, model, held_out).hidden_cosine
                if before is not None:
                    after = classes(model, held_out)
                    row["agreement"] = float((after == before).float().mean())
                    row["samples"] = len(before)
                    row["classes_seen"] = len(before.unique())
                rows.append(row)
                print(json.dumps(row), flush=True)
    result = {"versions": versions(), "rows": rows}
    out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
