"""Where a model keeps its attention: adapters tell, and a site reads and rewrites one layer.

    site.read() -> HeadForms,    site.install(factors, content)

An architecture is one :class:`Adapter` value: the class of its attention modules for every model
type it serves, and the names of their parts.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from collabify.attention import FORMS, Layout, SharedAttention, rewrite
from collabify.config import LayerConfig
from collabify.decompose import Factors, empty_factors
from collabify.errors import AlreadyConvertedError, UnsupportedModelError
from collabify.forms import HeadForms


@dataclass(frozen=True)
class Adapter:
    """One architecture.

    Parameters
    ----------
    attention_classes
        ``config.model_type`` to ``"module:class"`` of the attention module, for every type that is
        the same inside.
    layout
        Names of that module's parts.
    num_heads
        Name of the module's attribute with the number of heads.
    output
        ``(base_model, name of the attention module) -> the output projection``.
    """

    attention_classes: Mapping[str, str]
    layout: Layout
    num_heads: str
    output: Callable[[nn.Module, str], nn.Linear]

    def attention_class(self, model_type: str) -> type[nn.Module]:
        """The class of the attention modules, imported when it is needed."""
        module, _, name = self.attention_classes[model_type].partition(":")
        return cast(type[nn.Module], getattr(import_module(module), name))


@dataclass(frozen=True, eq=False)
class AttentionSite:
    """One distinct attention layer of a model.

    Parameters
    ----------
    index
        Position among the model's distinct attention layers, from 0. A layer that the model runs
        several times (ALBERT) is one site.
    name
        Its name within the base model, without the prefix that a head adds.
    module
        The attention module.
    adapter
        Its architecture.
    output
        Its output projection, wherever the architecture keeps it.
    """

    index: int
    name: str
    module: nn.Module
    adapter: Adapter
    output: nn.Linear

    @property
    def query(self) -> nn.Linear:
        """The query projection."""
        return cast(nn.Linear, getattr(self.module, self.adapter.layout.query))

    @property
    def key(self) -> nn.Linear:
        """The key projection."""
        return cast(nn.Linear, getattr(self.module, self.adapter.layout.key))

    @property
    def value(self) -> nn.Linear:
        """The value projection."""
        return cast(nn.Linear, getattr(self.module, self.adapter.layout.value))

    @property
    def num_heads(self) -> int:
        """Number of heads, h."""
        return int(getattr(self.module, self.adapter.num_heads))

    @property
    def head_dim(self) -> int:
        """Query-key channels of a head as trained, d."""
        return int(self.value.out_features // self.num_heads)

    @property
    def full_rank(self) -> int:
        """The largest rank, h * d."""
        return self.num_heads * self.head_dim

    @property
    def width(self) -> int:
        """Size of the layer's input, i and j."""
        return int(self.query.in_features)

    @property
    def converted(self) -> bool:
        """Whether the layer already has a shared form."""
        return isinstance(self.module, SharedAttention)

    def factor_tensors(self) -> list[tuple[str, Tensor]]:
        """What a conversion gave the module, by name: projections, mixing, cores, indices."""
        shared = tuple(f"{name}." for name in (self.adapter.layout.query, self.adapter.layout.key))
        tensors = self.module.state_dict(keep_vars=True).items()
        return [(name, t) for name, t in tensors if "." not in name or name.startswith(shared)]

    @property
    def query_key_parameters(self) -> int:
        """Numbers in the query-key part now."""
        if isinstance(self.module, SharedAttention):
            return self.module.num_parameters
        return sum(p.numel() for part in (self.query, self.key) for p in part.parameters())

    @property
    def value_output_parameters(self) -> int:
        """Numbers in the value and output projections."""
        return sum(p.numel() for part in (self.value, self.output) for p in part.parameters())

    def read(
        self, *, dtype: torch.dtype = torch.float64, device: torch.device | str | None = None
    ) -> HeadForms:
        """The layer's heads, with gradients cut.

        Parameters
        ----------
        dtype, device
            Where the numbers go; by default to float64 on the device of the weights.

        Raises
        ------
        AlreadyConvertedError
            Where the layer already has a shared form.
        """
        if self.converted:
            raise AlreadyConvertedError(
                f"{self.name!r} was converted before. Take the original model instead."
            )
        device = self.query.weight.device if device is None else torch.device(device)
        query, key = (part.weight.detach().to(device, dtype) for part in (self.query, self.key))
        bias = None if self.query.bias is None else self.query.bias.detach().to(device, dtype)
        scale = float(cast(Any, self.module).scaling)
        return HeadForms.from_projections(query, key, bias, num_heads=self.num_heads, scale=scale)

    def empty_factors(self, layer: LayerConfig) -> Factors:
        """Factors of the shapes that ``layer`` gives this site, on the meta device."""
        return empty_factors(
            layer, num_heads=self.num_heads, query_size=self.width, key_size=self.width
        )

    def install(self, factors: Factors, content: Float[Tensor, "h j"]) -> None:
        """Rewrite the layer in place, so that it scores with ``factors`` and ``content``."""
        rewrite(self.module, FORMS[type(factors)], self.adapter.layout, factors, content)

    def install_empty(self, layer: LayerConfig) -> None:
        """Rewrite the layer to the shapes of ``layer``, on meta, to load weights into."""
        self.install(
            self.empty_factors(layer), torch.empty(self.num_heads, self.width, device="meta")
        )


def check_projections(name: str, module: nn.Module, layout: Layout) -> None:
    """Refuse projections that are not plain linear maps in floating point.

    Raises
    ------
    UnsupportedModelError
        Naming the projection and what it is.
    """
    for part in (layout.query, layout.key, layout.value):
        projection = getattr(module, part)
        if not isinstance(projection, nn.Linear) or not projection.weight.is_floating_point():
            raise UnsupportedModelError(
                f"'{name}.{part}' is a {type(projection).__name__}, "
                "not a torch.nn.Linear in floating point. "
                "Merge adapters and undo quantisation before converting."
            )
