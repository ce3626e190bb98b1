"""collabify: attention heads that share what they have in common.

``import collabify`` is all a program needs to load a converted model with
``AutoModel*.from_pretrained``, before or after ``import transformers``. Nothing heavy is imported
until it is used.
"""

from typing import TYPE_CHECKING, Any

import wrapt

if TYPE_CHECKING:
    from collabify.analysis import analyze
    from collabify.benchmark import bench
    from collabify.conversion import convert
    from collabify.errors import CollabifyError
    from collabify.evaluation import evaluate_drift, evaluate_glue, evaluate_image
    from collabify.finetuning import finetune
    from collabify.healing import heal
    from collabify.models import find_attention
    from collabify.storage import write_standalone

__version__ = "0.1.0"
__all__ = [
    "CollabifyError",
    "__version__",
    "analyze",
    "bench",
    "convert",
    "evaluate_drift",
    "evaluate_glue",
    "evaluate_image",
    "find_attention",
    "finetune",
    "heal",
    "write_standalone",
]

_HOME = {
    "analyze": "collabify.analysis",
    "bench": "collabify.benchmark",
    "convert": "collabify.conversion",
    "evaluate_drift": "collabify.evaluation",
    "evaluate_glue": "collabify.evaluation",
    "evaluate_image": "collabify.evaluation",
    "find_attention": "collabify.models",
    "finetune": "collabify.finetuning",
    "heal": "collabify.healing",
    "CollabifyError": "collabify.errors",
    "write_standalone": "collabify.storage",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'collabify' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)


def _register(_transformers_quantizers: Any) -> None:
    import collabify.checkpoint  # noqa: F401 (registers itself)


# Runs at once where transformers is imported already, else as soon as it can load models.
wrapt.register_post_import_hook(_register, "transformers.quantizers.auto")
