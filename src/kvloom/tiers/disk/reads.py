"""The reading side of a handle: reads, what is done about objects that did not arrive, and counts."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from kvloom.errors import StoreError
from kvloom.tiers.disk.index import Index
from kvloom.tiers.disk.opened import OpenIndex
from kvloom.tiers.disk.quarantine import quarantine
from kvloom.tiers.disk.reading import Reader
from kvloom.tiers.disk.rows import layout_id, nodes
from kvloom.tiers.disk.sinks import Renumbered, Sink
from kvloom.tiers.values import Places, ReadResult, Result
from kvloom.types import AnyArray

IO_ERRORS = 2
"""An object that cannot be read this many times is given up; once may be a passing trouble of the device."""
REMEMBERED = 100_000

Place = tuple[int, int]


class Reads:
    """Thread-safe."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._lock = threading.Lock()
        self._failed: Counter[Place] = Counter()
        self._hidden: set[Place] = set()
        self.counts: Counter[str] = Counter()

    def read(self, indexes: OpenIndex, places: Places, sink: Sink, stop: Callable[[], bool]) -> ReadResult:
        """See ``DiskStore.read_each``."""
        done = self._reader.read(places, sink, stop)
        gone = np.flatnonzero(done.results == Result.MISSING)
        if len(gone):
            done = self._again(indexes, places, sink, stop, done, gone)
        for result, reason in ((Result.INTEGRITY, "integrity"), (Result.MISSING, "lost"), (Result.IO_ERROR, "io")):
            which = done.results == result
            if which.any():
                self._give_up(indexes, places.take(which), reason)
        with self._lock:
            for result in Result:
                self.counts[result.name.lower()] += int((done.results == result).sum())
            self.counts["bytes"] += places.take(done.results == Result.OK).nbytes
            self.counts["bytes_from_disk"] += done.bytes_read
            self.counts["reads"] += done.reads
        return done

    def _again(
        self,
        indexes: OpenIndex,
        places: Places,
        sink: Sink,
        stop: Callable[[], bool],
        done: ReadResult,
        gone: AnyArray,
    ) -> ReadResult:
        """Objects whose extent is gone may only have moved."""
        try:
            which, moved = indexes.run(lambda index: relocated(index, places, gone))
        except (OSError, StoreError):
            return done
        if not len(which):
            return done
        more = self._reader.read(moved, Renumbered(sink, which), stop)
        results = done.results.copy()
        results[which] = more.results
        return replace(
            done, results=results, bytes_read=done.bytes_read + more.bytes_read, reads=done.reads + more.reads
        )

    def _give_up(self, indexes: OpenIndex, places: Places, reason: str) -> None:
        """Make sure that what failed is not found again; what cannot be entered in the index is remembered here."""
        keys = _keys(places)
        with self._lock:
            if reason == "io":
                self._failed.update(keys)
                keep = np.array([self._failed[key] >= IO_ERRORS for key in keys], np.bool_)
                places, keys = places.take(keep), [key for key, bad in zip(keys, keep.tolist(), strict=True) if bad]
                if len(self._failed) > REMEMBERED:
                    self._failed.clear()
            if len(self._hidden) < REMEMBERED:
                self._hidden.update(keys)
        if not len(places):
            return
        try:
            count = indexes.run(lambda index: quarantine(index, places, reason))
        except (OSError, StoreError):
            return
        with self._lock:
            self._hidden.difference_update(keys)
            self.counts["quarantined"] += count

    def visible(self, places: Places) -> Places:
        """Without those that failed here and could not be taken out of the index."""
        if not self._hidden:
            return places
        return places.take(np.array([key not in self._hidden for key in _keys(places)], np.bool_))


def _keys(places: Places) -> list[Place]:
    return list(zip(places.entries["extent"].tolist(), places.entries["offset"].tolist(), strict=True))


def relocated(index: Index, places: Places, which: AnyArray) -> tuple[AnyArray, Places]:
    """Those of ``which`` that lie elsewhere now, and where."""
    asked = places.take(which)
    with index.read() as db:
        number = layout_id(db, places.layout)
        found = {} if number is None else nodes(db, number, {row.tobytes() for row in asked.digests})
    entries, kept = asked.entries.copy(), []
    for i, digest in enumerate(asked.digests):
        node = found.get(digest.tobytes())
        for entry in node.objects if node is not None else ():
            same = all(entry[name] == entries[i][name] for name in ("group", "column", "form", "grade", "length"))
            if same and (entry["check"] == entries[i]["check"]).all() and entry["extent"] != entries[i]["extent"]:
                entries[i] = entry
                kept.append(i)
                break
    rows = np.array(kept, np.int64)
    return which[rows], Places(places.layout, asked.digests[rows], entries[rows], asked.rows[rows])
