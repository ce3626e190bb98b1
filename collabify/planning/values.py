"""What a conversion does to values and outputs, checked before anything is touched."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor, nn

from collabify.config import ConversionConfig, LayerConfig
from collabify.decompose.budget import ranks_within
from collabify.errors import OptionError, RankError, UnsupportedModelError
from collabify.models import AttentionSite


@dataclass(frozen=True)
class ValueRequest:
    """What was asked for, as :func:`collabify.convert` documents it.

    Parameters
    ----------
    dv, kept, heads
        ``dv``, ``kept_values`` and ``value_heads``.
    insert
        Whether value heads are to be mixed where nothing says how many: as many as heads.
    dynamic
        Whether their mixing depends on tokens.
    multiple
        Channels chosen for ``kept`` are multiples of this.

    Raises
    ------
    OptionError
        Where no model could accept it.
    """

    dv: int | None
    kept: float | None
    heads: int | None
    insert: bool
    dynamic: bool
    multiple: int

    def __post_init__(self) -> None:
        for name, value in (("dv", self.dv), ("value_heads", self.heads)):
            if value is not None and value < 1:
                raise OptionError(
                    f"{name}={value} must be at least 1. Raise --{name.replace('_', '-')}."
                )
        if self.kept is None:
            return
        if self.dv is not None:
            raise OptionError(
                f"dv={self.dv} and kept_values={self.kept} given, one of --dv and --kept-values "
                "must be. Say how small the values are to be in one way."
            )
        if not 0 < self.kept <= 1:
            raise OptionError(
                f"kept_values={self.kept} must be above 0 and at most 1: it is a share of the "
                "parameters of values and outputs. Write 0.75 for three quarters."
            )
        if self.mixes:
            raise OptionError(
                f"kept_values={self.kept} goes with heads that have values of their own. "
                "Use --dv with --value-heads."
            )

    @property
    def mixes(self) -> bool:
        """Whether value heads read mixed probabilities."""
        return self.insert or self.heads is not None

    @property
    def asked(self) -> bool:
        """Whether anything is to be done."""
        return self.mixes or self.dv is not None or self.kept is not None

    def check(self, sites: Sequence[AttentionSite]) -> None:
        """Refuse sizes that do not fit the layers, before anything takes time.

        Raises
        ------
        RankError, UnsupportedModelError
        """
        for site in sites if self.asked else ():
            if not isinstance(site.output, nn.Linear) or not site.output.weight.is_floating_point():
                raise UnsupportedModelError(
                    f"{site.output_name!r} is a {type(site.output).__name__}, not a "
                    "torch.nn.Linear in floating point. "
                    "Merge adapters and undo quantisation before converting."
                )
        if self.kept is None:
            for site in sites:
                self._sized(site, LayerConfig(site.index, "collaborative", 1))
            return
        smallest = min(-(-8 // self.multiple) * self.multiple, sites[0].full_rank)
        least = sum(smallest * _cost(site) + _fixed(site) for site in sites)
        whole = sum(site.value_output_parameters for site in sites)
        if least > self.kept * whole:
            raise RankError(
                f"kept_values={self.kept} must be at least {-(-1000 * least // whole) / 1000} for "
                f"these {len(sites)} layers, with {smallest} channels each. Raise --kept-values."
            )

    def plan(
        self,
        sites: Sequence[AttentionSite],
        plan: ConversionConfig,
        strengths: Mapping[int, Tensor],
    ) -> ConversionConfig:
        """The plan with every layer's value sizes.

        Parameters
        ----------
        sites
            The layers of ``plan``.
        strengths
            For ``kept``: what each layer's directions say, descending, by index.
        """
        if not self.asked:
            return plan
        if self.kept is None:
            layers = [self._sized(*pair) for pair in zip(sites, plan.layers, strict=True)]
            return ConversionConfig(tuple(layers))
        whole = sum(site.value_output_parameters for site in sites)
        budget = int(self.kept * whole) - sum(map(_fixed, sites))
        chosen = ranks_within(
            [strengths[site.index] for site in sites],
            [_cost(site) for site in sites],
            budget,
            multiple=self.multiple,
        )
        pairs = zip(plan.layers, chosen, strict=True)
        return ConversionConfig(tuple(replace(layer, values=count) for layer, count in pairs))

    def _sized(self, site: AttentionSite, layer: LayerConfig) -> LayerConfig:
        """One layer with the sizes asked for."""
        if not self.mixes:
            if self.dv is None:
                return layer
            _check_range(self.dv, site)
            return replace(layer, values=self.dv)
        heads = self.heads or site.num_heads
        if heads > site.full_rank:
            raise RankError(
                f"value_heads={heads} must be at most {site.full_rank}, the channels of "
                f"{site.name!r}. Lower --value-heads."
            )
        if self.dv is not None:
            _check_range(self.dv, site)
        width = site.head_dim
        if self.dv is not None:
            width = min(-(-self.dv // heads), site.full_rank // heads)
        values = self.dv or heads * width
        if values != heads * width:
            raise RankError(
                f"dv={values} must be a multiple of {heads}, the value heads of {site.name!r}, "
                f"such as {heads * width}. Change --dv or --value-heads."
            )
        if width > site.width:
            raise RankError(
                f"dv={values} in {heads} value heads is {width} channels for each, above the "
                f"{site.width} inputs of {site.name!r}. Lower --dv or raise --value-heads."
            )
        if self.dv is None:
            _check_range(values, site, told=False)
        exact = (heads, width) == (site.num_heads, site.head_dim)
        if not exact and site.output.bias is None:
            raise UnsupportedModelError(
                f"{site.output_name!r} has no bias to take up what values have on average. "
                "Leave out --value-heads, and use --dv."
            )
        return replace(layer, values=values, value_heads=heads)


def _check_range(values: int, site: AttentionSite, *, told: bool = True) -> None:
    if values > site.full_rank:
        raise RankError(
            f"dv={values} must be between 1 and {site.full_rank} for {site.name!r} "
            f"({site.num_heads} heads of {site.head_dim}). {'Lower' if told else 'Set'} --dv."
        )


def _cost(site: AttentionSite) -> int:
    """Parameters of one value channel."""
    has_bias = site.value.bias is not None
    return int(site.value.in_features + site.output.out_features + has_bias)


def _fixed(site: AttentionSite) -> int:
    """Parameters that stay whatever the channels."""
    return 0 if site.output.bias is None else site.output.bias.numel()
