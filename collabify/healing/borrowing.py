"""Models and devices on loan: while healing as it needs them, then as they were."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import reduce

import torch
from accelerate import Accelerator, DistributedType  # type: ignore[import-untyped]
from accelerate.state import AcceleratorState, PartialState  # type: ignore[import-untyped]
from accelerate.utils import get_int_from_env  # type: ignore[import-untyped]
from torch import Tensor, nn

from collabify.errors import OptionError


def is_main_process() -> bool:
    """Whether this is the process that writes and prints, also before accelerate has started."""
    return int(get_int_from_env(_RANKS, 0)) == 0


# Where launchers put a process's number; those that accelerate reads.
_RANKS = ("RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK")


@contextmanager
def local_accelerator(device: torch.device) -> Iterator[Accelerator]:
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


def training_device(accelerator: Accelerator, trained: Sequence[nn.Parameter]) -> torch.device:
    """Where to train: where the model is, or with several processes each on its own device."""
    return trained[0].device if accelerator.num_processes == 1 else accelerator.device


@contextmanager
def borrowed(
    models: Sequence[nn.Module],
    trained: Sequence[nn.Parameter],
    start: Sequence[Tensor],
    device: torch.device,
) -> Iterator[None]:
    """Models on one device, in one dtype of at least 32 bits, without dropout; then as before.

    Nothing is kept twice: casting back to where and what a parameter was is exact. Only the values
    of ``trained`` stay changed, and after an exception not even those: they are ``start`` again.
    """
    parameters = [parameter for each in models for parameter in each.parameters()]
    modules = [module for each in models for module in each.modules()]
    places = [(parameter, parameter.device, parameter.dtype) for parameter in parameters]
    flags = [(parameter, parameter.requires_grad, parameter.grad) for parameter in parameters]
    buffers = [(module, dict(module._buffers), module.training) for module in modules]
    dtype = reduce(torch.promote_types, (p.dtype for p in parameters), torch.float32)
    try:
        for parameter in parameters:
            parameter.grad = None  # it would be cast along, in place
        for each in models:
            each.to(device=device, dtype=dtype).requires_grad_(False).eval()
        for parameter in trained:
            parameter.requires_grad_(True).grad = None
        yield
    except BaseException:
        put(start, trained)
        raise
    finally:
        for parameter, place, old in places:
            parameter.data = parameter.data.to(device=place, dtype=old)
        for parameter, required, gradient in flags:
            parameter.requires_grad_(required).grad = gradient
        for module, named, training in buffers:
            module._buffers.update(named)
            module.training = training


def put(values: Sequence[Tensor], parameters: Sequence[Tensor]) -> None:
    """Copy values into parameters, in place."""
    with torch.no_grad():
        for value, parameter in zip(values, parameters, strict=True):
            parameter.copy_(value)


def round_to(dtypes: Sequence[torch.dtype], parameters: Sequence[Tensor]) -> None:
    """The values that will be left when the parameters are in their own dtype again."""
    with torch.no_grad():
        for dtype, parameter in zip(dtypes, parameters, strict=True):
            parameter.copy_(parameter.to(dtype))
