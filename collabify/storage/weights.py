"""Which weights a measurement is of: their digest, kept beside what was measured.

digest(folder, files) -> record["evaluations"][n]["weights"] -> is it still of these weights?
"""

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from collabify.storage.records import MEASURED


def weights_digest(folder: Path, files: Iterable[str]) -> str:
    """Of the bytes of a model's weights, all files together."""
    whole = hashlib.blake2b(digest_size=16)
    for name in sorted(files):
        with (folder / name).open("rb") as opened:
            whole.update(hashlib.file_digest(opened, "blake2b").digest())
    return whole.hexdigest()


def of_these_weights(record: Mapping[str, Any], digest: str) -> tuple[dict[str, Any], int]:
    """A record without what was measured of other weights, and how many measurements that was."""
    kept, lost = dict(record), 0
    for name in MEASURED:
        found = record.get(name) or []
        same = [entry for entry in found if entry.get("weights") == digest]
        lost += len(found) - len(same)
        if name in record:
            kept[name] = same
    return kept, lost
