"""Heat maps of mixing matrices: layers down, kinds across, what is alike side by side."""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from scipy.cluster.hierarchy import leaves_list, linkage

from collabify.mixing import NAMES, Kind, Mixing, MixingReport

FEW = 200  # rows up to which neighbours are put in the best order, which takes their cube

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def mixing_figure(report: MixingReport) -> "Figure":
    """One panel for every mixing matrix: layers down, kinds across, zero in white."""
    from matplotlib.figure import Figure

    kinds: list[Kind] = [kind for kind in NAMES if report.of(kind)]
    indices = sorted({mixing.index for mixing in report.mixings})
    figure = Figure(
        figsize=(1 + 4 * max(1, len(kinds)), 0.6 + 1.7 * max(1, len(indices))),
        layout="constrained",
    )
    grid = figure.subplots(max(1, len(indices)), max(1, len(kinds)), squeeze=False)
    for axes in grid.flat:
        axes.set_axis_off()
    for mixing in report.mixings:
        axes = grid[indices.index(mixing.index)][kinds.index(mixing.kind)]
        _heat_map(axes, mixing)
    if report.source:
        figure.suptitle(Path(report.source).name)
    return figure


def _heat_map(axes: "Axes", mixing: Mixing) -> None:
    weights = np.asarray(mixing.weights)
    ordered = weights[by_likeness(weights)][:, by_likeness(weights.T)]
    largest = float(np.abs(ordered).max()) or 1.0
    axes.set_axis_on()
    axes.imshow(ordered, aspect="auto", cmap="RdBu_r", vmin=-largest, vmax=largest)
    reads, of = NAMES[mixing.kind][0], mixing.of
    axes.set_xticks([])
    axes.set_yticks([])
    axes.set_xlabel(of, fontsize=8)
    axes.set_ylabel(f"layer {mixing.index}\n{reads}s", fontsize=8)
    axes.set_title(f"{mixing.kind}: {mixing.mean_effective:.1f} of {weights.shape[1]}", fontsize=9)


def by_likeness(rows: np.ndarray) -> list[int]:
    """Rows in an order in which neighbours point the same way, up to sign."""
    if len(rows) < 3:
        return list(range(len(rows)))
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    directions = rows / np.where(lengths > 0, lengths, 1)
    apart = 1 - (directions @ directions.T) ** 2
    condensed = np.clip(apart[np.triu_indices(len(rows), 1)], 0, None)
    tree = linkage(condensed, "average", optimal_ordering=len(rows) <= FEW)
    return [int(n) for n in leaves_list(tree)]
