"""What every shared attention has in common: values, mask, dropout, transformers' kernels.

    probs  = softmax(logits * scale + mask)                     bhts
    output = probs v                                            bhts,bhse -> bhte

Where value heads read mixed probabilities (the weights projection P_w of talking heads),

    output[v] = sum_h weights_mixing[v, h] probs[h] v[v]        vh,bhts,bvse -> bvte

No fused kernel gives the probabilities that this needs, so it is computed here.

A converted layer stays the object it was: its query and key projections get new shapes under their
old names, it gains the method's own parameters, and its class becomes a subclass of the class that
it had. So everything else of it (values, output, configuration, hooks) is untouched, transformers
still recognises it when attention weights are asked for, and a program that does not know collabify
stops at the shape of ``key.weight``.

The shared key carries the content bias as ``h`` more rows, one channel for each head, that head
``h`` reads with a query of one. It has them also where the bias is zero, so that the shape of the
query or of the key always differs from the original's.

Heads whose values were reduced read their own rows of the value projection, ``value_columns``, each
as many columns as the widest original head, so that kernels that want equal widths apply; what the
output projection reads of them are ``context_rows``.

Axes: b batch, t target, s source, h head, m row of the shared key (shared channels and one content
bias a head), w column that a head scores in, e value channel.
"""

import sys
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from collabify.attention.ops import gather, mix, probabilities
from collabify.decompose.factors import Factors
from collabify.decompose.values import ValueFactors


@dataclass(frozen=True)
class Layout:
    """How one architecture names the parts of its attention module, and how it ends.

    Parameters
    ----------
    query, key, value
        Names of the projections, ``torch.nn.Linear`` each.
    dropout
        Name of the attention dropout: a share in [0, 1], or a ``torch.nn.Dropout``.
    finish
        ``(module, hidden_states, context) -> output``: what the module does after the heads are
        concatenated.
    """

    query: str
    key: str
    value: str
    dropout: str
    finish: Callable[[Any, Tensor, Tensor], Tensor]


class SharedAttention(nn.Module):
    """Attention whose heads share their query and key projections.

    Never built directly: :func:`rewrite` makes one of an existing module.
    """

    layout: Layout
    original: type[nn.Module]
    config: Any
    scaling: float
    value_columns: Tensor | None
    context_rows: Tensor | None
    weights_mixing: nn.Parameter | None
    x2w: nn.Parameter | None
    m2w: nn.Parameter | None

    def __reduce_ex__(self, protocol: Any) -> Any:
        # The class is made at run time, so pickle is told how to make it again.
        return _blank, (self._form(), self.original), self.__dict__

    @classmethod
    @abstractmethod
    def _form(cls) -> type["SharedAttention"]:
        """The class that defines the form, without the original's class mixed in."""

    @abstractmethod
    def set_factors(self, factors: Factors) -> None:
        """Take the method's own parameters, all but the shared projections."""

    @abstractmethod
    def factors(self) -> Factors:
        """The factors that it computes with, as :meth:`set_factors` took them; gradients reach."""

    @property
    def content(self) -> Float[Tensor, "h j"]:
        """The content bias of every head."""
        weight: Tensor = getattr(self, self.layout.key).weight
        return weight[self._rank :]

    @property
    def _projected(self) -> tuple[Float[Tensor, "r i"], Float[Tensor, "c j"]]:
        """The shared projections without the content bias."""
        query, key = (getattr(self, name) for name in (self.layout.query, self.layout.key))
        return query.weight, key.weight[: self._rank]

    @property
    def _rank(self) -> int:
        return int(getattr(self, self.layout.query).out_features)

    def value_factors(self, output: nn.Linear) -> ValueFactors:
        """The value side, with the output projection wherever the architecture keeps it."""
        value = getattr(self, self.layout.value)
        return ValueFactors(
            value.weight,
            value.bias,
            output.weight,
            output.bias,
            self.value_columns,
            self.context_rows,
            self.weights_mixing,
            self.x2w,
            self.m2w,
        )

    @abstractmethod
    def scores(
        self, q: Float[Tensor, "b t r"], k: Float[Tensor, "b s m"]
    ) -> tuple[Float[Tensor, "b h t w"], Float[Tensor, "b h s w"]]:
        """Queries and keys of every head, whose products are the logits before the scale."""

    def logits(
        self, x: Float[Tensor, "b t i"], q: Float[Tensor, "b t r"], k: Float[Tensor, "b t m"]
    ) -> Float[Tensor, "b h t s"]:
        """The logits of every head before the scale, where no kernel makes them."""
        query, key = self.scores(q, k)
        return query @ key.mT

    @property
    def needs_logits(self) -> bool:
        """Whether logits or probabilities are worked with, which fused kernels do not give."""
        return self.weights_mixing is not None

    def set_values(self, factors: ValueFactors | None) -> None:
        """Take the value side's own tensors, all but the projections; ``None``: as it was."""
        named = {} if factors is None else vars(factors)
        for name in ("x2w", "m2w"):
            self._register(name, named.get(name))
        self._register("weights_mixing", named.get("mixing"))
        self.register_buffer("value_columns", named.get("columns"))
        self.register_buffer("context_rows", named.get("rows"))

    def _register(self, name: str, value: Tensor | None) -> None:
        """A parameter, or none."""
        self.register_parameter(name, None if value is None else parameter(value))

    def indices(self) -> dict[str, tuple[Tensor, int]]:
        """Buffers that say which channels to read, with how many there are."""
        if self.value_columns is None or self.context_rows is None:
            return {}
        values = int(getattr(self, self.layout.value).out_features)
        return {
            "value_columns": (self.value_columns, values),
            "context_rows": (self.context_rows, self.value_columns.numel()),
        }

    def value_width(self, heads: int) -> int:
        """Channels of the values of one of ``heads`` heads, e."""
        return int(getattr(self, self.layout.value).out_features // heads)

    @property
    def num_parameters(self) -> int:
        """Numbers in the query-key part: projections, content bias, the method's own."""
        own = [p for n, p in self.named_parameters(recurse=False) if n not in VALUE_SIDE]
        return sum(parameter.numel() for parameter in own + _projections(self))

    @property
    def num_value_parameters(self) -> int:
        """Numbers beside the projections of the value side."""
        named = dict(self.named_parameters(recurse=False))
        return sum(named[name].numel() for name in VALUE_SIDE if name in named)

    def forward(
        self, hidden_states: Tensor, attention_mask: Any = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Attend within ``hidden_states``.

        Parameters
        ----------
        hidden_states
            ``[b, t, i]``.
        attention_mask
            As transformers prepares it for the chosen attention implementation.
        kwargs
            Passed on to transformers' attention interface.

        Returns
        -------
        output, probs
            ``[b, t, o]``, and ``[b, h, t, s]`` where the implementation returns it.

        Raises
        ------
        NotImplementedError
            Where a cache of keys and values, or another sequence's hidden states, are passed.
        """
        for name in ("cache", "past_key_values", "encoder_hidden_states"):
            if kwargs.pop(name, None) is not None:
                raise NotImplementedError(
                    f"{name} cannot be used with collabify's attention, which is for encoders. "
                    "Call the model without it."
                )
        layout = self.layout
        q, k, v = (
            getattr(self, name)(hidden_states) for name in (layout.query, layout.key, layout.value)
        )
        dropout = getattr(self, layout.dropout)
        dropout = dropout.p if isinstance(dropout, nn.Dropout) else dropout
        dropout = dropout if self.training else 0.0
        if self.needs_logits:
            logits = self.logits(hidden_states, q, k)
            probs = probabilities(logits * self.scaling, attention_mask)
            context = self._mixed_context(hidden_states, probs, v, dropout)
        else:
            query, key = self.scores(q, k)
            attend = ALL_ATTENTION_FUNCTIONS.get_interface(
                self.config._attn_implementation, _eager(self.original)
            )
            context, probs = attend(
                self,
                query,
                key,
                self._values(v, query.shape[1]),
                attention_mask,
                dropout=dropout,
                scaling=self.scaling,
                **kwargs,
            )
        context = context.reshape(*hidden_states.shape[:-1], -1).contiguous()
        if self.context_rows is not None:
            context = gather(context, self.context_rows)
        return layout.finish(self, hidden_states, context), probs

    def _values(self, v: Float[Tensor, "b s n"], heads: int) -> Float[Tensor, "b h s w"]:
        """The values of every head."""
        if self.value_columns is not None:
            v = gather(v, self.value_columns.flatten())
        return v.view(*v.shape[:-1], heads, -1).transpose(1, 2)

    def _mixed_context(
        self,
        x: Float[Tensor, "b t i"],
        probs: Float[Tensor, "b h t s"],
        v: Float[Tensor, "b t n"],
        dropout: float,
    ) -> Float[Tensor, "b t v w"]:
        """What value heads read with probabilities that they mix, if they do."""
        weights = probs
        if self.weights_mixing is not None:
            weights = mix(probs, self.weights_mixing, x, self.x2w, self.m2w)
        weights = nn.functional.dropout(weights, dropout)
        return (weights @ self._values(v, weights.shape[1])).transpose(1, 2)


VALUE_SIDE = ("weights_mixing", "x2w", "m2w")


def rewrite(
    module: nn.Module,
    form: type[SharedAttention],
    layout: Layout,
    factors: Factors,
    content: Float[Tensor, "h j"],
) -> SharedAttention:
    """Turn an attention module into ``form``, in place.

    Parameters
    ----------
    module
        The original; its projections may be on the meta device.
    form
        Which shared attention it becomes.
    layout
        Its architecture's names.
    factors, content
        What it computes from now on; cast to the dtype and device of the projections they replace.
    """
    old = getattr(module, layout.query).weight
    original = type(module)
    module.__class__ = _combined(form, original)
    shared = cast(SharedAttention, module)
    shared.layout = layout
    factors = factors.to(old.dtype).to(old.device)
    content = content.to(old.device, old.dtype)
    for name, weight in (
        (layout.query, factors.query),
        (layout.key, torch.cat([factors.key, content])),
    ):
        setattr(shared, name, _linear(weight))
    shared.set_factors(factors)
    shared.set_values(None)
    if not old.requires_grad:
        for parameter in (*shared.parameters(recurse=False), *_projections(shared)):
            parameter.requires_grad_(False)
    return shared.train(module.training)


def replace_values(shared: SharedAttention, output: nn.Linear, factors: ValueFactors) -> None:
    """Give a rewritten layer other values and outputs, in place.

    Parameters
    ----------
    shared
        As :func:`rewrite` made it.
    output
        Its output projection, which stays the object it is.
    factors
        What it reads and hands on; cast to the dtype and device of what they replace.
    """
    layout = shared.layout
    old = getattr(shared, layout.value).weight
    factors = factors.to(old.dtype).to(old.device)
    setattr(shared, layout.value, _linear(factors.value, factors.bias))
    output.in_features = factors.output.shape[1]
    for name, value in (("weight", factors.output), ("bias", factors.output_bias)):
        if value is not None:
            trained = getattr(output, name).requires_grad
            setattr(output, name, parameter(value).requires_grad_(trained))
    shared.set_values(factors)
    if not old.requires_grad:
        getattr(shared, layout.value).requires_grad_(False)
        for name, own in shared.named_parameters(recurse=False):
            if name in VALUE_SIDE:
                own.requires_grad_(False)
    shared.train(shared.training)


def _projections(shared: SharedAttention) -> list[Tensor]:
    """The weights of the shared projections."""
    names = (shared.layout.query, shared.layout.key)
    return [getattr(shared, name).weight for name in names]


def _linear(weight: Float[Tensor, "r i"], bias: Float[Tensor, "r"] | None = None) -> nn.Linear:
    """A projection that holds ``weight`` and ``bias``."""
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    linear.weight = parameter(weight)
    if bias is not None:
        linear.bias = parameter(bias)
    return linear


def parameter(value: Tensor) -> nn.Parameter:
    """A parameter with memory of its own: factors may be views of the weights they replace."""
    return nn.Parameter(value.clone(memory_format=torch.contiguous_format))


_CLASSES: dict[tuple[type, type], type[SharedAttention]] = {}


def _combined(form: type[SharedAttention], original: type[nn.Module]) -> type[SharedAttention]:
    """The class of a converted ``original``, made once."""
    if (form, original) not in _CLASSES:
        name = form.__name__.removesuffix("Attention") + original.__name__
        namespace = {"original": original, "__module__": form.__module__}
        _CLASSES[form, original] = type(name, (form, original), namespace)
    return _CLASSES[form, original]


def _blank(form: type[SharedAttention], original: type[nn.Module]) -> SharedAttention:
    """An instance for unpickling."""
    cls = _combined(form, original)
    return cls.__new__(cls)


def _eager(original: type[nn.Module]) -> Callable[..., Any]:
    """The architecture's own eager attention, beside its attention class."""
    return cast(
        Callable[..., Any], sys.modules[original.__module__].__dict__["eager_attention_forward"]
    )
