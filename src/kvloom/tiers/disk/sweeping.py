"""Making room: orphans first, then what nobody needs, then the boundaries worth least; extents go whole.

One process at a time makes room in a directory.  Every step is a small transaction after which the store is in order,
so being killed anywhere loses nothing but what was evicted already.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np

from kvloom.tiers.disk.directory import PUBLISH_BYTE, SWEEP_BYTE, Directory
from kvloom.tiers.disk.extents import ExtentRow, extent_rows, put_extent, seal_extent
from kvloom.tiers.disk.files import PIN_BYTE, WRITER_BYTE, FileOps
from kvloom.tiers.disk.index import DYING, OPEN, SEALED, Index, meta
from kvloom.tiers.disk.marks import Keep, Marks, Snapshot, live_bytes, mark, snapshot
from kvloom.tiers.disk.moving import Mover
from kvloom.tiers.disk.rows import layout_id, nodes, put_node, with_objects
from kvloom.tiers.disk.space import EXTENT_EXTRA, FIXED, Cap, fits, in_use
from kvloom.tiers.disk.writer import NoRoomError
from kvloom.types import AnyArray

FULL, GOAL = 0.9, 0.8
"""Beyond this part of the room that is there, boundaries go until this part is needed."""
STEPS = (GOAL, 0.6, 0.35, 0.0)
WASTE = 0.1
"""An extent of which less than this part is waste is not worth copying."""
TRIES = 2

T = TypeVar("T")


class StaleError(Exception):
    """Somebody published meanwhile, so what was found to be needed by nobody may be needed now."""


@dataclass(slots=True)
class Swept:
    """What making room did, in all."""

    units: int = 0
    objects: int = 0
    extents: int = 0
    compacted: int = 0
    orphans: int = 0
    bytes_freed: int = field(default=0)


class Sweeper:
    """Makes room.  Its owner holds the lock of the writer."""

    def __init__(self, directory: Directory, ops: FileOps, mover: Mover) -> None:
        self._directory, self._ops, self._mover = directory, ops, mover
        self.done = Swept()
        self._busy = False

    def make_room(self, index: Index, cap: Cap, more: int, keep: Keep | None = None) -> bool:
        """Have ``more`` bytes free under the cap, whatever has to go for it but ``keep``; False when that fails."""
        with self._directory.locked(SWEEP_BYTE, exclusive=True):
            self.collect(index)
            return self._evict(index, cap, more, keep)

    def _evict(self, index: Index, cap: Cap, more: int, keep: Keep | None) -> bool:
        for part in STEPS:
            if self._fits(index, cap, more):
                return True
            if part == 0.0 and self._busy:
                return False  # Dropping everything would not help: somebody reads what is to go.
            self._busy = False
            self._again(index, cap, more, keep, part)
        return self._fits(index, cap, more)

    def gc(self, index: Index, cap: Cap) -> None:
        """Collect orphans, drop what nobody needs, and copy extents together that are worth it.

        Where the cap was lowered and all that is not enough, what is worth least goes, too.
        """
        with self._directory.locked(SWEEP_BYTE, exclusive=True):
            self.collect(index)
            self._again(index, cap, None, None, 1.0)
            with index.read() as db:
                over = in_use(db, index) > cap.bytes
            if over:
                self._evict(index, cap, 0, None)

    def clear(self, index: Index, cap: Cap, layout: int, root: bytes) -> int:
        """Drop all units of one namespace, and copy what else lies in their extents; returns how many units."""
        with self._directory.locked(SWEEP_BYTE, exclusive=True):
            self.collect(index)
            return self._calmly(lambda: self._clear(index, cap, layout, root))

    def _clear(self, index: Index, cap: Cap, layout: int, root: bytes) -> int:
        rows = self._rows(index)
        snap = snapshot(index)
        mine = np.zeros(len(snap.ids), np.bool_)
        first = [parent == root for parent in snap.above]
        for row in np.argsort(snap.depth, kind="stable").tolist():
            up = int(snap.parents[row])
            mine[row] = mine[up] if up >= 0 else first[row] and snap.layouts[row] == layout
        victims = [boundary for boundary in snap.boundaries if mine[boundary.node]]
        rest = [boundary for boundary in snap.boundaries if not mine[boundary.node]]
        snap, gone = replace(snap, boundaries=(*victims, *rest)), len(victims)
        marks = mark(snap, None, None)
        self._drop(index, cap, snap, marks, gone)
        touched = {*snap.entries["extent"][mine[snap.owner]].tolist(), *snap.homes[mine].tolist()}
        for extent in touched & rows.keys():
            if rows[extent].state == SEALED and self._mover.empty(index, cap, snap, marks, gone, extent):
                self._remove(index, rows[extent])
        return gone

    def _again(self, index: Index, cap: Cap, more: int | None, keep: Keep | None, part: float) -> None:
        self._calmly(lambda: self._shrink(index, cap, more, keep, part))

    def _calmly(self, work: Callable[[], T]) -> T:
        """Do something that nobody may publish meanwhile: at first in the hope that nobody does."""
        for _ in range(TRIES):
            with contextlib.suppress(StaleError):
                return work()
        with self._directory.locked(PUBLISH_BYTE, exclusive=True):
            return work()

    def _fits(self, index: Index, cap: Cap, more: int) -> bool:
        with index.read() as db:
            return fits(db, index, cap, more)

    def _shrink(self, index: Index, cap: Cap, more: int | None, keep: Keep | None, part: float) -> None:
        rows = self._rows(index)
        snap = snapshot(index)
        with index.read() as db:
            marks = mark(snap, keep, None if keep is None else layout_id(db, keep.layout))
        gone = 0 if more is None else self._victims(index, cap, snap, marks, rows, more, part)
        self._drop(index, cap, snap, marks, gone)
        live = live_bytes(snap, marks, gone)
        sealed = sorted((row for row in rows.values() if row.state == SEALED), key=lambda row: live.get(row.id, 0))
        for row in sealed:
            if not live.get(row.id, 0):
                self._remove(index, row)
        for row in sealed:
            needed = live.get(row.id, 0)
            if more is not None and self._fits(index, cap, more):
                return
            if needed and row.reserved - needed > max(WASTE * row.reserved, EXTENT_EXTRA):
                try:
                    if self._mover.empty(index, cap, snap, marks, gone, row.id) and self._remove(index, row):
                        self.done.compacted += 1
                except NoRoomError:
                    return

    @staticmethod
    def _rows(index: Index) -> dict[int, ExtentRow]:
        """The extents, before a snapshot is taken: what is sealed then has nothing that the snapshot does not know."""
        with index.read() as db:
            return extent_rows(db)

    def _victims(
        self,
        index: Index,
        cap: Cap,
        snap: Snapshot,
        marks: Marks,
        rows: dict[int, ExtentRow],
        more: int,
        part: float,
    ) -> int:
        held = sum(row.reserved + EXTENT_EXTRA for row in rows.values() if row.state == OPEN)
        room = max(0, cap.bytes - cap.slack - FIXED - index.bytes() - held - more)
        live = int(snap.stored[marks.entries >= 0].sum())
        if part == GOAL and live <= FULL * room:
            return 0
        dead = int(snap.stored.sum()) - live
        return min(marks.victims(snap, dead + live - int(part * room)), len(snap.boundaries))

    def _drop(self, index: Index, cap: Cap, snap: Snapshot, marks: Marks, gone: int) -> None:
        """Take the first ``gone`` boundaries out of the index, and all that is needed by none then."""
        keys = list(snap.rows)
        step = cap.rows_at_once
        for begin in range(0, gone, step):
            part = snap.boundaries[begin : min(begin + step, gone)]
            with self._step(index, snap) as db:
                for boundary in part:
                    db.execute("DELETE FROM boundaries WHERE node = ?", (boundary.id,))
            self.done.units += len(part)
        dead = marks.entries < gone
        touched = np.union1d(snap.owner[dead], np.flatnonzero(marks.nodes < gone)).tolist()
        for begin in range(0, len(touched), step):
            with self._step(index, snap) as db:
                for row in touched[begin : begin + step]:
                    mine = slice(snap.starts[row], snap.starts[row + 1])
                    self._drop_objects(db, snap, row, keys[row], dead[mine], mine, marks.nodes[row] < gone)
            if index.log_bytes() > cap.slack // 2:
                index.checkpoint()

    def _drop_objects(
        self,
        db: sqlite3.Connection,
        snap: Snapshot,
        row: int,
        key: tuple[int, bytes],
        dead: AnyArray,
        part: slice,
        whole: bool,
    ) -> None:
        layout, digest = key
        if whole:
            db.execute("DELETE FROM nodes WHERE id = ?", (int(snap.ids[row]),))
            self.done.objects += int(dead.sum())
        else:
            node = nodes(db, layout, [digest]).get(digest)
            if node is None:
                return
            out = {(int(e["extent"]), int(e["offset"])) for e in snap.entries[part][dead]}
            kept = [(int(e["extent"]), int(e["offset"])) not in out for e in node.objects]
            self.done.objects += len(kept) - sum(kept)
            put_node(db, with_objects(node, node.objects[np.array(kept, np.bool_)]))

    @contextlib.contextmanager
    def _step(self, index: Index, snap: Snapshot) -> Iterator[sqlite3.Connection]:
        with index.write() as db:
            if meta(db, "published") != snap.published:
                raise StaleError
            yield db

    def _remove(self, index: Index, row: ExtentRow) -> bool:
        """Remove the file of an extent that nothing refers to; not while somebody reads or writes it."""
        path = self._directory.extent(row.id)
        try:
            fd = self._ops.open(path, os.O_RDWR)
        except FileNotFoundError:
            fd = -1
        try:
            if fd >= 0 and not self._ours(fd):
                self._busy = True
                return False
            with index.write() as db:
                put_extent(db, ExtentRow(row.id, DYING, row.reserved, row.used))
            self._bury(index, row.id)
        finally:
            if fd >= 0:
                self._ops.close(fd)
        self.done.extents += 1
        self.done.bytes_freed += row.reserved
        return True

    def _ours(self, fd: int) -> bool:
        return self._ops.lock(fd, WRITER_BYTE, exclusive=True) and self._ops.lock(fd, PIN_BYTE, exclusive=True)

    def _bury(self, index: Index, extent: int) -> None:
        """The file, then its row: as long as there are bytes they are counted."""
        with contextlib.suppress(FileNotFoundError):
            self._ops.unlink(self._directory.extent(extent))
        self._ops.sync_directory(self._directory.extents)
        with index.write() as db:
            db.execute("DELETE FROM extents WHERE id = ?", (extent,))

    def collect(self, index: Index) -> None:
        """Take back what crashed writers left: files that nobody knows, ends that nobody published, promised room."""
        with index.read() as db:
            rows = extent_rows(db)
        files = self._directory.extent_files()
        for extent, row in rows.items():
            if row.state == DYING:
                self._bury(index, extent)
            elif extent in files and (row.state == OPEN or row.reserved > row.used):
                self._settle(index, row)
            elif extent not in files:
                with index.write() as db:
                    db.execute("DELETE FROM extents WHERE id = ?", (extent,))
        for extent in files.keys() - rows.keys():
            self._orphan(index, extent)

    def _settle(self, index: Index, row: ExtentRow) -> None:
        with contextlib.suppress(FileNotFoundError):
            fd = self._ops.open(self._directory.extent(row.id), os.O_RDWR)
            try:
                if not self._ops.lock(fd, WRITER_BYTE, exclusive=True):
                    return
                seal_extent(index, self._ops, fd, row.id, lasting=True)
                self.done.orphans += 1
            finally:
                self._ops.close(fd)

    def _orphan(self, index: Index, extent: int) -> None:
        path = self._directory.extent(extent)
        with contextlib.suppress(FileNotFoundError):
            fd = self._ops.open(path, os.O_RDWR)
            try:
                if not self._ours(fd):
                    return
                with index.read() as db:
                    known = extent in extent_rows(db)
                if not known:
                    self._ops.unlink(path)
                    self.done.orphans += 1
            finally:
                self._ops.close(fd)
