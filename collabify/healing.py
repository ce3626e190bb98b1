"""Healing: win back what a conversion lost, without labels.

    loss = sum_lt |h_l[t] - h~_l[t]|^2  /  sum_lt |h_l[t]|^2

Only what the conversion made is trained (shared queries and keys with their content rows, mixing,
cores), so that the hidden states ``h~`` after every layer follow those of the original, ``h``, on
text or images that nobody has labelled. The step that is best on held-out data is kept, and if none
is better than the start, the model is left bit for bit as it was.

Axes: l layer, t real token of all sequences of a batch.
"""

import hashlib
import json
import shutil
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import reduce
from operator import itemgetter
from pathlib import Path
from typing import Any, cast

import torch
from accelerate import Accelerator, DistributedType  # type: ignore[import-untyped]
from accelerate.state import (  # type: ignore[import-untyped]
    AcceleratorState,
    PartialState,
)
from accelerate.utils import (  # type: ignore[import-untyped]
    broadcast_object_list,
    get_int_from_env,
)
from jaxtyping import Bool, Float
from torch import Tensor, nn

from collabify.calibration import on_device
from collabify.data import CalibrationData, load_calibration
from collabify.drift import base_model, measure_drift
from collabify.errors import (
    AlreadyConvertedError,
    CheckpointError,
    CollabifyWarning,
    NonFiniteError,
    OptionError,
    first_line,
)
from collabify.models import find_attention
from collabify.planning import check_finite
from collabify.results import HealingReport

MOST_SAMPLES = 1024  # by default; more than one pass over the data brings little
EVALUATIONS = 10  # on held-out data, evenly over the steps
RUN_FILE = "run.json"

Progress = Callable[[str, int, int, str], None]
Batch = Mapping[str, Tensor]


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
        What both read, as :func:`collabify.convert` takes it, but for ``none``.
    samples
        How many calibration samples to take; by default a quarter of what all steps read, at most
        1024. More than that are read in several rounds, in a new order each.
    max_length
        Tokens of a text at most.
    steps, batch_size
        Steps of Adam, and samples that a process reads in each. Ready batches stay as they are.
    learning_rate
        The peak of one cycle.
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
        Where a weight or the loss is NaN or infinite. As after all errors and Ctrl-C, the model is
        then what it was.

    Examples
    --------
    >>> report = collabify.heal(model, original, calibration="texts.txt")  # doctest: +SKIP
    >>> report.kept, report.drift_after.hidden_cosine  # doctest: +SKIP
    """
    started = time.perf_counter()
    _check_options(calibration, steps, batch_size, learning_rate)
    trained = new_parameters(model)
    _check_teacher(model, teacher, trained)
    for checked in (model, teacher):
        check_finite(checked)
    if samples is None:
        samples = max(2, min(MOST_SAMPLES, steps * batch_size // 4))
    data = load_calibration(
        calibration,
        cast(Any, model).config,
        samples=samples,
        max_length=max_length,
        batch_size=batch_size,
        seed=seed,
        processor=processor,
    )
    if not data.batches or not data.held_out:
        raise OptionError(
            f"The calibration data ({data.description}) has {len(data.batches)} batches and "
            f"{len(data.held_out)} held out; healing needs both. Give more samples."
        )
    options = {"steps": steps, "batch_size": batch_size, "learning_rate": learning_rate}
    options |= {"samples": samples, "max_length": max_length, "seed": seed}
    with _accelerator(trained[0].device) as accelerator:
        run = _Run(trained, steps, learning_rate, seed, _store(state, accelerator, options))
        with _borrowed(model, teacher, trained, _device(accelerator, trained)):
            if run.store is not None:
                run.store.identify(model, teacher, data)
            before = measure_drift(teacher, model, data.held_out)
            _train(run, base_model(model), base_model(teacher), data, accelerator, progress)
            _round(trained, run.dtypes)
            after = measure_drift(teacher, model, data.held_out)
            # Rounded to its own dtype, behind the last norm, the model has the last word.
            worse = not after.hidden_error <= before.hidden_error
            (worse,) = broadcast_object_list([worse])  # every process with the same verdict
            if worse:
                run.restore()
        kept = not worse and run.best_step > 0
        return HealingReport(
            kept=kept,
            steps=steps,
            best_step=run.best_step if kept else 0,
            loss_before=run.curve[0][1],
            loss_after=run.best_loss if kept else run.curve[0][1],
            drift_before=before,
            drift_after=after if kept else before,
            curve=tuple(run.curve),
            parameters=sum(parameter.numel() for parameter in trained),
            calibration=data.description,
            options=options | {"processes": accelerator.num_processes},
            resumed_at=run.resumed_at,
            seconds=time.perf_counter() - started,
        )


def new_parameters(model: nn.Module) -> list[nn.Parameter]:
    """What a conversion made: shared projections of queries and keys, and the method's own.

    Raises
    ------
    CheckpointError
        Where no layer was converted.
    """
    found = [
        parameter
        for site in find_attention(model)
        if site.converted
        for parameter in (
            *site.query.parameters(),
            *site.key.parameters(),
            *site.module.parameters(recurse=False),
        )
    ]
    if not found:
        raise CheckpointError(
            f"None of the attention layers of this {type(model).__name__} was converted, so there "
            "is nothing to heal. Convert it first."
        )
    return found


def is_main_process() -> bool:
    """Whether this is the process that writes and prints, also before accelerate has started."""
    return int(get_int_from_env(_RANKS, 0)) == 0


# Where launchers put a process's number; those that accelerate reads.
_RANKS = ("RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK")


def _check_options(calibration: object, steps: int, batch_size: int, learning_rate: float) -> None:
    for name, value in (("steps", steps), ("batch_size", batch_size)):
        if value < 1:
            raise OptionError(
                f"{name}={value} must be at least 1. Raise --{name.replace('_', '-')}."
            )
    if not 0 < learning_rate < float("inf"):
        raise OptionError(
            f"learning_rate={learning_rate} must be above 0 and finite. Change --learning-rate."
        )
    if calibration is None or calibration == "none":
        raise OptionError(
            f"calibration={calibration!r} leaves nothing to heal on. "
            "Leave out --calibration for 'synthetic', or give a file."
        )


def _check_teacher(model: nn.Module, teacher: nn.Module, trained: Sequence[nn.Parameter]) -> None:
    """Refuse a teacher of another architecture, of other sizes, or that was converted too."""
    if any(site.converted for site in find_attention(teacher)):
        raise AlreadyConvertedError(
            "The teacher was converted before; it must be the original. Change --teacher."
        )
    (ours, is_), (theirs, was) = (_outline(each) for each in (model, teacher))
    if ours != theirs:
        raise CheckpointError(
            f"The teacher ({was}) must be the model that this one was converted from ({is_}). "
            "Change --teacher."
        )
    new = {id(parameter) for parameter in trained}
    originals = dict(base_model(teacher).named_parameters())
    differ = []
    for name, parameter in base_model(model).named_parameters():
        if id(parameter) in new or name not in originals:
            continue
        if parameter.shape != originals[name].shape:
            raise CheckpointError(
                f"{name!r} of the teacher is {tuple(originals[name].shape)}; it must be "
                f"{tuple(parameter.shape)}, as in the converted model. Change --teacher."
            )
        if not torch.equal(originals[name].detach().to(parameter), parameter.detach()):
            differ.append(name)
    if differ:
        warnings.warn(
            f"{len(differ)} parameters that the conversion left alone differ from the teacher's "
            f"({differ[0]!r} first): it is not what this model was converted from, or the model "
            "was trained since.",
            CollabifyWarning,
            stacklevel=3,
        )


def _outline(model: nn.Module) -> tuple[tuple[Any, ...], str]:
    """A model's architecture, to compare and in words."""
    config, sites = cast(Any, model).config, find_attention(model)
    heads = [(site.name, site.num_heads, site.width) for site in sites]
    words = (
        f"{config.model_type}, {config.num_hidden_layers} layers of {sites[0].num_heads} heads, "
        f"width {sites[0].width}"
    )
    return (config.model_type, config.num_hidden_layers, heads), words


@contextmanager
def _accelerator(device: torch.device) -> Iterator[Accelerator]:
    """An accelerator that leaves no trace where there was none; tensors we place ourselves."""
    there = PartialState._shared_state != {}
    accelerator = Accelerator(
        cpu=not there and device.type == "cpu",
        device_placement=False,
        step_scheduler_with_optimizer=False,
    )
    try:
        if accelerator.distributed_type in _SHARDED:
            raise OptionError(
                f"accelerate is set to {accelerator.distributed_type.value}, which splits a model; "
                "healing only splits the data. Run: accelerate launch --multi_gpu ..."
            )
        yield accelerator
    finally:
        accelerator.free_memory()
        if not there and accelerator.num_processes == 1:
            AcceleratorState._reset_state(reset_partial_state=True)


_SHARDED = (DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM)


def _device(accelerator: Accelerator, trained: Sequence[nn.Parameter]) -> torch.device:
    """Where to train: where the model is, or with several processes each on its own device."""
    return trained[0].device if accelerator.num_processes == 1 else accelerator.device


@contextmanager
def _borrowed(
    model: nn.Module, teacher: nn.Module, trained: Sequence[nn.Parameter], device: torch.device
) -> Iterator[None]:
    """Both models on one device, in one dtype of at least 32 bits, without dropout; then as before.

    Only the values of ``trained`` stay, cast to the dtype that they had. After an exception not
    even those.
    """
    models = (model, teacher)
    parameters = [parameter for each in models for parameter in each.parameters()]
    modules = [module for each in models for module in each.modules()]
    data = [(parameter, parameter.data) for parameter in parameters]
    flags = [(parameter, parameter.requires_grad, parameter.grad) for parameter in parameters]
    buffers = [(module, dict(module._buffers), module.training) for module in modules]
    values = [parameter.detach().clone() for parameter in trained]
    dtype = reduce(torch.promote_types, (p.dtype for p in parameters), torch.float32)
    try:
        for each in models:
            each.to(device=device, dtype=dtype).requires_grad_(False).eval()
        for parameter in trained:
            parameter.requires_grad_(True).grad = None
        yield
        values = [parameter.detach().clone() for parameter in trained]
    finally:
        for parameter, old in data:
            parameter.data = old
        for parameter, required, gradient in flags:
            parameter.requires_grad_(required).grad = gradient
        for module, named, training in buffers:
            module._buffers.update(named)
            module.training = training
        _put(values, trained)


def _put(values: Sequence[Tensor], parameters: Sequence[nn.Parameter]) -> None:
    """Copy values into parameters, in place."""
    with torch.no_grad():
        for value, parameter in zip(values, parameters, strict=True):
            parameter.copy_(value)


def _round(trained: Sequence[nn.Parameter], dtypes: Sequence[torch.dtype]) -> None:
    """The values that will be left when the parameters are in their own dtype again."""
    _put([p.detach().to(dtype) for p, dtype in zip(trained, dtypes, strict=True)], trained)


class _HiddenStates(nn.Module):
    """An encoder as a function to its hidden states after every layer."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, batch: Batch) -> tuple[Tensor, ...]:
        """Of all layers, ``[b, t, i]`` each."""
        return tuple(self.encoder(**batch, output_hidden_states=True).hidden_states[1:])


def squares(
    old: Sequence[Float[Tensor, "b t i"]],
    new: Sequence[Float[Tensor, "b t i"]],
    mask: Bool[Tensor, "b t"] | None,
) -> Float[Tensor, "2 l"]:
    """Sums over the real tokens of every layer: ``|h - h~|^2`` and ``|h|^2``."""
    sums = []
    for h, g in zip(old, new, strict=True):
        if mask is not None:
            h, g = h[mask], g[mask]
        sums.append(torch.stack([(h - g).square().sum(), h.square().sum()]))
    return torch.stack(sums, dim=1)


def relative(sums: Float[Tensor, "2 l"]) -> Float[Tensor, ""]:
    """The loss: the quotient over all layers together.

    So layers count by their norms, as in a plain mean of squares. Measured on minilm-l6 at D̃k = 128
    (150 steps of 32 RTE premises), mean cosine of sentence embeddings to the original's: 0.9766
    before, 0.9917 so, 0.9912 with the mean over layers of each one's quotient.
    """
    total = sums.sum(dim=1)
    return total[0] / total[1].clamp(min=torch.finfo(sums.dtype).tiny)


def _mask(batch: Batch) -> Bool[Tensor, "b t"] | None:
    mask = batch.get("attention_mask")
    return None if mask is None else mask.bool()


def held_out_loss(
    student: nn.Module, teacher: nn.Module, batches: Sequence[Batch], accelerator: Accelerator
) -> tuple[float, float]:
    """The loss over all tokens of all batches at once, and the last layer's part of it.

    The processes share the batches among them.
    """
    total: Tensor | None = None
    mine = range(accelerator.process_index, len(batches), accelerator.num_processes)
    with torch.no_grad():
        # A process without a batch of its own needs zeros of the right shape.
        for index, batch in enumerate(on_device(batches, student)):
            if index in mine or total is None:
                part = squares(teacher(batch), student(batch), _mask(batch)).double()
                part = part if index in mine else torch.zeros_like(part)
                total = part if total is None else total + part
    sums = cast(Tensor, accelerator.reduce(total, "sum"))
    return float(relative(sums)), float(relative(sums[:, -1:]))


@dataclass
class _Run:
    """How far a run is; what is saved so that it can go on."""

    trained: list[nn.Parameter]
    steps: int
    learning_rate: float
    seed: int
    store: "_Store | None"
    step: int = 0
    best_step: int = 0
    best_loss: float = float("inf")
    limit: float = float("inf")
    curve: list[tuple[int, float]] = field(default_factory=list)
    resumed_at: int | None = None

    def __post_init__(self) -> None:
        self.dtypes = [parameter.dtype for parameter in self.trained]
        self.start = [parameter.detach().clone() for parameter in self.trained]
        self.best = self.start

    def judge(self, loss: float, last: float) -> None:
        """Keep what the parameters are now if it is the best so far; NaN never is.

        The loss is of all layers, but the last one's part of it may not grow on the way: it is what
        the model gives.
        """
        if not self.curve:
            self.limit = last
        if loss < self.best_loss and last <= self.limit:
            self.best_step, self.best_loss = self.step, loss
            self.best = [parameter.detach().clone() for parameter in self.trained]
        self.curve.append((self.step, loss))

    @property
    def judged(self) -> int:
        """The last step that was judged; -1: none."""
        return self.curve[-1][0] if self.curve else -1

    def restore(self) -> None:
        """Give the parameters the values that they had."""
        _put(self.start, self.trained)

    def state_dict(self) -> dict[str, Any]:
        """For accelerate."""
        now = [parameter.detach() for parameter in self.trained]
        names = ("step", "best_step", "best_loss", "best", "limit", "curve")
        return {name: getattr(self, name) for name in names} | {"now": now}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """For accelerate."""
        _put(state.pop("now"), self.trained)
        for name, value in state.items():
            setattr(self, name, value)
        self.resumed_at = self.step


def _train(
    run: _Run,
    encoder: nn.Module,
    original: nn.Module,
    data: CalibrationData,
    accelerator: Accelerator,
    progress: Progress | None,
) -> None:
    """All steps; the parameters end as the best of them."""
    student, teacher = _HiddenStates(encoder), _HiddenStates(original)
    optimizer = torch.optim.Adam(run.trained, lr=run.learning_rate)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, run.learning_rate, total_steps=max(run.steps, 2)
    )
    wrapped, optimizer, scheduler = accelerator.prepare(student, optimizer, scheduler)
    if run.store is not None:
        run.store.resume(run)
    every = max(1, run.steps // EVALUATIONS)
    whole = True  # not while a step is half taken

    def judge() -> None:
        if (run.step % every == 0 or run.step == run.steps) and run.judged < run.step:
            run.judge(*held_out_loss(student, teacher, data.held_out, accelerator))
            if run.store is not None and run.step > 0:
                run.store.save()

    try:
        judge()  # the start, or a step after which a run was interrupted
        for batch in on_device(_batches(run, data, accelerator), student):
            loss = _loss(wrapped, teacher, batch)
            seen = float(cast(Tensor, accelerator.reduce(loss.detach(), "mean")))
            if not torch.isfinite(torch.tensor(seen)):
                raise NonFiniteError(
                    f"The loss is {seen} at step {run.step + 1} of {run.steps}; it must be finite. "
                    f"The model is left as it was. Lower --learning-rate ({run.learning_rate:g})."
                )
            optimizer.zero_grad()
            accelerator.backward(loss)
            whole = False
            optimizer.step()
            scheduler.step()
            run.step += 1
            whole = True
            if progress is not None:
                progress("Healing", run.step, run.steps, f"loss {seen:.4f}")
            judge()
    except KeyboardInterrupt:
        if run.store is not None and whole and run.step > 0:
            run.store.save()
        if run.store is None or not run.store.folder.is_dir():
            raise
        raise KeyboardInterrupt(
            f"Interrupted after step {run.step} of {run.steps}; the model is as it was. "
            "Run the same command again to go on from there."
        ) from None
    _put(run.best, run.trained)


def _loss(student: nn.Module, teacher: nn.Module, batch: Batch) -> Float[Tensor, ""]:
    """Of one batch, with a graph."""
    with torch.no_grad():
        old = teacher(batch)
    return relative(squares(old, student(batch), _mask(batch)))


def _batches(run: _Run, data: CalibrationData, accelerator: Accelerator) -> Any:
    """The batches of the steps to come: each once, in a new order, and again."""
    needed = run.steps * accelerator.num_processes
    generator = torch.Generator().manual_seed(run.seed)
    order: list[int] = []
    while len(order) < needed:
        order += torch.randperm(len(data.batches), generator=generator).tolist()
    rest = order[run.step * accelerator.num_processes : needed]
    return accelerator.prepare(
        torch.utils.data.DataLoader(
            [data.batches[index] for index in rest],  # type: ignore[arg-type]
            batch_size=1,
            collate_fn=itemgetter(0),
            generator=generator,  # so that the caller's own is not drawn from
        )
    )


def _store(
    state: Path | None, accelerator: Accelerator, options: Mapping[str, Any]
) -> "_Store | None":
    if state is None:
        return None
    return _Store(state, accelerator, {**options, "processes": accelerator.num_processes})


class _Store:
    """The folder that keeps a run's progress; the main process writes it, whole or not at all."""

    def __init__(self, folder: Path, accelerator: Accelerator, options: dict[str, Any]) -> None:
        self.folder, self.accelerator, self.record = folder, accelerator, options
        # Everything that changes is in the run, which is registered with the accelerator.
        accelerator.register_save_state_pre_hook(lambda models, weights, _: weights.clear())
        accelerator.register_load_state_pre_hook(lambda models, _: models.clear())

    def identify(self, model: nn.Module, teacher: nn.Module, data: CalibrationData) -> None:
        """Say which run this is: what goes in, and the options."""
        self.record["model"] = _digest(model.parameters())
        self.record["teacher"] = _digest(teacher.parameters())
        batches = (*data.batches, *data.held_out)
        self.record["calibration"] = _digest(value for batch in batches for value in batch.values())

    def resume(self, run: _Run) -> None:
        """Go on from where the same run stopped, if it did."""
        self.accelerator.register_for_checkpointing(run)
        if not self.folder.is_dir():
            return
        try:
            record = json.loads((self.folder / RUN_FILE).read_text())
            differ = [name for name in self.record if record.get(name) != self.record[name]]
            if not differ:
                self.accelerator.load_state(str(self.folder))
                return
        except Exception as error:  # torch.load raises nothing narrower for a damaged file
            raise CheckpointError(
                f"{str(self.folder)!r} holds a run that was interrupted, and cannot be read "
                f"({first_line(error)}). Delete it to start over."
            ) from error
        if self.accelerator.is_main_process:
            warnings.warn(
                f"The run that was interrupted had another {', '.join(differ)}: starting over.",
                CollabifyWarning,
                stacklevel=2,
            )

    def save(self) -> None:
        """Write the progress."""
        if not self.accelerator.is_main_process:
            return
        scratch = self.folder.with_name(f"{self.folder.name}-new")
        shutil.rmtree(scratch, ignore_errors=True)
        self.accelerator.save_state(str(scratch))
        (scratch / RUN_FILE).write_text(json.dumps(self.record))
        shutil.rmtree(self.folder, ignore_errors=True)
        scratch.rename(self.folder)


def _digest(tensors: Any) -> str:
    """A fingerprint of numbers."""
    found = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        found.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return found.hexdigest()
