"""Scores as tables of strings; nothing is printed here.

The table of GLUE has the columns and the order of Cordonnier et al. 2020, with pairs as F1/accuracy
and Pearson/Spearman, everything times 100. Means say what they are means of.
"""

from collections.abc import Callable, Sequence

from collabify.results import ParameterCount
from collabify.scores import (
    OWN_PROCESSOR,
    Average,
    DriftScores,
    GlueScores,
    ImageScores,
    Interval,
    Score,
    TaskScores,
)
from collabify.speeds import BenchReport, Latency

Table = tuple[list[str], list[list[str]]]

# Columns in the paper's order, and the metrics of a cell.
_COLUMNS = {
    "cola": ("CoLA", {"matthews_correlation": "Matthews"}),
    "sst2": ("SST-2", {"accuracy": "acc"}),
    "mrpc": ("MRPC", {"f1": "F1", "accuracy": "acc"}),
    "stsb": ("STS-B", {"pearson": "Pearson", "spearmanr": "Spearman"}),
    "qqp": ("QQP", {"f1": "F1", "accuracy": "acc"}),
    "mnli": ("MNLI", {"accuracy": "acc"}),
    "qnli": ("QNLI", {"accuracy": "acc"}),
    "rte": ("RTE", {"accuracy": "acc"}),
    "wnli": ("WNLI", {"accuracy": "acc"}),
}
_MNLI = {"validation_matched": "m", "validation_mismatched": "mm"}


def glue_table(report: GlueScores) -> Table:
    """A column for each task and each mean; rows for model, baseline, difference, intervals."""
    cells: list[tuple[str, str, Sequence[Score]]] = []
    for task, (name, metrics) in _COLUMNS.items():
        found = [scores for scores in report.tasks if scores.task == task]
        if found:
            listed = [_named(scores, metric) for scores in found for metric in metrics]
            examples = "/".join(str(scores.examples) for scores in found)
            cells.append((f"{name}\n{_kind(found, metrics)}", examples, listed))
    for average in report.averages:
        cells.append((_mean_head(average), "", [average.score]))
    return _columns(cells, examples=True)


def width(table: Table) -> int:
    """Characters of a table's longest line, with three between columns."""
    heads, rows = table
    columns = zip(heads, *rows, strict=True)
    return sum(3 + max(len(part) for cell in c for part in cell.split("\n")) for c in columns)


def transposed(table: Table) -> Table:
    """The same with a row for each column."""
    heads, rows = table
    _, *names = heads
    turned = zip(names, *(row[1:] for row in rows), strict=True)
    return ["", *(row[0] for row in rows)], [[n.replace("\n", " "), *c] for n, *c in turned]


def _named(scores: TaskScores, metric: str) -> Score:
    return next(score for score in scores.scores if score.metric == metric)


def _kind(found: Sequence[TaskScores], metrics: dict[str, str]) -> str:
    if len(found) > 1:
        return "/".join(_MNLI.get(scores.split, scores.split) for scores in found)
    return "/".join(metrics.values())


def _mean_head(average: Average) -> str:
    what = "tasks" if average.score.metric == "mean of tasks" else "paper's"
    numbers = "" if what == "tasks" else " numbers"
    return f"mean of {len(average.over)}\n{what}{numbers}"


def image_table(report: ImageScores) -> Table:
    """A column for top-1 and, where it says anything, top-5."""
    return _columns([(score.metric, "", [score]) for score in report.scores], examples=False)


def _columns(cells: Sequence[tuple[str, str, Sequence[Score]]], *, examples: bool) -> Table:
    rows = [["examples", *(count for _, count, _ in cells)]] if examples else []
    listed = [scores for _, _, scores in cells]
    rows += [
        ["model", *("/".join(_value(s.value) for s in scores) for scores in listed)],
        ["95 % interval", *(_stacked(scores, lambda s: s.interval, "") for scores in listed)],
    ]
    if any(score.baseline is not None for scores in listed for score in scores):
        rows += [
            ["baseline", *("/".join(_value(s.baseline) for s in scores) for scores in listed)],
            ["difference", *("/".join(_value(s.difference, "+") for s in t) for t in listed)],
            ["95 % interval", *(_stacked(t, lambda s: s.difference_interval, "+") for t in listed)],
        ]
    return ["", *(head for head, _, _ in cells)], rows


def _value(value: float | None, sign: str = "") -> str:
    """A number times 100; a dash where it is undefined."""
    if value is None or value != value:
        return "-"
    return f"{100 * value:{sign}.1f}"


def _stacked(scores: Sequence[Score], of: Callable[[Score], Interval | None], sign: str) -> str:
    """One interval a line."""
    found = [of(score) for score in scores]
    return "\n".join(
        "-" if pair is None else f"{_value(pair[0], sign)} to {_value(pair[1], sign)}"
        for pair in found
    )


def glue_notes(report: GlueScores) -> list[str]:
    """What a reader of the table should know."""
    notes = ["Scores x 100, with 95 % bootstrap intervals over the examples."]
    notes += [_mean_note(average, report) for average in report.averages]
    for who in ("model", "baseline"):
        unnamed = [s.task for s in report.tasks if who in s.nameless and s.task != "stsb"]
        if unnamed:
            notes.append(
                f"No label names in the config of the {who} for "
                f"{', '.join(dict.fromkeys(unnamed))}: the order of the data was taken."
            )
    implementations = dict.fromkeys(scores.implementation for scores in report.tasks)
    notes.append(f"Metrics: {', '.join(implementations)}.")
    return notes


def _mean_note(average: Average, report: GlueScores) -> str:
    if average.score.metric == "mean of tasks":
        return f"Mean of tasks: {len(average.over)} of {average.out_of}, pairs averaged first."
    mnli = next((s.split for s in report.tasks if s.task == "mnli"), "validation_matched")
    return (
        f"The paper's mean: {len(average.over)} of its {average.out_of} numbers "
        f"(MNLI once, {mnli.removeprefix('validation_')}; no WNLI)."
    )


def image_notes(report: ImageScores) -> list[str]:
    """What a reader of the table should know."""
    notes = [
        f"{report.examples} images of {report.classes} classes ({report.data}, {report.split}), "
        "shares x 100, 95 % bootstrap intervals over the images."
    ]
    if len(report.scores) == 1:
        notes.append(f"No top-5: with {report.classes} classes it says nothing.")
    for who, how in report.options["preprocessing"].items():
        if how != OWN_PROCESSOR:
            notes.append(f"Images for the {who}: {how}.")
    if report.nameless:
        of = {"model": "the model's config", "baseline": "the baseline's config"}
        lacking = ", ".join(of.get(who, "the data") for who in report.nameless)
        notes.append(f"No class names in {lacking}: positions were taken.")
    return notes


def drift_table(report: DriftScores) -> Table:
    """One row for each measure."""
    rows = [
        ["hidden states, cosine", f"{report.hidden_cosine:.4f}"],
        ["hidden states, error", f"{report.hidden_error:.4f}"],
        ["attention moved by", f"{100 * report.attention:.1f} %"],
    ]
    if report.agreement is not None and report.divergence is not None:
        rows += [
            ["same predictions", f"{100 * report.agreement:.1f} %"],
            ["predictions, KL", f"{report.divergence:.3g} nats"],
        ]
    return ["against the baseline", ""], rows


def drift_notes(report: DriftScores) -> list[str]:
    """What a reader of the table should know."""
    notes = [f"{report.samples} samples: {report.data} and those held out."]
    if report.agreement is None:
        notes.append("No predictions to compare: the models have no head that classifies.")
    else:
        notes.append(f"{report.predictions} predictions.")
    return notes


def size_table(report: BenchReport) -> Table:
    """Parameters and bytes; beside the baseline's where there is one."""
    own, other = report.size, report.baseline_size
    named = {
        "query-key parameters": "query_key",
        "attention parameters": "attention",
        "parameters of the whole model": "model",
        "bytes in memory": "bytes",
    }
    if other is None:
        return ["", "model"], [[name, f"{getattr(own, key):,}"] for name, key in named.items()]
    rows = []
    for name, key in named.items():
        count = ParameterCount(getattr(other, key), getattr(own, key))
        rows.append([name, f"{count.before:,}", f"{count.after:,}", f"{count.kept:.1%}"])
    return ["", "baseline", "model", "kept"], rows


def latency_table(report: BenchReport) -> Table:
    """A row for each shape: milliseconds, and how they compare in the same rounds."""
    heads = ["batch x length" if report.latencies[0].length else "images", "model, ms"]
    compared = report.baseline_size is not None
    counted = report.latencies[0].peak_bytes is not None
    heads += ["baseline, ms", "model / baseline", "quartiles"] if compared else ["quartiles, ms"]
    heads += ["peak, MB"] if counted else []
    heads += ["baseline, MB"] if counted and compared else []
    return heads, [_latency_row(each) for each in report.latencies]


def _latency_row(each: Latency) -> list[str]:
    row = [f"{each.batch_size} x {each.length}" if each.length else str(each.batch_size)]
    row.append(f"{1e3 * each.seconds:.4g}")
    if each.baseline_seconds is None or each.over_quartiles is None:
        row.append(" to ".join(f"{1e3 * edge:.4g}" for edge in each.quartiles))
    else:
        row += [f"{1e3 * each.baseline_seconds:.4g}", f"{each.over_baseline:.3f}"]
        row.append(" to ".join(f"{edge:.3f}" for edge in each.over_quartiles))
    peaks = (each.peak_bytes, each.baseline_peak_bytes)
    return row + [f"{peak / 1e6:,.1f}" for peak in peaks if peak is not None]


def bench_notes(report: BenchReport) -> list[str]:
    """What a reader of the tables should know."""
    machine, repeats = report.machine, report.options["repeats"]
    on = machine.processor if machine.device == "cpu" else f"{machine.device}, {machine.processor}"
    threads = f"{machine.threads} thread{'s' if machine.threads > 1 else ''}"
    interleaved = "" if report.baseline_size is None else "interleaved "
    notes = [
        f"Whole models, {report.dtype}, {report.attention} attention, {report.inputs}; medians of "
        f"{repeats} {interleaved}runs.",
        f"On {on}, {threads}, torch {report.versions['torch']}.",
    ]
    if report.baseline_size is None:
        notes.append("Nothing to compare with: --baseline MODEL")
    return notes
