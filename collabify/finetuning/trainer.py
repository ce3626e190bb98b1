"""Hugging Face's Trainer, with a teacher, whole checkpoints, and a loss that must be finite.

    loss = alpha T^2 KL(softmax(z / T) || softmax(z~ / T)) + (1 - alpha) loss of the labels
    loss = alpha |z - z~|^2 + (1 - alpha) loss of the labels          where a number is predicted

To either, where hidden states are asked for, healing's relative distance of all layers is added.

Axes: b batch, k output of the head.
Reference: Hinton et al. 2015, Distilling the Knowledge in a Neural Network.
"""

import math
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from collabify.errors import NonFiniteError, OutputError, first_line
from collabify.healing import relative, squares

Progress = Callable[[str, int, int, str], None]
_NOT_SCORED = ("hidden_states", "attentions", "past_key_values")
COMPLETE = "complete"  # the file that a whole checkpoint has


@dataclass(frozen=True, eq=False)
class Teacher:
    """Whom to follow, and how closely.

    Parameters
    ----------
    model
        With the student's outputs.
    alpha
        Share of the teacher in the loss, in [0, 1].
    temperature
        Divides both models' logits, above 0.
    hidden_states
        Whether the hidden states follow too.
    """

    model: nn.Module
    alpha: float
    temperature: float
    hidden_states: bool


def distillation(
    told: Float[Tensor, "b k"], said: Float[Tensor, "b k"], temperature: float
) -> Float[Tensor, ""]:
    """The teacher's part of the loss, from its logits and the student's; of one output, a number.

    Parameters
    ----------
    told, said
        Logits of the teacher and of the student.
    temperature
        Above 0.
    """
    told, said = told.float(), said.float()
    if said.shape[-1] == 1:
        return nn.functional.mse_loss(said, told)
    soft, wanted = (nn.functional.log_softmax(z / temperature, dim=-1) for z in (said, told))
    kl = nn.functional.kl_div(soft, wanted, reduction="batchmean", log_target=True)
    return kl * temperature**2


class Training(Trainer):
    """The Trainer of a fine-tuning.

    Parameters
    ----------
    teacher
        ``None``: the labels alone.
    options
        Of ``transformers.Trainer``.
    """

    def __init__(self, *, teacher: Teacher | None, **options: Any) -> None:
        super().__init__(**options)
        self.model_accepts_loss_kwargs = False  # heads take the mean: no scaling by processes
        self.teacher = teacher
        self.seen = math.nan  # the last step's loss
        if teacher is not None:
            teacher.model.to(self.args.device)

    def compute_loss(  # type: ignore[override]
        self,
        model: nn.Module,
        inputs: Any,  # a mapping; the collator decides which
        return_outputs: bool = False,
        **kwargs: Any,
    ) -> Any:
        """The labels' loss, and in training the teacher's."""
        if self.teacher is None or not model.training:
            return super().compute_loss(model, inputs, return_outputs, **kwargs)
        hidden = self.teacher.hidden_states
        said = model(**inputs, output_hidden_states=hidden)
        unlabelled = {name: value for name, value in inputs.items() if name != "labels"}
        with torch.no_grad():
            told = self.teacher.model(**unlabelled, output_hidden_states=hidden)
        alpha = self.teacher.alpha
        soft = distillation(told.logits, said.logits, self.teacher.temperature)
        loss = alpha * soft + (1 - alpha) * said.loss
        if hidden:
            loss = loss + _distance(told.hidden_states, said.hidden_states, inputs)
        return (loss, said) if return_outputs else loss

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """One step's gradients.

        Raises
        ------
        NonFiniteError
            Where the loss is NaN or infinite.
        """
        loss = super().training_step(*args, **kwargs)
        self.seen = float(loss)
        if not math.isfinite(self.seen):
            step, steps = self.state.global_step + 1, self.state.max_steps
            raise NonFiniteError(
                f"The loss is {self.seen} at step {step} of {steps}; it must be finite. Lower "
                f"--learning-rate ({self.args.learning_rate:g}), or look at the data of that step."
            )
        return loss

    def prediction_step(
        self, model: nn.Module, inputs: Any, loss_only: bool, ignore_keys: Any = None
    ) -> Any:
        """Loss, logits and labels, also of models whose config asks for more outputs."""
        ignored = [*(ignore_keys or ()), *_NOT_SCORED]
        return super().prediction_step(model, inputs, loss_only, ignored)

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Write a checkpoint whole or not at all, so that those before it stay of use."""
        name = f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        folder = Path(str(self.args.output_dir)) / name
        try:
            super()._save_checkpoint(*args, **kwargs)
            if self.args.should_save:
                (folder / COMPLETE).touch()
        except (OSError, SafetensorError, RuntimeError) as error:  # torch's and safetensors' own
            shutil.rmtree(folder, ignore_errors=True)
            before = last_checkpoint(folder.parent)
            stays = "There is none before it" if before is None else f"{before.name!r} stays"
            raise OutputError(
                f"{str(folder)!r} could not be written ({first_line(error)}). {stays}. "
                "Free space, then run the same command with --resume."
            ) from error


def _distance(
    told: tuple[Tensor, ...], said: tuple[Tensor, ...], inputs: Mapping[str, Tensor]
) -> Float[Tensor, ""]:
    """Healing's loss, of all layers."""
    mask = inputs.get("attention_mask")
    old, new = ([h.float() for h in states[1:]] for states in (told, said))
    return relative(squares(old, new, None if mask is None else mask.bool()))


def last_checkpoint(work: Path) -> Path | None:
    """The last whole checkpoint in a folder, or ``None``; others may be writing there."""
    try:
        found = [path.parent for path in work.glob(f"{PREFIX_CHECKPOINT_DIR}-*/{COMPLETE}")]
    except FileNotFoundError:  # the folder went while it was read
        return None
    return max(found, key=checkpoint_step, default=None)


def checkpoint_step(checkpoint: Path) -> int:
    """The step after which a checkpoint was written."""
    return int(checkpoint.name.rpartition("-")[2])


class Flow(TrainerCallback):
    """Shows progress, and ends a run early but whole.

    After :meth:`stop`, the step under way is finished and a checkpoint written; an epoch that is at
    its end is also scored.

    Parameters
    ----------
    training
        The Trainer.
    progress
        Called with a stage, what is done of it, out of how much, and a few words.
    logs
        How many in the whole run, for those who report them; ``None``: one an epoch.
    """

    def __init__(self, training: Training, progress: Progress | None, logs: int | None) -> None:
        self.training, self.progress, self.logs = training, progress, logs
        self.stopped = False
        self.scored = 0

    def stop(self) -> None:
        """Ask for an end."""
        self.stopped = True

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Between two steps."""
        if self.progress is not None:
            note = f"loss {self.training.seen:.4f}"
            self.progress("Training", state.global_step, state.max_steps, note)
        if self.logs is not None and state.global_step % -(-state.max_steps // self.logs) == 0:
            control.should_log = True
        if self.stopped and not _at_epoch_end(state):
            control.should_log = control.should_save = control.should_training_stop = True

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Also after a run that was stopped on the way."""
        if self.stopped:
            control.should_training_stop = True
            if not _at_epoch_end(state):
                control.should_evaluate = control.should_save = False

    def on_prediction_step(
        self, args: Any, state: Any, control: Any, eval_dataloader: Any = None, **kwargs: Any
    ) -> None:
        """Within a scoring."""
        self.scored += 1
        if self.progress is not None:
            self.progress("Scoring", self.scored, len(eval_dataloader), "")

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """After one."""
        self.scored = 0


def _at_epoch_end(state: Any) -> bool:
    return bool(state.global_step % (state.max_steps // state.num_train_epochs) == 0)
