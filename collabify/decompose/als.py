"""Accelerated alternating least squares on the factored stack, for every form that mixes channels.

    minimise sum_h |w_q[h]^T w_k[h] - query^T diag(mixing[h]) key|^2

Each factor in turn solves its normal equations. Their right-hand sides need only ``w_q query^T``
and ``w_k key^T``:

    query  (key key^T * mixing^T mixing) query = sum_h (mixing[h] * w_k[h] key^T)^T w_q[h]
    mixing (query query^T * key key^T) mixing[h]^T = sum_d (w_q[h] query^T * w_k[h] key^T)[d]

A head may have weights for some of the channels only (``support``), or one weight for every block
of channels (``width``): then the equations of the mixing are those of the weights that it has.

A step that is proximal by a rounding error's worth, ``+ lambda |new - old|^2``, keeps singular
systems (dead or repeated channels) solvable. Sweeps are extrapolated with Nesterov's momentum; one
that raises the error is dropped and the momentum starts again, so the error never rises.

Axes: h head, d channel within a head, i query-side input, j key-side input, r shared rank,
n block of channels, k channel that a head keeps.
References: Kolda & Bader 2009, section 3.4; Mitchell, Ye & De Sterck 2020, Nesterov acceleration of
alternating least squares for CP.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from collabify.decompose.factors import relative_error, rounding_floor
from collabify.forms import HeadForms

MOMENTUM = 0.95  # at most
WINDOW = 5  # sweeps over which the improvement is averaged


class State(NamedTuple):
    """Factors, and the products ``w_k key^T`` that the next sweep begins with."""

    query: Tensor
    key: Tensor
    mixing: Tensor
    k: Tensor


class Search:
    """Factors on their way down; ``state`` holds those of the lowest error so far."""

    def __init__(
        self,
        forms: HeadForms,
        query: Float[Tensor, "r i"],
        key: Float[Tensor, "r j"],
        mixing: Float[Tensor, "h r"],
        *,
        support: Int[Tensor, "h k"] | None = None,
        width: int = 1,
    ) -> None:
        self.heads, self.head_dim = forms.num_heads, forms.head_dim
        self.w_q, self.w_k = forms.w_q.flatten(0, 1), forms.w_k.flatten(0, 1)
        self.truth = forms.squared_norms().sum().double()
        self.floor = rounding_floor(forms)
        self.support, self.width = support, width
        query, key, mixing = (part.to(self.w_k.dtype) for part in (query, key, mixing))
        self.state = State(query, key, mixing, self.w_k @ key.T)

    def run(self, sweeps: int, tolerance: float) -> tuple[list[float], bool]:
        """Sweep until it no longer pays; the lowest error after each, and whether it stopped."""
        errors: list[float] = []
        point, streak = self.state, 0
        for _ in range(sweeps):
            new, error = self._sweep(*point)
            if errors and error > errors[-1]:
                point, streak, error = self.state, 0, errors[-1]
            else:
                weight = min(MOMENTUM, streak / (streak + 3))
                pairs = zip(new, self.state, strict=True)
                point = State(*(now + weight * (now - before) for now, before in pairs))
                self.state, streak = new, streak + 1
            errors.append(error)
            before = errors[-WINDOW - 1] if len(errors) > WINDOW else float("inf")
            if before - error <= WINDOW * tolerance * error or error <= self.floor:
                return errors, True
        return errors, False

    def _sweep(
        self,
        query: Float[Tensor, "r i"],
        key: Float[Tensor, "r j"],
        mixing: Float[Tensor, "h r"],
        k: Float[Tensor, "hd r"],
    ) -> tuple["State", float]:
        """One least-squares step for query, key and mixing each, and the error after them."""
        per_channel = mixing.repeat_interleave(self.head_dim, dim=0)  # (h d) r
        mixing_gram = mixing.T @ mixing
        query = solve((key @ key.T) * mixing_gram, (k * per_channel).T @ self.w_q, query)
        q, query_gram = self.w_q @ query.T, query @ query.T
        key = solve(query_gram * mixing_gram, (q * per_channel).T @ self.w_k, key)
        k, gram = self.w_k @ key.T, query_gram * (key @ key.T)
        matched = (q * k).view(self.heads, self.head_dim, -1).sum(1)  # h r
        mixing = self._mix(gram, matched, mixing)
        inner = (matched.double() * mixing).sum()
        error = relative_error(self.truth, inner, ((mixing @ gram).double() * mixing).sum())
        scales = scales_of(query, key, mixing)
        query, key, mixing = balance_by(scales, query, key, mixing)
        return State(query, key, mixing, k * scales[1]), error

    def _mix(
        self, gram: Float[Tensor, "r r"], matched: Float[Tensor, "h r"], old: Float[Tensor, "h r"]
    ) -> Float[Tensor, "h r"]:
        """The mixing that fits best, on each head's own channels where it has some."""
        if self.width > 1:
            return self._mix_blocks(gram, matched, old)
        if self.support is None:
            return solve(gram, matched.T, old.T).T
        rows, columns = self.support[:, :, None], self.support[:, None, :]
        target, own = (x.gather(1, self.support)[..., None] for x in (matched, old))
        return torch.zeros_like(old).scatter(
            1, self.support, solve(gram[rows, columns], target, own)[..., 0]
        )

    def _mix_blocks(
        self, gram: Float[Tensor, "r r"], matched: Float[Tensor, "h r"], old: Float[Tensor, "h r"]
    ) -> Float[Tensor, "h r"]:
        """The same with one weight for all channels of a block."""
        count = len(gram) // self.width
        sums = gram.view(count, self.width, count, self.width).sum((1, 3))
        target = matched.view(len(matched), count, self.width).sum(2)
        weights = solve(sums, target.T, old[:, :: self.width].T).T
        return weights.repeat_interleave(self.width, dim=1)


def solve(
    gram: Float[Tensor, "*h r r"], target: Float[Tensor, "*h r n"], old: Float[Tensor, "*h r n"]
) -> Float[Tensor, "*h r n"]:
    """The factor nearest to ``old``: ``(gram + lambda) new = target + lambda old``.

    By the inverse, which is a third of the time of two triangular solves in float32.
    """
    size = gram.shape[-1]
    floor = size * torch.finfo(gram.dtype).eps * gram.diagonal(dim1=-2, dim2=-1).max()
    floored = gram + floor * torch.eye(size, dtype=gram.dtype, device=gram.device)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(floored))
    return inverse @ (target + floor * old)


def scales_of(
    query: Float[Tensor, "r i"], key: Float[Tensor, "r j"], mixing: Float[Tensor, "h r"]
) -> tuple[Float[Tensor, "r"], Float[Tensor, "r"], Float[Tensor, "r"]]:
    """What each channel of query, key and mixing is multiplied by to be balanced."""
    tiny = torch.finfo(query.dtype).tiny
    lengths = query.norm(dim=1), key.norm(dim=1), mixing.norm(dim=0)
    common = (lengths[0] * lengths[1] * lengths[2]).sqrt()
    floored = [length.clamp(min=tiny) for length in lengths]
    return common / floored[0], common / floored[1], 1 / floored[2]


def balance_by(
    scales: tuple[Tensor, Tensor, Tensor],
    query: Float[Tensor, "r i"],
    key: Float[Tensor, "r j"],
    mixing: Float[Tensor, "h r"],
) -> tuple[Float[Tensor, "r i"], Float[Tensor, "r j"], Float[Tensor, "h r"]]:
    """Multiply every channel by its scales."""
    return query * scales[0][:, None], key * scales[1][:, None], mixing * scales[2]
