"""What a conversion will do, checked before anything is touched: options, layers, ranks, counts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from collabify.config import ConversionConfig, Form, LayerConfig
from collabify.decompose.budget import pooled_strengths, ranks_for_error, ranks_within
from collabify.decompose.head_svd import head_triplets
from collabify.errors import (
    AlreadyConvertedError,
    LayerError,
    NonFiniteError,
    OptionError,
    RankError,
    UnsupportedModelError,
)
from collabify.forms import HeadForms
from collabify.models import AttentionSite, find_attention
from collabify.results import ParameterCount

Method = Literal["cp", "tucker", "head-svd"]
Solver = Literal["factored", "tensorly"]
FORM_OF: dict[str, Form] = {"cp": "collaborative", "tucker": "tucker", "head-svd": "collaborative"}


@dataclass(frozen=True)
class Request:
    """What was asked for, as :func:`collabify.convert` documents it.

    Raises
    ------
    OptionError
        Where no model could accept it.
    """

    dk: int | None
    kept: float | None
    error: float | None
    method: str
    head_rank: int | None
    channels: int | Literal["all"] | None
    solver: str
    iterations: int
    tolerance: float
    multiple: int

    def __post_init__(self) -> None:
        sizes = {"dk": self.dk, "kept": self.kept, "error": self.error}
        given = [name for name, value in sizes.items() if value is not None]
        if len(given) != 1:
            raise OptionError(
                f"{' and '.join(given) or 'no size'} given, exactly one of --dk, --kept and "
                "--error must be. Say how small the model is to be in one way."
            )
        self._check_choices()
        self._check_numbers()

    def _check_choices(self) -> None:
        if self.method not in FORM_OF:
            raise OptionError(
                f"method={self.method!r} must be one of {', '.join(get_args(Method))}. "
                "Change --method."
            )
        if self.solver not in get_args(Solver):
            raise OptionError(
                f"solver={self.solver!r} must be one of {', '.join(get_args(Solver))}. "
                "Change --solver."
            )
        if self.head_rank is not None and self.method != "tucker":
            raise OptionError(
                f"head_rank={self.head_rank} goes with method='tucker' only, not {self.method!r}. "
                "Leave out --head-rank or use --method tucker."
            )
        if self.solver == "tensorly" and self.method == "head-svd":
            raise OptionError(
                "solver='tensorly' has no method 'head-svd', which needs none. Leave out --solver."
            )
        if isinstance(self.channels, int) and (self.method == "tucker" or self._tensorly):
            raise OptionError(
                f"channels={self.channels} goes with method='cp' or 'head-svd' "
                "and our solver only. Leave out --channels."
            )

    def _check_numbers(self) -> None:
        if isinstance(self.channels, int) and self.channels < 1:
            raise OptionError(f"channels={self.channels} must be at least 1. Raise --channels.")
        if isinstance(self.channels, str) and self.channels != "all":
            raise OptionError(
                f"channels={self.channels!r} must be a whole number or 'all'. Change --channels."
            )
        if self.iterations < 1:
            raise OptionError(
                f"iterations={self.iterations} must be at least 1. Raise --iterations."
            )
        if not 0 <= self.tolerance < 1:
            raise OptionError(
                f"tolerance={self.tolerance} must be at least 0 and below 1: it is a share of the "
                "error. Change --tol."
            )
        if self.multiple < 1:
            raise OptionError(f"round={self.multiple} must be at least 1. Raise --round.")
        if self.kept is not None and not 0 < self.kept <= 1:
            raise OptionError(
                f"kept={self.kept} must be above 0 and at most 1: it is a share of the query-key "
                "parameters. Write 0.5 for half."
            )
        if self.error is not None and not 0 < self.error < 1:
            raise OptionError(
                f"error={self.error} must be above 0 and below 1: it is a relative error. "
                "Change --error."
            )

    @property
    def _tensorly(self) -> bool:
        return self.solver == "tensorly"

    def check(self, sites: Sequence[AttentionSite]) -> None:
        """Refuse sizes that do not fit the layers, before anything takes time.

        Raises
        ------
        RankError, OptionError
        """
        if self.dk is not None:
            self.plan(sites)
        if self.error is not None and (self.head_rank is not None or self._tensorly):
            raise OptionError(
                f"error={self.error} goes with our solver and without head_rank only: ranks are "
                "chosen by what a head-SVD would err, which those need not reach. "
                "Use --dk, or leave out --head-rank and --solver."
            )
        if self.kept is None:
            return
        if self.method == "tucker":
            raise OptionError(
                "kept goes with methods whose parameters grow evenly with the rank, not 'tucker'. "
                "Use --dk or --error."
            )
        before = sum(site.query_key_parameters for site in sites)
        smallest = [min(-(-8 // self.multiple) * self.multiple, site.full_rank) for site in sites]
        least = self._cost(
            sites, [min(n, self._reach(s)) for n, s in zip(smallest, sites, strict=True)]
        )
        if least > self.kept * before:
            raise RankError(
                f"kept={self.kept} must be at least {-(-1000 * least // before) / 1000} for these "
                f"{len(sites)} layers, with {smallest[0]} channels each and content biases. "
                "Raise --kept."
            )

    def plan(
        self,
        sites: Sequence[AttentionSite],
        forms: Mapping[int, HeadForms] | None = None,
        sensitivities: Sequence[float] | None = None,
    ) -> ConversionConfig:
        """Every layer's form and sizes, checked against its heads.

        Parameters
        ----------
        sites
            The layers to convert.
        forms
            Their heads by index, where ranks are to be chosen: in the calibrated space, if any.
        sensitivities
            How much each layer's logits matter, for ``kept``; by default all the same.

        Raises
        ------
        RankError
            Where a size does not fit a layer, or an error cannot be kept.
        """
        ranks = [self.dk or 0] * len(sites)
        if self.dk is None:
            if forms is None:
                raise ValueError("choosing ranks takes the heads")
            heads = [forms[site.index] for site in sites]
            ranks = self._choose(sites, heads, sensitivities or [1.0] * len(sites))
        return ConversionConfig(
            tuple(self._layer(site, rank) for site, rank in zip(sites, ranks, strict=True))
        )

    def is_exact(self, site: AttentionSite, rank: int) -> bool:
        """Whether a layer of this rank is the original."""
        factored = self.solver == "factored" and self.head_rank is None
        return factored and self.channels is None and rank == self._largest(site)

    def _layer(self, site: AttentionSite, rank: int) -> LayerConfig:
        heads = site.num_heads
        largest = self._largest(site)
        if not 1 <= rank <= largest:
            raise RankError(
                f"dk={rank} must be between 1 and {largest} for {site.name!r} ({heads} heads of "
                f"{site.head_dim}). {'Lower' if rank > largest else 'Raise'} --dk."
            )
        if self.head_rank is not None and not 1 <= self.head_rank <= heads:
            raise RankError(
                f"head_rank={self.head_rank} must be between 1 and {heads}, the heads of "
                f"{site.name!r}. Change --head-rank, or leave it out for a core per head."
            )
        form = FORM_OF[self.method]
        return LayerConfig(site.index, form, rank, self.head_rank, self._channels(site, rank))

    def _largest(self, site: AttentionSite) -> int:
        return min(site.full_rank, site.width) if self.method == "tucker" else site.full_rank

    def _channels(self, site: AttentionSite, rank: int) -> int | None:
        """Channels that a head keeps: with its content bias as wide as its values, if that fits."""
        if self.method == "tucker" or self._tensorly or self.channels == "all":
            return None
        if isinstance(self.channels, int):
            if self.channels * site.num_heads < rank:
                raise RankError(
                    f"channels={self.channels} must be at least {-(-rank // site.num_heads)} for "
                    f"{site.name!r}, so that its {site.num_heads} heads can use dk={rank}. "
                    "Raise --channels or lower --dk."
                )
            return min(self.channels, rank)
        kept = site.head_dim - 1
        return min(kept if rank <= kept * site.num_heads else site.head_dim, rank)

    def _reach(self, site: AttentionSite) -> int:
        """The largest rank that the heads' channels can use."""
        if isinstance(self.channels, int):
            return min(self._largest(site), self.channels * site.num_heads)
        return self._largest(site)

    def _choose(
        self,
        sites: Sequence[AttentionSite],
        forms: Sequence[HeadForms],
        sensitivities: Sequence[float],
    ) -> list[int]:
        """Ranks across layers for ``kept`` or ``error``.

        Strengths count by the root of the sensitivities: between logits alone and effect alone,
        which is better on hidden states and attention together than either
        (``benchmarks/quality/budget.py``). An error allowed is one of logits.
        """
        channels = self.channels if isinstance(self.channels, int) else None
        few = self.error is not None and self.channels is None and self.method != "tucker"
        strengths, unreachable = _strengths(sites, forms, channels, few=few)
        strengths = [s[: self._reach(site)] for s, site in zip(strengths, sites, strict=True)]
        if self.error is None:
            roots = [sensitivity**0.5 for sensitivity in sensitivities]
            weighted = [root * s for root, s in zip(roots, strengths, strict=True)]
            return self._choose_within(sites, weighted)
        least = (unreachable / (unreachable + sum(float(s.sum()) for s in strengths))) ** 0.5
        if least > self.error:
            raise RankError(
                f"error={self.error} must be at least {least:.4f} where heads keep "
                f"{channels or sites[0].head_dim - 1} channels. Raise --error, or --channels (at "
                f"most {sites[0].head_dim}, or all)."
            )
        return ranks_for_error(
            strengths, self.error, multiple=self.multiple, unreachable=unreachable
        )

    def _choose_within(
        self, sites: Sequence[AttentionSite], strengths: Sequence[Tensor]
    ) -> list[int]:
        """The ranks that spend what ``kept`` allows and no more."""
        dense = self.channels == "all" or self._tensorly
        budget = int((self.kept or 0) * sum(site.query_key_parameters for site in sites))
        costs = [2 * site.width + dense * site.num_heads for site in sites]
        ranks: list[int] = []
        for spare in (1, 0):  # a head has its full width only where few channels are dropped
            kept = [self.channels or site.head_dim - spare for site in sites]
            fixed = sum(
                site.num_heads * (site.width + (0 if dense else int(k)))
                for site, k in zip(sites, kept, strict=True)
            )
            ranks = ranks_within(strengths, costs, budget - fixed, multiple=self.multiple)
            if self._cost(sites, ranks) <= budget:
                break
        return ranks

    def _cost(self, sites: Sequence[AttentionSite], ranks: Sequence[int]) -> int:
        """Query-key parameters of layers of these ranks."""
        return sum(
            site.empty_factors(self._layer(site, rank)).num_parameters + site.num_heads * site.width
            for site, rank in zip(sites, ranks, strict=True)
        )


def _strengths(
    sites: Sequence[AttentionSite],
    forms: Sequence[HeadForms],
    channels: int | None,
    *,
    few: bool = False,
) -> tuple[list[Tensor], float]:
    """Strengths of the triplets that heads of so many channels can keep, and of all others.

    With ``few``, a head keeps one less than it is wide.
    """
    found = [
        pooled_strengths(
            head_triplets(heads)[0], heads.scale, site.head_dim - 1 if few else channels
        )
        for site, heads in zip(sites, forms, strict=True)
    ]
    return [values for values, _ in found], sum(beyond for _, beyond in found)


def select(
    sites: Sequence[AttentionSite], layers: Sequence[int] | None
) -> tuple[AttentionSite, ...]:
    """The layers asked for, in the model's order, of a model that was not converted before.

    Raises
    ------
    LayerError, AlreadyConvertedError
        Where a layer is not there, or has a shared form.
    UnsupportedModelError
        Where accelerate has placed the model's parts.
    """
    for index in layers or ():
        if not 0 <= index < len(sites):
            raise LayerError(
                f"layer={index} must be between 0 and {len(sites) - 1}: "
                f"the model has {len(sites)} distinct attention layers. Change --layer."
            )
    chosen = tuple(site for site in sites if layers is None or site.index in layers)
    if not chosen:
        raise LayerError(f"layers={layers!r} must name at least one layer. Leave it out for all.")
    for site in sites:
        if hasattr(site.module, "_hf_hook") or site.query.weight.is_meta:
            raise UnsupportedModelError(
                f"{site.name!r} was placed by accelerate (device_map), whose hooks run the old "
                "attention. Load the model on one device, convert it, save it, and place that."
            )
        if site.converted:
            raise AlreadyConvertedError(
                f"{site.name!r} was converted before. Take the original model instead."
            )
    return chosen


def check_finite(model: nn.Module) -> None:
    """Refuse a model with NaN or infinite weights, and name the first.

    Raises
    ------
    NonFiniteError
    """
    for name, parameter in model.named_parameters():
        bad = int((~torch.isfinite(parameter)).sum())
        if bad:
            raise NonFiniteError(
                f"{bad} of the {parameter.numel()} numbers of {name!r} are NaN or infinite; "
                "all must be finite. "
                "Take a checkpoint from before training diverged."
            )


def count(
    model: nn.Module, sites: Sequence[AttentionSite], plan: ConversionConfig
) -> tuple[ParameterCount, ParameterCount, ParameterCount]:
    """Parameters of query-key, attention and the whole model before and after."""
    everything = find_attention(model)
    query_key = sum(site.query_key_parameters for site in everything)
    value_output = sum(site.value_output_parameters for site in everything)
    whole = sum(parameter.numel() for parameter in model.parameters())
    change = 0
    for site, layer in zip(sites, plan.layers, strict=True):
        after = site.empty_factors(layer).num_parameters + site.num_heads * site.width
        change += after - site.query_key_parameters
    return (
        ParameterCount(query_key, query_key + change),
        ParameterCount(query_key + value_output, query_key + value_output + change),
        ParameterCount(whole, whole + change),
    )
