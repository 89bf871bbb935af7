"""The disk tier: large append-only extent files for bytes, SQLite for the index (``docs/format.md``).

It stores and finds what it is told to and decides nothing about prefixes.  Everything that a caller needs is here.
"""

from kvloom.tiers.disk.files import FileOps
from kvloom.tiers.disk.store import DiskStore
from kvloom.tiers.values import (
    Fill,
    Found,
    Need,
    NewObject,
    Outcome,
    Places,
    Published,
    ReadResult,
    Result,
    Unit,
)
from kvloom.types import PayloadForm

__all__ = [
    "DiskStore",
    "FileOps",
    "Fill",
    "Found",
    "Need",
    "NewObject",
    "Outcome",
    "PayloadForm",
    "Places",
    "Published",
    "ReadResult",
    "Result",
    "Unit",
]
