"""The value side in fewer channels: drift before and after healing, and latency.

    python benchmarks/talking_heads/values.py --glue FOLDER NAME=MODEL ... [--heal STEPS]

Writes values.json; rows of models that are not named stay. NAME is minilm-l6 or dinov2-small.
Values and outputs at 3/4 and 1/2 of their channels, queries and keys exact (head-svd of full
width), with the weights alone, with as many channels for every head, and with channels chosen
across heads; and both sides at once, at half of the queries and keys. Healed on up to 1024 texts
in batches of 32, or on the photographs that were calibrated on, in batches of 16. Measured on other
input. Latency is that of the whole model over the original's on one held-out batch, interleaved,
one thread.
"""

import argparse
import copy
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

import collabify
from collabify.drift import measure_drift
from collabify.storage import load, quiet, versions

sys.path.append(str(Path(__file__).parent.parent / "quality"))
from budget import batches

SHARES = {"3/4": (3, 4), "1/2": (1, 2)}


def ways(config: Any, dv: int) -> dict[str, dict[str, Any]]:
    """Options of a conversion by name."""
    width, heads = config.hidden_size, config.num_attention_heads
    whole: dict[str, Any] = {"method": "head-svd", "dv": dv}
    return {
        "weights only": whole | {"calibration": "none"},
        "as many for every head, mixed": whole | {"value_heads": heads},
        "across heads": whole,
        "across heads, and cp at D/2": {"dk": width // 2, "dv": dv},
    }


def reading(batches: list[Any]) -> dict[str, Any]:
    """All of the batches, as an option."""
    samples = sum(len(next(iter(batch.values()))) for batch in batches)
    return {"calibration": batches, "samples": samples}


def ratio(original: Any, model: Any, batch: Any, rounds: int = 25) -> float:
    """Median of one pass over the other."""
    found = []
    for _ in range(rounds + 1):
        times = []
        for each in (original, model):
            begin = time.perf_counter()
            with torch.inference_mode():
                each(**batch)
            times.append(time.perf_counter() - begin)
        found.append(times[1] / times[0])
    return statistics.median(found[1:])  # the first warms up


def main() -> None:
    """Run every model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="+", metavar="NAME=MODEL")
    parser.add_argument("--glue", required=True)
    parser.add_argument("--heal", type=int, default=100, metavar="STEPS")
    given = parser.parse_args()
    quiet()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    out = Path(__file__).parent / "values.json"
    there = json.loads(out.read_text())["rows"] if out.is_file() else []
    asked = {pair.split("=", 1)[0] for pair in given.models}
    rows: list[dict[str, Any]] = [row for row in there if row["model"] not in asked]
    for name, folder in (pair.split("=", 1) for pair in given.models):
        original, _ = load(folder)
        seen, held_out = batches(name, folder, given.glue)
        size = 16 if "pixel_values" in seen[0] else 32
        healing, _ = batches(name, folder, given.glue, most=1024, size=size)
        for share, (part, of) in SHARES.items():
            dv = part * original.config.hidden_size // of
            for way, options in ways(original.config, dv).items():
                model = copy.deepcopy(original)
                report = collabify.convert(model, **reading(seen) | options)
                row = {"model": name, "share": share, "way": way}
                row["kept_attention"] = report.attention.kept
                row["hidden_cosine"] = measure_drift(original, model, held_out).hidden_cosine
                row["latency"] = ratio(original, model, held_out[0])
                if given.heal and way.startswith("across heads"):
                    found = collabify.heal(model, original, steps=given.heal, **reading(healing))
                    row["went_back"] = len(found.went_back)
                    row["healed"] = measure_drift(original, model, held_out).hidden_cosine
                    row["heal_steps"] = given.heal
                rows.append(row)
                print(json.dumps(row), flush=True)
        result = {"versions": versions(), "rows": rows}
        out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
