"""GLUE: a fine-tuned model's scores, against a baseline's on the same examples.

task -> rows, features -> logits[:, order] -> predictions -> metric, interval -> averages
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from torch import Tensor, nn

from collabify.bootstrap import METRICS, Array
from collabify.data.glue import (
    LABEL,
    TASKS,
    Task,
    check_labels,
    encode,
    find_tasks,
    load_task,
)
from collabify.data.labels import nameless
from collabify.data.splits import sample
from collabify.data.text import load_tokenizer
from collabify.errors import OptionError
from collabify.evaluation.compare import Measured, check_draws, mean_of, measure
from collabify.evaluation.heads import TEXT, check_head
from collabify.evaluation.predict import Progress, predict
from collabify.scores import Average, GlueScores, TaskScores
from collabify.storage import versions

TASK_MEAN, PAPER_MEAN = "mean of tasks", "mean of the paper's numbers"
# Cordonnier et al. 2020 average eleven numbers: MNLI counts once (matched), WNLI not at all.
_PAPER = ("cola", "sst2", "mrpc", "stsb", "qqp", "mnli", "qnli", "rte")
_PAPER_NUMBERS = sum(len(TASKS[name].metrics) for name in _PAPER)

Models: TypeAlias = nn.Module | Callable[[str], Any]


@dataclass(frozen=True)
class _Options:
    """What all models of a run have in common."""

    data: str | None
    split: str | None
    batch_size: int
    max_length: int
    limit: int | None
    resamples: int
    seed: int
    processor: object
    progress: Progress | None


def evaluate_glue(
    model: Models,
    task: str | Sequence[str],
    *,
    data: str | None = None,
    split: str | None = None,
    batch_size: int = 32,
    max_length: int = 128,
    limit: int | None = None,
    baseline: Models | None = None,
    resamples: int = 1000,
    seed: int = 0,
    processor: object = None,
    progress: Progress | None = None,
) -> GlueScores:
    """Score a model on tasks of GLUE, with 95 % intervals.

    Parameters
    ----------
    model
        A transformers model with a head for the task; or, for several tasks, a function that gives
        the model of a task by its name.
    task
        One name or several, or ``all``: those that ``data`` has.
    data
        Hub id or folder with the layout of ``nyu-mll/glue``, which it is by default.
    split
        By default the task's validation split; of MNLI both, matched and mismatched.
    batch_size
        Examples at once.
    max_length
        Tokens of an example at most.
    limit
        Examples at most, drawn at random.
    baseline
        As ``model``: what it is compared with, on the same examples.
    resamples
        Of the bootstrap behind the intervals.
    seed
        Of ``limit`` and of the bootstrap.
    processor
        Tokenizer, or where to load it; by default each model's own.
    progress
        ``(stage, done, total, note)``.

    Raises
    ------
    OptionError
        Where an option is out of bounds, or there is no such task, data, split or column.
    LabelError
        Where a model has no head, or one with other labels than the task; or the data's labels are
        hidden or others.
    CheckpointError
        Where the tokenizer cannot be loaded or is another model's.
    NonFiniteError
        Where a model's output is NaN or infinite.
    """
    check_draws(resamples, seed)
    start = time.perf_counter()
    tasks = find_tasks([task] if isinstance(task, str) else task, data)
    for models, name in ((model, "model"), (baseline, "baseline")):
        if len(tasks) > 1 and isinstance(models, nn.Module):
            raise OptionError(
                f"{name} is one model and there are {len(tasks)} tasks "
                f"({', '.join(each.name for each in tasks)}), each with a head of its own. "
                "Give a function from a task's name to its model, or one task."
            )
    options = _Options(
        data, split, batch_size, max_length, limit, resamples, seed, processor, progress
    )
    records: list[TaskScores] = []
    measured: dict[str, list[list[Measured]]] = {}
    for each in tasks:
        for record, parts in _evaluate_task(each, model, baseline, options):
            records.append(record)
            measured.setdefault(each.name, []).append(parts)
    return GlueScores(
        tuple(records),
        averages(measured),
        {
            "data": data,
            "split": split,
            "batch_size": batch_size,
            "max_length": max_length,
            "limit": limit,
            "resamples": resamples,
            "seed": seed,
        },
        time.perf_counter() - start,
        versions(),
    )


def _evaluate_task(
    task: Task, model: Models, baseline: Models | None, options: _Options
) -> list[tuple[TaskScores, list[Measured]]]:
    """The splits of one task; models are loaded one after the other and let go."""
    splits = task.validation if options.split is None else (options.split,)
    rows = {
        split: sample(load_task(task, options.data, split), options.limit, options.seed)
        for split in splits
    }
    results, config = _predictions(task, model, rows, "", options)
    other = None if baseline is None else _predictions(task, baseline, rows, "baseline ", options)
    configs = {"model": config} | ({} if other is None else {"baseline": other[1]})
    unnamed = nameless(task.label_names or (), configs)
    scored = []
    for number, split in enumerate(splits):
        parts, implementation = _scores(
            task,
            np.asarray(rows[split][LABEL]),
            results[split],
            None if other is None else other[0][split],
            options.resamples,
            [options.seed, list(TASKS).index(task.name), number],
        )
        record = TaskScores(
            task.name,
            split,
            len(rows[split]),
            tuple(part.score for part in parts),
            implementation,
            "position" if unnamed else "names",
            _name(config),
            None if other is None else _name(other[1]),
            unnamed,
        )
        scored.append((record, parts))
    return scored


def _name(config: Any) -> str | None:
    return getattr(config, "_name_or_path", None) or None


def _predictions(
    task: Task, models: Models, rows: dict[str, Any], prefix: str, options: _Options
) -> tuple[dict[str, Array], Any]:
    """Labels, or numbers, of every row by split, and the config of the model."""
    model: Any = models if isinstance(models, nn.Module) else models(task.name)
    command = f"collabify finetune MODEL --task {task.name} --out DIR"
    check_head(model, TEXT, f"task {task.name!r}", command)
    orders = {split: check_labels(task, model.config, data) for split, data in rows.items()}
    tokenizer = load_tokenizer(options.processor, model.config)
    found: dict[str, Array] = {}
    for split, data in rows.items():
        logits = predict(
            model,
            encode(data, task, tokenizer, model.config, max_length=options.max_length),
            lambda features: tokenizer.pad(features, return_tensors="pt"),
            batch_size=options.batch_size,
            stage=f"{prefix}{task.name} {split}",
            progress=options.progress,
        )
        found[split] = decide(logits, orders[split])
    return found, model.config


def decide(logits: Tensor, order: Sequence[int]) -> Array:
    """The label with the largest logit, in the data's order; the number itself without labels."""
    if not order:
        return np.asarray(logits.squeeze(-1).numpy())
    return np.asarray(logits[:, list(order)].argmax(-1).numpy())


def _scores(
    task: Task,
    references: Array,
    predictions: Array,
    baseline: Array | None,
    resamples: int,
    seed: Sequence[int],
) -> tuple[list[Measured], str]:
    from collabify.metrics import compute, load_metric  # seconds to import

    metric, implementation = load_metric(task.name)
    parts = measure(
        {name: METRICS[name] for name in task.metrics},
        compute(metric, predictions, references),
        predictions,
        references,
        baseline_values=None if baseline is None else compute(metric, baseline, references),
        baseline_predictions=baseline,
        resamples=resamples,
        seed=seed,
    )
    return parts, implementation


def averages(measured: dict[str, list[list[Measured]]]) -> tuple[Average, ...]:
    """The mean of the tasks that are there, and the paper's mean of the numbers that are.

    Parameters
    ----------
    measured
        By task, for each of its splits, its metrics.
    """
    if len(measured) < 2:
        return ()
    by_task = [
        mean_of(name, [part for split in splits for part in split])
        for name, splits in measured.items()
    ]
    found = [Average(mean_of(TASK_MEAN, by_task).score, tuple(measured), len(TASKS))]
    numbers = {
        f"{name} {part.score.metric}": part
        for name, splits in measured.items()
        if name in _PAPER
        for part in splits[0]
    }
    if numbers:
        mean = mean_of(PAPER_MEAN, list(numbers.values()))
        found.append(Average(mean.score, tuple(numbers), _PAPER_NUMBERS))
    return tuple(found)
