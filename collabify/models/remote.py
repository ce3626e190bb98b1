"""Converted models where collabify is not installed: the end of ``modeling_collabify.py``.

That file is this module and all that it needs (:mod:`collabify.storage.standalone`). transformers
asks it for the classes that ``auto_map`` in ``config.json`` names; each is transformers' own class
of that name, whose layers take the forms of the record before weights are loaded.
"""

import copy
from typing import Any, cast

import transformers
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING

from collabify.config import QUANT_METHOD, ConversionConfig
from collabify.errors import CheckpointError, OptionError
from collabify.models.loading import check_files, check_loaded, shape_as_recorded


class Standalone:
    """What such a class has before transformers' own; see :func:`__getattr__`."""

    original: type[PreTrainedModel]

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        record = vars(config).pop(_MOVED, None) or getattr(config, "quantization_config", None)
        if not isinstance(record, dict) or record.get("quant_method") != QUANT_METHOD:
            raise CheckpointError(
                "config.json has no record of collabify, which modeling_collabify.py needs. "
                f"Load the model without it: transformers.{type(self).__name__}"
            )
        super().__init__(config, *args, **kwargs)  # type: ignore[call-arg]
        model = cast(Any, self)
        if not next(model.parameters()).is_meta:
            raise CheckpointError(
                "A converted model cannot start from random weights. Load it: from_pretrained"
            )
        shape_as_recorded(model, ConversionConfig.from_dict(record))
        model.config.quantization_config = record

    @classmethod
    def is_custom_code(cls) -> bool:
        """No: such a checkpoint has the names that transformers' own class reads and renames."""
        return False

    @staticmethod
    def _load_pretrained_model(model: Any, state: Any, files: Any, *args: Any) -> Any:
        """As transformers' own, of files that :func:`check_files` lets pass."""
        check_files(files or ())
        return cast(Any, PreTrainedModel)._load_pretrained_model(model, state, files, *args)

    @classmethod
    def from_pretrained(cls, name: Any, *args: Any, config: Any = None, **kwargs: Any) -> Any:
        """As transformers' own; where collabify is imported, it loads the model itself.

        Raises
        ------
        OptionError
            Where the model is to be quantised while it is loaded.
        CheckpointError
            Where the checkpoint lacks a factor, or holds one of another kind.
        """
        if QUANT_METHOD in AUTO_QUANTIZER_MAPPING:
            return cls.original.from_pretrained(name, *args, config=config, **kwargs)
        if kwargs.get("quantization_config") is not None:
            raise OptionError(
                f"quantization_config={type(kwargs['quantization_config']).__name__} must not be "
                f"given for {str(name)!r}: config.json holds one method, and that is collabify. "
                "Load the model without it, then quantise its layers."
            )
        if isinstance(config, PreTrainedConfig) and hasattr(config, "quantization_config"):
            # Moved out of transformers' sight, which would look for a quantizer of that name.
            config = copy.deepcopy(config)
            vars(config)[_MOVED] = vars(config).pop("quantization_config")
        loader = cast(Any, super())
        found = loader.from_pretrained(name, *args, config=config, **kwargs)
        model = found[0] if isinstance(found, tuple) else found
        check_loaded(model, ConversionConfig.from_dict(model.config.quantization_config))
        return found


_MOVED = "_collabify_record"
_CLASSES: dict[str, type] = {}


def __getattr__(name: str) -> Any:
    """The class of that name, made once."""
    original = None if name.startswith("_") else getattr(transformers, name, None)
    if not isinstance(original, type) or not issubclass(original, PreTrainedModel):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name not in _CLASSES:
        same = {"__qualname__": name, "__doc__": original.__doc__}
        namespace = {"original": original, "__module__": __name__, **same}
        _CLASSES[name] = type(name, (Standalone, original), namespace)
    return _CLASSES[name]
