"""What was done to each layer: a frozen, versioned record, kept in a model's ``config.json``.

The record holds just what loading needs, the form and the sizes of every converted layer. How the
numbers were found is in ``collabify.json`` (see :mod:`collabify.results`).
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args

from collabify.errors import CheckpointError

FORMAT_VERSION = 1
QUANT_METHOD = "collabify"  # the name under which transformers finds us in config.json

Form = Literal["collaborative", "tucker", "talking-heads"]


@dataclass(frozen=True)
class LayerConfig:
    """The form and the sizes of one converted layer.

    Parameters
    ----------
    index
        Position among the model's distinct attention layers, from 0.
    form
        ``collaborative`` (one diagonal core per head), ``tucker`` (one full core per head) or
        ``talking-heads`` (base heads that the heads mix).
    rank
        Shared channels of queries and keys, D̃k.
    head_rank
        Cores that the heads mix, for ``tucker`` with a compressed head mode; ``None``: a core per
        head.
    channels
        Shared channels that each head keeps, for ``collaborative``; ``None``: all.
    base_heads
        Base heads that the heads mix, for ``talking-heads``, each ``rank / base_heads`` wide;
        ``None``: they are the heads.
    values
        Channels of all values, D̃v; ``None``: values and outputs are the original's.
    value_heads
        Value heads that read mixed attention probabilities, each ``values / value_heads`` wide;
        ``None``: one for every head, of any width.
    dynamic
        Whether the mixing of base heads and of value heads has terms that depend on the tokens.
    """

    index: int
    form: Form
    rank: int
    head_rank: int | None = None
    channels: int | None = None
    base_heads: int | None = None
    values: int | None = None
    value_heads: int | None = None
    dynamic: bool = False


@dataclass(frozen=True)
class ConversionConfig:
    """Every converted layer of a model, in order.

    Raises
    ------
    CheckpointError
        From :meth:`from_dict`, where the record was written by a later format or is not one of
        ours.
    """

    layers: tuple[LayerConfig, ...]

    def to_dict(self) -> dict[str, Any]:
        """As ``config.json`` holds it, under ``quantization_config``."""
        layers = [asdict(layer) for layer in self.layers]
        return {"quant_method": QUANT_METHOD, "version": FORMAT_VERSION, "layers": layers}

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> "ConversionConfig":
        """Read what :meth:`to_dict` wrote."""
        version = record.get("version")
        if version != FORMAT_VERSION:
            raise CheckpointError(
                f"version={version!r} must be {FORMAT_VERSION} in config.json's collabify record. "
                "Install the collabify that wrote it."
            )
        try:
            layers = tuple(_layer(layer) for layer in record["layers"])
            if len({layer.index for layer in layers}) < len(layers):
                raise ValueError("a layer twice")
        except CheckpointError:
            raise
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"config.json's collabify record is damaged ({error}). Convert the model again."
            ) from error
        return cls(layers)


def _layer(record: Any) -> LayerConfig:
    """One layer of :meth:`ConversionConfig.to_dict`, checked number by number."""
    if not isinstance(record, Mapping):
        raise ValueError(f"{record!r} is no LayerConfig")
    unknown = set(record) - {field.name for field in fields(LayerConfig)}
    if unknown:
        raise ValueError(f"unknown {', '.join(sorted(unknown))}")
    if record["form"] not in get_args(Form):
        raise CheckpointError(
            f"form={record['form']!r} must be one of {', '.join(get_args(Form))} "
            f"for layer {record['index']}. Install the collabify that wrote it."
        )
    for name in ("index", "rank", *_OPTIONAL):
        value = record.get(name) if name in _OPTIONAL else record[name]
        smallest = 0 if name == "index" else 1
        absent = name in _OPTIONAL and value is None
        if not absent and (type(value) is not int or value < smallest):
            raise ValueError(f"{name}={value!r} must be a whole number from {smallest}")
    if type(record.get("dynamic", False)) is not bool:
        raise ValueError(f"dynamic={record['dynamic']!r} must be true or false")
    layer = LayerConfig(**record)
    _check_sizes(layer)
    return layer


_OPTIONAL = ("head_rank", "channels", "base_heads", "values", "value_heads")


def _check_sizes(layer: LayerConfig) -> None:
    """Refuse sizes that contradict each other."""
    if layer.channels is not None and layer.channels > layer.rank:
        raise ValueError(f"channels={layer.channels} above rank={layer.rank}")
    if layer.base_heads is not None and layer.form != "talking-heads":
        raise ValueError(f"base_heads={layer.base_heads} with form={layer.form!r}")
    for whole, parts in ((layer.rank, layer.base_heads), (layer.values, layer.value_heads)):
        if parts is not None and (whole is None or whole % parts):
            raise ValueError(f"{whole} channels for {parts} heads of one width")
