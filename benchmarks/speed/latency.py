"""Latency of converted models over that of their originals, whole models, interleaved runs.

    python benchmarks/speed/latency.py NAME=MODEL ... [--repeats N] [--threads N] [--no-shape]

Writes latency.json. 'bert-base-shape' (random weights: time does not depend on them) is there
unless told otherwise. Every model is converted at D/2 and D/3 in the default way, at D/2 with all
channels, as head-svd and as tucker, and at 3/4 of a head with few and with all channels. For
each length and batch size, originals and converted models take turns (A B C A B C ...); the figure
is the median of the pairwise ratios of a round, with its quartiles.
"""

import argparse
import copy
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from transformers import BertConfig, BertModel

import collabify
from collabify.storage import load, quiet, versions

HERE = Path(__file__).parent
SHAPES = [(1, 32), (1, 128), (1, 512), (8, 32), (8, 128), (8, 512)]


def variants(original: Any) -> dict[str, Any]:
    """The original and its conversions, by name."""
    width = original.config.hidden_size
    narrow = 3 * width // original.config.num_attention_heads // 4
    fast: dict[str, Any] = {"calibration": "none", "iterations": 2}
    found = {"original": original}
    for name, options in {
        "cp D/2": {"dk": width // 2},
        "cp D/3": {"dk": width // 3},
        "cp D/2, all channels": {"dk": width // 2, "channels": "all"},
        "head-svd D/2": {"dk": width // 2, "method": "head-svd"},
        "tucker D/2": {"dk": width // 2, "method": "tucker"},
        "cp 3/4 of a head": {"dk": narrow},
        "cp 3/4 of a head, all channels": {"dk": narrow, "channels": "all"},
    }.items():
        found[name] = copy.deepcopy(original)
        collabify.convert(found[name], **options, **fast)
    return found


def seconds(model: Any, batch: dict[str, Any]) -> float:
    """Of one forward pass."""
    begin = time.perf_counter()
    with torch.inference_mode():
        model(**batch)
    return time.perf_counter() - begin


def measure(models: dict[str, Any], batch_size: int, length: int, repeats: int) -> dict[str, Any]:
    """Ratios of every model to the first, and the first's seconds."""
    ids = torch.randint(1000, 20000, (batch_size, length))
    mask = torch.ones_like(ids)
    mask[:, length - length // 8 :] = 0  # some padding, as batches have
    batch = {"input_ids": ids, "attention_mask": mask}
    for model in models.values():
        seconds(model, batch)
    rounds = [{name: seconds(m, batch) for name, m in models.items()} for _ in range(repeats)]
    result: dict[str, Any] = {"original_seconds": statistics.median(r["original"] for r in rounds)}
    for name in models:
        ratios = sorted(r[name] / r["original"] for r in rounds)
        quarter = len(ratios) // 4
        result[name] = {
            "median": statistics.median(ratios),
            "quartiles": [ratios[quarter], ratios[-1 - quarter]],
        }
    return result


def main() -> None:
    """Run everything and write latency.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", metavar="NAME=MODEL")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--no-shape", action="store_true", help="leave out bert-base-shape")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    quiet()
    originals = {name: load(m)[0] for name, m in (p.split("=", 1) for p in arguments.models)}
    if not arguments.no_shape:
        originals["bert-base-shape"] = BertModel(BertConfig()).eval()
    rows = []
    for name, original in originals.items():
        models = variants(original)
        for kernel in ("sdpa", "eager"):
            for model in models.values():
                model.set_attn_implementation(kernel)
            for batch_size, length in SHAPES:
                repeats = max(3, arguments.repeats // (1 + batch_size * length // 1024))
                row = {"model": name, "kernel": kernel, "batch": batch_size, "length": length}
                row |= measure(models, batch_size, length, repeats)
                rows.append(row)
                print(json.dumps(row), flush=True)
                result = {"versions": versions(), "threads": arguments.threads, "rows": rows}
                (HERE / "latency.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
