"""Healing: win back what a conversion lost, without labels.

    loss = sum_lt |h_l[t] - h~_l[t]|^2  /  sum_lt |h_l[t]|^2

Only what the conversion made is trained (shared queries and keys with their content rows, mixing,
cores, and values and outputs where it reduced them), so that the hidden states ``h~`` after every
layer follow those of the original, ``h``, on text or images that nobody has labelled. Where this
loss gets worse on held-out data than at the start, training goes back to the best so far and on at
a quarter of the learning rate. The step that is best is kept, and if none is better than the start,
the model is left bit for bit as it was.

Axes: l layer, t real token of all sequences of a batch.
"""

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

from accelerate import Accelerator  # type: ignore[import-untyped]
from accelerate.utils import broadcast_object_list  # type: ignore[import-untyped]
from torch import nn

from collabify.data import CalibrationData, load_calibration
from collabify.drift import base_model, measure_drift
from collabify.errors import OptionError
from collabify.healing.borrowing import borrowed, local_accelerator, round_to, training_device
from collabify.healing.checks import check_options, check_teacher, new_parameters
from collabify.healing.loss import Batch
from collabify.healing.run import Run
from collabify.healing.store import Store
from collabify.healing.training import Progress, train
from collabify.planning import check_finite
from collabify.results import Drift, HealingReport
from collabify.storage import note

MOST_SAMPLES = 1024  # by default; more than one pass over the data brings little
# Of a batch, for which the attention probabilities of all layers are in memory at once: with more,
# measuring drift on long sequences takes more memory than training.
ROWS = 4


def heal(
    model: nn.Module,
    teacher: nn.Module,
    *,
    calibration: object = "synthetic",
    samples: int | None = None,
    max_length: int = 128,
    steps: int = 150,
    batch_size: int = 32,
    learning_rate: float = 1e-3,
    seed: int = 0,
    processor: object = None,
    state: Path | None = None,
    progress: Progress | None = None,
) -> HealingReport:
    """Train a converted model's new attention parameters to follow the original, in place.

    Runs wherever accelerate does: under ``accelerate launch`` every process takes batches of its
    own, and the gradients are averaged.

    Parameters
    ----------
    model
        A converted model, with or without a head.
    teacher
        The model that it was converted from; used, not changed.
    calibration
        What both read, as :func:`collabify.convert` takes it, but for ``none``. The batches of a
        ready :class:`collabify.data.CalibrationData` are used as they are, and ``samples``,
        ``max_length``, ``batch_size`` and ``processor`` then say nothing.
    samples
        How many calibration samples to take; by default a quarter of what all steps read, at most
        1024. More than that are read in several rounds, in a new order each.
    max_length
        Tokens of a text at most.
    steps, batch_size
        Steps of Adam, and samples that a process reads in each. Ready batches stay as they are.
    learning_rate
        The peak of one cycle, to begin with; lowered where it turns out to be too high.
    seed
        Of the samples and of the order of the batches.
    processor
        Tokenizer or image processor; by default from where the model was loaded.
    state
        Folder that keeps the run's progress, so that after an interruption the same call goes on
        where it stopped. It is still there at the end: remove it once the result is saved.
    progress
        Called with a stage, what is done of it, out of how much, and a few words.

    Returns
    -------
    HealingReport
        Loss and drift on held-out samples before and after, and whether anything was won.

    Raises
    ------
    OptionError
        Where an option is out of bounds.
    CheckpointError
        Where nothing of the model was converted, or the teacher is not what it came from.
    AlreadyConvertedError
        Where the teacher was converted too.
    NonFiniteError
        Where a weight is NaN or infinite, or the loss though training is not to blame.
    OutputError
        Where ``state`` cannot be written.

    Notes
    -----
    After every error and Ctrl-C the model is what it was.

    Examples
    --------
    >>> report = collabify.heal(model, original, calibration="texts.txt")  # doctest: +SKIP
    >>> report.kept, report.drift_after.hidden_cosine  # doctest: +SKIP
    """
    started = time.perf_counter()
    check_options(calibration, steps, batch_size, learning_rate)
    trained = new_parameters(model)
    check_teacher(model, teacher, trained)
    for checked in (model, teacher):
        check_finite(checked)
    if samples is None:
        samples = max(2, min(MOST_SAMPLES, steps * batch_size // 4))
    reading = {"samples": samples, "max_length": max_length, "batch_size": batch_size}
    config = cast(Any, model).config
    data = load_calibration(calibration, config, seed=seed, processor=processor, **reading)
    _check_data(data)
    options: dict[str, Any] = {"steps": steps, "learning_rate": learning_rate, "seed": seed}
    options |= {"samples": data.samples} if data is calibration else reading
    with local_accelerator(trained[0].device) as accelerator:
        options["processes"] = accelerator.num_processes
        store = None if state is None else Store(state, accelerator, dict(options))
        run = Run(trained, steps, learning_rate, seed)
        device = training_device(accelerator, trained)
        with borrowed((model, teacher), trained, run.start, device):
            drifts = _improve(run, model, teacher, data, accelerator, store, progress)
    kept = run.best.step > 0
    report = HealingReport(
        kept=kept,
        steps=steps,
        best_step=run.best.step,
        loss_before=run.curve[0][1],
        loss_after=run.best.loss if kept else run.curve[0][1],
        drift_before=drifts[0],
        drift_after=drifts[1] if kept else drifts[0],
        curve=tuple(run.curve),
        went_back=tuple(run.went_back),
        parameters=sum(parameter.numel() for parameter in trained),
        calibration=data.description,
        options=options,
        resumed_at=run.resumed_at,
        seconds=time.perf_counter() - started,
    )
    note(model, "healing", report.to_dict())
    return report


def _check_data(data: CalibrationData) -> None:
    if not data.batches or not data.held_out:
        raise OptionError(
            f"The calibration data ({data.description}) has {len(data.batches)} batches and "
            f"{len(data.held_out)} held out; healing needs both. Give more samples."
        )


def _improve(
    run: Run,
    model: nn.Module,
    teacher: nn.Module,
    data: CalibrationData,
    accelerator: Accelerator,
    store: Store | None,
    progress: Progress | None,
) -> tuple[Drift, Drift]:
    """Train, and undo it where it made the end worse; drift before and after."""
    if store is not None:
        store.identify(model, teacher, data)
    held_out = list(_in_rows(data.held_out))
    before = measure_drift(teacher, model, held_out)
    train(run, base_model(model), base_model(teacher), data, accelerator, store, progress)
    round_to(run.dtypes, run.trained)
    after = measure_drift(teacher, model, held_out)
    # Rounded to its own dtype, behind the last norm, the model has the last word.
    worse = not after.hidden_error <= before.hidden_error
    (worse,) = broadcast_object_list([worse])  # every process with the same verdict
    if worse:
        run.restore()
    return before, after


def _in_rows(batches: Sequence[Batch]) -> Iterator[Batch]:
    """The same inputs, few at a time: drift looks at attention, which is quadratic in length."""
    for batch in batches:
        for start in range(0, len(next(iter(batch.values()))), ROWS):
            yield {name: value[start : start + ROWS] for name, value in batch.items()}
