"""Our CP and head-SVD beside tensorly's parafac: error and seconds, layer by layer, in one run.

    python benchmarks/solver/sweeps.py NAME=MODEL ... [--dk N ...]   > table; writes sweeps.json

MODEL is a folder, a Hub id or 'demo'. The row 'bert-base-shape' is always there: 12 heads of 64 in
768, half of their directions shared, spectra falling, R = 256. tensorly: random start, 100
iterations, its default tolerance, on the dense float64 stack; ours: default tolerance, 100 sweeps
at most. Times are of one thread and alternate (ours, tensorly, ours, tensorly ...), so only their
ratio means anything. Peak memory is what a fit of the BERT-base-shaped layer adds to a process that
has fitted a small one before (Linux only).
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import tensorly
import torch
from tensorly.decomposition import parafac

from collabify.decompose import fit_cp, fit_head_svd
from collabify.decompose.cp import _sweep
from collabify.decompose.oracle import fit_cp_tensorly
from collabify.forms import HeadForms
from collabify.models import find_attention
from collabify.storage import load, quiet, versions

TENSORLY_ITERATIONS = 100
HERE = Path(__file__).parent


def bert_base_layer(seed: int = 0) -> HeadForms:
    """Heads whose singular values fall as 1/n and whose directions are half shared."""
    generator = torch.Generator().manual_seed(seed)
    common_q, common_k = (
        torch.randn(64, 768, generator=generator, dtype=torch.float64) for _ in range(2)
    )
    own_q, own_k = (
        torch.randn(12, 64, 768, generator=generator, dtype=torch.float64) for _ in range(2)
    )
    falling = torch.arange(1, 65, dtype=torch.float64).rsqrt()[:, None]
    w_q, w_k = (falling * (c + o) / 40 for c, o in ((common_q, own_q), (common_k, own_k)))
    return HeadForms(w_q, w_k, torch.zeros(12, 768, dtype=torch.float64), 0.125)


def one_layer(forms: HeadForms, rank: int, iterations: int) -> dict[str, Any]:
    """Errors and seconds of all solvers on one layer."""
    floor = fit_head_svd(forms, rank).relative_error
    start = time.perf_counter()
    ours = fit_cp(forms, rank)
    our_seconds = time.perf_counter() - start
    start = time.perf_counter()
    theirs = fit_cp_tensorly(forms, rank, iterations=iterations, tolerance=1e-8)
    their_seconds = time.perf_counter() - start
    return {
        "head_svd_error": floor,
        "cp_error": ours.relative_error,
        "cp_sweeps": ours.sweeps,
        "cp_converged": ours.converged,
        "cp_seconds": our_seconds,
        "parafac_error": theirs.relative_error,
        "parafac_iterations": theirs.sweeps,
        "parafac_seconds": their_seconds,
        "times_faster": their_seconds / our_seconds,
    }


def real_model(name: str, model: str, ranks: list[int]) -> list[dict[str, Any]]:
    """One row per layer and rank."""
    loaded, _ = load(model)
    rows = []
    for site in find_attention(loaded):
        for rank in ranks:
            row = {"model": name, "layer": site.index, "rank": rank}
            row |= one_layer(site.read(), rank, TENSORLY_ITERATIONS)
            rows.append(row)
            print(json.dumps(row), file=sys.stderr, flush=True)
    return rows


def seconds_per_sweep(forms: HeadForms, rank: int, repeats: int = 5) -> dict[str, float]:
    """Median seconds of one of our sweeps and of one of parafac's, taken in turns."""
    truth, factors = forms.squared_norms().sum(), fit_head_svd(forms, rank).factors
    dense = forms.dense()
    ours, theirs = [], []
    for _ in range(repeats):
        start = time.perf_counter()
        _sweep(forms, truth, factors)
        ours.append(time.perf_counter() - start)
        start = time.perf_counter()
        with tensorly.backend_context("pytorch"):
            parafac(dense, rank, n_iter_max=2, init="random", random_state=0, tol=None)
        two = time.perf_counter() - start
        start = time.perf_counter()
        with tensorly.backend_context("pytorch"):
            parafac(dense, rank, n_iter_max=1, init="random", random_state=0, tol=None)
        theirs.append(two - (time.perf_counter() - start))
    middle = repeats // 2
    return {"cp": sorted(ours)[middle], "parafac": sorted(theirs)[middle]}


def peak_megabytes(solver: str, rank: int) -> float:
    """Peak resident memory that a fit adds in a fresh process, in MB."""
    command = [sys.executable, __file__, "--peak", solver, "--dk", str(rank)]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def _measure_peak(solver: str, rank: int) -> None:
    warm = bert_base_layer().w_q[:2, :3, :5]
    small = HeadForms(warm, warm, torch.zeros(2, 5, dtype=warm.dtype), 1.0)
    fit_cp(small, 2, iterations=2)
    fit_cp_tensorly(small, 2, iterations=2)
    forms = bert_base_layer()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    before = _resident_megabytes()
    if solver == "cp":
        fit_cp(forms, rank, iterations=3)
    else:
        fit_cp_tensorly(forms, rank, iterations=3)
    print(_resident_megabytes() - before)


def _resident_megabytes() -> float:
    """Peak resident memory of this process since it was last cleared."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


def main() -> None:
    """Run everything and write sweeps.json beside this file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", metavar="NAME=MODEL")
    parser.add_argument("--dk", type=int, nargs="+", default=[192, 128])
    parser.add_argument("--peak", choices=["cp", "parafac"])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    quiet()
    if arguments.peak:
        _measure_peak(arguments.peak, arguments.dk[0])
        return
    rows = []
    for pair in arguments.models:
        name, _, model = pair.partition("=")
        rows += real_model(name, model, arguments.dk)
    forms, rank = bert_base_layer(), 256
    shape = {"rank": rank, "seconds_per_sweep": seconds_per_sweep(forms, rank)}
    shape["times_faster_per_sweep"] = (
        shape["seconds_per_sweep"]["parafac"] / shape["seconds_per_sweep"]["cp"]
    )
    shape |= {"layer": one_layer(forms, rank, TENSORLY_ITERATIONS)}
    megabyte = 2**20
    shape["megabytes"] = {
        "layer_factored_float64": (forms.w_q.numel() + forms.w_k.numel()) * 8 / megabyte,
        "layer_dense_float64": 12 * 768 * 768 * 8 / megabyte,
        "peak_cp": peak_megabytes("cp", rank),
        "peak_parafac": peak_megabytes("parafac", rank),
    }
    result = {"versions": versions(), "layers": rows, "bert_base_shape": shape}
    (HERE / "sweeps.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(shape, indent=1))


if __name__ == "__main__":
    main()
