"""What was used lately: counted in memory, entered along with the next transaction.  Losing some of it is harmless."""

from __future__ import annotations

import sqlite3
import threading

from kvloom.tiers.disk.index import meta, set_meta
from kvloom.tiers.disk.rows import layout_id

MOST = 32
"""Units in one transaction."""


class Heat:
    """Uses of units since they were last entered.  Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._uses: dict[tuple[bytes, bytes], int] = {}

    def note(self, layout: bytes, digest: bytes) -> bool:
        """A unit was used; True when there are so many that they should be entered."""
        with self._lock:
            key = layout, digest
            # What was used last comes last, so that it gets the latest moment.
            self._uses[key] = self._uses.pop(key, 0) + 1
            return len(self._uses) >= MOST

    def waiting(self) -> bool:
        """Whether there is anything to enter."""
        return bool(self._uses)

    def flush(self, db: sqlite3.Connection) -> None:
        """Enter what there is, within a transaction."""
        with self._lock:
            keys = list(self._uses)[:MOST]
            uses = [(key, self._uses.pop(key)) for key in keys]
        now = meta(db, "clock")
        numbers = {layout: layout_id(db, layout) for layout in {key[0] for key in keys}}
        for (layout, digest), count in uses:
            now += 1
            db.execute(
                "UPDATE boundaries SET touched = ?, hits = hits + ? "
                "WHERE node = (SELECT id FROM nodes WHERE layout = ? AND digest = ?)",
                (now, count, numbers[layout], digest),
            )
        set_meta(db, "clock", now)
