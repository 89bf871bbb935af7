"""Extent files: the one that this process appends to, and the ones that its reads hold in place."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from kvloom.tiers.disk.directory import Directory
from kvloom.tiers.disk.files import DIRECT, PIN_BYTE, WRITER_BYTE, FileOps, aligned
from kvloom.tiers.disk.format import PAGE, TYPE_EXTENT, first_page
from kvloom.tiers.disk.index import DYING, OPEN, SEALED, Index, IndexCorruptError, row_sum


@dataclass(frozen=True, slots=True)
class ExtentRow:
    """An extent as the index has it: ``reserved`` is what its file may take, ``used`` the end of what is published."""

    id: int
    state: int
    reserved: int
    used: int

    def sum(self) -> int:
        """Checksum of the row."""
        return row_sum(self.id, self.state, self.reserved, self.used)


def extent_rows(db: sqlite3.Connection) -> dict[int, ExtentRow]:
    """Every extent, checked."""
    found = {}
    for number, state, reserved, used, check in db.execute("SELECT id, state, reserved, used, sum FROM extents"):
        row = ExtentRow(number, state, reserved, used)
        if row.sum() != check:
            raise IndexCorruptError("an extent of the index is damaged")
        found[number] = row
    return found


def put_extent(db: sqlite3.Connection, row: ExtentRow) -> None:
    """Write a row of ``extents``."""
    values = (row.id, row.state, row.reserved, row.used, row.sum())
    db.execute("INSERT OR REPLACE INTO extents VALUES (?, ?, ?, ?, ?)", values)


@dataclass(slots=True)
class OpenExtent:
    """The extent that this handle appends to.

    ``end``: where the next run begins; ``named``: whether its name is on the medium, as it has to be before anything in
    it is published.
    """

    id: int
    fd: int
    reserved: int
    end: int = PAGE
    named: bool = False

    @property
    def left(self) -> int:
        """Bytes that still fit."""
        return self.reserved - self.end

    def row(self) -> ExtentRow:
        """As the index is to have it, with all that was written so far."""
        return ExtentRow(self.id, OPEN, self.reserved, self.end)


def create_extent(directory: Directory, ops: FileOps, reserved: int) -> OpenExtent:
    """A new, empty extent file that is ours alone to write; nobody knows of it yet.  Raises OSError."""
    while True:
        number = int.from_bytes(os.urandom(8), "little") >> 1
        path = directory.extent(number)
        fd = ops.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | DIRECT)
        # Until it is locked, somebody who collects orphans may take the file away again.
        if ops.lock(fd, WRITER_BYTE, exclusive=True) and ops.linked(fd):
            return OpenExtent(number, fd, reserved)
        ops.close(fd)


def begin_extent(ops: FileOps, extent: OpenExtent, cap: int) -> None:
    """Write the first page.  Raises OSError."""
    page = aligned(PAGE)
    page[:] = np.frombuffer(first_page(TYPE_EXTENT, extent=extent.id, reserved=extent.reserved, cap=cap), np.uint8)
    ops.write(extent.fd, page.data, 0)


def seal_extent(index: Index, ops: FileOps, fd: int, extent: int, *, lasting: bool) -> None:
    """Nobody appends to an extent any more: cut its file behind what is published.  The caller has its writer's lock.

    The file is cut after a transaction, never before.  What a process published that was killed while it committed may
    be in SQLite's log and seen by nobody, until the last who has the index open is gone and the log is read anew; once
    another transaction was written that cannot happen any more.  ``lasting``: nor after a loss of power.  That is not
    needed where the process that appended is this one and no commit of its failed: it knows what it published.
    """
    with index.write(lasting=lasting) as db:
        row = extent_rows(db).get(extent)
        if row is None or row.state == DYING:
            return
        put_extent(db, replace(row, state=SEALED))
    with contextlib.suppress(OSError):  # then its bytes stay promised, and somebody tries again
        ops.truncate(fd, row.used)
        if row.reserved > row.used:
            with index.write(lasting=False) as db:
                put_extent(db, ExtentRow(extent, SEALED, row.used, row.used))


class Pins:
    """Open extents: as long as one is pinned, by any process, its file is not removed.  Thread-safe."""

    def __init__(self, directory: Directory, ops: FileOps) -> None:
        self._directory, self._ops = directory, ops
        self._lock = threading.Lock()
        self._held: dict[int, list[int]] = {}  # extent: [descriptor, holders]

    @contextlib.contextmanager
    def hold(self, extents: Iterable[int]) -> Iterator[dict[int, int]]:
        """Descriptors of those that are still there.  Raises OSError for trouble other than a missing file."""
        held: dict[int, int] = {}
        try:
            for extent in extents:
                fd = self._take(extent)
                if fd is not None:
                    held[extent] = fd
            yield held
        finally:
            for extent in held:
                self._give(extent)

    def _take(self, extent: int) -> int | None:
        with self._lock:
            entry = self._held.get(extent)
            if entry is None:
                try:
                    fd = self._ops.open(self._directory.extent(extent), os.O_RDONLY | DIRECT)
                except FileNotFoundError:
                    return None
                # Locked and still linked: whoever removes it asks for this lock first.
                if not self._ops.lock(fd, PIN_BYTE, exclusive=False) or not self._ops.linked(fd):
                    self._ops.close(fd)
                    return None
                entry = self._held[extent] = [fd, 0]
            entry[1] += 1
            return entry[0]

    def _give(self, extent: int) -> None:
        with self._lock:
            entry = self._held[extent]
            entry[1] -= 1
            if entry[1] == 0:
                del self._held[extent]
                self._ops.close(entry[0])
