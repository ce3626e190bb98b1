"""What a model costs: parameters, bytes, and the latency of the whole of it beside its original's.

round[n] = (seconds of the baseline, seconds of the model), one pass each, one after the other
over     = median_n(model[n] / baseline[n]), with quartiles

What slows the machine down for a while slows both passes of a round, so interleaved runs compare
well where means of separate runs do not. No layer is timed by itself.

Axes: n round, b batch, t position.
"""

import platform
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from collabify.calibration import on_device
from collabify.data.base import image_size, max_positions, model_kind
from collabify.data.synthetic import usable_ids, zipf_ids
from collabify.errors import LabelError, OptionError
from collabify.evaluation.drift import check_comparable
from collabify.evaluation.heads import has_head
from collabify.evaluation.predict import Progress, in_eval_mode
from collabify.models import find_attention
from collabify.scores import Interval
from collabify.speeds import BenchReport, Latency, Machine, Size
from collabify.storage import versions

BATCH_SIZES, LENGTHS, REPEATS = (1, 8), (32, 128), 15
ATTENTION = ("eager", "sdpa")
_WARM_UP = 2  # passes that do not count
_PADDED = 8  # one position in so many, and at least one

Shape = tuple[int, int | None]


def bench(
    model: Any,
    baseline: Any = None,
    *,
    batch_sizes: Sequence[int] = BATCH_SIZES,
    lengths: Sequence[int] | None = None,
    repeats: int = REPEATS,
    threads: int | None = None,
    attention: str | None = None,
    progress: Progress | None = None,
) -> BenchReport:
    """Measure what a model costs to hold and to run, where it is and in its dtype.

    Every batch size is run at every length, on drawn ids of which one in eight is padding, or on
    drawn images. Models and torch are left as they were.

    Parameters
    ----------
    model
        A transformers model, converted or not.
    baseline
        What it is compared with in interleaved runs: a model of the same class, device and dtype.
    batch_sizes
        Texts or images at once.
    lengths
        Tokens of a text, by default 32 and 128, or what the model takes at most; images have the
        model's size.
    repeats
        Rounds for each shape, at least 4.
    threads
        Of torch on the CPU, by default those that it has.
    attention
        ``eager`` or ``sdpa``, for both models; by default the model's.
    progress
        ``(stage, done, total, note)``.

    Raises
    ------
    OptionError
        Where an option is out of bounds, or device or dtype of the models differ.
    LabelError
        Where the baseline is of another class or size.

    Examples
    --------
    >>> report = collabify.bench(model, original)  # doctest: +SKIP
    >>> report.latencies[0].over_baseline  # doctest: +SKIP
    """
    start = time.perf_counter()
    shapes = _shapes(model.config, batch_sizes, lengths)
    _check(repeats, threads, attention)
    if baseline is not None:
        check_alike(model, baseline)
    models = {"model": model} | ({} if baseline is None else {"baseline": baseline})
    wanted = attention or model.config._attn_implementation
    with ExitStack() as stack:
        stack.enter_context(_threads(threads))
        for each in models.values():
            stack.enter_context(in_eval_mode(each))
            stack.enter_context(_attention(each, wanted))
        latencies = tuple(_latency(models, shape, repeats, progress) for shape in shapes)
        machine = _machine(model.device)
    return BenchReport(
        latencies,
        size_of(model),
        None if baseline is None else size_of(baseline),
        machine,
        str(model.dtype).removeprefix("torch."),
        wanted,
        _inputs(model.config),
        _name(model),
        None if baseline is None else _name(baseline),
        options={
            "batch_sizes": list(batch_sizes),
            "lengths": None if lengths is None else list(lengths),
            "repeats": repeats,
            "threads": threads,
            "attention": attention,
        },
        seconds=time.perf_counter() - start,
        versions=versions(),
    )


def size_of(model: Any) -> Size:
    """Parameters and bytes of a model; what several layers share counts once."""
    sites = find_attention(model)
    query_key = sum(site.query_key_parameters for site in sites)
    return Size(
        query_key,
        query_key + sum(site.value_output_parameters for site in sites),
        sum(parameter.numel() for parameter in model.parameters()),
        model.get_memory_footprint(),
    )


def check_alike(model: Any, baseline: Any) -> None:
    """Refuse two models whose passes are not the same work but for the conversion.

    Raises
    ------
    LabelError
        Where class or sizes differ: heads take time of their own.
    OptionError
        Where device or dtype differ.
    """
    ours, theirs = type(model).__name__, type(baseline).__name__
    if ours != theirs:
        raise LabelError(
            f"The model is a {ours} and the baseline a {theirs}, whose head takes time of its own. "
            "Give a baseline of the model's class."
        )
    check_comparable(model, baseline)
    rest, its = (_apart_from_attention(each) for each in (model, baseline))
    if rest != its:
        raise LabelError(
            f"The model has {rest:,} parameters outside attention and the baseline {its:,}, so "
            "their passes are not the same work. Give a baseline of the model's sizes."
        )
    for name in ("device", "dtype"):
        one, other = getattr(model, name), getattr(baseline, name)
        if one != other:
            raise OptionError(
                f"{name}={other} of the baseline must be {one}, as of the model, to be compared. "
                "Load both alike."
            )


def _apart_from_attention(model: Any) -> int:
    size = size_of(model)
    return size.model - size.attention


def _name(model: Any) -> str | None:
    return getattr(model.config, "_name_or_path", None) or None


def _check(repeats: int, threads: int | None, attention: str | None) -> None:
    if repeats < 4:
        raise OptionError(f"repeats={repeats} must be at least 4 for quartiles. Raise --repeats.")
    if threads is not None and threads < 1:
        raise OptionError(f"threads={threads} must be at least 1. Raise --threads.")
    if attention not in (None, *ATTENTION):
        raise OptionError(
            f"attention={attention!r} must be one of {', '.join(ATTENTION)}. Change --attention."
        )


def _shapes(
    config: Any, batch_sizes: Sequence[int], lengths: Sequence[int] | None
) -> tuple[Shape, ...]:
    """Every batch size at every length, each shape once; refuses what the model cannot read."""
    for name, given in (("batch_sizes", batch_sizes), ("lengths", lengths)):
        if given is not None and not given:
            raise OptionError(f"{name}={given} must hold at least one. Leave it out for the usual.")
    for size in batch_sizes:
        if size < 1:
            raise OptionError(f"batch_size={size} must be at least 1. Raise --batch-size.")
    if model_kind(config) == "image":
        if lengths is not None:
            raise OptionError(
                f"length={lengths[0]} is for texts, and model_type={config.model_type!r} takes "
                "images. Leave out --length."
            )
        return tuple(dict.fromkeys((size, None) for size in batch_sizes))
    most = max_positions(config)
    for length in lengths or ():
        if not 2 <= length <= (most or length):
            bound = "at least 2" if most is None else f"between 2 and {most}"
            raise OptionError(
                f"length={length} must be {bound} for model_type={config.model_type!r}. "
                "Change --length."
            )
    taken = lengths or [min(length, most or length) for length in LENGTHS]
    return tuple(dict.fromkeys((size, length) for size in batch_sizes for length in taken))


def _inputs(config: Any) -> str:
    if model_kind(config) == "text":
        return f"token ids, one in {_PADDED} padded and at least one"
    height, width = image_size(config)
    return f"images of {height} x {width}"


def _batch(model: Any, shape: Shape) -> dict[str, Tensor]:
    """Drawn input of one shape; the same each time."""
    config, (size, length) = model.config, shape
    generator = torch.Generator().manual_seed(0)
    if length is None:
        pixels = (size, config.num_channels, *image_size(config))
        return {"pixel_values": torch.randn(pixels, generator=generator)}
    ids = zipf_ids(usable_ids(config), (size, length), generator=generator)
    mask = torch.ones_like(ids)
    mask[:, length - max(1, length // _PADDED) :] = 0
    ids = ids.masked_fill(mask == 0, getattr(config, "pad_token_id", None) or 0)
    batch = {"input_ids": ids, "attention_mask": mask}
    if has_head(model, "ForMultipleChoice"):
        return {name: value[:, None] for name, value in batch.items()}  # one choice each
    return batch


def _latency(
    models: Mapping[str, Any], shape: Shape, repeats: int, progress: Progress | None
) -> Latency:
    """One shape: rounds in which every model runs once, the baseline first."""
    size, length = shape
    batches = {
        name: next(iter(on_device([_batch(model, shape)], model))) for name, model in models.items()
    }
    order = [name for name in ("baseline", "model") if name in models]
    for _ in range(_WARM_UP):
        for name in order:
            _seconds(models[name], batches[name])
    rounds = []
    for done in range(1, repeats + 1):
        rounds.append({name: _seconds(models[name], batches[name]) for name in order})
        if progress is not None:
            progress(f"{size} x {length}" if length else f"{size} images", done, repeats, "")
    middle, quartiles = _spread([each["model"] for each in rounds])
    peaks = {name: _peak(models[name], batches[name]) for name in order}
    if "baseline" not in models:
        return Latency(size, length, middle, quartiles, peak_bytes=peaks["model"])
    return Latency(
        size,
        length,
        middle,
        quartiles,
        *_spread([each["baseline"] for each in rounds]),
        *_spread([each["model"] / each["baseline"] for each in rounds]),
        peaks["model"],
        peaks["baseline"],
    )


def _spread(values: Sequence[float]) -> tuple[float, Interval]:
    """Median and quartiles."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return middle, (low, high)


def _seconds(model: Any, batch: Mapping[str, Tensor]) -> float:
    """Of one forward pass, until its result is there."""
    _synchronise(model.device)
    begin = time.perf_counter()
    with torch.inference_mode():
        model(**batch)
    _synchronise(model.device)
    return time.perf_counter() - begin


def _synchronise(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _peak(model: Any, batch: Mapping[str, Tensor]) -> int | None:
    """What a pass adds to the memory in use, at most, where the allocator counts it."""
    if model.device.type != "cuda":
        return None
    before = torch.cuda.memory_allocated(model.device)
    torch.cuda.reset_peak_memory_stats(model.device)
    _seconds(model, batch)
    return torch.cuda.max_memory_allocated(model.device) - before


def _machine(device: torch.device) -> Machine:
    named = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return Machine(_processor(), named, torch.get_num_threads())


def _processor() -> str:
    """The CPU's name, as its maker and the system tell it."""
    table = Path("/proc/cpuinfo")
    lines = table.read_text(errors="replace").splitlines() if table.is_file() else []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return next(filter(None, [*named, platform.processor(), platform.machine()]), "not known")


@contextmanager
def _threads(number: int | None) -> Iterator[None]:
    """Torch with so many threads; then with those that it had."""
    before = torch.get_num_threads()
    try:
        if number is not None:
            torch.set_num_threads(number)
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _attention(model: Any, implementation: str) -> Iterator[None]:
    """The model with an implementation of attention; then with its own."""
    before = model.config._attn_implementation
    model.set_attn_implementation(implementation)
    try:
        yield
    finally:
        model.set_attn_implementation(before)
