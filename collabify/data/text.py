"""Texts to padded batches of token ids.

    texts, sorted by length -> tokenizer -> input_ids[b, t], attention_mask[b, t]

Axes: b batch, t position.
"""

from collections.abc import Iterable, Iterator, Sequence
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from collabify.data.base import Batch, max_positions, pinned
from collabify.errors import CheckpointError, OptionError, first_line


def read_lines(path: Path) -> list[str]:
    """The lines of a text file.

    Raises
    ------
    OptionError
        Where the file cannot be read as utf-8, or holds only blank lines.
    """
    try:
        with path.open(encoding="utf-8-sig") as file:
            lines = list(distinct(file))
    except UnicodeDecodeError as error:
        raise OptionError(
            f"{str(path)!r} must be text in utf-8, one text a line, and is not "
            f"({first_line(error)}). Save it as utf-8."
        ) from error
    except OSError as error:
        raise OptionError(
            f"{str(path)!r} cannot be read ({error.strerror}). Give a text file that can."
        ) from error
    if not lines:
        raise OptionError(
            f"{str(path)!r} holds no text: every line is blank. Give a file with one text a line."
        )
    return lines


def distinct(texts: Iterable[str | None]) -> Iterator[str]:
    """Each text once, without blank and missing ones; reads no further than it is asked."""
    seen: set[str] = set()
    for text in texts:
        stripped = (text or "").strip()
        if stripped and stripped not in seen:
            seen.add(stripped)
            yield stripped


def load_tokenizer(processor: object, config: Any) -> Any:
    """The tokenizer that ``processor`` is or names; by default the model's own.

    Parameters
    ----------
    processor
        A tokenizer, a folder or Hub id, or ``None``: from where the model's config came.
    config
        The model's config.

    Raises
    ------
    OptionError
        Where nothing says which tokenizer, or ``processor`` is none.
    CheckpointError
        Where it cannot be loaded.
    """
    if isinstance(processor, PreTrainedTokenizerBase):
        return processor
    if processor is not None and not isinstance(processor, (str, PathLike)):
        raise OptionError(
            f"processor={type(processor).__name__} must be a tokenizer, for a model of "
            f"model_type={config.model_type!r} reads texts. Pass its tokenizer, or a folder of one."
        )
    location = fspath(processor or config._name_or_path)
    if not location:
        raise OptionError(
            f"Texts need a tokenizer, and the config of model_type={config.model_type!r} does not "
            "say where it came from (no _name_or_path). Pass processor=; "
            "calibration also takes 'synthetic'."
        )
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(
            location, trust_remote_code=False, **pinned(location, config)
        )
    except Exception as error:  # tokenizers raises nothing narrower for a damaged file
        raise _no_tokenizer(location, first_line(error)) from error
    if len(tokenizer) <= len(tokenizer.all_special_ids):  # transformers makes one up
        raise _no_tokenizer(location, "it has no vocabulary")
    return tokenizer


def _no_tokenizer(location: str, reason: str) -> CheckpointError:
    return CheckpointError(
        f"No tokenizer could be loaded from {location!r} ({reason}). "
        "Put the tokenizer's files there, or pass processor=."
    )


def sequence_length(max_length: int, tokenizer: Any, config: Any, *, pair: bool = False) -> int:
    """Tokens in the longest sequence: ``max_length``, or what the model takes if that is less.

    Parameters
    ----------
    max_length
        Tokens wanted at most.
    tokenizer
        Its special tokens count; ``None``: there are none.
    config
        The model's config.
    pair
        Whether two texts make one sequence.

    Raises
    ------
    OptionError
        Where no token of a text would fit between the special ones.
    """
    special = 0 if tokenizer is None else int(tokenizer.num_special_tokens_to_add(pair=pair))
    least = max(2, special + 1 + pair)
    if max_length < least:
        of_text = "one of each text" if pair else "one of the text"
        room = f"{special} special tokens and {of_text}" if special else "two tokens"
        raise OptionError(
            f"max_length={max_length} must be at least {least} for {config.model_type!r} ({room}). "
            "Raise --max-length."
        )
    return min(max_length, max_positions(config) or max_length)


def encode_texts(
    texts: Sequence[str], tokenizer: Any, config: Any, *, length: int, batch_size: int
) -> tuple[Batch, ...]:
    """Batches of texts of about the same length, each padded to its longest.

    Parameters
    ----------
    texts
        In any order.
    tokenizer
        A tokenizer with a padding token.
    config
        The config of the model that reads the ids.
    length
        Tokens at most.
    batch_size
        Texts in a batch.

    Raises
    ------
    OptionError
        Where the tokenizer cannot pad.
    CheckpointError
        Where it has tokens that the model does not know.
    """
    if tokenizer.pad_token_id is None:
        raise OptionError(
            f"The tokenizer ({type(tokenizer).__name__}) has no padding token, which batches of "
            f"texts need for {config.model_type!r}. Set its pad_token."
        )
    options = {"truncation": True, "max_length": length}
    lengths = [len(ids) for ids in tokenizer(list(texts), **options)["input_ids"]]
    order = sorted(range(len(texts)), key=lengths.__getitem__)
    batches = []
    for start in range(0, len(order), batch_size):
        chunk = [texts[index] for index in order[start : start + batch_size]]
        encoded = tokenizer(
            chunk, **options, padding=True, return_attention_mask=True, return_tensors="pt"
        )
        batches.append(dict(encoded))
        check_ids(int(batches[-1]["input_ids"].max()), tokenizer, config)
    return tuple(batches)


def check_ids(largest: int, tokenizer: Any, config: Any) -> None:
    """Refuse token ids that the model does not know.

    Raises
    ------
    CheckpointError
        Naming the largest id and the size of the vocabulary.
    """
    if largest >= config.vocab_size:
        raise CheckpointError(
            f"Token id {largest} must be below {config.vocab_size}, the vocabulary of the model "
            f"({config.model_type!r}); the tokenizer ({type(tokenizer).__name__}, {len(tokenizer)} "
            "tokens) belongs to another. Pass the model's own as processor=."
        )
