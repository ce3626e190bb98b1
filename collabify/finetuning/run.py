"""Fine-tuning a model, converted or not, from a name to a folder.

MODEL, task -> head -> Trainer -> scores an epoch -> OUT with collabify.json["finetuning"]

References
----------
Cordonnier et al. 2020, section 4: 3 epochs of batches of 32 at a learning rate of 2e-5.
"""

import shutil
import signal
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import PrinterCallback, set_seed

from collabify.data.base import Kind
from collabify.errors import OptionError
from collabify.finetuning.arguments import no_trace, trainer_arguments
from collabify.finetuning.examples import Examples, open_images, open_task
from collabify.finetuning.folders import check_output, open_work, work_folder, write
from collabify.finetuning.heads import Headed, choose_trained, load_headed, load_teacher, open_model
from collabify.finetuning.options import Options
from collabify.finetuning.trainer import (
    Flow,
    Progress,
    Teacher,
    Training,
    checkpoint_step,
    last_checkpoint,
)
from collabify.healing import is_main_process
from collabify.models import find_attention
from collabify.storage import read_record, resolved, versions
from collabify.training_record import FinetuneReport

ALPHA, TEMPERATURE = 0.5, 2.0  # where there is a teacher and nothing else is said
LOGS = 100  # in a run, for those who report them


@no_trace()
def finetune(
    model: str,
    *,
    out: str | Path,
    revision: str | None = None,
    task: str | None = None,
    data: str | None = None,
    image_data: str | None = None,
    split: str | None = None,
    eval_split: str | None = None,
    epochs: int = 3,
    learning_rate: float = 2e-5,
    batch_size: int = 32,
    max_length: int = 128,
    only: str = "all",
    teacher: str | None = None,
    alpha: float | None = None,
    temperature: float | None = None,
    hidden_states: bool = False,
    seed: int = 0,
    limit: int | None = None,
    precision: str = "fp32",
    device: str | None = None,
    report_to: Sequence[str] = (),
    resume: bool = False,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> FinetuneReport:
    """Train a model for a task and write it, its companions and a record into a folder.

    A head that fits the task's labels is trained on; any other model gets a new one, and a warning
    says why. Training is in float32 (see ``precision``), and so is the result. Checkpoints lie
    beside ``out`` in ``.OUT-finetuning`` until it is written. Under ``accelerate launch`` every
    process takes batches of its own, and the main one writes.

    Parameters
    ----------
    model
        A folder, a Hub id, or ``demo``.
    out
        The folder to make.
    revision
        Branch, tag or commit of a model on the Hub, by default ``main``.
    task, data
        One of GLUE's tasks, and where to find it: by default ``nyu-mll/glue``.
    image_data
        Instead of a task: a data set of labelled images, or a folder with a folder for each label.
    split, eval_split
        Of ``image_data``: to train on, and to score.
    epochs, learning_rate, batch_size, max_length, seed, limit
        See :class:`collabify.finetuning.options.Options`.
    only
        ``all``, or ``attention``: what a conversion made, the head, and what the checkpoint lacked.
    teacher
        A model fine-tuned for the same labels, whose outputs are followed as well.
    alpha, temperature
        The teacher's share of the loss, in [0, 1] (0.5), and what divides the logits (2).
    hidden_states
        Whether to follow the teacher's hidden states too, as healing does.
    precision
        ``fp32``, ``fp16`` or ``bf16``: of the products; weights stay in float32.
    device
        ``cpu``, ``cuda`` or ``mps``; by default what accelerate finds.
    report_to
        Names of trackers, as transformers knows them.
    resume
        Go on from the last checkpoint of an interrupted run; without one, start.
    overwrite
        Replace a model in ``out``, and forget an interrupted run.
    progress
        Called with a stage, what is done of it, out of how much, and a few words.

    Returns
    -------
    FinetuneReport
        As ``collabify.json`` holds it under ``finetuning``.

    Raises
    ------
    OptionError
        Where an option is out of bounds, or options contradict each other.
    LabelError
        Where labels of the data are no labels, or the teacher's are others.
    CheckpointError
        Where a model, a teacher or an interrupted run cannot be used.
    NonFiniteError
        Where the loss is NaN or infinite; no file is written then.
    OutputError
        Where the result or a checkpoint cannot be written; whole checkpoints stay.

    Examples
    --------
    >>> report = collabify.finetune("demo", task="rte", out="demo-rte")  # doctest: +SKIP
    >>> report.scores[-1]["validation"]["accuracy"]  # doctest: +SKIP
    """
    started = time.perf_counter()
    options = Options(
        epochs=epochs,
        learning_rate=learning_rate,
        batch_size=batch_size,
        max_length=max_length,
        only=only,
        alpha=alpha,
        temperature=temperature,
        hidden_states=hidden_states,
        seed=seed,
        limit=limit,
        precision=precision,
    )
    options.check(teacher=teacher is not None)
    kind = _kind(task, data, image_data, split, eval_split)
    target = Path(out).resolve()
    work = work_folder(target)
    check_output(target, model, work, resume=resume, overwrite=overwrite)
    arguments = trainer_arguments(work, options, device, report_to)
    source, config = open_model(model, kind, revision)
    record = read_record(source)  # a damaged one is found before anything takes time
    if kind == "text":
        examples = open_task(str(task), data, limit, seed)
    else:
        examples = open_images(str(image_data), split, eval_split, limit, seed)
    set_seed(seed)
    headed = load_headed(source, config, kind, examples.labels, examples.place)
    parameters = choose_trained(headed, only)
    encoded = examples.encode(headed, source.location, max_length)
    training = Training(
        teacher=_teacher(teacher, headed, examples, options, kind),
        model=headed.model,
        args=arguments,
        train_dataset=encoded.train,
        eval_dataset=encoded.evaluation,
        data_collator=encoded.collate,
        compute_metrics=examples.measure(headed.order),
    )
    training.remove_callback(PrinterCallback)
    launched = {"no": "fp32"}.get(arguments.mixed_precision, arguments.mixed_precision)
    asked = options.to_dict() | {"precision": launched, "processes": arguments.world_size}
    run = {"model": source.record, "teacher": teacher, "fingerprint": examples.fingerprint}
    checkpoint = open_work(work, {**run, "task": examples.task, **asked}, resume=resume)
    _train(training, checkpoint, progress, reported=bool(report_to))
    report = FinetuneReport(
        task=examples.task,
        data=examples.description,
        fingerprint=examples.fingerprint,
        scores=_scores(training.state.log_history, examples.evaluation),
        labels=tuple(headed.model.config.id2label.values()) if headed.order else (),
        new_head=headed.new_head,
        new_parameters=headed.new_parameters,
        examples=len(encoded.train),
        evaluated=sum(map(len, encoded.evaluation.values())),
        steps=training.state.global_step,
        parameters=parameters,
        options=asked
        | _data(data, image_data, split, eval_split)
        | {"device": str(arguments.device)},
        source=source.record,
        revision=source.revision,
        converted=any(site.converted for site in find_attention(headed.model)),
        teacher=teacher,
        resumed_at=None if checkpoint is None else checkpoint_step(checkpoint),
        seconds=time.perf_counter() - started,
        versions=versions(),
    )
    if is_main_process():
        write(headed.model, source, record, target, report, overwrite=overwrite)
        shutil.rmtree(work, ignore_errors=True)
    return report


def _data(
    data: str | None, image_data: str | None, split: str | None, eval_split: str | None
) -> dict[str, str]:
    """What was trained on, as it can be found again from anywhere."""
    asked = {"data": resolved(data), "image_data": resolved(image_data)}
    asked |= {"split": split, "eval_split": eval_split}
    return {name: value for name, value in asked.items() if value is not None}


def _kind(
    task: str | None,
    data: str | None,
    image_data: str | None,
    split: str | None,
    eval_split: str | None,
) -> Kind:
    """What the data are; refuses options that do not go together."""
    if (task is None) == (image_data is None):
        raise OptionError(
            f"task={task!r} and image_data={image_data!r}: one of them must say what to train for. "
            "Give --task or --image-data."
        )
    if task is None and data is not None:
        raise OptionError(
            f"data={data!r} says where a task is, and there is none. Give --task, or leave it out."
        )
    if task is not None and (split or eval_split):
        raise OptionError(
            f"split={split or eval_split!r} is for image data; task {task!r} has its own splits. "
            "Leave out --split and --eval-split."
        )
    return "image" if task is None else "text"


def _teacher(
    name: str | None, headed: Headed, examples: Examples, options: Options, kind: Kind
) -> Teacher | None:
    """The teacher, if there is one."""
    if name is None:
        return None
    return Teacher(
        load_teacher(name, headed, kind, examples.labels, hidden_states=options.hidden_states),
        ALPHA if options.alpha is None else options.alpha,
        TEMPERATURE if options.temperature is None else options.temperature,
        options.hidden_states,
    )


def _train(
    training: Training, checkpoint: Path | None, progress: Progress | None, *, reported: bool
) -> None:
    """All steps; Ctrl-C leaves a checkpoint and says how to go on."""
    flow = Flow(training, progress, LOGS if reported else None)
    training.add_callback(flow)
    work = Path(str(training.args.output_dir))
    try:
        with _interruptible(flow, alone=training.args.world_size == 1):
            training.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
        if flow.stopped:
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        found = last_checkpoint(work)
        if found is None:
            raise
        raise KeyboardInterrupt(
            f"Interrupted; a checkpoint of step {checkpoint_step(found)} of "
            f"{training.state.max_steps} is kept. Go on with the same command and --resume."
        ) from None


@contextmanager
def _interruptible(flow: Flow, *, alone: bool) -> Iterator[None]:
    """Within: the first Ctrl-C ends the run after the step under way, the second one at once."""
    if not alone or threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: Any) -> None:
        if flow.stopped:
            raise KeyboardInterrupt
        flow.stop()

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


_TIMES = ("runtime", "samples_per_second", "steps_per_second", "model_preparation_time")


def _scores(history: Sequence[dict[str, Any]], splits: Iterable[str]) -> tuple[dict[str, Any], ...]:
    """The Trainer's log, one record an epoch."""
    records: list[dict[str, Any]] = []
    total, last, first = 0.0, 0, 0
    for entry in history:
        step = entry["step"]
        if "loss" in entry:
            total += entry["loss"] * (step - last)
            last = step
        for split in splits:
            prefix = f"eval_{split}_"
            found = {n.removeprefix(prefix): v for n, v in entry.items() if n.startswith(prefix)}
            if found and step > first:
                loss = total / (step - first)
                records.append({"epoch": round(entry["epoch"]), "step": step, "loss": loss})
                total, first = 0.0, step
            if found:
                records[-1][split] = {n: v for n, v in found.items() if n not in _TIMES}
    return tuple(records)
