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

from collabify.attention import (
    FORMS,
    GeneralBilinearAttention,
    Layout,
    SharedAttention,
    replace_values,
    rewrite,
)
from collabify.config import LayerConfig
from collabify.decompose import Factors, ValueFactors, ValueForms, empty_factors, empty_values
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
    num_heads, head_dim
        Names of the module's attributes with the number of heads and their width.
    output
        ``name of the attention module -> name of its output projection``.
    """

    attention_classes: Mapping[str, str]
    layout: Layout
    num_heads: str
    head_dim: str
    output: Callable[[str], str]

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
    output_name, output
        Its output projection, wherever the architecture keeps it.
    """

    index: int
    name: str
    module: nn.Module
    adapter: Adapter
    output_name: str
    output: Any  # torch.nn.Linear, which is checked where values are converted

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
        """Channels of a head as trained, d for queries and keys and e for values."""
        return int(getattr(self.module, self.adapter.head_dim))

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

    @property
    def values_converted(self) -> bool:
        """Whether values and outputs are no longer the original's."""
        if not isinstance(self.module, SharedAttention):
            return False
        return self.module.value_columns is not None or self.module.weights_mixing is not None

    def factor_tensors(self) -> list[tuple[str, Tensor]]:
        """What a conversion made, by name in the base model: projections, mixing, indices."""
        layout, found = self.adapter.layout, []
        parts = (layout.query, layout.key) + (layout.value,) * self.values_converted
        within = tuple(f"{part}." for part in parts)
        for name, tensor in self.module.state_dict(keep_vars=True).items():
            if "." not in name or name.startswith(within):
                found.append((f"{self.name}.{name}", tensor))
        if self.values_converted:
            output = self.output.state_dict(keep_vars=True)
            found += [(f"{self.output_name}.{name}", tensor) for name, tensor in output.items()]
        return found

    @property
    def new_parameters(self) -> list[nn.Parameter]:
        """Those of :meth:`factor_tensors` that can be trained."""
        return [t for _, t in self.factor_tensors() if isinstance(t, nn.Parameter)]

    @property
    def query_key_parameters(self) -> int:
        """Numbers in the query-key part now."""
        if isinstance(self.module, SharedAttention):
            return self.module.num_parameters
        return sum(p.numel() for part in (self.query, self.key) for p in part.parameters())

    @property
    def value_output_parameters(self) -> int:
        """Numbers in the value and output projections, and in what mixes value heads."""
        own = self.module.num_value_parameters if isinstance(self.module, SharedAttention) else 0
        return own + sum(p.numel() for part in (self.value, self.output) for p in part.parameters())

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

    def read_values(self, *, device: torch.device | str | None = None) -> ValueForms:
        """The layer's values and outputs in float64, with gradients cut."""
        device = self.value.weight.device if device is None else torch.device(device)

        def read(tensor: Tensor) -> Tensor:
            return tensor.detach().to(device, torch.float64)

        value = read(self.value.weight).view(self.num_heads, self.head_dim, -1)
        bias = value.new_zeros(value.shape[:2])
        if self.value.bias is not None:
            bias = read(self.value.bias).view_as(bias)
        output = read(self.output.weight).T.reshape(self.num_heads, self.head_dim, -1)
        has_bias = self.output.bias is not None
        return ValueForms(value, bias, output, read(self.output.bias) if has_bias else None)

    def general_bilinear(self) -> GeneralBilinearAttention:
        """The layer as general bilinear attention in float64, converted or not, exactly.

        Without residual, norm and dropout, and without what mixing has on top for tokens.
        """
        if not isinstance(self.module, SharedAttention):
            return GeneralBilinearAttention.of(self.read(), self.read_values())
        shared = self.module
        factors = shared.factors().to(torch.float64)
        values = shared.value_factors(self.output).to(torch.float64)
        with torch.no_grad():
            return GeneralBilinearAttention.of_factors(
                factors, shared.content.double(), values, shared.scaling
            )

    def empty_factors(self, layer: LayerConfig) -> Factors:
        """Factors of the shapes that ``layer`` gives this site, on the meta device."""
        return empty_factors(
            layer, num_heads=self.num_heads, query_size=self.width, key_size=self.width
        )

    def value_width(self, layer: LayerConfig) -> int:
        """Columns in which a head of ``layer`` hands its values on: as many as it scores in."""
        scored = layer.channels + 1 if layer.channels is not None else 0
        return max(self.head_dim, scored)

    def empty_values(self, layer: LayerConfig) -> ValueFactors | None:
        """Values and outputs of the shapes that ``layer`` gives this site, on the meta device."""
        return empty_values(
            layer,
            num_heads=self.num_heads,
            width=self.value_width(layer),
            input_size=self.value.in_features,
            output_size=self.output.out_features,
            biases=(self.value.bias is not None, self.output.bias is not None),
        )

    def install(
        self,
        factors: Factors,
        content: Float[Tensor, "h j"],
        values: ValueFactors | None = None,
    ) -> None:
        """Rewrite the layer in place: it scores with ``factors`` and ``content``, reads ``values``.

        Without ``values`` its values and outputs stay.
        """
        layout = self.adapter.layout
        shared = rewrite(self.module, FORMS[type(factors)], layout, factors, content)
        if values is not None:
            replace_values(shared, self.output, values)

    def install_empty(self, layer: LayerConfig) -> None:
        """Rewrite the layer to the shapes of ``layer``, on meta, to load weights into."""
        content = torch.empty(self.num_heads, self.width, device="meta")
        self.install(self.empty_factors(layer), content, self.empty_values(layer))


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
