"""Block terms by alternating least squares on the factored stack: talking heads.

    minimise sum_h |w_q[h]^T w_k[h] - sum_n mixing[h, n] query[n]^T key[n]|^2

``n`` base heads of width ``d`` that the heads mix, a CP whose mixing is tied within each block. The
problem has many local minima, and the start decides. Three are tried, and the best goes on:

- the heads' own strongest triplets, where there are as many base heads as heads;
- greedily, one base head after the other: the ``d`` directions, and the mixing, that take most of
  what those before it left;
- a CP of the same rank, its channels sorted into blocks that are mixed alike.

Axes: h head, d channel within a head, i query-side input, j key-side input, r shared rank (n d),
n base head.
References: De Lathauwer 2008, Decompositions of a higher-order tensor in block terms; Shazeer et
al. 2020, Talking-Heads Attention.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import cast

import torch
from jaxtyping import Float, Int
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from collabify.decompose.als import Search
from collabify.decompose.cp import fit_cp
from collabify.decompose.factors import BlockFactors, CPFactors, Decomposition
from collabify.decompose.head_svd import head_triplets
from collabify.forms import HeadForms

TRIAL = 0.15  # share of the sweeps that every start gets
LAST = 0.1  # share of the sweeps that runs in float64
ROUNDS = 20  # of power iteration for one greedy base head, and of sorting channels


def fit_block_term(
    forms: HeadForms,
    base_heads: int,
    width: int,
    *,
    iterations: int = 200,
    tolerance: float = 1e-4,
) -> Decomposition:
    """Fit base heads that all heads mix.

    Parameters
    ----------
    forms
        The heads.
    base_heads
        How many there are to be, at least 1.
    width
        Channels of each, at least 1; exact with as many base heads as heads at ``forms.head_dim``.
    iterations
        Sweeps at most, of the start that proved best; three, where fewer are asked for.
    tolerance
        Stop when sweeps lower the relative error by less than this share of it on average.
    """
    if (base_heads, width) == (forms.num_heads, forms.head_dim):
        mixing = torch.eye(forms.num_heads, dtype=forms.w_q.dtype, device=forms.w_q.device)
        found = fit_own_heads(forms, width)
        return replace(found, factors=replace(cast(BlockFactors, found.factors), mixing=mixing))
    trial = max(1, round(TRIAL * iterations))
    last = max(1, round(LAST * iterations))
    fast = forms.to(torch.float32)
    best: tuple[Search, list[float]] | None = None
    for start in _starts(forms, base_heads, width, trial, tolerance):
        whole = start.as_cp
        search = Search(fast, whole.query, whole.key, whole.mixing, width=width)
        errors = [start.relative_error(forms)]
        if errors[0] > search.floor:
            errors += search.run(trial, tolerance)[0]
        if best is None or errors[-1] < best[1][-1]:
            best = search, errors
    assert best is not None  # noqa: S101 (narrows the type)
    search, errors = best
    converged = False
    if errors[-1] > search.floor:
        errors += search.run(max(1, iterations - len(errors) - last), tolerance)[0]
    query, key, mixing, _ = search.state
    exact = Search(forms, query, key, mixing, width=width)
    ended: list[float] = []
    converged = True
    if errors[-1] > exact.floor:
        ended, converged = exact.run(last, tolerance)
    query, key, mixing, _ = exact.state
    factors = BlockFactors(query, key, mixing[:, ::width].contiguous(), forms.num_heads)
    return Decomposition(factors, (*errors, *ended), converged)


def fit_own_heads(forms: HeadForms, width: int) -> Decomposition:
    """Heads kept apart, all of one width: their strongest triplets, or themselves, bit for bit.

    Parameters
    ----------
    forms
        The heads.
    width
        Channels of each, between 1 and ``forms.head_dim``.
    """
    if width == forms.head_dim:
        query, key = forms.w_q.flatten(0, 1), forms.w_k.flatten(0, 1)
        return Decomposition(
            BlockFactors(query, key, None, forms.num_heads), (0.0,), converged=True
        )
    factors = replace(_truncated(forms, width), mixing=None)
    return Decomposition(factors, (factors.relative_error(forms),), converged=True)


def _starts(
    forms: HeadForms, base_heads: int, width: int, sweeps: int, tolerance: float
) -> Iterator[BlockFactors]:
    """Factors to go on from."""
    if base_heads == forms.num_heads and width <= forms.head_dim:
        yield _truncated(forms, width)
    yield _greedy(forms, base_heads, width)
    rank = base_heads * width
    if base_heads > 1 and rank <= forms.full_rank:
        yield _sorted(forms, base_heads, width, sweeps, tolerance)


def _truncated(forms: HeadForms, width: int) -> BlockFactors:
    """Each head's ``width`` strongest triplets."""
    values, left, right = (part[:, :width] for part in head_triplets(forms))
    roots = values.sqrt()[..., None]
    mixing = torch.eye(forms.num_heads, dtype=values.dtype, device=values.device)
    query, key = ((roots * part).flatten(0, 1) for part in (left, right))
    return BlockFactors(query, key, mixing, forms.num_heads)


def _greedy(forms: HeadForms, base_heads: int, width: int) -> BlockFactors:
    """One base head after the other, each the best for what the others left."""
    w_q, w_k = forms.w_q, forms.w_k  # of what is left, heads grow by every base head
    queries, keys, mixings = [], [], []
    for _ in range(base_heads):
        left = HeadForms(w_q, w_k, forms.content, forms.scale)
        query, key, mixing = _one_block(left, width)
        queries.append(query)
        keys.append(key)
        mixings.append(mixing)
        taken = -mixing[:, None, None] * query
        w_q = torch.cat([w_q, taken], dim=1)
        w_k = torch.cat([w_k, key.expand(forms.num_heads, -1, -1)], dim=1)
    mixing = torch.stack(mixings, dim=1)
    return BlockFactors(torch.cat(queries), torch.cat(keys), mixing, forms.num_heads)


def _one_block(
    forms: HeadForms, width: int
) -> tuple[Float[Tensor, "d i"], Float[Tensor, "d j"], Float[Tensor, "h"]]:
    """The base head and the mixing that take most of some forms, by alternation."""
    norms = forms.squared_norms()
    mixing = (norms == norms.max()).to(norms.dtype)
    w_q, w_k = forms.w_q, forms.w_k
    key = _strongest_rows(w_k[int(norms.argmax())], width)
    for _ in range(ROUNDS):
        # sum_h mixing[h] forms[h], which is never built, from both sides
        query = _orthonormal(_weighted(mixing, w_q, w_k @ _orthonormal(key).T))
        key = _weighted(mixing, w_k, w_q @ query.T)
        products = ((w_q @ query.T) * (w_k @ key.T)).sum((1, 2))
        mixing = products / products.norm().clamp(min=torch.finfo(products.dtype).tiny)
    return query, key, products / key.square().sum().clamp(min=torch.finfo(key.dtype).tiny)


def _weighted(
    mixing: Float[Tensor, "h"], w: Float[Tensor, "h d i"], seen: Float[Tensor, "h d r"]
) -> Float[Tensor, "r i"]:
    """``sum_h mixing[h] seen[h]^T w[h]``."""
    return (mixing[:, None, None] * seen).flatten(0, 1).T @ w.flatten(0, 1)


def _strongest_rows(rows: Float[Tensor, "d j"], width: int) -> Float[Tensor, "r j"]:
    """``width`` directions that hold most of ``rows``; any others where there are fewer."""
    directions: Tensor = torch.linalg.svd(rows, full_matrices=True).Vh
    return directions[:width]


def _orthonormal(rows: Float[Tensor, "r i"]) -> Float[Tensor, "r i"]:
    basis: Tensor = torch.linalg.qr(rows.T).Q
    return basis.T


def _sorted(
    forms: HeadForms, base_heads: int, width: int, sweeps: int, tolerance: float
) -> BlockFactors:
    """A CP's channels in blocks of those that are mixed most alike, with one mixing for each."""
    found = fit_cp(forms, base_heads * width, iterations=sweeps, tolerance=tolerance).factors
    assert isinstance(found, CPFactors)  # noqa: S101 (narrows the type)
    query, key, mixing = found.query, found.key, found.head_mixing()
    strength = query.norm(dim=1) * key.norm(dim=1) * mixing.norm(dim=0)
    directions = mixing / mixing.norm(dim=0).clamp(min=torch.finfo(mixing.dtype).tiny)
    blocks, centres = _balanced_clusters(directions, strength, base_heads)
    order = blocks.argsort(stable=True)
    weights = (directions * centres[:, blocks]).sum(0) * mixing.norm(dim=0)
    query = query * weights[:, None]
    return BlockFactors(query[order], key[order], centres, forms.num_heads)


def _balanced_clusters(
    directions: Float[Tensor, "h r"], strength: Float[Tensor, "r"], count: int
) -> tuple[Int[Tensor, "r"], Float[Tensor, "h n"]]:
    """Blocks of equal size by squared cosine, and the line that each block's channels lie along."""
    size = directions.shape[1] // count
    centres = directions[:, _spread(directions, strength, count)]
    blocks = torch.zeros(directions.shape[1], dtype=torch.int64)
    for _ in range(ROUNDS):
        gain = (directions.T @ centres).square() * strength.square()[:, None]
        rows, seats = linear_sum_assignment(-gain.repeat_interleave(size, dim=1).cpu().numpy())
        new = torch.zeros_like(blocks)
        new[torch.as_tensor(rows)] = torch.as_tensor(seats) // size
        lines = []
        for block in range(count):
            own = (directions * strength)[:, new.to(directions.device) == block]
            lines.append(torch.linalg.svd(own, full_matrices=False).U[:, 0])
        centres = torch.stack(lines, dim=1)
        if torch.equal(new, blocks):
            break
        blocks = new
    return blocks.to(directions.device), centres


def _spread(
    directions: Float[Tensor, "h r"], strength: Float[Tensor, "r"], count: int
) -> Int[Tensor, "n"]:
    """Strong channels whose mixing differs most from that of those chosen before."""
    left = strength.square().clone()
    chosen = []
    for _ in range(count):
        pick = int(left.argmax())
        chosen.append(pick)
        left = torch.minimum(
            left,
            strength.square() * (1 - (directions.T @ directions[:, pick]).square()).clamp(min=0),
        )
        left[pick] = -1
    return torch.tensor(chosen, device=directions.device)
