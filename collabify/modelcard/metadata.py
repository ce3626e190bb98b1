"""A card's metadata, as the Hub reads it, in huggingface_hub's own classes."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from huggingface_hub import EvalResult, ModelCardData

from collabify.modelcard.private import is_hub_id

# The ending of a class with a head -> the pipeline that it serves.
_PIPELINES = {
    "ForSequenceClassification": "text-classification",
    "ForTokenClassification": "token-classification",
    "ForQuestionAnswering": "question-answering",
    "ForMaskedLM": "fill-mask",
    "ForMultipleChoice": "multiple-choice",
    "ForImageClassification": "image-classification",
}
MODELING_FILE = "modeling_collabify.py"  # of models that load without collabify
# What a base model's own card says of it and of everything that is made of it.
CARRIED = ("license", "license_name", "license_link", "language", "datasets", "base_model")


def architecture(config: Mapping[str, Any]) -> str | None:
    """The class that the model was saved with."""
    named = config.get("architectures")
    first = named[0] if isinstance(named, list) and named else None
    return first if isinstance(first, str) else None


def is_standalone(config: Mapping[str, Any]) -> bool:
    """Whether a configuration takes its classes from ``modeling_collabify.py``."""
    named = config.get("auto_map")
    module = f"{MODELING_FILE.removesuffix('.py')}."
    references = named.values() if isinstance(named, Mapping) else ()
    return any(str(each).rpartition("--")[2].startswith(module) for each in references)


def standalone_class(config: Mapping[str, Any]) -> str:
    """The Auto class that loads a standalone model with its head."""
    best, name = auto_class(config), architecture(config)
    named: Mapping[str, Any] = config["auto_map"]
    fits = [auto for auto, each in named.items() if str(each).rpartition(".")[2] == name]
    return best if best in fits or not fits else fits[0]


def auto_class(config: Mapping[str, Any]) -> str:
    """The class of transformers that loads the model with its head."""
    name = architecture(config) or ""
    ending = name[name.find("For") :] if "For" in name else ""
    if ending in _PIPELINES:
        return f"AutoModel{ending}"
    return "AutoModel" if not ending else name


def pipeline_tag(config: Mapping[str, Any], *, sentences: bool) -> str | None:
    """What the model does, where it is one of the Hub's tasks.

    Parameters
    ----------
    config
        ``config.json``.
    sentences
        Whether sentence-transformers' ``modules.json`` is there.
    """
    name = architecture(config)
    if name is None:
        return None
    if "For" in name:
        return _PIPELINES.get(name[name.find("For") :])
    if sentences:
        return "sentence-similarity"
    return "image-feature-extraction" if "image_size" in config else "feature-extraction"


def base_model(record: Mapping[str, Any]) -> str | None:
    """The nearest ancestor that has a name on the Hub."""
    tuned = record.get("finetuning") or {}
    chain = [record.get("source")]
    if tuned.get("converted") is not True:
        chain.append(tuned.get("source"))
    named = (record.get("base") or {}).get("base_model")
    chain += named if isinstance(named, list) else [named]
    return next((name for name in chain if is_hub_id(name)), None)


def metadata(
    record: Mapping[str, Any],
    config: Mapping[str, Any],
    name: str,
    *,
    sentences: bool,
    tags: Sequence[str] = (),
) -> ModelCardData:
    """The YAML at the top of a card; parameters as for :func:`collabify.modelcard.model_card`.

    Of the relations that the Hub knows (adapter, finetune, merge, quantized), ``finetune`` is the
    one that holds: the weights are other numbers in the same precision. It is always said, because
    the Hub guesses otherwise, and a ``quantization_config`` looks like quantised weights.
    """
    base, carried = base_model(record), record.get("base") or {}
    forms = {layer.get("form") for layer in _layers(config)}
    ours = ["collabify", *(f"{form}-attention" for form in sorted(filter(None, forms)))]
    tuned = _tuned_here(record)
    given: dict[str, Any] = {
        key: carried.get(key) for key in CARRIED if key not in ("datasets", "base_model")
    }
    results = list(_measured(record, config))
    covered = {_split_of(result) for result in results}
    if tuned:
        results += [each for each in _results(tuned, config) if _split_of(each) not in covered]
    return ModelCardData(
        base_model=base,
        base_model_relation=None if base is None else "finetune",
        library_name="transformers",
        pipeline_tag=pipeline_tag(config, sentences=sentences),
        tags=[*ours, *tags],
        datasets=_datasets(record) or None,
        metrics=list(dict.fromkeys(result.metric_type for result in results)) or None,
        model_name=name if results else None,
        eval_results=results or None,
        **given,
    )


def _layers(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return list((config.get("quantization_config") or {}).get("layers") or [])


def _tuned_here(record: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The fine-tuning whose scores are those of this model; not one before the conversion."""
    tuned: Mapping[str, Any] | None = record.get("finetuning")
    return tuned if tuned is not None and tuned.get("converted") is True else None


def _datasets(record: Mapping[str, Any]) -> list[str]:
    """Those on the Hub that its weights were trained on."""
    found = (record.get("base") or {}).get("datasets") or []
    names = [found] if isinstance(found, str) else list(found)
    for steps in (record, record.get("healing") or {}, record.get("finetuning") or {}):
        options = steps.get("options") or {}
        names += [options.get(key) for key in ("calibration", "data", "image_data")]
        if "task" in steps and not {"data", "image_data"} & set(options):
            names.append(steps.get("data"))
    plain = [name.partition(":")[0] for name in names if isinstance(name, str)]
    return list(dict.fromkeys(n for n in plain if is_hub_id(n) and n not in ("synthetic", "none")))


def scores(tuned: Mapping[str, Any]) -> Iterator[tuple[str, str, float]]:
    """Split, metric and value after the last epoch."""
    last = (tuned.get("scores") or [{}])[-1]
    for split, found in last.items():
        for metric, value in found.items() if isinstance(found, Mapping) else ():
            if metric != "loss" and isinstance(value, int | float) and math.isfinite(value):
                yield split, metric, value


def _measured(record: Mapping[str, Any], config: Mapping[str, Any]) -> Iterator[EvalResult]:
    """Scores of the very model, as ``collabify eval --record`` found them on a whole split.

    Of two of the same split (with a baseline and without) the later is taken.
    """
    found: dict[object, EvalResult] = {}
    for entry in record.get("evaluations") or ():
        if (entry.get("options") or {}).get("limit") is not None:
            continue  # the index has no place for how many were drawn
        for score in entry.get("scores") or ():
            rank = score["metric"] if score["metric"].startswith("top-") else None
            if score["value"] is not None:
                result = EvalResult(
                    task_type=pipeline_tag(config, sentences=False) or "other",
                    **_dataset(str(entry.get("data")), entry.get("task")),
                    dataset_split=entry["split"],
                    metric_type="accuracy" if rank else score["metric"],
                    metric_name=f"{rank} accuracy" if rank else None,
                    metric_value=score["value"],
                )
                found[*_split_of(result), score["metric"]] = result
    yield from found.values()


def _split_of(result: EvalResult) -> tuple[object, ...]:
    return result.dataset_type, result.dataset_config, result.dataset_split


def _dataset(data: str, task: str | None) -> dict[str, Any]:
    """How the index names data: a folder is no data set of the Hub, whatever it is called."""
    name = data.partition(":")[0]
    words = name.removeprefix("./") + ("" if task is None else f" {task}")
    if is_hub_id(name):
        return {"dataset_type": name, "dataset_name": words, "dataset_config": task}
    # The index tells data apart by type and config.
    return {"dataset_type": "local", "dataset_name": words, "dataset_config": words}


def _results(tuned: Mapping[str, Any], config: Mapping[str, Any]) -> Iterator[EvalResult]:
    options = tuned.get("options") or {}
    data = str(options.get("data") or options.get("image_data") or tuned.get("data"))
    task = None if "image_data" in options else str(tuned.get("task"))
    for split, metric, value in scores(tuned):
        yield EvalResult(
            task_type=pipeline_tag(config, sentences=False) or "other",
            **_dataset(data, task),
            dataset_split=split,
            metric_type=metric,
            metric_value=value,
        )
