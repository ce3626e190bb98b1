"""The nine tasks of GLUE: rows of one or two texts and a label in, features of a model out.

task, split -> load_task -> labels in the task's own order -> encode -> input_ids, ..., labels

References
----------
Wang et al. 2018, GLUE: A Multi-Task Benchmark and Analysis Platform for Natural Language
Understanding.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from collabify.data.labels import check_range, hidden, label_order, plain, same_names
from collabify.data.splits import check_columns, config_names, datasets_package, load_split
from collabify.data.text import check_ids, sequence_length
from collabify.errors import LabelError, OptionError

HUB = "nyu-mll/glue"
LABEL = "label"
ALL = "all"


@dataclass(frozen=True)
class Task:
    """One task.

    Parameters
    ----------
    name
        As the data set names its configuration.
    columns
        Of the one or two texts.
    label_names
        In the order of the labels; ``None``: a number is to be predicted.
    metrics
        By the names that the package ``evaluate`` gives them.
    train
        The split to train on.
    validation
        The splits to evaluate on.
    """

    name: str
    columns: tuple[str, ...]
    label_names: tuple[str, ...] | None
    metrics: tuple[str, ...]
    train: str = "train"
    validation: tuple[str, ...] = ("validation",)

    @property
    def num_labels(self) -> int:
        """Outputs of a head for this task."""
        return 1 if self.label_names is None else len(self.label_names)


_PAIR = ("sentence1", "sentence2")
_ENTAILMENT = ("entailment", "not_entailment")
_BOTH = ("accuracy", "f1")
_MNLI = ("validation_matched", "validation_mismatched")

TASKS: Mapping[str, Task] = {
    task.name: task
    for task in (
        Task("cola", ("sentence",), ("unacceptable", "acceptable"), ("matthews_correlation",)),
        Task("sst2", ("sentence",), ("negative", "positive"), ("accuracy",)),
        Task("mrpc", _PAIR, ("not_equivalent", "equivalent"), _BOTH),
        Task("stsb", _PAIR, None, ("pearson", "spearmanr")),
        Task("qqp", ("question1", "question2"), ("not_duplicate", "duplicate"), _BOTH),
        Task(
            "mnli",
            ("premise", "hypothesis"),
            ("entailment", "neutral", "contradiction"),
            ("accuracy",),
            validation=_MNLI,
        ),
        Task("qnli", ("question", "sentence"), _ENTAILMENT, ("accuracy",)),
        Task("rte", _PAIR, _ENTAILMENT, ("accuracy",)),
        Task("wnli", _PAIR, ("not_entailment", "entailment"), ("accuracy",)),
    )
}


def find_task(task: Task | str) -> Task:
    """A task by its name.

    Raises
    ------
    OptionError
        Where there is none, with those that there are.
    """
    if isinstance(task, Task):
        return task
    if task not in TASKS:
        raise OptionError(f"task={task!r} must be one of {', '.join(TASKS)}. Change --task.")
    return TASKS[task]


def find_tasks(names: Iterable[str], data: str | None = None) -> list[Task]:
    """Tasks by name, each once, in GLUE's order; ``all`` stands for those that ``data`` has.

    Parameters
    ----------
    names
        Of tasks, or ``all``.
    data
        As for :func:`load_task`.

    Raises
    ------
    OptionError
        Where a name is unknown, there are none, or ``data`` has no task at all.
    """
    wanted = set(names)
    if ALL in wanted:
        there = TASKS if data is None else config_names(data)
        wanted = (wanted - {ALL}) | (set(TASKS) & set(there))
        if not wanted:
            raise OptionError(
                f"data={data!r} has none of the tasks {', '.join(TASKS)}. "
                f"There are: {', '.join(there)}. Give other data."
            )
    if not wanted:
        raise OptionError(f"task must be one or more of {', '.join(TASKS)}, or all. Give --task.")
    found = {find_task(name).name for name in sorted(wanted)}
    return [task for name, task in TASKS.items() if name in found]


def load_task(task: Task | str, data: str | None = None, split: str | None = None) -> Any:
    """A split of a task, its labels in the order of ``Task.label_names``.

    Parameters
    ----------
    task
        Itself or its name.
    data
        Hub id or folder with the layout of ``nyu-mll/glue``, which it is by default.
    split
        By default the first that the task is evaluated on.

    Returns
    -------
    dataset
        A ``datasets.Dataset`` with the task's columns and ``label``.

    Raises
    ------
    OptionError
        Where there is no such task, data, split or column.
    LabelError
        Where the labels are hidden, out of range, of the wrong type or of other names.
    """
    task = find_task(task)
    name, split = data or HUB, split or task.validation[0]
    loaded = load_split(name, task.name, split)
    place = f"{name}:{task.name}:{split}"
    check_columns(loaded, (*task.columns, LABEL), place)
    for column in task.columns:
        _check_texts(loaded[column], column, place)
    if task.label_names is None:
        _check_numbers(loaded, place)
        return loaded
    loaded = _in_order(loaded, task.label_names, place)
    check_range(loaded[LABEL], task.label_names, repr(place))
    return loaded


def _check_texts(texts: Sequence[Any], column: str, place: str) -> None:
    for row, text in enumerate(texts):
        if not isinstance(text, str):
            raise OptionError(
                f"Row {row} of {place!r} has a {type(text).__name__} in the column {column!r}; it "
                "must be a text. Put the data right."
            )


def _check_numbers(data: Any, place: str) -> None:
    """A regression's labels: numbers, not hidden (-1 in a scale from 0 to 5)."""
    for row, label in enumerate(data[LABEL]):
        if isinstance(label, bool) or not isinstance(label, (int, float)) or label != label:
            raise LabelError(
                f"Row {row} of {place!r} has the label {label!r}; it must be a number. "
                "Put the data right."
            )
        if label == -1:
            raise hidden(row, repr(place))


def _in_order(data: Any, names: Sequence[str], place: str) -> Any:
    """The data with class labels in the order of ``names``."""
    datasets = datasets_package()
    feature = data.features[LABEL]
    if not isinstance(feature, datasets.ClassLabel):
        if not str(getattr(feature, "dtype", "")).startswith("int"):
            raise LabelError(
                f"The column {LABEL!r} of {place!r} has the type {feature}; it must be a class "
                f"label or a whole number ({', '.join(names)}). Put the data right."
            )
        return data
    if not same_names(feature.names, names):
        raise LabelError(
            f"The labels of {place!r} ({', '.join(feature.names)}) must be those of the task "
            f"({', '.join(names)}). Put the data right."
        )
    where = {plain(name): label for label, name in enumerate(names)}
    moved = [where[plain(name)] for name in feature.names]
    if moved == list(range(len(names))):
        return data
    check_range(data[LABEL], feature.names, repr(place))
    labels = [moved[label] for label in data[LABEL]]
    ordered = datasets.Value("int64")
    return data.remove_columns(LABEL).add_column(LABEL, labels, feature=ordered)


def check_labels(task: Task | str, config: Any, dataset: Any) -> tuple[int, ...]:
    """The head's output for each label of a task; empty where the task predicts a number.

    Parameters
    ----------
    task
        Itself or its name.
    config
        The config of a model with a head.
    dataset
        As :func:`load_task` gives it.

    Returns
    -------
    order
        ``logits[:, order]`` is in the order of the task's labels; ``order[label]`` is what to train
        the head for.

    Raises
    ------
    LabelError
        Where the head has another number of labels or other names than the task, or the data have
        labels outside of it.
    """
    task = find_task(task)
    if task.label_names is None:
        if config.num_labels != 1:
            raise LabelError(
                f"The model's head has {config.num_labels} labels and task {task.name!r} predicts "
                "one number. Give a model for this task, or make one: collabify finetune"
            )
        return ()
    order = label_order(task.label_names, config, f"task {task.name!r}")
    check_range(dataset[LABEL], task.label_names, f"task {task.name!r}")
    return order


def encode(
    dataset: Any,
    task: Task | str,
    tokenizer: Any,
    config: Any,
    *,
    max_length: int = 128,
    order: Sequence[int] = (),
) -> list[dict[str, Any]]:
    """Token ids of every row, not padded, pairs as the tokenizer joins them.

    Parameters
    ----------
    dataset
        As :func:`load_task` gives it.
    task
        Itself or its name.
    tokenizer
        The model's.
    config
        The model's config.
    max_length
        Tokens at most; the model's own bound holds too. The longer text of a pair is cut first.
    order
        From :func:`check_labels`; ``labels`` are then outputs of the head.

    Returns
    -------
    features
        ``input_ids`` and the like as lists, and ``labels``.

    Raises
    ------
    OptionError
        Where ``max_length`` leaves no room for a token.
    CheckpointError
        Where the tokenizer has tokens that the model does not know.
    """
    task = find_task(task)
    length = sequence_length(max_length, tokenizer, config, pair=len(task.columns) > 1)
    texts = [list(dataset[column]) for column in task.columns]
    encoded = tokenizer(*texts, truncation=True, max_length=length)
    check_ids(max(max(ids) for ids in encoded["input_ids"]), tokenizer, config)
    labels = list(dataset[LABEL])
    if task.label_names is not None and order:
        labels = [order[label] for label in labels]
    return [
        {name: values[row] for name, values in encoded.items()} | {"labels": labels[row]}
        for row in range(len(labels))
    ]
