"""Error against seconds: our CP, plain ALS and tensorly's parafac, in one run, one thread.

    python benchmarks/solver/convergence.py MODEL --glue FOLDER   writes convergence.json and .png

Two layers: the second of MODEL (MiniLM), calibrated on 256 RTE premises, at D/2; and the layer of
BERT-base shape of ``sweeps.py`` at R = 256. Ours goes through its 200 sweeps (no tolerance), plain
ALS takes 400 from a head-SVD, parafac 100 or 40 from a random start and from its SVD.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import datasets
import tensorly
import torch
from matplotlib.figure import Figure
from sweeps import bert_base_layer, plain_als
from tensorly.decomposition import parafac
from transformers import AutoTokenizer

from collabify import conversion, find_attention
from collabify.decompose import cp, fit_cp
from collabify.forms import HeadForms
from collabify.storage import load, quiet, versions

HERE = Path(__file__).parent
Curve = dict[str, list[float]]


def ours(forms: HeadForms, rank: int) -> Curve:
    """Errors after every sweep of the default, with their seconds; the start counts."""
    begin = time.perf_counter()
    seconds: list[float] = []
    sweep = cp._Search._sweep

    def timed(self: Any, *state: Any) -> Any:
        found = sweep(self, *state)
        seconds.append(time.perf_counter() - begin)
        return found

    with patch.object(cp._Search, "_sweep", timed):
        found = fit_cp(forms, rank, tolerance=0)
    return {"seconds": seconds, "errors": list(found.errors[1:])}


def theirs(forms: HeadForms, rank: int, start: str, iterations: int) -> Curve:
    """Errors of parafac after every iteration on the dense stack."""
    dense = forms.dense()
    curve: Curve = {"seconds": [], "errors": []}
    begin = time.perf_counter()

    def note(_: Any, error: Any) -> None:
        curve["seconds"].append(time.perf_counter() - begin)
        curve["errors"].append(float(error))

    with tensorly.backend_context("pytorch"):
        parafac(
            dense, rank, n_iter_max=iterations, init=start, random_state=0, tol=1e-12, callback=note
        )
    return curve


def measure(forms: HeadForms, rank: int, iterations: int) -> dict[str, Any]:
    """All curves of one layer, and when ours is where plain ALS is after 400 sweeps."""
    errors, seconds = plain_als(forms, rank, 400)
    curves = {"collabify": ours(forms, rank), "plain ALS": {"seconds": seconds, "errors": errors}}
    for start in ("random", "svd"):
        curves[f"parafac, {start} start"] = theirs(forms, rank, start, iterations)
    default = curves["collabify"]
    at = next((n for n, e in enumerate(default["errors"]) if e <= errors[-1]), None)
    return {
        "rank": rank,
        "sweeps_to_plain_400": None if at is None else at + 1,
        "seconds_to_plain_400_over_plain_50": None
        if at is None
        else default["seconds"][at] / seconds[49],
        "curves": curves,
    }


def draw(layers: dict[str, Any]) -> Figure:
    """Both layers beside one another."""
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    for axes, (name, layer) in zip(figure.subplots(1, len(layers)), layers.items(), strict=True):
        for label, curve in layer["curves"].items():
            axes.plot(curve["seconds"], curve["errors"], label=label)
        lowest = min(min(curve["errors"]) for curve in layer["curves"].values())
        axes.set(title=f"{name}, rank {layer['rank']}", xlabel="seconds", ylabel="relative error")
        axes.set(xscale="log", yscale="log", ylim=(0.95 * lowest, 3 * lowest))
        axes.grid(color="0.9", linewidth=0.5, which="both")
    axes.legend(frameon=False)
    return figure


def main() -> None:
    """Measure, write convergence.json and draw convergence.png."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--glue", required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    quiet()
    model, where = load(arguments.model)
    rte = datasets.load_dataset(arguments.glue, "rte")["train"]["sentence1"]
    tokenizer = AutoTokenizer.from_pretrained(where.location)
    data = conversion.load(model, list(dict.fromkeys(rte)), 256, 128, 0, tokenizer)
    sites = find_attention(model)[1:2]
    spaces = conversion.whitenings(model, sites, data, None)
    layers = {
        f"{Path(where.name).name}, layer 1, calibrated": measure(
            conversion._whitened(sites[0], spaces, None), model.config.hidden_size // 2, 100
        ),
        "BERT-base shape": measure(bert_base_layer(), 256, 40),
    }
    for name, layer in layers.items():
        print(name, layer["sweeps_to_plain_400"], layer["seconds_to_plain_400_over_plain_50"])
    result = {"versions": versions(), "layers": layers}
    (HERE / "convergence.json").write_text(json.dumps(result) + "\n")
    draw(layers).savefig(HERE / "convergence.png", dpi=150)


if __name__ == "__main__":
    main()
