"""Reports as tables of strings and as figures; nothing is printed here.

The figure has the paper's two panels (Cordonnier et al. 2020, Figure 1): captured variance of
``W_Q^h W_K^hT`` for heads separately, and of ``W_Q W_K^T`` for the heads of a layer concatenated.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from collabify.errors import OptionError, OutputError
from collabify.results import ConversionReport, HealingReport, LayerReport
from collabify.spectra import AnalysisReport, LayerSpectra, Spectrum, directions

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FIGURE_SUFFIXES = (".png", ".svg", ".pdf")
_BARS = "▁▂▃▄▅▆▇█"


def sparkline(curve: Sequence[float], width: int = 8) -> str:
    """A curve of shares in [0, 1] as ``width`` characters, each the mean of its piece."""
    edges = [round(n * len(curve) / width) for n in range(width + 1)]
    pieces = [curve[a : max(b, a + 1)] for a, b in pairwise(edges)]
    means = [sum(piece) / len(piece) for piece in pieces]
    return "".join(_BARS[min(int(mean * len(_BARS)), len(_BARS) - 1)] for mean in means)


def mean_curve(curves: Sequence[Sequence[float]]) -> list[float]:
    """The mean of curves of one length."""
    return [sum(values) / len(values) for values in zip(*curves, strict=True)]


def percent(share: float) -> str:
    """A share as a percentage with no more digits than it needs."""
    return f"{100 * share:.4g} %"


def analysis_table(
    report: AnalysisReport, layers: Sequence[LayerSpectra]
) -> tuple[list[str], list[list[str]]]:
    """Column heads and one row per layer: directions at each level, and curves."""
    first = layers[0]
    of_head, of_sum = len(first.heads[0].energy), len(first.concatenated.energy)
    of_side = len(first.query_side.energy)
    heads = [
        "layer",
        f"a head alone\n(of {of_head})",
        f"W_Q W_Kᵀ\n(of {of_sum})",
        f"together: query,\nkey side (of {of_side})",
        "alone",
        "together",
    ]
    return heads, [_analysis_row(layer, report.levels) for layer in layers]


def _analysis_row(layer: LayerSpectra, levels: Sequence[float]) -> list[str]:
    alone = " ".join(f"{layer.heads_alone(level):.0f}" for level in levels)
    return [
        str(layer.index),
        alone,
        _needed(layer.concatenated, levels),
        f"{_needed(layer.query_side, levels)}, {_needed(layer.key_side, levels)}",
        sparkline(mean_curve([head.energy for head in layer.heads])),
        sparkline(mean_curve([layer.query_side.energy, layer.key_side.energy])),
    ]


def _needed(spectrum: Spectrum, levels: Sequence[float]) -> str:
    return " ".join(str(directions(spectrum.energy, level)) for level in levels)


def conversion_table(report: ConversionReport) -> tuple[list[str], list[list[str]]]:
    """Column heads and one row per converted layer."""
    heads = ["layer", "name", "rank", "", "per head", "error", "of weights", "sweeps", "seconds"]
    has_values = any(layer.values is not None for layer in report.layers)
    if has_values:
        heads[5:5] = ["values", "value error"]
    widest = max(layer.rank for layer in report.layers)
    rows = []
    for layer in report.layers:
        row = [str(layer.index), layer.name, str(layer.rank)]
        row += ["█" * max(1, round(8 * layer.rank / widest)), _read_by_head(layer, report.method)]
        rows.append([*row, *(_values(layer) if has_values else ()), *_outcome(layer)])
    return heads, rows


def _read_by_head(layer: LayerReport, method: str) -> str:
    """What a head reads."""
    if layer.head_rank is not None:
        return f"{layer.head_rank} cores"
    if layer.base_heads is not None:
        return f"{layer.base_heads} base heads"
    if method == "talking-heads":
        return "its own"
    return str(layer.channels or "all")


def _values(layer: LayerReport) -> list[str]:
    """Channels of the values, and what they lose."""
    if layer.values is None:
        return ["-", "-"]
    heads = "" if layer.value_heads is None else f" in {layer.value_heads} heads"
    error = "-" if layer.value_error is None else f"{layer.value_error:.4f}"
    return [f"{layer.values}{heads}", error]


def _outcome(layer: LayerReport) -> list[str]:
    """What came of one layer; dashes in a dry run, ``+`` where sweeps ended before converging."""
    if layer.relative_error is None:
        return ["-"] * 4
    error = layer.relative_error if layer.calibrated_error is None else layer.calibrated_error
    sweeps = f"{layer.sweeps}" if layer.converged else f"{layer.sweeps}+"
    return [f"{error:.4f}", f"{layer.relative_error:.4f}", sweeps, f"{layer.seconds:.1f}"]


def parameter_table(report: ConversionReport) -> tuple[list[str], list[list[str]]]:
    """Column heads and one row each for query-key, attention and the whole model."""
    heads = ["parameters", "before", "after", "kept"]
    named = (
        ("query-key", report.query_key),
        ("attention", report.attention),
        ("model", report.model),
    )
    return heads, [[n, f"{c.before:,}", f"{c.after:,}", f"{c.kept:.1%}"] for n, c in named]


def went_back(report: HealingReport) -> str:
    """Say that the learning rate was lowered, and why."""
    steps = ", ".join(map(str, report.went_back))
    after = "steps" if len(report.went_back) > 1 else "step"
    rate = report.options["learning_rate"]
    return (
        f"After {after} {steps} healing went back to the best so far, each time with a quarter of "
        f"the learning rate ({rate:g} at first): the loss was above the start's."
    )


def check_figure_path(path: Path) -> None:
    """Refuse a figure's file that cannot be written, before anything is computed.

    Raises
    ------
    OptionError
        Where its ending names no format.
    OutputError
        Where its folder does not exist.
    """
    if path.suffix.lower() not in FIGURE_SUFFIXES:
        raise OptionError(
            f"plot={str(path)!r} must end in one of {', '.join(FIGURE_SUFFIXES)}. Rename --plot."
        )
    if not path.absolute().parent.is_dir():
        raise OutputError(
            f"{str(path.parent)!r} is not a folder, so {path.name!r} cannot be written. "
            "Make it first."
        )


def save_figure(draw: "Callable[[], Figure]", path: Path) -> None:
    """Write the figure that ``draw`` makes to a file; errors as for :func:`check_figure_path`."""
    check_figure_path(path)
    try:
        draw().savefig(path, dpi=200, bbox_inches="tight")
    except OSError as error:
        raise OutputError(
            f"{str(path)!r} could not be written ({error}). Choose another --plot."
        ) from error


def spectra_figure(report: AnalysisReport) -> "Figure":
    """The paper's Figure 1 for this model: thin lines for heads and layers, bold means."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    separate = [head.variance or head.energy for layer in report.layers for head in layer.heads]
    together = [layer.concatenated.variance or layer.concatenated.energy for layer in report.layers]
    _panel(left, separate, "heads separately", r"directions of $W_Q^{(h)} W_K^{(h)\top}$")
    _panel(right, together, "heads concatenated", r"directions of $W_Q W_K^{\top}$")
    left.set_ylabel("captured variance")
    if report.source:
        figure.suptitle(Path(report.source).name)
    return figure


def _panel(axes: "Axes", curves: Sequence[Sequence[float]], title: str, xlabel: str) -> None:
    longest = max(len(curve) for curve in curves)
    for curve in curves:
        axes.plot(range(len(curve) + 1), (0.0, *curve), color="0.65", linewidth=0.5)
    same = [curve for curve in curves if len(curve) == longest]
    axes.plot(
        range(longest + 1), (0.0, *mean_curve(same)), color="black", linewidth=2.0, label="mean"
    )
    axes.set(title=title, xlabel=xlabel, xlim=(0, longest), ylim=(0, 1.01))
    axes.grid(color="0.9", linewidth=0.5)
    axes.legend(loc="lower right", frameon=False)
