"""The options of a fine-tuning in the words of Hugging Face's Trainer."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from accelerate.state import AcceleratorState, PartialState  # type: ignore[import-untyped]
from transformers import TrainingArguments
from transformers.integrations import integration_utils

from collabify.errors import OptionError, first_line
from collabify.finetuning.options import PRECISIONS, Options
from collabify.storage import check_device


def trainer_arguments(
    work: Path, options: Options, device: str | None, report_to: Sequence[str]
) -> TrainingArguments:
    """The Trainer's arguments.

    Raises
    ------
    OptionError
        Where the device, a tracker or the precision cannot be had here.
    """
    if device not in (None, "cpu", "cuda", "mps"):
        raise OptionError(
            f"device={device!r} must be cpu, cuda or mps. Choose one GPU of several with "
            "CUDA_VISIBLE_DEVICES."
        )
    check_device(device)
    trackers = integration_utils.get_available_reporting_integrations()  # type: ignore[no-untyped-call]
    for name in report_to:
        if name not in trackers:
            raise OptionError(
                f"report_to={name!r} must be a tracker that is installed "
                f"({', '.join(trackers) or 'there is none'}). Install it, or leave out --report-to."
            )
    precision = PRECISIONS[options.precision]
    on_cpu = device == "cpu" or not torch.accelerator.is_available()
    try:
        if precision == "fp16" and on_cpu:
            raise ValueError("it needs a GPU")
        arguments = TrainingArguments(
            output_dir=str(work),
            num_train_epochs=options.epochs,
            learning_rate=options.learning_rate,
            per_device_train_batch_size=options.batch_size,
            per_device_eval_batch_size=options.batch_size,
            seed=options.seed,
            fp16=precision == "fp16",
            bf16=precision == "bf16",
            use_cpu=on_cpu,
            eval_strategy="epoch",
            save_strategy="epoch",
            logging_strategy="epoch",
            save_total_limit=2,
            logging_nan_inf_filter=False,
            report_to=list(report_to) or "none",
            disable_tqdm=True,
            remove_unused_columns=False,
            label_names=["labels"],
            dataloader_pin_memory=not on_cpu,
        )
        arguments._n_gpu = min(arguments.n_gpu, 1)  # several GPUs: accelerate launch
    except ValueError as error:
        raise OptionError(
            f"precision={options.precision!r} cannot be had here ({first_line(error)}). "
            "Leave out --precision."
        ) from error
    return arguments


@contextmanager
def no_trace() -> Iterator[None]:
    """The while with accelerate's state of the run's own, where one process had none before."""
    there = PartialState._shared_state != {}
    try:
        yield
    finally:
        if not there and PartialState._shared_state and PartialState().num_processes == 1:
            AcceleratorState._reset_state(reset_partial_state=True)
