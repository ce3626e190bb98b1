"""Model folders: find and load a model with its head, write one whole or not at all.

model, source = load("bert-base-uncased")
with output_folder(out) as folder:
    save(model, folder, source=source)
"""

from collabify.storage.folders import output_folder
from collabify.storage.loading import cast_to, check_device, find, load, quiet, read
from collabify.storage.source import DEMO, DEMO_PACKAGE, Source, check_not_source, locate
from collabify.storage.writing import COMPANIONS, REPORT_FILE, read_record, save, versions

__all__ = [
    "COMPANIONS",
    "DEMO",
    "DEMO_PACKAGE",
    "REPORT_FILE",
    "Source",
    "cast_to",
    "check_device",
    "check_not_source",
    "find",
    "load",
    "locate",
    "output_folder",
    "quiet",
    "read",
    "read_record",
    "save",
    "versions",
]
