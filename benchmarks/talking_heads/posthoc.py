"""Talking heads out of a trained sentence encoder, beside cp and tucker at equal parameters.

    python benchmarks/talking_heads/posthoc.py MODEL --glue FOLDER [--dk N ...] [--heal STEPS]

Writes posthoc.json, row by row; rows that are there already and not asked for stay. Calibrated on
256 distinct RTE train premises, no training, or with --heal healed on 1024 of them. Measured:
cosine of sentence embeddings to the original's on the distinct RTE validation premises. Base heads
are written as number x width; tucker has the rank whose parameters come nearest to cp's from below.
With --dk D, queries and keys stay exact and values go to 3/4 and 1/2.
"""

import argparse
import copy
import json
import sys
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

import collabify
from collabify.storage import load, quiet, versions

sys.path.append(str(Path(__file__).parent.parent / "quality"))
from inputs import premises
from minilm import embed

WIDTHS = (4, 8, 16, 32)


def tucker_rank(config: Any, dk: int) -> int:
    """The rank at which cores of all heads leave no more parameters than cp with ``dk``."""
    width, heads = config.hidden_size, config.num_attention_heads
    budget = 2 * width * dk + heads * min(dk, width // heads - 1)
    return max(r for r in range(1, width + 1) if 2 * width * r + heads * r * r <= budget)


def ways(config: Any, dk: int) -> dict[str, dict[str, Any]]:
    """Options of a conversion by name."""
    if dk == config.hidden_size:
        parts = {"3/4": 3 * dk // 4, "1/2": dk // 2}
        return {f"values {name}": {"dv": dv, "method": "head-svd"} for name, dv in parts.items()}
    found: dict[str, dict[str, Any]] = {"cp": {"dk": dk}, "cp, all channels": {"dk": dk}}
    found["cp, all channels"]["channels"] = "all"
    found["tucker"] = {"dk": tucker_rank(config, dk), "method": "tucker"}
    for width in WIDTHS:
        if dk % width == 0:
            base = dk // width
            found[f"talking-heads {base} x {width}"] = {
                "dk": dk,
                "method": "talking-heads",
                "base_heads": base,
            }
    return found


def main() -> None:
    """Run every way at every size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--glue", required=True)
    parser.add_argument("--dk", type=int, nargs="+", default=[256, 192, 128])
    parser.add_argument("--heal", type=int, default=0, metavar="STEPS")
    parser.add_argument("--only", nargs="+", help="ways, by the beginnings of their names")
    given = parser.parse_args()
    quiet()
    original, where = load(given.model)
    tokenizer = AutoTokenizer.from_pretrained(where.location)
    train, held_out = premises(given.glue)
    reference = embed(original, tokenizer, held_out)
    out = Path(__file__).parent / "posthoc.json"
    rows = json.loads(out.read_text())["rows"] if out.is_file() else []
    for dk in given.dk:
        for name, options in ways(original.config, dk).items():
            if given.only and not name.startswith(tuple(given.only)):
                continue
            model = copy.deepcopy(original)
            reading = {"processor": tokenizer}
            report = collabify.convert(model, calibration=train[:256], **options, **reading)
            if given.heal:
                collabify.heal(
                    model, original, calibration=train, samples=1024, steps=given.heal, **reading
                )
            row = {
                "dk": dk,
                "method": name,
                "healed": given.heal,
                "kept_query_key": report.query_key.kept,
                "calibrated_error": report.error,
                "cosine": float((embed(model, tokenizer, held_out) * reference).sum(-1).mean()),
                "seconds": sum(layer.seconds or 0 for layer in report.layers),
            }
            print(json.dumps(row), flush=True)
            same = (dk, name, given.heal)
            rows = [r for r in rows if (r["dk"], r["method"], r["healed"]) != same] + [row]
            result = {"model": Path(where.name).name, "versions": versions(), "rows": rows}
            out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
