"""Model folders: find and load a model with its head, write one whole or not at all.

model, source = load("bert-base-uncased")
with output_folder(out) as folder:
    save(model, folder, source=source)
"""

from collabify.hub import RECORD_FILE as REPORT_FILE
from collabify.storage.carried import carry, note
from collabify.storage.folders import output_folder, recover
from collabify.storage.headers import Headers, headers
from collabify.storage.loading import cast_to, check_device, find, load, load_like, quiet, read
from collabify.storage.publishing import (
    Package,
    conversion_of,
    package,
    parse_config,
    write_standalone,
)
from collabify.storage.records import (
    MEASURED,
    inherited,
    read_record,
    unmeasured,
    write_record,
)
from collabify.storage.source import (
    DEMO,
    DEMO_PACKAGE,
    Source,
    cached_repository,
    check_not_source,
    check_revision,
    commit_of,
    locate,
    resolved,
)
from collabify.storage.standalone import modeling, with_auto_map
from collabify.storage.weights import of_these_weights, weights_digest
from collabify.storage.writing import COMPANIONS, save, versions

__all__ = [
    "COMPANIONS",
    "DEMO",
    "DEMO_PACKAGE",
    "MEASURED",
    "REPORT_FILE",
    "Headers",
    "Package",
    "Source",
    "cached_repository",
    "carry",
    "cast_to",
    "check_device",
    "check_not_source",
    "check_revision",
    "commit_of",
    "conversion_of",
    "find",
    "headers",
    "inherited",
    "load",
    "load_like",
    "locate",
    "modeling",
    "note",
    "of_these_weights",
    "output_folder",
    "package",
    "parse_config",
    "quiet",
    "read",
    "read_record",
    "recover",
    "resolved",
    "save",
    "unmeasured",
    "versions",
    "weights_digest",
    "with_auto_map",
    "write_record",
    "write_standalone",
]
