"""The steps of healing: Adam on one cycle, judged on held-out data now and then.

No learning rate suits every model: weights differ in size, and layers in how they pass errors on.
Where the loss on held-out data is above the start's, or a batch's is not finite, the run goes back
to the best that it found and on from there, with a quarter of the learning rate.
"""

from collections.abc import Callable, Iterator, Sequence
from math import isfinite
from operator import itemgetter
from typing import Any, cast

import torch
from accelerate import Accelerator  # type: ignore[import-untyped]
from torch import Tensor, nn

from collabify.calibration import on_device
from collabify.data import CalibrationData
from collabify.errors import NonFiniteError
from collabify.healing.borrowing import put
from collabify.healing.loss import Batch, HiddenStates, batch_loss, held_out_loss
from collabify.healing.run import Run
from collabify.healing.store import Store

EVALUATIONS = 10  # on held-out data, evenly over the steps
LOWER = 0.25  # what the learning rate is multiplied by where it was too high

Progress = Callable[[str, int, int, str], None]


def train(
    run: Run,
    student: nn.Module,
    teacher: nn.Module,
    data: CalibrationData,
    accelerator: Accelerator,
    store: Store | None,
    progress: Progress | None,
) -> None:
    """All steps that are left; the parameters end as the best of them.

    Parameters
    ----------
    run
        Fresh; where the store has the state of the same run, it goes on from there.
    student, teacher
        Encoders without heads.
    data
        What both read.
    accelerator
        Shares batches and gradients among processes.
    store
        Keeps the progress.
    progress
        Told of every step.

    Raises
    ------
    NonFiniteError
        Where the loss is NaN or infinite though the parameters are the start's or the best.
    """
    student, teacher = HiddenStates(student), HiddenStates(teacher)
    wrapped, *stepped = accelerator.prepare(student, *_optimizer(run))
    if store is not None:
        store.resume(run)

    def judge() -> None:
        every = max(1, run.steps // EVALUATIONS)
        if (run.step % every == 0 or run.step == run.steps) and run.judged < run.step:
            found = held_out_loss(student, teacher, data.held_out, accelerator)
            with run.changing():
                run.judge(*found)
                if run.step == 0:
                    _refuse(found[0], run, store)
                elif run.astray and run.step < run.steps:
                    _go_back(run, stepped[0])
            if store is not None and run.step > 0:
                store.save()

    try:
        judge()  # the start, or a step after which a run was interrupted
        for batch in on_device(_batches(run, data.batches, accelerator), student):
            with torch.enable_grad():  # whatever the caller set
                loss = batch_loss(wrapped, teacher, batch)
            seen = float(cast(Tensor, accelerator.reduce(loss.detach(), "mean")))
            if run.is_best:  # as good as it was on held-out data: no step is to blame
                _refuse(seen, run, store)
            _step(run, loss if isfinite(seen) else None, stepped, accelerator)
            if progress is not None:
                progress("Healing", run.step, run.steps, f"loss {seen:.4f}")
            judge()
    except KeyboardInterrupt:
        raise _interruption(run, store) from None
    put(run.best.values, run.trained)


def _optimizer(run: Run) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """Adam, and the one cycle of its learning rate."""
    optimizer = torch.optim.Adam(run.trained, lr=run.learning_rate)
    return optimizer, torch.optim.lr_scheduler.OneCycleLR(
        optimizer, run.learning_rate, total_steps=max(run.steps, 2)
    )


def _go_back(run: Run, optimizer: Any) -> None:
    """Go on from the best so far, at a lower learning rate.

    What Adam knows of the gradients' size stays where it is finite; what it knows of their
    direction does not.
    """
    put(run.best.values, run.trained)
    for group in optimizer.param_groups:
        for name in ("lr", "initial_lr", "max_lr", "min_lr"):  # what OneCycleLR reads
            group[name] *= LOWER
    for state in optimizer.state.values():
        state["exp_avg"].zero_()
        state["exp_avg_sq"].nan_to_num_(0, 0, 0)
    run.went_back.append(run.step)


def _batches(run: Run, batches: Sequence[Batch], accelerator: Accelerator) -> Iterator[Batch]:
    """The batches of the steps to come: each once, in a new order, and again."""
    needed = run.steps * accelerator.num_processes
    generator = torch.Generator().manual_seed(run.seed)
    order: list[int] = []
    while len(order) < needed:
        order += torch.randperm(len(batches), generator=generator).tolist()
    rest = order[run.step * accelerator.num_processes : needed]
    loader: Any = torch.utils.data.DataLoader(
        [batches[index] for index in rest],  # type: ignore[arg-type]
        batch_size=1,
        collate_fn=itemgetter(0),
        generator=generator,  # so that the caller's own is not drawn from
    )
    return iter(accelerator.prepare(loader))


def _refuse(loss: float, run: Run, store: Store | None) -> None:
    """Stop at a loss that is not finite, where going on, now or later, leads nowhere."""
    if isfinite(loss):
        return
    if store is not None:
        store.discard()
    where = "on held-out samples, before the first step"
    if run.curve and isfinite(run.curve[0][1]):
        where = f"at step {run.step + 1} of {run.steps}, of the best parameters that were found"
    raise NonFiniteError(
        f"The loss is {loss} {where}; it must be finite. The model is left as it was. "
        "Change what is read (--calibration, --seed)."
    )


def _step(run: Run, loss: Tensor | None, stepped: Sequence[Any], accelerator: Accelerator) -> None:
    """One step of optimizer and scheduler; without a loss, a step back."""
    optimizer, scheduler = stepped
    optimizer.zero_grad()
    if loss is not None:
        with torch.enable_grad():  # accelerate divides the loss first
            accelerator.backward(loss)
    with run.changing():
        if loss is not None:
            optimizer.step()
        scheduler.step()
        run.step += 1
        if loss is None:
            _go_back(run, optimizer)


def _interruption(run: Run, store: Store | None) -> KeyboardInterrupt:
    """Save what can be saved; what to raise says how to go on, if that is possible."""
    if store is not None and not run.torn and run.step > 0:
        store.save()
    if store is None or not store.resumable:
        return KeyboardInterrupt()
    return KeyboardInterrupt(
        f"Interrupted after step {run.step} of {run.steps}; the model is as it was. "
        "Run the same command again to go on from there."
    )
