"""What every shared attention has in common: values, mask, dropout, transformers' kernels.

    probs  = softmax(logits * scale + mask)                     bhts
    output = probs v                                            bhts,bhse -> bhte

A converted layer stays the object it was: its query and key projections get new shapes under their
old names, it gains the method's own parameters, and its class becomes a subclass of the class that
it had. So everything else of it (values, output, configuration, hooks) is untouched, transformers
still recognises it when attention weights are asked for, and a program that does not know collabify
stops at the shape of ``key.weight``.

The shared key carries the content bias as ``h`` more rows, one channel for each head, that head
``h`` reads with a query of one. It has them also where the bias is zero, so that its shape always
differs from the original's.

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

from collabify.decompose.factors import Factors


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
    def scores(
        self, q: Float[Tensor, "b t r"], k: Float[Tensor, "b s m"]
    ) -> tuple[Float[Tensor, "b h t w"], Float[Tensor, "b h s w"]]:
        """Queries and keys of every head, whose products are the logits before the scale."""

    def value_width(self, heads: int) -> int:
        """Channels of the values of one of ``heads`` heads, e."""
        return int(getattr(self, self.layout.value).out_features // heads)

    @property
    def num_parameters(self) -> int:
        """Numbers in the query-key part: projections, content bias, the method's own."""
        own = list(self.parameters(recurse=False))
        return sum(parameter.numel() for parameter in own + _projections(self))

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs: Any
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
        query, key = self.scores(
            getattr(self, layout.query)(hidden_states), getattr(self, layout.key)(hidden_states)
        )
        value = getattr(self, layout.value)(hidden_states)
        value = value.unflatten(-1, (query.shape[1], -1)).transpose(1, 2)
        dropout = getattr(self, layout.dropout)
        dropout = dropout.p if isinstance(dropout, nn.Dropout) else dropout
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, _eager(self.original)
        )
        context, probs = attend(
            self,
            query,
            key,
            value,
            attention_mask,
            dropout=dropout if self.training else 0.0,
            scaling=self.scaling,
            **kwargs,
        )
        context = context.reshape(*hidden_states.shape[:-1], -1).contiguous()
        return layout.finish(self, hidden_states, context), probs


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
    if not old.requires_grad:
        for parameter in (*shared.parameters(recurse=False), *_projections(shared)):
            parameter.requires_grad_(False)
    return shared.train(module.training)


def _projections(shared: SharedAttention) -> list[Tensor]:
    """The weights of the shared projections."""
    names = (shared.layout.query, shared.layout.key)
    return [getattr(shared, name).weight for name in names]


def _linear(weight: Float[Tensor, "r i"]) -> nn.Linear:
    """A projection without bias that holds ``weight``."""
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(weight.contiguous())
    return linear


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
