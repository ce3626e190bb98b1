"""What a model is, without its weights: config.json, collabify.json and safetensors' headers.

describe(name) -> ModelInfo -> info_table
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from collabify.errors import ModelNotFoundError
from collabify.hub import CONFIG_FILE, RECORD_FILE, download
from collabify.modelcard import architecture, evaluation_line, latency_line, scores, sizes
from collabify.results import finite
from collabify.storage import (
    Headers,
    Source,
    commit_of,
    conversion_of,
    headers,
    locate,
    parse_config,
    read_record,
)


@dataclass(frozen=True)
class ModelInfo:
    """A model, converted or not.

    Parameters
    ----------
    name, revision
        As asked for, and the commit where it is on the Hub.
    architecture, model_type
        Of transformers.
    layers
        Form and sizes of every converted layer; none where nothing was converted.
    numbers, bytes
        In the files of the weights: how many of each dtype, and all together.
    files
        Of the weights.
    record
        ``collabify.json``, where there is one.
    """

    name: str
    revision: str | None
    architecture: str | None
    model_type: str | None
    layers: tuple[dict[str, Any], ...]
    numbers: dict[str, int]
    bytes: int
    files: tuple[str, ...]
    record: dict[str, Any] = field(default_factory=dict)

    @property
    def converted(self) -> bool:
        """Whether any layer was."""
        return bool(self.layers)

    def to_dict(self) -> dict[str, Any]:
        """All of it, with ``converted``."""
        return {"converted": self.converted} | asdict(self)

    def to_json(self) -> str:
        """:meth:`to_dict`, indented."""
        return json.dumps(finite(self.to_dict()), indent=2, allow_nan=False)


def describe(name: str, revision: str | None = None) -> ModelInfo:
    """Read what is said of a model; no weights are read, and from the Hub only small files.

    Parameters
    ----------
    name
        A folder, a Hub id, or ``demo``.
    revision
        Branch, tag or commit on the Hub, by default ``main``.

    Raises
    ------
    ModelNotFoundError
        Where there is no such folder, or no configuration or weights in it.
    HubError
        Where the Hub cannot be reached or refuses.
    CheckpointError
        Where its files are damaged, or were written by a later collabify.
    OptionError
        Where a revision is asked for of a folder.
    """
    source = locate(name, revision)
    path = _config(source)
    config = parse_config(path)
    if not source.is_folder:
        source = Source(name, name, commit_of(path))
    conversion = conversion_of(config)
    found: Headers = headers(source)
    return ModelInfo(
        name,
        source.revision,
        architecture(config),
        config.get("model_type"),
        () if conversion is None else tuple(asdict(layer) for layer in conversion.layers),
        found.numbers,
        found.bytes,
        found.files,
        read_record(source),
    )


def _config(source: Source) -> Path:
    if source.is_folder:
        return Path(source.location) / CONFIG_FILE
    found = download(source.location, CONFIG_FILE, source.revision)
    if found is None:
        raise ModelNotFoundError(
            f"{source.name!r} has no {CONFIG_FILE} on the Hub. Give a folder, a Hub id, or 'demo'."
        )
    return found


def info_table(info: ModelInfo) -> list[tuple[str, str]]:
    """What it is in words, one row a fact."""
    record = info.record
    rows = [("model", info.name if info.revision is None else f"{info.name} at {info.revision}")]
    rows.append(("architecture", f"{info.architecture or 'not said'} ({info.model_type})"))
    numbers = ", ".join(f"{count:,} {dtype}" for dtype, count in sorted(info.numbers.items()))
    files = info.files[0] if len(info.files) == 1 else f"{len(info.files)} files"
    rows.append(("weights", f"{numbers}; {info.bytes / 1e6:,.1f} MB in {files}"))
    if info.converted:
        rows += _conversion(info)
    else:
        rows.append(("converted", "no: its attention is as trained"))
    rows += _measured(record)
    rows += _tuned(record.get("finetuning"))
    rows += [("measured", evaluation_line(each)) for each in record.get("evaluations") or ()]
    rows += [("latency", latency_line(each)) for each in record.get("latency") or ()]
    if record.get("versions"):
        said = ", ".join(f"{package} {v}" for package, v in record["versions"].items())
        rows.append(("made with", said))
    return rows


def _conversion(info: ModelInfo) -> list[tuple[str, str]]:
    record, forms = info.record, list(dict.fromkeys(layer["form"] for layer in info.layers))
    rows = [("converted", f"{len(info.layers)} attention layers, {', '.join(forms)}")]
    shown = [{k: v for k, v in layer.items() if k != "form"} for layer in info.layers]
    rows += [(f"{size} by layer", values) for size, values in sizes(shown)]
    if not record:
        return [*rows, ("recorded", f"nothing: there is no {RECORD_FILE}")]
    made = f"{record.get('method')} ({record.get('solver')})"
    rows.append(("method", made))
    if record.get("source") is not None:
        at = "" if record.get("revision") is None else f" at {record['revision']}"
        rows.append(("made from", f"{record['source']}{at}"))
    for part, count in (record.get("parameters") or {}).items():
        kept = f"{count['before']:,} -> {count['after']:,} ({count['kept']:.1%} kept)"
        rows.append((f"{part.replace('_', '-')} parameters", kept))
    rows.append(("calibrated on", record.get("calibration") or "nothing: the weights alone"))
    return rows


def _measured(record: Mapping[str, Any]) -> list[tuple[str, str]]:
    rows = []
    if record.get("error") is not None:
        rows.append(("error of logits", f"{record['error']:.4f}"))
    if record.get("drift") is not None:
        rows.append(("held-out drift", _drift(record["drift"])))
    healing = record.get("healing")
    if healing is not None:
        rows.append(("healed", f"{healing['steps']} steps on {healing['calibration']}"))
        rows.append(("drift before, after", _drift(healing["drift_before"])))
        rows.append(("", _drift(healing["drift_after"])))
    return rows


def _drift(drift: Mapping[str, Any]) -> str:
    said = {name: "not finite" if v is None else f"{v:.4f}" for name, v in drift.items()}
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in said.items())


def _tuned(tuned: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    if tuned is None:
        return []
    when: dict[Any, str] = {True: "after the conversion", False: "before any conversion"}
    said = f"{tuned['task']}, {when.get(tuned.get('converted'), 'when: not recorded')}"
    found = ", ".join(f"{split} {metric} {value:.4f}" for split, metric, value in scores(tuned))
    return [("fine-tuned", said), ("scores then", found)]
