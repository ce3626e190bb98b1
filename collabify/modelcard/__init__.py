"""Model cards: metadata and text out of ``collabify.json`` and ``config.json``, and nothing else.

model_card(record, config, repo="user/name") -> README.md
"""

import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from collabify.modelcard.measured import evaluation_line, latency_line
from collabify.modelcard.metadata import (
    CARRIED,
    MODELING_FILE,
    architecture,
    auto_class,
    base_model,
    is_standalone,
    metadata,
    scores,
    standalone_class,
)
from collabify.modelcard.private import is_hub_id, public
from collabify.modelcard.text import sizes, text

__all__ = [
    "CARRIED",
    "MODELING_FILE",
    "architecture",
    "auto_class",
    "base_model",
    "evaluation_line",
    "is_generated",
    "is_hub_id",
    "is_standalone",
    "latency_line",
    "model_card",
    "public",
    "scores",
    "sizes",
    "standalone_class",
]

_MARK = re.compile(r"\n<!-- Written by collabify ([0-9a-f]{32})\. [^\n]* -->\n\Z")
_NOTE = "It is written anew at every push, unless it was edited."


def model_card(
    record: Mapping[str, Any],
    config: Mapping[str, Any],
    *,
    repo: str,
    sentences: bool = False,
    tags: Sequence[str] = (),
) -> str:
    """A card as README.md holds it.

    Parameters
    ----------
    record
        ``collabify.json`` of a converted model; folders in it are told by their names only.
    config
        ``config.json``.
    repo
        ``user/name`` on the Hub.
    sentences
        Whether sentence-transformers' ``modules.json`` is there.
    tags
        More of them.
    """
    record, name = public(dict(record)), repo.rpartition("/")[2]
    data = metadata(record, config, name, sentences=sentences, tags=tags)
    head = data.to_yaml(line_break="\n")
    card = f"---\n{head}\n---\n\n{text(record, config, name, repo)}"
    return f"{card}\n<!-- Written by collabify {_digest(card)}. {_NOTE} -->\n"


def is_generated(card: str) -> bool:
    """Whether a card is as :func:`model_card` wrote it, not a character changed since."""
    card = card.replace("\r\n", "\n")
    found = _MARK.search(card)
    return found is not None and found[1] == _digest(card[: found.start()])


def _digest(card: str) -> str:
    return hashlib.blake2b(card.encode(), digest_size=16).hexdigest()
