"""Time and memory of calibration beside plain forward passes of the same batches.

    python benchmarks/speed/calibrating.py                               writes calibrating.json

BERT-base shape (random weights: neither depends on them), 256 sequences of 128 tokens in batches of
16. Plain passes and calibrating ones take turns, 32 sequences at a time; the figure is the ratio of
the sums. Whitening, once for all, is beside it. Memory: the peak of a process that does one of the
two, less what it held before (Linux).
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import BertConfig, BertModel

from collabify import find_attention
from collabify.calibration import Whitening, collect_moments
from collabify.storage import quiet, versions

HERE = Path(__file__).parent


def setting(sequences: int) -> tuple[Any, dict[str, Any], list[dict[str, Any]]]:
    """A model, its attention layers and batches."""
    torch.manual_seed(0)
    model = BertModel(BertConfig()).eval()
    ids = torch.randint(1000, 20000, (sequences, 128))
    batches = [{"input_ids": p, "attention_mask": torch.ones_like(p)} for p in ids.split(16)]
    return model, {site.name: site.module for site in find_attention(model)}, batches


def plain(model: Any, batches: list[dict[str, Any]]) -> None:
    """Forward passes and nothing else."""
    with torch.inference_mode():
        for batch in batches:
            model(**batch)


def peak(kind: str) -> None:
    """Print what one pass over two batches adds to this process, in MB."""
    model, layers, batches = setting(32)
    plain(model, [{name: x[:1, :8] for name, x in batches[0].items()}])
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    before = resident()
    collect_moments(model, layers, batches) if kind == "calibrated" else plain(model, batches)
    print(resident() - before)


def resident() -> float:
    """Peak resident memory of this process since it was last cleared, in MB."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


def main() -> None:
    """Measure both and write calibrating.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peak", choices=("plain", "calibrated"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    quiet()
    if arguments.peak:
        peak(arguments.peak)
        return
    model, layers, batches = setting(256)
    plain(model, batches[:1])
    seconds = {"plain": 0.0, "calibrated": 0.0}
    for start in range(0, len(batches), 2):
        part = batches[start : start + 2]
        begin = time.perf_counter()
        plain(model, part)
        middle = time.perf_counter()
        moments = collect_moments(model, layers, part)
        seconds["plain"] += middle - begin
        seconds["calibrated"] += time.perf_counter() - middle
    begin = time.perf_counter()
    for found in moments.values():
        Whitening.of(found)
    seconds["whitening"] = time.perf_counter() - begin
    megabytes = {
        kind: float(subprocess.check_output([sys.executable, __file__, "--peak", kind], text=True))
        for kind in ("plain", "calibrated")
    }
    result = {
        "versions": versions(),
        "seconds_over_plain": {k: v / seconds["plain"] for k, v in seconds.items()},
        "peak_megabytes": megabytes,
    }
    print(json.dumps(result))
    (HERE / "calibrating.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
