"""How to calibrate: where the eigenvalues' floor lies, and whether layers should go one by one.

    python benchmarks/quality/calibration.py MODEL --glue FOLDER            writes calibration.json

MiniLM, cosine of sentence embeddings to the original's on held-out RTE premises. Floors: with 256
sentences (more tokens than channels) and with 4 (fewer). Sequential: every layer is calibrated on
what the model converted so far gives it, instead of on the original's states in one pass.
"""

import argparse
import copy
import json
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from inputs import premises
from minilm import embed
from transformers import AutoTokenizer

import collabify
from collabify.calibration import EIGENVALUE_FLOOR, Whitening
from collabify.storage import load, quiet, versions

FLOORS = (1e-2, 1e-3, 1e-4, 1e-5, 1e-6, 1e-7, 1e-8, 1e-10)
RANKS = (192, 128)


def main() -> None:
    """Run both sweeps and write calibration.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--glue", required=True)
    arguments = parser.parse_args()
    quiet()
    torch.manual_seed(0)
    original, where = load(arguments.model)
    tokenizer = AutoTokenizer.from_pretrained(where.location)
    train, held_out = premises(arguments.glue)
    reference = embed(original, tokenizer, held_out)
    rows: list[dict[str, Any]] = []

    def record(model: Any, **row: Any) -> None:
        cosine = float((embed(model, tokenizer, held_out) * reference).sum(-1).mean())
        rows.append({**row, "cosine": cosine})
        print(json.dumps(rows[-1]), flush=True)

    for sentences in (256, 4):
        for floor in FLOORS:
            model = copy.deepcopy(original)
            with patch.object(Whitening, "of", partial(Whitening.of, floor=floor)):
                collabify.convert(
                    model,
                    dk=128,
                    calibration=train,
                    samples=sentences,
                    processor=tokenizer,
                )
            record(model, sweep="floor", dk=128, sentences=sentences, floor=floor)
    for dk in RANKS:
        for sequential in (False, True):
            model = copy.deepcopy(original)
            collabify.convert(
                model, dk=dk, calibration=train, processor=tokenizer, sequential=sequential
            )
            record(model, sweep="sequential", dk=dk, sequential=sequential)
    result = {"versions": versions(), "default_floor": EIGENVALUE_FLOOR, "rows": rows}
    out = Path(__file__).parent / "calibration.json"
    out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
