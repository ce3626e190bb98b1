"""Converted models as ordinary checkpoints: the plug-in that lets transformers load them.

``config.json`` carries the record of :class:`collabify.config.ConversionConfig` under
``quantization_config``, the one place where transformers lets a package change a model's modules
before its weights are loaded. Once they are, the model is a plain float model again: ``half()``,
``Trainer``, ``save_pretrained`` and the rest see nothing special.

A process that did not import collabify builds the original architecture and stops at the shape of
the key projections.

Importing this module registers the plug-in. ``import collabify`` sees to it, while transformers
itself is still being imported, so what needs models is imported where it is used.
"""

from pathlib import Path
from typing import Any

from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from collabify.config import QUANT_METHOD, ConversionConfig


@register_quantization_config(QUANT_METHOD)
class CollabifyConfig(QuantizationConfigMixin):
    """The record of ``config.json`` in the shape that transformers wants."""

    def __init__(self, **record: Any) -> None:
        self.quant_method = QUANT_METHOD  # type: ignore[assignment]
        self.record = ConversionConfig.from_dict(record)

    def to_dict(self) -> dict[str, Any]:
        """The record as JSON."""
        return self.record.to_dict()


@register_quantizer(QUANT_METHOD)
class CollabifyQuantizer(HfQuantizer):
    """Gives a model its converted modules before its weights are loaded, and then steps aside."""

    quantization_config: CollabifyConfig
    commits: set[str | None]
    shapes: dict[str, Any]

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> None:
        from collabify.models.loading import check_files, shape_as_recorded
        from collabify.storage import commit_of

        files = kwargs.get("checkpoint_files") or ()
        check_files(files)
        self.commits = {commit_of(Path(file)) for file in files}
        shape_as_recorded(model, self.quantization_config.record)
        self.shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}

    def postprocess_model(self, model: Any, **kwargs: Any) -> Any:
        """Leave an ordinary model that still says what it is, and takes its record along.

        Raises
        ------
        CheckpointError
            Where the checkpoint lacks a factor: transformers would make one up.
        """
        from collabify.models.loading import check_loaded, check_shapes
        from collabify.storage import carry

        check_shapes(model, self.shapes)
        check_loaded(model, self.quantization_config.record)
        model.config.quantization_config = self.quantization_config.to_dict()
        for name in ("hf_quantizer", "quantization_method", "is_quantized"):
            model.__dict__.pop(name, None)
        model.config._commit_hash = next(iter(self.commits), None)  # never saved
        carry(model)
        return model

    def is_serializable(self) -> bool:
        """Converted models are saved like any other."""
        return True

    @property
    def is_trainable(self) -> bool:
        """Converted models are trained like any other."""
        return True
