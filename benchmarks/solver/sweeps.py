"""Our CP beside plain ALS and tensorly's parafac: error and seconds, layer by layer, in one run.

    python benchmarks/solver/sweeps.py NAME=MODEL ... [--dk N ...]       writes sweeps.json

MODEL is a folder, a Hub id or 'demo'. The part 'bert_base_shape' is always there: 12 heads of 64 in
768, half of their directions shared, spectra falling, R = 256. All on the weights alone.
tensorly: random start, 100 iterations, on the dense float64 stack. Ours: ``fit_cp`` with 100 sweeps
at most. Plain ALS: the same sweeps in float64 without momentum. Times are of one thread and in
turns (ours, tensorly, ours, tensorly ...), so only their ratio means anything. Peak memory is what
a fit of the BERT-base-shaped layer adds to a process that has fitted a small one before (Linux).
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

from collabify.decompose import cp, fit_cp, fit_head_svd
from collabify.decompose.factors import CPFactors
from collabify.decompose.oracle import fit_cp_tensorly
from collabify.forms import HeadForms
from collabify.models import find_attention
from collabify.storage import load, quiet, versions

ITERATIONS = 100
HERE = Path(__file__).parent


def bert_base_layer(seed: int = 0) -> HeadForms:
    """Heads whose spectra fall and whose directions are half shared."""
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


def plain_als(forms: HeadForms, rank: int, sweeps: int) -> tuple[list[float], list[float]]:
    """Errors and seconds after each sweep in float64 without momentum."""
    start = fit_head_svd(forms, rank).factors
    assert isinstance(start, CPFactors)
    search = cp._Search(forms, start, None)
    errors, seconds = [], []
    begin = time.perf_counter()
    for _ in range(sweeps):
        search.state, error = search._sweep(*search.state)
        errors.append(error)
        seconds.append(time.perf_counter() - begin)
    return errors, seconds


def one_layer(forms: HeadForms, rank: int) -> dict[str, Any]:
    """Errors and seconds of all solvers on one layer."""
    floor = fit_head_svd(forms, rank).relative_error
    start = time.perf_counter()
    ours = fit_cp(forms, rank, iterations=ITERATIONS)
    our_seconds = time.perf_counter() - start
    start = time.perf_counter()
    theirs = fit_cp_tensorly(forms, rank, iterations=ITERATIONS, tolerance=1e-8)
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


def against_plain(forms: HeadForms, rank: int) -> dict[str, Any]:
    """The error that plain ALS reaches in 400 sweeps, and when the default is there."""
    errors, seconds = plain_als(forms, rank, 400)
    start = time.perf_counter()
    ours = fit_cp(forms, rank, tolerance=0)
    our_seconds = time.perf_counter() - start
    reached = next((n for n, e in enumerate(ours.errors) if e <= errors[-1]), None)
    at = None if reached is None else our_seconds * reached / ours.sweeps
    return {
        "rank": rank,
        "plain_errors": {str(n): errors[n - 1] for n in (25, 50, 100, 200, 400)},
        "plain_seconds_50": seconds[49],
        "default_error": ours.relative_error,
        "default_seconds": our_seconds,
        "default_sweeps_to_plain_400": reached,
        "seconds_to_plain_400_over_plain_50": None if at is None else at / seconds[49],
    }


def real_model(name: str, model: str, ranks: list[int]) -> list[dict[str, Any]]:
    """One row per layer and rank."""
    loaded, _ = load(model)
    rows = []
    for site in find_attention(loaded):
        for rank in ranks:
            row = {"model": name, "layer": site.index, "rank": rank}
            row |= one_layer(site.read(), rank)
            rows.append(row)
            print(json.dumps(row), file=sys.stderr, flush=True)
    return rows


def seconds_per_sweep(forms: HeadForms, rank: int, repeats: int = 5) -> dict[str, float]:
    """Median seconds of a sweep of ours (float32, float64) and of parafac's, taken in turns."""
    start = fit_head_svd(forms, rank).factors
    assert isinstance(start, CPFactors)
    searches = {t: cp._Search(forms.to(t), start, None) for t in (torch.float32, torch.float64)}
    dense = forms.dense()
    taken: dict[str, list[float]] = {"cp_float32": [], "cp_float64": [], "parafac": []}
    for _ in range(repeats):
        for name, search in zip(taken, searches.values(), strict=False):
            begin = time.perf_counter()
            search._sweep(*search.state)
            taken[name].append(time.perf_counter() - begin)
        begin = time.perf_counter()
        with tensorly.backend_context("pytorch"):
            parafac(dense, rank, n_iter_max=4, init="random", random_state=0, tol=None)
        four = time.perf_counter() - begin
        begin = time.perf_counter()
        with tensorly.backend_context("pytorch"):
            parafac(dense, rank, n_iter_max=1, init="random", random_state=0, tol=None)
        taken["parafac"].append((four - (time.perf_counter() - begin)) / 3)
    return {name: sorted(values)[repeats // 2] for name, values in taken.items()}


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


def base_shape(rank: int = 256) -> dict[str, Any]:
    """Everything about the BERT-base-shaped layer."""
    forms = bert_base_layer()
    per_sweep = seconds_per_sweep(forms, rank)
    return {
        "rank": rank,
        "seconds_per_sweep": per_sweep,
        "times_faster_per_sweep": {
            name: per_sweep["parafac"] / per_sweep[name] for name in ("cp_float32", "cp_float64")
        },
        "layer": one_layer(forms, rank),
        "against_plain": against_plain(forms, rank),
        "megabytes": {
            "layer_factored_float64": (forms.w_q.numel() + forms.w_k.numel()) * 8 / 2**20,
            "layer_dense_float64": 12 * 768 * 768 * 8 / 2**20,
            "peak_cp": peak_megabytes("cp", rank),
            "peak_parafac": peak_megabytes("parafac", rank),
        },
    }


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
    result: dict[str, Any] = {"versions": versions(), "bert_base_shape": base_shape()}
    result["layers"] = rows = []
    for pair in arguments.models:
        name, _, model = pair.partition("=")
        rows += real_model(name, model, arguments.dk)
        (HERE / "sweeps.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
