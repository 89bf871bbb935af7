"""How full a store is, asked of the index only when it has changed."""

from __future__ import annotations

import threading
from pathlib import Path

from kvloom.tiers.contract import Usage
from kvloom.tiers.disk.format import PLACE
from kvloom.tiers.disk.index import Index, meta
from kvloom.tiers.disk.space import in_use


class Usages:
    """Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen: tuple[Path, int] | None = None
        self.last = Usage(0, 0, 0, 0)

    def ask(self, index: Index) -> Usage:
        """The usage now; counts everything again only after some transaction."""
        with index.read() as db:
            seen = index.path, int(db.execute("PRAGMA data_version").fetchone()[0])
            with self._lock:
                if seen == self._seen:
                    return self.last
            (size,) = db.execute("SELECT coalesce(sum(length(objects)), 0) FROM nodes").fetchone()
            (units,) = db.execute("SELECT count(*) FROM boundaries").fetchone()
            made = Usage(in_use(db, index), meta(db, "capacity"), int(size) // PLACE.itemsize, int(units))
        with self._lock:
            self._seen, self.last = seen, made
        return made
