"""What was measured of the very model, as a card and one line a thing tell it.

0.8529 [0.8186, 0.8873]: a score and its 95 % interval
-0.0049 [-0.0147, +0.0049]: its difference to the baseline's on the same examples, paired
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Entry = Mapping[str, Any]
Number = int | float  # JSON need not tell 1.0 from 1


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """In Markdown; nothing without rows."""
    if not rows:
        return ""
    lines = [heads, ["---"] + ["---:" if len(heads) > 2 else "---"] * (len(heads) - 1), *rows]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", r"\|") for cell in row) + " |" for row in lines
    )


def measured_scores(record: Mapping[str, Any]) -> Iterator[str]:
    """Scores with their intervals, and what they are compared with."""
    entries = [each for each in _entries(record, "evaluations") if each.get("scores")]
    compared = any(score["difference"] is not None for each in entries for score in each["scores"])
    rows = []
    for each in entries:
        for score in each["scores"]:
            row = [_where(each), score["metric"], _examples(each)]
            row.append(_with_interval(score["value"], score["interval"]))
            if compared:
                row += _compared(each, score)
            rows.append(row)
    if rows:
        yield (
            "Scores of this model, measured with `collabify eval`"
            + (", and differences on the same examples" if compared else "")
            + "; in brackets 95 % bootstrap intervals over the examples:"
        )
        heads = ["data", "metric", "examples", "this model"]
        yield table(heads + (["compared with", "difference"] if compared else []), rows)


def _compared(entry: Entry, score: Entry) -> tuple[str, str]:
    if score["difference"] is None:
        return "", ""
    named = f" (`{entry['baseline']}`)" if entry.get("baseline") else ""
    return f"{_number(score['baseline'])}{named}", _difference(score)


def measured_drift(record: Mapping[str, Any]) -> Iterator[str]:
    """How far it is from another model, without labels."""
    rows = [
        (
            _named(each),
            each["data"],
            f"{each['samples']:,}",
            _number(each["hidden_cosine"]),
            _number(each["hidden_error"]),
            _number(each["attention"]),
            _number(each["agreement"]),
            _number(each["divergence"]),
        )
        for each in _entries(record, "evaluations")
        if each.get("kind") == "drift"
    ]
    if rows:
        yield "How far this model is from others, measured with `collabify eval drift`:"
        yield table(
            (
                *("from", "data", "samples, held-out ones too"),
                *("final hidden states, cosine", "relative error"),
                *("attention, total variation", "same predictions", "predictions, KL in nats"),
            ),
            rows,
        )


def latency(record: Mapping[str, Any]) -> Iterator[str]:
    """Seconds of whole passes, and how they compare in interleaved runs; one table a machine."""
    for each in _entries(record, "latency"):
        against, whose = _beside(each), _whose(each)
        runs = f"{each['options']['repeats']} {'interleaved ' if against else ''}runs"
        beside = f" beside {_named(each)}" if against else ""
        quotient = f"; this model / {whose}: the median of each round's quotient" * against
        yield (
            f"Latency of the whole model{beside}, measured with `collabify bench` on "
            f"{_machine(each)}; {each['inputs']}; medians of {runs}, in brackets quartiles"
            f"{quotient}:"
        )
        texts = each["latencies"][0]["length"] is not None
        heads = ["batch x length" if texts else "images", "this model, ms"]
        heads += [f"{whose}, ms", f"this model / {whose}"] if against else []
        counted = each["latencies"][0]["peak_bytes"] is not None
        heads += ["peak memory, MB"] if counted else []
        heads += [f"{whose}, MB"] if counted and against else []
        yield table(heads, [_row(each, one) for one in each["latencies"]])
        yield _bytes(each)


def _row(entry: Entry, one: Entry) -> list[str]:
    row = [_shape(one), _milliseconds(one["seconds"], one["quartiles"])]
    if _beside(entry):
        row.append(_milliseconds(one["baseline_seconds"], one["baseline_quartiles"]))
        row.append(_over(one))
    peaks = (one["peak_bytes"], one["baseline_peak_bytes"])
    return row + [f"{peak / 1e6:,.1f}" for peak in peaks if peak is not None]


def _bytes(entry: Entry) -> str:
    said = f"It holds {entry['size']['bytes'] / 1e6:,.1f} MB in memory"
    if _beside(entry):
        said += f", the {_whose(entry)} {entry['baseline_size']['bytes'] / 1e6:,.1f} MB"
    return f"{said}."


def evaluation_line(entry: Entry) -> str:
    """One evaluation in one line; in brackets, as it says, 95 % intervals."""
    if entry.get("kind") == "drift":
        said = f"hidden cosine {_number(entry['hidden_cosine'])}"
        if entry["agreement"] is not None:
            said += f", same predictions {_number(entry['agreement'])}"
        return f"{said}, from {entry['baseline']} ({entry['data']})"
    parts = []
    for score in entry.get("scores") or ():
        part = f"{score['metric']} {_with_interval(score['value'], score['interval'])}"
        if score["difference"] is not None:
            part += f", difference {_difference(score)}"
        parts.append(part)
    against = f"; against {entry['baseline']}" if entry.get("baseline") else ""
    return f"{_where(entry)}: {'; '.join(parts)}{against}; in brackets 95 % intervals"


def latency_line(entry: Entry) -> str:
    """The latencies of one machine in one line; in brackets, as it says, quartiles."""
    beside = _beside(entry)
    parts = [
        f"{_shape(one)}: {1e3 * one['seconds']:.4g} ms" + (f", {_over(one)}" if beside else "")
        for one in entry["latencies"]
    ]
    of = f" of the {_whose(entry)}'s" if beside else ""
    if beside and entry.get("baseline"):
        of += f" ({entry['baseline']})"
    of += ", in brackets quartiles" * beside
    return f"{'; '.join(parts)}{of}; {_machine(entry)}"


def _entries(record: Mapping[str, Any], name: str) -> list[Entry]:
    return list(record.get(name) or ())


def _named(entry: Entry) -> str:
    named = entry.get("baseline")
    return "a model without a name" if named is None else f"`{named}`"


def _whose(entry: Entry) -> str:
    """What the model it was timed beside is to it: it may be any other."""
    return "original" if entry.get("original") else "baseline"


def _beside(entry: Entry) -> bool:
    return entry.get("baseline_size") is not None


def _where(entry: Entry) -> str:
    task = f" {entry['task']}" if entry.get("task") else ""
    return f"{entry['data']}{task}, {entry['split']}"


def _examples(entry: Entry) -> str:
    drawn = (entry.get("options") or {}).get("limit") is not None
    return f"{entry['examples']:,}{' drawn' if drawn else ''}"


def _shape(one: Entry) -> str:
    length = one["length"]
    return str(one["batch_size"]) if length is None else f"{one['batch_size']} x {length}"


def _machine(entry: Entry) -> str:
    machine, versions = entry["machine"], entry.get("versions") or {}
    named = machine["processor"]
    if machine["device"] != "cpu":
        named = f"{machine['device']}, {named}"
    threads = f"{machine['threads']} thread{'s' if machine['threads'] > 1 else ''}"
    torch = f", torch {versions['torch']}" if "torch" in versions else ""
    return f"{named}, {threads}, {entry['dtype']}, {entry['attention']} attention{torch}"


def _milliseconds(value: Number, edges: Sequence[Number]) -> str:
    low, high = edges
    return f"{1e3 * value:.4g} [{1e3 * low:.4g}, {1e3 * high:.4g}]"


def _over(one: Entry) -> str:
    low, high = one["over_quartiles"]
    return f"{one['over_baseline']:.3f} [{low:.3f}, {high:.3f}]"


def _difference(score: Entry) -> str:
    return _with_interval(score["difference"], score["difference_interval"], "+")


def _with_interval(value: Number | None, edges: Sequence[Number] | None, sign: str = "") -> str:
    if edges is None:
        return _number(value, sign)
    low, high = (_number(edge, sign) for edge in edges)
    return f"{_number(value, sign)} [{low}, {high}]"


def _number(value: Number | None, sign: str = "") -> str:
    return "-" if value is None else f"{value:{sign}.4f}"
