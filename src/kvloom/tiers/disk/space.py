"""The cap: what is in use, and what may still be taken.

Extents are counted with what they may grow to, from before their file exists until after it is gone; the index with its
files as they are and with what the next transaction can add to them at most.  So the bytes on disk are below the cap at
any instant, with any number of processes, each of which decides inside a transaction.
"""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass

from kvloom.tiers.disk.extents import extent_rows
from kvloom.tiers.disk.index import PARENT_INDEX, Index, has_parent_index

KIB = 1024
MINIMUM = 8 << 20
"""Bytes of the smallest store."""
FIXED = 64 * KIB
"""Directories, marker, lock."""
EXTENT_EXTRA = 16 * KIB
"""What the file system itself may need for a large file."""
ROW_GROWTH = 16 * KIB
"""Pages that a row of a node can touch in table, keys and log."""
KEY_BYTES = 80
"""Of a node in the key of parents, with what pages leave free."""
SLACK_PART = 32
SLACK_MOST = 16 << 20
EXTENT_PART = 16
SMALLEST_EXTENT = 512 * KIB
LARGEST_EXTENT = 256 << 20


@dataclass(frozen=True, slots=True)
class Cap:
    """What a store may take, in bytes."""

    bytes: int

    @property
    def slack(self) -> int:
        """Kept free for the transactions that make room."""
        return min(max(self.bytes // SLACK_PART, 512 * KIB), SLACK_MOST)

    @property
    def extent(self) -> int:
        """Bytes of an extent, unless one unit needs more."""
        return min(max(self.bytes // EXTENT_PART, SMALLEST_EXTENT), LARGEST_EXTENT)

    @property
    def rows_at_once(self) -> int:
        """Nodes that a transaction which makes room may touch: index and log stay within the slack."""
        return min(max(self.slack // (2 * ROW_GROWTH), 4), 512)

    @property
    def headroom(self) -> int:
        """Left free by whoever publishes, so that an extent can always be copied."""
        return self.extent + EXTENT_EXTRA

    @property
    def largest_run(self) -> int:
        """Bytes of the largest unit that can be stored at all."""
        return self.bytes - FIXED - 2 * self.slack - self.headroom - 2 * EXTENT_EXTRA


def in_use(db: sqlite3.Connection, index: Index) -> int:
    """Bytes that are taken or promised; exact within a writing transaction."""
    rows = extent_rows(db).values()
    return sum(row.reserved for row in rows) + len(rows) * EXTENT_EXTRA + index.bytes() + FIXED


def growth(nodes: int, row_bytes: int) -> int:
    """What a transaction that writes ``nodes`` rows of ``row_bytes`` in all adds to index and log at most."""
    return 384 * KIB + nodes * ROW_GROWTH + 3 * row_bytes


def add_parent_index(index: Index, cap: Cap) -> None:
    """Give the index of an earlier version the key that it lacks, where there is room for it."""
    with index.read() as db:
        if has_parent_index(db):
            return
    with index.write() as db:
        (count,) = db.execute("SELECT count(*) FROM nodes").fetchone()
        if fits(db, index, cap, growth(0, KEY_BYTES * int(count))):
            db.execute(f"CREATE INDEX IF NOT EXISTS {PARENT_INDEX} ON nodes (layout, parent)")


def fits(db: sqlite3.Connection, index: Index, cap: Cap, more: int) -> bool:
    """Whether ``more`` bytes may be taken, leaving the slack alone; for good within a writing transaction."""
    return in_use(db, index) + more + cap.slack <= cap.bytes
