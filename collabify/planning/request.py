"""What a conversion does to queries and keys, checked before anything is touched."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from torch import Tensor

from collabify.config import ConversionConfig, Form, LayerConfig
from collabify.decompose.budget import pooled_strengths, ranks_for_error, ranks_within
from collabify.decompose.head_svd import head_triplets
from collabify.errors import OptionError, RankError
from collabify.forms import HeadForms
from collabify.models import AttentionSite

Method = Literal["cp", "tucker", "head-svd", "talking-heads"]
Solver = Literal["factored", "tensorly"]
Projections = Literal["logits", "weights", "both"]
FORM_OF: dict[str, Form] = {
    "cp": "collaborative",
    "tucker": "tucker",
    "head-svd": "collaborative",
    "talking-heads": "talking-heads",
}


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
    base_heads: int | None = None
    base_width: int | None = None
    projections: str | None = None
    dynamic: bool = False
    value_heads: int | None = None
    values_alone: bool = False

    def __post_init__(self) -> None:
        sizes = {"dk": self.dk, "kept": self.kept, "error": self.error}
        given = [name for name, value in sizes.items() if value is not None]
        alone = self.values_alone and self.method != "tucker"
        optional = alone or self.method == "talking-heads"
        if len(given) > 1 or not (given or optional):
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
        if self._tensorly and self.method in ("head-svd", "talking-heads"):
            raise OptionError(
                f"solver='tensorly' has no method {self.method!r}. Leave out --solver."
            )
        for name, value in self._of_talking_heads().items():
            if value and self.method != "talking-heads":
                raise OptionError(
                    f"{name}={value} goes with method='talking-heads' only, not {self.method!r}. "
                    f"Leave out --{name.replace('_', '-')} or use --method talking-heads."
                )
        self._check_projections()
        few = self.method in ("tucker", "talking-heads") or self._tensorly
        if self.channels == "all" and self.method == "talking-heads":
            raise OptionError(
                "channels='all' goes with method='cp' or 'head-svd' only. Leave out --channels."
            )
        if isinstance(self.channels, int) and few:
            raise OptionError(
                f"channels={self.channels} goes with method='cp' or 'head-svd' "
                "and our solver only. Leave out --channels."
            )

    def _check_projections(self) -> None:
        choices = get_args(Projections)
        if self.projections not in (None, *choices):
            raise OptionError(
                f"projections={self.projections!r} must be one of {', '.join(choices)}. "
                "Change --projections."
            )
        if self.base_heads is not None and self.projections == "weights":
            raise OptionError(
                f"base_heads={self.base_heads} goes with a logits projection, and "
                "projections='weights' has none. Use --projections both."
            )
        if self.value_heads is not None and self.projections == "logits":
            raise OptionError(
                f"value_heads={self.value_heads} goes with a weights projection, and "
                "projections='logits' has none. Use --projections both."
            )

    def _of_talking_heads(self) -> dict[str, object]:
        return {
            "base_heads": self.base_heads,
            "base_width": self.base_width,
            "projections": self.projections,
            "dynamic": self.dynamic,
        }

    def _check_numbers(self) -> None:
        for name in ("base_heads", "base_width"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise OptionError(
                    f"{name}={value} must be at least 1. Raise --{name.replace('_', '-')}."
                )
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
        if self.dk is None:
            width = self.base_width or site.head_dim
            if base * width > site.full_rank and self.base_width is None:
                raise RankError(
                    f"base_heads={base} of {width} channels each are {base * width}, above the "
                    f"{site.full_rank} of {site.name!r}. Set --base-width or --dk."
                )
            return self._fitting(base, width, site)
        width = self.base_width or -(-self.dk // base)
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
        return LayerConfig(
            site.index,
            FORM_OF[self.method],
            rank,
            self.head_rank,
            self._channels(site, rank),
            self._base_heads(site),
            dynamic=self.dynamic,
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
