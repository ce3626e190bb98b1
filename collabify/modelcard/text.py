"""A card's text: what was done, what it cost, how to load it, how to make it again."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from collabify.modelcard.commands import commands
from collabify.modelcard.measured import latency, measured_drift, measured_scores, table
from collabify.modelcard.metadata import (
    MODELING_FILE,
    auto_class,
    base_model,
    is_standalone,
    scores,
    standalone_class,
)

_METHODS = {
    "cp": "collaborative attention",
    "tucker": "Tucker: shared subspaces and a core for each head",
    "talking-heads": "talking-heads attention: base heads that the heads mix",
    "head-svd": "heads kept apart, each of lower rank",
}
# Of a layer's record, what says which one it is and how the solver fared; the rest is its sizes.
_NO_SIZE = (
    *("index", "name", "relative_error", "calibrated_error", "energy", "value_error"),
    *("sweeps", "converged", "seconds"),
)
_CITATIONS = """\
```bibtex
@article{cordonnier2020multihead,
  title   = {Multi-Head Attention: Collaborate Instead of Concatenate},
  author  = {Cordonnier, Jean-Baptiste and Loukas, Andreas and Jaggi, Martin},
  journal = {arXiv preprint arXiv:2006.16362},
  year    = {2020},
  url     = {https://arxiv.org/abs/2006.16362}
}

@article{shazeer2020talking,
  title   = {Talking-Heads Attention},
  author  = {Shazeer, Noam and Lan, Zhenzhong and Cheng, Youlong and Ding, Nan and Hou, Le},
  journal = {arXiv preprint arXiv:2003.02436},
  year    = {2020},
  url     = {https://arxiv.org/abs/2003.02436}
}
```"""


def text(record: Mapping[str, Any], config: Mapping[str, Any], name: str, repo: str) -> str:
    """The card below its metadata; parameters as for :func:`collabify.modelcard.model_card`."""
    parts = [
        f"# {name}",
        _opening(record),
        "## What was done",
        table(("", ""), _done(record)),
        "## What it cost",
        table(("parameters", "before", "after", "kept"), _parameters(record)),
        _measured(record),
        *measured_scores(record),
        *_scored(record),
        *measured_drift(record),
        *latency(record),
        _caveat(record),
        "## How to load it",
        _loading(config, repo),
        "## How to make it again",
        "```sh\n" + "\n".join(commands(record, name)) + "\n```",
        _versions(record),
        "## Citations",
        _CITATIONS,
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def ranks(layers: Sequence[Mapping[str, Any]], key: str = "rank") -> str:
    """One size of every layer, in order: ``192 x 6``, or ``96, 128 x 2, 160``."""
    runs = [(value, len(list(run))) for value, run in groupby(layer.get(key) for layer in layers)]
    words = [("all" if v is None else str(v), count) for v, count in runs]
    return ", ".join(word if count == 1 else f"{word} x {count}" for word, count in words)


def sizes(layers: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    """Every size that any layer has, by its name in words."""
    keys = dict.fromkeys(key for layer in layers for key in layer if key not in _NO_SIZE)
    for key in keys:
        if any(layer.get(key) not in (None, False) for layer in layers):
            yield key.replace("_", " "), ranks(layers, key)


def _opening(record: Mapping[str, Any]) -> str:
    source, base = record.get("source"), base_model(record)
    version = (record.get("versions") or {}).get("collabify")
    with_ = "collabify" if version is None else f"collabify {version}"
    named = "a model"
    if isinstance(source, str):
        linked = source == base
        named = f"[{source}](https://huggingface.co/{source})" if linked else f"`{source}`"
        if base is not None and not linked:
            named += f" (a descendant of [{base}](https://huggingface.co/{base}))"
    opening = (
        f"This is {named}, whose attention was rewritten after training with {with_}, so that the "
        "heads of a layer share what they have in common. All other weights are the original's"
    )
    tuned = record.get("finetuning")
    after = tuned is not None and tuned.get("converted") is True
    return opening + ("; then it was trained for a task (below)." if after else ".")


def _done(record: Mapping[str, Any]) -> list[tuple[str, str]]:
    method, layers = str(record.get("method")), record.get("layers") or []
    rows = [("method", f"{_METHODS[method]} (`{method}`)" if method in _METHODS else f"`{method}`")]
    rows.append(("layers converted", str(len(layers))))
    rows += [(f"{size}, layer by layer", values) for size, values in sizes(layers)]
    dtype = (record.get("options") or {}).get("dtype")
    if dtype not in (None, "auto"):
        rows.append(("all weights cast to", dtype))
    rows.append(("calibrated on", record.get("calibration") or "nothing: the weights alone"))
    healing = record.get("healing")
    if healing is not None:
        outcome = (
            f"best at step {healing['best_step']}" if healing["kept"] else "nothing won, undone"
        )
        words = f"{healing['steps']} steps without labels on {healing['calibration']}; {outcome}"
        rows.append(("healed", words))
    tuned = record.get("finetuning")
    if tuned is not None:
        when = {True: "after the conversion", False: "before the conversion"}
        words = f"{tuned['task']}, {tuned['examples']:,} examples of {tuned['data']}, "
        words += (
            f"{tuned['steps']:,} steps, {when.get(tuned.get('converted'), 'when: not recorded')}"
        )
        if tuned.get("teacher"):
            words += f", taught by `{tuned['teacher']}`"
        rows.append(("fine-tuned", words))
    return rows


def _parameters(record: Mapping[str, Any]) -> list[tuple[str, ...]]:
    return [
        (
            part.replace("_", "-"),
            f"{count['before']:,}",
            f"{count['after']:,}",
            f"{count['after'] / count['before']:.1%}",
        )
        for part, count in (record.get("parameters") or {}).items()
    ]


def _measured(record: Mapping[str, Any]) -> str:
    """Errors and drift, each with what it is of."""
    rows = []
    if record.get("error") is not None:
        where = (
            "of logits on the calibration data" if record.get("calibration") else "of the weights"
        )
        rows.append((f"relative error {where}, all layers together", f"{record['error']:.4f}"))
    if record.get("mean_relative_error") is not None:
        rows.append(
            ("relative error of the weights, mean of layers", _four(record, "mean_relative_error"))
        )
    healing, drift = record.get("healing"), record.get("drift")
    if healing is not None:
        rows += _drift(healing["drift_before"], "held-out samples, before healing")
        rows += _drift(healing["drift_after"], "held-out samples, after healing")
    elif drift is not None:
        rows += _drift(drift, "held-out samples")
    return table(("measured when it was converted, against the original", ""), rows)


def _drift(drift: Mapping[str, Any], when: str) -> list[tuple[str, str]]:
    return [
        (f"final hidden states, cosine ({when})", _four(drift, "hidden_cosine")),
        (f"final hidden states, relative error ({when})", _four(drift, "hidden_error")),
        (f"attention probabilities, total variation ({when})", _four(drift, "attention")),
    ]


def _four(record: Mapping[str, Any], key: str) -> str:
    value = record.get(key)
    return "not finite" if value is None else f"{value:.4f}"


def _scored(record: Mapping[str, Any]) -> Iterator[str]:
    tuned = record.get("finetuning")
    if tuned is None:
        return
    rows = [(split, metric, f"{value:.4f}") for split, metric, value in scores(tuned)]
    whose = "this model" if tuned.get("converted") is True else "the model before its conversion"
    if "converted" not in tuned:
        whose = "the model as it was fine-tuned (before or after the conversion: not recorded)"
    yield (
        f"Scores of {whose} for {tuned['task']}, after the last epoch, on {tuned['evaluated']:,} "
        "examples:"
    )
    yield table(("split", "metric", "score"), rows)


def _caveat(record: Mapping[str, Any]) -> str:
    measured = any(record.get(key) for key in ("evaluations", "latency"))
    when = "as the model was made and measured" if measured else "as the model was made"
    said = (
        f"These numbers were recorded {when}; what was done to its weights by other means since "
        "then is not in them."
    )
    if record.get("latency"):
        return f"{said} Latency is that of one machine; on others it differs."
    return (
        f"{said} Latency was not recorded: fewer parameters do not by themselves make a model "
        "faster."
    )


def _loading(config: Mapping[str, Any], repo: str) -> str:
    cls, alone = auto_class(config), ""
    if is_standalone(config):
        own = standalone_class(config)
        alone = (
            "\n\nWhere collabify is not installed, the model brings its own code, "
            f"[`{MODELING_FILE}`]({MODELING_FILE}), which transformers runs if it is told to:\n\n"
            "```python\n"
            f"from transformers import {own}\n\n"
            f'model = {own}.from_pretrained("{repo}", trust_remote_code=True)\n'
            "```"
        )
    return (
        "```python\n"
        "import collabify  # lets transformers load converted models\n"
        f"from transformers import {cls}\n\n"
        f'model = {cls}.from_pretrained("{repo}")\n'
        "```\n\n"
        "A program that does not import collabify stops with a size mismatch; it never fills heads "
        "with random numbers unless it is told to ignore that."
    ) + alone


def _versions(record: Mapping[str, Any]) -> str:
    versions = record.get("versions") or {}
    said = ", ".join(f"{package} {version}" for package, version in versions.items())
    return f"Made with {said}." if said else ""
