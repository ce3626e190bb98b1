"""What each idea keeps of a sentence encoder, without training, at equal parameters.

    python benchmarks/quality/minilm.py MODEL --glue FOLDER [--dk N ...] [--rows ROW ...]

Writes minilm.json, row by row; rows that are there already and not asked for stay.

MODEL is a folder, a Hub id or 'demo' (all-MiniLM-L6-v2); FOLDER has GLUE in the Hub's layout.
Calibration: 256 distinct RTE train premises; healing: 150 steps of 32 out of 1024. Measured: cosine
of mean-pooled, normalised embeddings to the original's on the distinct RTE validation premises, and
Spearman's correlation of the embeddings' cosine with STS-B's validation scores.
"""

import argparse
import copy
import json
import time
from pathlib import Path
from typing import Any

import datasets
import torch
from scipy.stats import spearmanr
from torch import Tensor
from transformers import AutoTokenizer

import collabify
from collabify.storage import load, quiet, versions

ROWS: dict[str, dict[str, Any]] = {
    "weights only": {"calibration": "none"},
    "synthetic": {"calibration": "synthetic"},
    "head-svd, one rank a head": {"uniform": True},
    "head-svd, ranks across heads": {"method": "head-svd"},
    "cp, all channels": {"channels": "all"},
    "cp (default)": {},
    "tucker": {"method": "tucker"},
    "cp (default), healed": {"heal": True},
    "synthetic, healed": {"heal": True, "calibration": "synthetic"},
}


def embed(model: Any, tokenizer: Any, texts: list[str]) -> Tensor:
    """Mean-pooled, normalised embeddings, in the texts' order."""
    order = sorted(range(len(texts)), key=lambda n: len(texts[n]))
    rows: list[Tensor] = [torch.empty(0)] * len(texts)
    for start in range(0, len(texts), 32):
        chosen = order[start : start + 32]
        batch = tokenizer(
            [texts[n] for n in chosen],
            padding=True,
            truncation=True,
            max_length=128,
            return_tensors="pt",
        )
        with torch.inference_mode():
            states = model(**batch).last_hidden_state
        mask = batch["attention_mask"][..., None]
        pooled = torch.nn.functional.normalize((states * mask).sum(1) / mask.sum(1), dim=-1)
        for n, row in zip(chosen, pooled, strict=True):
            rows[n] = row
    return torch.stack(rows)


def uniform_head_svd(model: Any, dk: int, texts: list[str], tokenizer: Any) -> Any:
    """Per-head truncation to one rank for all heads, as per-head SVD tools do."""
    heads = model.config.num_attention_heads
    return collabify.convert(
        model,
        dk=dk,
        method="head-svd",
        channels=-(-dk // heads),
        calibration=texts,
        processor=tokenizer,
    )


def main() -> None:
    """Run every row at every rank and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--glue", required=True)
    parser.add_argument("--dk", type=int, nargs="+", default=[256, 192, 128])
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(ROWS))
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "minilm.json")
    arguments = parser.parse_args()
    quiet()
    datasets.disable_progress_bars()
    original, where = load(arguments.model)
    tokenizer = AutoTokenizer.from_pretrained(where.location)
    rte = datasets.load_dataset(arguments.glue, "rte")
    premises = list(dict.fromkeys(rte["train"]["sentence1"]))
    train = premises[:256]
    held_out = list(dict.fromkeys(rte["validation"]["sentence1"]))
    stsb = datasets.load_dataset(arguments.glue, "stsb")["validation"]
    sentences = [*stsb["sentence1"], *stsb["sentence2"]]

    def spearman(model: Any) -> float:
        both = embed(model, tokenizer, sentences).chunk(2)
        return float(spearmanr((both[0] * both[1]).sum(-1), stsb["label"]).statistic)

    reference = embed(original, tokenizer, held_out)
    result: dict[str, Any] = {
        "model": Path(where.name).name,
        "versions": versions(),
        "original_spearman": spearman(original),
        "rows": [],
    }
    if arguments.out.is_file():
        result["rows"] = json.loads(arguments.out.read_text())["rows"]
    for dk in arguments.dk:
        for name in arguments.rows:
            options = ROWS[name]
            model = copy.deepcopy(original)
            start = time.perf_counter()
            if options.get("uniform"):
                report = uniform_head_svd(model, dk, train, tokenizer)
            else:
                options = {"calibration": train, "processor": tokenizer} | options
                heals = options.pop("heal", False)
                report = collabify.convert(model, dk=dk, **options)
                if heals:
                    source = options["calibration"]
                    collabify.heal(
                        model,
                        original,
                        calibration=source if source == "synthetic" else premises,
                        processor=tokenizer,
                        steps=150,
                        batch_size=32,
                        samples=1024,
                    )
            row = {
                "dk": dk,
                "method": name,
                "kept_query_key": report.query_key.kept,
                "cosine": float((embed(model, tokenizer, held_out) * reference).sum(-1).mean()),
                "spearman": spearman(model),
                "relative_error": report.mean_relative_error,
                "seconds": time.perf_counter() - start,
            }
            rows = [r for r in result["rows"] if (r["dk"], r["method"]) != (dk, name)]
            result["rows"] = sorted(
                [*rows, row], key=lambda r: (-r["dk"], list(ROWS).index(r["method"]))
            )
            print(json.dumps(row), flush=True)
            arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
