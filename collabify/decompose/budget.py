"""Ranks across layers: one threshold on the strength of singular triplets, wherever they are.

    keep the triplet (layer, n) where scale^2 sigma_n^2 is large, until the budget is spent

Strength is absolute, in squared logits: a triplet of a layer whose logits hardly vary is dropped
before one of a layer whose logits decide. (Energies relative to each layer's own do worse.)

Axes: n triplet of a layer, all heads pooled, strongest first.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor


def ranks_within(
    strengths: Sequence[Float[Tensor, "_"]],
    costs: Sequence[int],
    budget: int,
    *,
    smallest: int = 8,
    multiple: int = 8,
) -> list[int]:
    """The ranks that keep most strength for a number of parameters.

    Parameters
    ----------
    strengths
        Squared singular values of each layer's triplets, scaled to logits, descending.
    costs
        Parameters per rank in each layer.
    budget
        Parameters for all layers together.
    smallest, multiple
        No layer gets fewer than ``smallest`` channels (or all it has), and ranks are multiples of
        ``multiple`` (or all the layer has).

    Returns
    -------
    ranks
        Of each layer; those of the smallest size where even they exceed the budget.
    """
    ranks = [_round_up(min(smallest, len(s)), multiple, len(s)) for s in strengths]
    spent = sum(rank * cost for rank, cost in zip(ranks, costs, strict=True))
    full: set[int] = set()
    while len(full) < len(ranks):
        gains = [_gain(s, ranks[n], multiple, costs[n]) for n, s in enumerate(strengths)]
        best = max((n for n in range(len(ranks)) if n not in full), key=gains.__getitem__)
        step = min(ranks[best] + multiple, len(strengths[best])) - ranks[best]
        if step == 0 or spent + step * costs[best] > budget:
            full.add(best)
            continue
        ranks[best] += step
        spent += step * costs[best]
    return ranks


def ranks_for_error(
    strengths: Sequence[Float[Tensor, "_"]],
    error: float,
    *,
    smallest: int = 8,
    multiple: int = 8,
    unreachable: float = 0.0,
) -> list[int]:
    """The smallest ranks whose error over all layers is allowed.

    Parameters
    ----------
    strengths, smallest, multiple
        As for :func:`ranks_within`.
    error
        Root of the share of strength that may be lost over all layers, in [0, 1): the relative
        error of a head-SVD of these ranks, which shared channels only lower.
    unreachable
        Strength of triplets that no rank keeps, in the strengths' unit.

    Returns
    -------
    ranks
        Of each layer; all that there is where even that errs more.
    """
    ranks = [_round_up(min(smallest, len(s)), multiple, len(s)) for s in strengths]
    total = sum(float(s.sum()) for s in strengths) + unreachable
    lost = [float(s[rank:].sum()) for s, rank in zip(strengths, ranks, strict=True)]
    while sum(lost) + unreachable > error**2 * total:
        gains = [_gain(s, rank, multiple, 1) for s, rank in zip(strengths, ranks, strict=True)]
        best = max(range(len(ranks)), key=gains.__getitem__)
        if ranks[best] == len(strengths[best]):
            break
        ranks[best] = min(ranks[best] + multiple, len(strengths[best]))
        lost[best] = float(strengths[best][ranks[best] :].sum())
    return ranks


def _round_up(rank: int, multiple: int, largest: int) -> int:
    return min(-(-rank // multiple) * multiple, largest)


def _gain(strength: Float[Tensor, "n"], rank: int, multiple: int, cost: int) -> float:
    """Strength per parameter that the next channels of a layer keep."""
    following = strength[rank : rank + multiple]
    return float(following.sum()) / (len(following) * cost) if len(following) else float("-inf")


def pooled_strengths(
    values: Float[Tensor, "h d"], scale: float, channels: int | None = None
) -> tuple[Float[Tensor, "n"], float]:
    """Squared singular values of all heads in squared logits, descending.

    With ``channels``, only so many of each head, the strongest; and what the others sum to.
    """
    squared: Tensor = (scale * values).square().sort(dim=1, descending=True).values
    within = squared if channels is None else squared[:, :channels]
    left = float(squared.sum() - within.sum())
    return torch.sort(within.flatten(), descending=True).values, left
