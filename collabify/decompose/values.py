"""The value side: what heads hand on, in fewer channels.

    y = sum_h output[h]^T c_h + output_bias,    c_h = value[h] a_h + bias[h]        heo,he -> o

``a_h`` is what head ``h`` attends to, a mean of inputs, and ``c_h`` its context. A head keeps some
directions of its context, ``z = turn c``, and all outputs are fitted anew to them. With the mean
and the covariance of the contexts of all heads, as attention really makes them, both have closed
forms: within a head the directions are those of a singular value decomposition of ``cov(c_h)^(1/2)
output[h]``, and what the whole layer's output loses where one of them is dropped and all outputs
are refitted is

    cost[c] = |weights[c]|^2 / inverse(cov(z))[c, c]                                co,cc -> c

so that directions are dropped, a few at a time, wherever they are missed least, in all heads at
once. What the means contribute is exact: the output's bias takes it up.

Axes: h head, e value channel of a head, i input, o output, c context channel of all heads,
n value channel that is kept, w column of a head, v value head.
Reference: Hassibi & Stork 1993, Optimal Brain Surgeon.
"""

from dataclasses import dataclass, fields, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from collabify.calibration import EIGENVALUE_FLOOR, Moments
from collabify.config import LayerConfig

STEP = 0.05  # share of the channels that go at once
# Of the largest variance, 1 where nothing is dead. Turned contexts are divided by roots as small as
# that of the eigenvalue floor, so that their Gram matrix is known to about 1e-9.
RIDGE = 1e-7
SILENT = 1e-6  # of what the channel that says most says


@dataclass(frozen=True, eq=False)
class ValueForms:
    """A layer's values and outputs.

    Parameters
    ----------
    value, bias
        ``[h, e, i]`` and ``[h, e]``; zero where the model has none.
    output, output_bias
        ``[h, e, o]``, and ``[o]`` or ``None``.
    """

    value: Float[Tensor, "h e i"]
    bias: Float[Tensor, "h e"]
    output: Float[Tensor, "h e o"]
    output_bias: Float[Tensor, "o"] | None


@dataclass(frozen=True, eq=False)
class ValueFactors:
    """Projections of values and outputs, and which head reads which row.

    Parameters
    ----------
    value, bias
        ``[n, i]`` and ``[n]``, or ``None`` where the model has no bias.
    output, output_bias
        ``[o, n]`` as ``torch.nn.Linear`` stores it, and ``[o]`` or ``None``.
    columns
        Row of ``value`` that every column of a head's values reads, ``[h, w]``; columns beyond a
        head's own read anything. ``None``: heads are equally wide and follow one another.
    rows
        Where among the heads' columns every row of ``value`` is, ``[n]``, or ``None``.
    mixing
        Weight of every softmax head in every value head, ``[v, h]``: the weights projection, P_w;
        ``None``: a value head for each.
    x2w, m2w
        What P_w has on top for a target and for a source, as a map of its input, ``[v, h, i]``.
    """

    value: Float[Tensor, "n i"]
    bias: Float[Tensor, "n"] | None
    output: Float[Tensor, "o n"]
    output_bias: Float[Tensor, "o"] | None
    columns: Int[Tensor, "h w"] | None = None
    rows: Int[Tensor, "n"] | None = None
    mixing: Float[Tensor, "v h"] | None = None
    x2w: Float[Tensor, "v h i"] | None = None
    m2w: Float[Tensor, "v h i"] | None = None

    @property
    def num_parameters(self) -> int:
        """How many numbers they hold, the output's bias included."""
        return sum(t.numel() for t in self._tensors().values() if t.is_floating_point())

    def dense(self, heads: int) -> tuple[Float[Tensor, "h i o"], Float[Tensor, "o"]]:
        """What each of ``heads`` softmax heads makes of an input, and what is added to it all."""
        if self.mixing is not None:
            reads = self.mixing.T.repeat_interleave(len(self.value) // len(self.mixing), dim=1)
        else:
            width = len(self.value) // heads if self.columns is None else self.columns.shape[1]
            place = torch.arange(len(self.value), device=self.value.device)
            owner = (place if self.rows is None else self.rows) // width
            reads = nn.functional.one_hot(owner, heads).T.to(self.value)
        maps = torch.einsum("hn,ni,on->hio", reads, self.value, self.output)
        bias = self.value.new_zeros(len(self.output))
        if self.bias is not None:
            bias = bias + self.output @ (reads.sum(0) * self.bias)
        if self.output_bias is not None:
            bias = bias + self.output_bias
        return maps, bias

    def balanced(self) -> "ValueFactors":
        """The same outputs, with rows of values and columns of outputs of equal length.

        Training takes steps of one size in both. A channel that says next to nothing stays, since
        halves that are both zero could never be trained.
        """
        tiny = torch.finfo(self.value.dtype).tiny
        lengths = self.value.norm(dim=1), self.output.norm(dim=0)
        said = lengths[0] * lengths[1]
        ratio = lengths[1] / lengths[0].clamp(min=tiny)
        scale = torch.where(said > SILENT * said.max(), ratio.sqrt(), 1)
        return replace(
            self,
            value=self.value * scale[:, None],
            bias=None if self.bias is None else self.bias * scale,
            output=self.output / scale,
        )

    def to(self, target: torch.dtype | torch.device) -> "ValueFactors":
        """The same in another dtype or on another device."""
        stays = isinstance(target, torch.dtype)
        moved = {
            name: t if stays and not t.is_floating_point() else t.to(target)
            for name, t in self._tensors().items()
        }
        return replace(self, **moved)

    def _tensors(self) -> dict[str, Tensor]:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if value is not None}


def fit_values(
    forms: ValueForms,
    contexts: Moments | None,
    channels: int,
    *,
    has_bias: bool,
    columns: int | None = None,
) -> tuple[ValueFactors, float]:
    """Keep ``channels`` directions of all heads' contexts, with the outputs refitted.

    Parameters
    ----------
    forms
        Values and outputs.
    contexts
        Of the contexts, all heads one after the other, ``[c]`` and ``[c, c]``; ``None``: the
        weights alone, as of inputs that are white and attended to independently.
    channels
        Between 1 and ``h * e``; exact at the latter.
    has_bias
        Whether the values have a bias to keep.
    columns
        In which a head hands them on, w; by default e.

    Returns
    -------
    factors, error
        The error is that of the layer's output about its mean, relative.
    """
    heads, width, _ = forms.value.shape
    mean, covariance = _moments(forms, contexts)
    turn, weights = _turned(forms, covariance)
    gram = turn @ covariance @ turn.T
    kept, refitted = _eliminate(gram, weights, channels)
    total = (weights * (gram @ weights)).sum()
    lost = total - (refitted * (gram[kept][:, kept] @ refitted)).sum()
    turned = turn[kept]
    bias = turned @ forms.bias.flatten() if has_bias else None
    output_bias = forms.output_bias
    if output_bias is not None:
        before = forms.output.flatten(0, 1).T @ mean
        output_bias = output_bias + before - refitted.T @ (turned @ mean)
    read, rows = _places(kept // width, heads, columns or width)
    factors = ValueFactors(
        turned @ forms.value.flatten(0, 1), bias, refitted.T, output_bias, read, rows
    )
    error = float((lost.clamp(min=0) / total).sqrt()) if total > 0 else 0.0
    return factors.balanced(), error


def value_strengths(forms: ValueForms, contexts: Moments | None) -> Float[Tensor, "c"]:
    """What each direction of the heads' contexts says, squared, all heads pooled, descending."""
    _, covariance = _moments(forms, contexts)
    _, weights = _turned(forms, covariance)
    return weights.square().sum(1).sort(descending=True).values


def empty_values(
    layer: LayerConfig,
    *,
    num_heads: int,
    width: int,
    input_size: int,
    output_size: int,
    biases: tuple[bool, bool],
) -> ValueFactors | None:
    """Values and outputs of a configured layer's shapes, without numbers and on the meta device.

    Parameters
    ----------
    layer
        Its sizes; ``None`` where its values are the original's.
    num_heads, width, input_size, output_size
        h, w, i and o.
    biases
        Whether values and outputs have one.
    """
    if layer.values is None:
        return None
    channels, own, mixed = layer.values, num_heads, layer.value_heads
    with torch.device("meta"):
        factors = ValueFactors(
            torch.empty(channels, input_size),
            torch.empty(channels) if biases[0] else None,
            torch.empty(output_size, channels),
            torch.empty(output_size) if biases[1] else None,
        )
        if mixed is None:
            columns = torch.empty(own, width, dtype=torch.int64)
            return replace(factors, columns=columns, rows=torch.empty(channels, dtype=torch.int64))
        shape = mixed, own, input_size
        dynamic = {name: torch.empty(shape) for name in ("x2w", "m2w") if layer.dynamic}
        return replace(factors, mixing=torch.empty(mixed, own), **dynamic)


def _moments(
    forms: ValueForms, contexts: Moments | None
) -> tuple[Float[Tensor, "c"], Float[Tensor, "c c"]]:
    """Mean and covariance of the contexts; about zero where no bias can take the mean up."""
    if contexts is None:
        mean = forms.bias.flatten()
        covariance = _block_diagonal(forms.value @ forms.value.mT)
    else:
        mean, covariance = (
            part.to(forms.value.dtype).to(forms.value.device)
            for part in (contexts.mean, contexts.covariance)
        )
    if forms.output_bias is None:
        covariance = covariance + torch.outer(mean, mean)
    return mean, covariance


def _turned(
    forms: ValueForms, covariance: Float[Tensor, "c c"]
) -> tuple[Float[Tensor, "c c"], Float[Tensor, "c o"]]:
    """Each head's context in directions of its own, strongest first, and their outputs.

    ``turn`` makes a head's contexts white, so that its singular values are what each says.
    """
    heads, width, _ = forms.value.shape
    blocks = covariance.view(heads, width, heads, width)
    own = torch.stack([blocks[h, :, h] for h in range(heads)])
    values, vectors = torch.linalg.eigh(own)
    largest = values[:, -1:].clamp(min=torch.finfo(values.dtype).tiny)
    roots = torch.maximum(values, EIGENVALUE_FLOOR * largest).sqrt()
    root, inverse = (vectors * roots[:, None] @ vectors.mT, vectors / roots[:, None] @ vectors.mT)
    left, singular, right = torch.linalg.svd(root @ forms.output, full_matrices=False)
    return _block_diagonal(left.mT @ inverse), (singular[..., None] * right).flatten(0, 1)


def _block_diagonal(blocks: Float[Tensor, "h e e"]) -> Float[Tensor, "c c"]:
    heads, width, _ = blocks.shape
    whole = blocks.new_zeros(heads, width, heads, width)
    each = torch.arange(heads, device=blocks.device)
    whole[each, :, each] = blocks
    return whole.view(heads * width, heads * width)


def _eliminate(
    gram: Float[Tensor, "c c"], weights: Float[Tensor, "c o"], channels: int
) -> tuple[Int[Tensor, "n"], Float[Tensor, "n o"]]:
    """The channels that the output misses most, in order, and weights refitted to them."""
    kept = torch.arange(len(gram), device=gram.device)
    refitted, inverse = _refit(gram, weights, kept)
    while len(kept) > channels:
        left = max(channels, len(kept) - max(1, int(STEP * len(kept))))
        cost = refitted.square().sum(1) / inverse.diagonal()
        kept = kept[cost.topk(left).indices.sort().values]
        refitted, inverse = _refit(gram, weights, kept)
    return kept, refitted


def _refit(
    gram: Float[Tensor, "c c"], weights: Float[Tensor, "c o"], kept: Int[Tensor, "n"]
) -> tuple[Float[Tensor, "n o"], Float[Tensor, "n n"]]:
    """Least squares of the whole output on the channels kept, near the weights that they had."""
    own = gram[kept][:, kept]
    floor = RIDGE * gram.diagonal().max().clamp(min=torch.finfo(gram.dtype).tiny ** 0.5)
    eye = torch.eye(len(own), dtype=gram.dtype, device=gram.device)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(own + floor * eye))
    return inverse @ (gram[kept] @ weights + floor * weights[kept]), inverse


def _places(
    owner: Int[Tensor, "n"], heads: int, width: int
) -> tuple[Int[Tensor, "h w"], Int[Tensor, "n"]]:
    """Columns and rows of channels that are sorted by their head."""
    counts = torch.bincount(owner, minlength=heads)
    first = counts.cumsum(0) - counts
    place = torch.arange(len(owner), device=owner.device) - first[owner]
    rows = owner * width + place
    columns = torch.zeros(heads, width, dtype=torch.int64, device=owner.device)
    columns.view(-1)[rows] = torch.arange(len(owner), device=owner.device)
    return columns, rows
