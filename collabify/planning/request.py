"""What a conversion does to queries and keys, checked against the layers before they change."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from collabify.config import ConversionConfig, LayerConfig
from collabify.decompose.budget import pooled_strengths, ranks_for_error, ranks_within
from collabify.decompose.head_svd import head_triplets
from collabify.errors import OptionError, RankError
from collabify.forms import HeadForms
from collabify.models import AttentionSite
from collabify.planning.asked import FORM_OF, Asked


@dataclass(frozen=True)
class Request(Asked):
    """What layers become of what was asked for."""

    def check(self, sites: Sequence[AttentionSite]) -> None:
        """Refuse sizes that do not fit the layers: those of one rank by planning with it."""
        if not self.chooses:
            self.plan(sites)
        apart = self.head_rank is not None or self._tensorly or self.method == "talking-heads"
        if self.error is not None and apart:
            raise OptionError(
                f"error={self.error} goes with our solver of cp, tucker and head-svd and without "
                "head_rank only: ranks are chosen by what a head-SVD would err, which others need "
                "not reach. Use --dk, or leave out --head-rank and --solver."
            )
        if self.kept is None:
            return
        if self.method in ("tucker", "talking-heads"):
            raise OptionError(
                "kept goes with methods whose parameters grow evenly with the rank, not "
                f"{self.method!r}. Use --dk."
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
        ranks = [self._given(site) for site in sites]
        if self.chooses:
            if forms is None:
                raise ValueError("choosing ranks takes the heads")
            heads = [forms[site.index] for site in sites]
            ranks = self._choose(sites, heads, sensitivities or [1.0] * len(sites))
        return ConversionConfig(
            tuple(self._layer(site, rank) for site, rank in zip(sites, ranks, strict=True))
        )

    @property
    def chooses(self) -> bool:
        """Whether ranks are chosen across layers."""
        return self.kept is not None or self.error is not None

    def _given(self, site: AttentionSite) -> int:
        """The rank asked for, or all there is."""
        if self.method != "talking-heads":
            return self._largest(site) if self.dk is None else self.dk
        base = self._base_heads(site) or site.num_heads
        if base > site.full_rank:
            raise RankError(
                f"base_heads={base} must be at most {site.full_rank}, the channels of "
                f"{site.name!r}. Lower --base-heads."
            )
        if self.dk is None:
            width = self.base_width or site.head_dim
            if base * width > site.full_rank and self.base_width is None:
                raise RankError(
                    f"base_heads={base} of {width} channels each are {base * width}, above the "
                    f"{site.full_rank} of {site.name!r}. Set --base-width or --dk."
                )
            rank = self._fitting(base, width, site)
            if rank > site.full_rank:
                raise RankError(
                    f"base_heads={base} of base_width={width} are {rank}, above the "
                    f"{site.full_rank} of {site.name!r}. Lower --base-heads or --base-width."
                )
            return rank
        self._check_rank(site, self.dk)
        width = self.base_width or min(-(-self.dk // base), site.full_rank // base)
        if self.dk != base * width:
            raise RankError(
                f"dk={self.dk} must be {base * width} for {base} base heads of {width}. Change "
                "--dk, --base-heads or --base-width."
            )
        return self._fitting(base, width, site)

    def _fitting(self, base: int, width: int, site: AttentionSite) -> int:
        """The rank of base heads that are no wider than what they read."""
        if width > site.width:
            raise RankError(
                f"base_width={width} must be at most {site.width}, the inputs of {site.name!r}. "
                "Lower --base-width, or raise --base-heads."
            )
        return base * width

    def _base_heads(self, site: AttentionSite) -> int | None:
        """How many base heads are mixed; ``None``: they are the heads, and there is no P_l."""
        if self.method != "talking-heads" or self.projections == "weights":
            return None
        return self.base_heads or site.num_heads

    def is_exact(self, site: AttentionSite, rank: int) -> bool:
        """Whether a layer of this rank is the original."""
        if self._base_heads(site) not in (None, site.num_heads):
            return False
        factored = self.solver == "factored" and self.head_rank is None
        return factored and self.channels is None and rank == self._largest(site)

    def _layer(self, site: AttentionSite, rank: int) -> LayerConfig:
        heads = site.num_heads
        self._check_rank(site, rank)
        if self.head_rank is not None and not 1 <= self.head_rank <= heads:
            raise RankError(
                f"head_rank={self.head_rank} must be between 1 and {heads}, the heads of "
                f"{site.name!r}. Change --head-rank, or leave it out for a core per head."
            )
        return LayerConfig(
            site.index,
            FORM_OF[self.method],
            rank,
            self.head_rank,
            self._channels(site, rank),
            self._base_heads(site),
            dynamic=self.dynamic,
        )

    def _check_rank(self, site: AttentionSite, rank: int) -> None:
        largest = self._largest(site)
        if not 1 <= rank <= largest:
            raise RankError(
                f"dk={rank} must be between 1 and {largest} for {site.name!r} ({site.num_heads} "
                f"heads of {site.head_dim}). {'Lower' if rank > largest else 'Raise'} --dk."
            )

    def _largest(self, site: AttentionSite) -> int:
        return min(site.full_rank, site.width) if self.method == "tucker" else site.full_rank

    def _channels(self, site: AttentionSite, rank: int) -> int | None:
        """Channels that a head keeps: with its content bias as wide as its values, if that fits."""
        shared = self.method in ("cp", "head-svd")
        if not shared or self._tensorly or self.channels == "all":
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
