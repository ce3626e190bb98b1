"""Fine-tuning, with labels and with a teacher; Hugging Face's Trainer underneath."""

from collabify.finetuning.run import finetune

__all__ = ["finetune"]
