"""Shared factors of a layer's heads, and what a solver returns.

    CP      forms[h] ~ query^T diag(mixing[h]) key              ri,hr,rj -> hij
    Tucker  forms[h] ~ query^T core[h] key                      ri,hrc,cj -> hij
            core[h]  = sum_a mixing[h, a] core[a]               ha,arc -> hrc
    blocks  forms[h] ~ sum_n mixing[h, n] query[n]^T key[n]     hn,ndi,ndj -> hij

A CP may keep ``k`` of the ``r`` channels in each head: then ``mixing`` is ``[h, k]``, beside their
indices. Norms, inner products and errors come from Gram matrices; no stack is built.

Axes: h head, d channel within a head, i query-side input, j key-side input, r and c shared rank,
a rank of the head mode, k channel that a head keeps, n base head.
References: Kolda & Bader 2009; Cordonnier et al. 2020, section 4; Shazeer et al. 2020; De Lathauwer
2008 (rank-(L, L, 1) block terms).
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, fields, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from collabify.config import LayerConfig
from collabify.forms import HeadForms


class Factors(ABC):
    """One factorisation of a stack of forms; each field is a tensor or ``None``."""

    query: Float[Tensor, "r i"]
    key: Float[Tensor, "c j"]

    @abstractmethod
    def dense(self) -> Float[Tensor, "h i j"]:
        """The stack that the factors stand for."""

    @abstractmethod
    def squared_norm(self) -> Float[Tensor, ""]:
        """Squared Frobenius norm of the stack, from Gram matrices."""

    @abstractmethod
    def inner(self, forms: HeadForms) -> Float[Tensor, ""]:
        """Inner product of the stack with ``forms``."""

    @abstractmethod
    def logits(
        self, x: Float[Tensor, "b t i"], y: Float[Tensor, "b s j"]
    ) -> Float[Tensor, "b h t s"]:
        """Scores of targets ``x`` against sources ``y``, without scale and content bias."""

    @abstractmethod
    def key_term(self, x: Float[Tensor, "i"]) -> Float[Tensor, "h j"]:
        """``stack[h]^T x``, as :meth:`HeadForms.key_term`."""

    def transformed(self, matrix: Float[Tensor, "i i"]) -> "Factors":
        """Factors of ``matrix^T stack[h] matrix``, for inputs that were multiplied by it before."""
        return self._with(query=self.query @ matrix, key=self.key @ matrix)

    @property
    def num_parameters(self) -> int:
        """How many numbers the factors hold."""
        tensors = self._tensors().values()
        return sum(tensor.numel() for tensor in tensors if tensor.is_floating_point())

    def to(self, target: torch.dtype | torch.device) -> "Factors":
        """The same factors in another dtype or on another device."""
        integers_stay = isinstance(target, torch.dtype)
        return self._with(
            **{
                name: tensor
                if integers_stay and not tensor.is_floating_point()
                else tensor.to(target)
                for name, tensor in self._tensors().items()
            }
        )

    def relative_error(self, forms: HeadForms) -> float:
        """Frobenius norm of the difference over that of ``forms``.

        Its floor is the square root of the rounding error. Zero where both are zero.
        """
        return relative_error(forms.squared_norms().sum(), self.inner(forms), self.squared_norm())

    def _tensors(self) -> dict[str, Tensor]:
        values = {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]
        return {name: value for name, value in values.items() if isinstance(value, Tensor)}

    def _with(self, **tensors: Tensor) -> "Factors":
        """The same with other tensors."""
        return replace(self, **tensors)  # type: ignore[type-var]


@dataclass(frozen=True, eq=False)
class CPFactors(Factors):
    """A diagonal core per head: collaborative attention, or a head-SVD if ``mixing`` is one-hot.

    Parameters
    ----------
    query, key
        Shared projections, ``[r, i]`` and ``[r, j]``.
    mixing
        Weight of every shared channel in every head, ``[h, r]``, or with ``channels`` of those
        that the head keeps, ``[h, k]``.
    channels
        Which shared channels each head keeps, ``[h, k]``, distinct; ``None``: all.
    """

    query: Float[Tensor, "r i"]
    key: Float[Tensor, "r j"]
    mixing: Float[Tensor, "h k"]
    channels: Int[Tensor, "h k"] | None = None

    def head_mixing(self) -> Float[Tensor, "h r"]:
        """Weights of all shared channels, zero for those that a head does not keep."""
        if self.channels is None:
            return self.mixing
        whole = self.mixing.new_zeros(len(self.mixing), len(self.query))
        return whole.scatter(1, self.channels, self.mixing)

    def keep(self, channels: int) -> "CPFactors":
        """Only the ``channels`` that add most to each head, by the norm of what they add."""
        mixing = self.head_mixing()
        strength = mixing.abs() * self.query.norm(dim=1) * self.key.norm(dim=1)
        kept = strength.topk(channels, dim=1).indices.sort(dim=1).values
        return CPFactors(self.query, self.key, mixing.gather(1, kept), kept)

    def dense(self) -> Float[Tensor, "h i j"]:
        """``hr,ri,rj -> hij``."""
        return torch.einsum("hr,ri,rj->hij", self.head_mixing(), self.query, self.key)

    def squared_norm(self) -> Float[Tensor, ""]:
        """Sum of the elementwise product of the three Gram matrices."""
        grams = (factor @ factor.T for factor in (self.query, self.key, self.head_mixing().T))
        return torch.stack(list(grams)).prod(0).sum()

    def inner(self, forms: HeadForms) -> Float[Tensor, ""]:
        """``sum_hr mixing[h, r] <query[r]^T key[r], forms[h]>``."""
        q = torch.einsum("hdi,ri->hdr", forms.w_q, self.query)
        k = torch.einsum("hdj,rj->hdr", forms.w_k, self.key)
        return torch.einsum("hdr,hdr,hr->", q, k, self.head_mixing())

    def key_term(self, x: Float[Tensor, "i"]) -> Float[Tensor, "h j"]:
        """``(mixing * (query x)) key``."""
        return (self.head_mixing() * (self.query @ x)) @ self.key

    def logits(
        self, x: Float[Tensor, "b t i"], y: Float[Tensor, "b s j"]
    ) -> Float[Tensor, "b h t s"]:
        """``btr,hr,bsr -> bhts``."""
        return torch.einsum(
            "btr,hr,bsr->bhts", x @ self.query.T, self.head_mixing(), y @ self.key.T
        )


@dataclass(frozen=True, eq=False)
class TuckerFactors(Factors):
    """A full core per head, or ``a`` cores that the heads mix.

    Parameters
    ----------
    query, key
        Shared projections, ``[r, i]`` and ``[c, j]``.
    core
        ``[h, r, c]``, or ``[a, r, c]`` with ``mixing``.
    mixing
        ``[h, a]``, or ``None`` where every head has a core of its own.
    """

    query: Float[Tensor, "r i"]
    key: Float[Tensor, "c j"]
    core: Float[Tensor, "a r c"]
    mixing: Float[Tensor, "h a"] | None = None

    def head_cores(self) -> Float[Tensor, "h r c"]:
        """One core per head, mixed if need be."""
        if self.mixing is None:
            return self.core
        return torch.einsum("ha,arc->hrc", self.mixing, self.core)

    def dense(self) -> Float[Tensor, "h i j"]:
        """``ri,hrc,cj -> hij``."""
        return torch.einsum("ri,hrc,cj->hij", self.query, self.head_cores(), self.key)

    def squared_norm(self) -> Float[Tensor, ""]:
        """``sum_h <gram(query) core[h], core[h] gram(key)>``."""
        core = self.head_cores()
        gram_q, gram_k = self.query @ self.query.T, self.key @ self.key.T
        return torch.sum((gram_q @ core) * (core @ gram_k))

    def inner(self, forms: HeadForms) -> Float[Tensor, ""]:
        """``sum_h <core[h], query forms[h] key^T>``."""
        return torch.sum(project(forms, self.query, self.key) * self.head_cores())

    def key_term(self, x: Float[Tensor, "i"]) -> Float[Tensor, "h j"]:
        """``(query x) core[h] key``."""
        return torch.einsum("r,hrc,cj->hj", self.query @ x, self.head_cores(), self.key)

    def logits(
        self, x: Float[Tensor, "b t i"], y: Float[Tensor, "b s j"]
    ) -> Float[Tensor, "b h t s"]:
        """``btr,hrc,bsc -> bhts``."""
        return torch.einsum(
            "btr,hrc,bsc->bhts", x @ self.query.T, self.head_cores(), y @ self.key.T
        )


@dataclass(frozen=True, eq=False)
class BlockFactors(Factors):
    """Base heads that every head mixes: talking heads, or the heads themselves with a one-hot mix.

    A CP whose mixing is the same within each of ``n`` blocks of channels.

    Parameters
    ----------
    query, key
        Projections of the base heads, one after the other, ``[r, i]`` and ``[r, j]``; ``r`` is a
        multiple of ``n``.
    mixing
        Weight of every base head in every head, ``[h, n]``: the logits projection, P_l; ``None``:
        the base heads are the heads.
    heads
        How many heads there are.
    x2l, m2l
        What P_l has on top for a target and for a source, as a map of its input, ``[h, n, i]``, for
        training; the stack is that without them.
    """

    query: Float[Tensor, "r i"]
    key: Float[Tensor, "r j"]
    mixing: Float[Tensor, "h n"] | None
    heads: int
    x2l: Float[Tensor, "h n i"] | None = None
    m2l: Float[Tensor, "h n j"] | None = None

    @property
    def as_cp(self) -> CPFactors:
        """The same stack with a weight for every channel."""
        mixing = self.mixing
        if mixing is None:
            mixing = torch.eye(self.heads, dtype=self.query.dtype, device=self.query.device)
        width = len(self.query) // mixing.shape[1]
        return CPFactors(self.query, self.key, mixing.repeat_interleave(width, dim=1))

    def dense(self) -> Float[Tensor, "h i j"]:
        """``hn,ndi,ndj -> hij``."""
        return self.as_cp.dense()

    def squared_norm(self) -> Float[Tensor, ""]:
        """As of a CP."""
        return self.as_cp.squared_norm()

    def inner(self, forms: HeadForms) -> Float[Tensor, ""]:
        """As of a CP."""
        return self.as_cp.inner(forms)

    def key_term(self, x: Float[Tensor, "i"]) -> Float[Tensor, "h j"]:
        """As of a CP."""
        return self.as_cp.key_term(x)

    def logits(
        self, x: Float[Tensor, "b t i"], y: Float[Tensor, "b s j"]
    ) -> Float[Tensor, "b h t s"]:
        """``btnd,bsnd,hn -> bhts``."""
        return self.as_cp.logits(x, y)


@dataclass(frozen=True, eq=False)
class Decomposition:
    """What a solver found.

    Parameters
    ----------
    factors
        The shared form.
    errors
        Relative error at the start and after every sweep.
    converged
        Whether the last sweep improved by less than the tolerance, or there was nothing left to
        improve.
    """

    factors: Factors
    errors: tuple[float, ...]
    converged: bool

    @property
    def relative_error(self) -> float:
        """Relative error of the stack at the end."""
        return self.errors[-1]

    @property
    def sweeps(self) -> int:
        """Sweeps over all factors."""
        return len(self.errors) - 1


def project(
    forms: HeadForms, query: Float[Tensor, "r i"], key: Float[Tensor, "c j"]
) -> Float[Tensor, "h r c"]:
    """``query forms[h] key^T`` for every head."""
    q = torch.einsum("hdi,ri->hdr", forms.w_q, query)
    k = torch.einsum("hdj,cj->hdc", forms.w_k, key)
    return torch.einsum("hdr,hdc->hrc", q, k)


def relative_error(
    truth: Float[Tensor, ""], inner: Float[Tensor, ""], approximation: Float[Tensor, ""]
) -> float:
    """``|truth - approximation| / |truth|`` from two squared norms and an inner product."""
    if truth == 0:
        return 0.0 if approximation == 0 else float("inf")
    return float(((truth - 2 * inner + approximation).clamp(min=0) / truth).sqrt())


def rounding_floor(forms: HeadForms) -> float:
    """The relative error below which Gram matrices only see rounding."""
    return 10 * math.sqrt(torch.finfo(forms.w_q.dtype).eps)


def empty_factors(layer: LayerConfig, *, num_heads: int, query_size: int, key_size: int) -> Factors:
    """Factors of a configured layer's shapes, without values and on the meta device.

    What a conversion will hold is counted from these, and a checkpoint is loaded into them.
    """
    heads, rank = num_heads, layer.rank
    with torch.device("meta"):
        query, key = torch.empty(rank, query_size), torch.empty(rank, key_size)
        if layer.form == "collaborative":
            if layer.channels is None:
                return CPFactors(query, key, torch.empty(heads, rank))
            kept = heads, layer.channels
            return CPFactors(query, key, torch.empty(kept), torch.empty(kept, dtype=torch.int64))
        if layer.form == "talking-heads":
            shape = heads, layer.base_heads or heads
            mixing = torch.empty(shape) if layer.base_heads else None
            if mixing is None or not layer.dynamic:
                return BlockFactors(query, key, mixing, heads)
            x2l, m2l = (torch.empty(*shape, size) for size in (query_size, key_size))
            return BlockFactors(query, key, mixing, heads, x2l, m2l)
        if layer.head_rank is None:
            return TuckerFactors(query, key, torch.empty(heads, rank, rank))
        cores, mixing = (
            torch.empty(layer.head_rank, rank, rank),
            torch.empty(heads, layer.head_rank),
        )
        return TuckerFactors(query, key, cores, mixing)
