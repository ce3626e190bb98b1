"""Put what was found into a model, in place, so that it can be undone.

with undone_on_failure(model, sites):
    install(model, found, plan)
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

from torch import Tensor, nn

from collabify.config import ConversionConfig
from collabify.decompose import Factors, ValueFactors
from collabify.models import AttentionSite


def install(
    model: nn.Module,
    found: Sequence[tuple[AttentionSite, Factors, Tensor, ValueFactors | None]],
    plan: ConversionConfig,
) -> None:
    """Rewrite the layers, and the record of it."""
    for site, factors, content, values in found:
        site.install(factors, content, values)
    _own_config(model).quantization_config = plan.to_dict()


@contextmanager
def undone_on_failure(model: nn.Module, sites: Sequence[AttentionSite]) -> Iterator[None]:
    """Whatever goes wrong, Ctrl-C too, leaves the modules and configurations that there were."""
    configs = [(module, module.config) for module in model.modules() if hasattr(module, "config")]
    undo = [_undo(module) for site in sites for module in (site.module, site.output)]
    try:
        yield
    except BaseException:
        for restore in undo:
            restore()
        for module, config in configs:
            cast(Any, module).config = config
        raise


def _undo(module: nn.Module) -> Callable[[], None]:
    """What gives a module the class and the contents back that it has now."""
    cls, attributes = type(module), dict(vars(module))
    parts = {part: dict(attributes.pop(part)) for part in ("_modules", "_parameters", "_buffers")}

    def restore() -> None:
        module.__class__ = cls
        for name in set(vars(module)) - set(attributes) - set(parts):
            del vars(module)[name]
        vars(module).update(attributes)
        for part, content in parts.items():
            vars(module)[part].clear()
            vars(module)[part].update(content)

    return restore


def _own_config(model: nn.Module) -> Any:
    """The model's configuration, after making it a copy: models may share theirs with others."""
    shared = cast(Any, model).config
    own = copy.deepcopy(shared)
    vars(own).pop("auto_map", None)  # code of the original's folder, which is not of this model
    for module in model.modules():
        if getattr(module, "config", None) is shared:
            cast(Any, module).config = own
    return own
