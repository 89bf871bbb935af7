"""``DiskStore``: the door of the disk tier."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt

from kvloom.errors import InputError, StoreError
from kvloom.tiers.disk import lookups, publishing
from kvloom.tiers.disk.directory import Directory
from kvloom.tiers.disk.extents import Pins, extent_rows, put_extent
from kvloom.tiers.disk.files import FileOps
from kvloom.tiers.disk.health import Health
from kvloom.tiers.disk.index import OPEN, Index, meta, set_meta
from kvloom.tiers.disk.lookups import Batch, Changes
from kvloom.tiers.disk.opened import OpenIndex
from kvloom.tiers.disk.reading import THREADS, Deliver, Reader
from kvloom.tiers.disk.space import MINIMUM, Cap, fits
from kvloom.tiers.disk.values import (
    Digests,
    Found,
    Outcome,
    Places,
    Published,
    ReadResult,
    Unit,
    check_digests,
    check_layout,
    no_places,
)
from kvloom.tiers.disk.writer import NoRoomError, Writer
from kvloom.types import AnyArray, IntArray


class DiskStore:
    """Prefix units on disk.  Several handles, threads and processes may use one directory at a time.

    Nothing here raises for what the disk does: what cannot be stored, found or read is reported as such.
    """

    def __init__(self, directory: Directory, ops: FileOps, clock: Callable[[], float], threads: int) -> None:
        """Use ``open``."""
        self._directory, self._ops = directory, ops
        self._writes, self._reads = Health(clock), Health(clock)
        self._publishing = threading.RLock()
        self._writer = Writer(directory, ops)
        self._reader = Reader(Pins(directory, ops), ops, threads)
        self._index = OpenIndex(directory, self._rebuild, self._writer.forget)

    @classmethod
    def open(
        cls,
        directory: str | Path,
        capacity_bytes: int | None = None,
        *,
        ops: FileOps | None = None,
        clock: Callable[[], float] = time.monotonic,
        threads: int = THREADS,
        create: bool = True,
    ) -> DiskStore:
        """Open a store, making it if there is none and ``create``.

        Args:
            directory: for the store alone; made with mode 0700.
            capacity_bytes: cap on everything in the directory, for all who use it; None: as it was last set.
            ops: file operations (tests replace them).
            clock: monotonic seconds, for pauses after failures.
            threads: that read.

        Raises StoreError for a directory that is not ours or not usable, FormatError for a store of a newer kvloom,
        InputError for a cap that is too small.
        """
        if capacity_bytes is not None and capacity_bytes < MINIMUM:
            raise InputError(f"a store of {capacity_bytes} bytes is too small; use at least {MINIMUM}")
        ops = ops or FileOps()
        try:
            place = Directory(Path(directory), ops, create=create)
            made = cls(place, ops, clock, threads)
            made._index.create()
            made._index.run(lambda index: made._set_capacity(index, capacity_bytes))
        except OSError as error:
            raise StoreError(f"{directory} cannot be used as a store: {error}") from error
        return made

    @staticmethod
    def _set_capacity(index: Index, asked: int | None) -> None:
        with index.read() as db:
            have = meta(db, "capacity")
        if asked is None and not have:
            raise InputError("the store has no cap yet; name one")
        if asked is not None and asked != have:
            with index.write() as db:
                set_meta(db, "capacity", asked)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Give everything back.  What was published stays."""
        with self._publishing:
            try:
                self._index.run(self._writer.release)
            except (OSError, StoreError):
                self._writer.forget()
            self._writer.close()
        self._reader.close()
        self._index.close()

    # Storing

    def publish(self, unit: Unit) -> Published:
        """Store a unit; when this returns ``PUBLISHED`` it survives a loss of power.

        Blocks for as long as the disk takes; units of one handle are stored one after the other.  Thread-safe.  Raises
        only what a ``Fill`` raises.
        """
        if not self._writes.ready():
            return Published(Outcome.UNAVAILABLE, reason=self._writes.reason)
        with self._publishing:
            try:
                done = self._publish(unit)
            except NoRoomError:
                return Published(Outcome.NO_ROOM)
            except (OSError, StoreError) as error:
                self._failed(str(error))
                return Published(Outcome.UNAVAILABLE, reason=str(error))
        self._writes.worked()
        return done

    def _failed(self, reason: str) -> None:
        self._writes.failed(reason)
        # After a failed write or sync nobody knows what is in the file: it gets no more.
        try:
            self._index.run(self._writer.release)
        except (OSError, StoreError):
            self._writer.forget()

    def _publish(self, unit: Unit) -> Published:
        made = self._index.run(lambda index: publishing.draft(index, unit))
        if not made.complete:
            return Published(Outcome.INCOMPLETE)
        if made.known:
            return Published(Outcome.KNOWN)
        run = made.run()
        self._index.run(lambda index: self._room(index, run.size, made.growth))
        places = self._writer.append(run)
        return self._index.run(lambda index: self._enter(index, made, places, run.size))

    def _room(self, index: Index, size: int, growth: int) -> None:
        self._writer.claim(index, self._cap(index), size)

    def _enter(self, index: Index, made: publishing.Draft, places: AnyArray, size: int) -> Published:
        extent = self._writer.extent
        if extent is None:
            raise StoreError("the index was made anew while the unit was written")
        try:
            with index.write() as db:
                if not fits(db, index, Cap(meta(db, "capacity")), made.growth):
                    raise NoRoomError
                row = extent_rows(db).get(extent.id)
                if row is None or row.state != OPEN:
                    raise StoreError("the extent was taken away while the unit was written")
                before, extent.used = extent.used, extent.end
                if not publishing.enter(db, made, places, extent.id):
                    raise _IncompleteError
                put_extent(db, extent.row())
        except _IncompleteError:
            extent.used = before
            return Published(Outcome.INCOMPLETE)
        return Published(Outcome.PUBLISHED, len(made.objects), size)

    # Finding

    def lookup(self, layout: bytes, digests: Digests) -> Found:
        """What is stored of a chain of nodes.

        Args:
            layout: 32 bytes; objects of another layout are not found.
            digests: uint8 ``[n, 32]``.

        The places may be read until the objects are removed; a read says so then.  Nothing is found while the index
        cannot be read.  Thread-safe.
        """
        check_layout(layout)
        check_digests(digests)
        nothing = np.zeros(len(digests), np.bool_)
        if self._reads.ready():
            try:
                found = self._index.run(lambda index: lookups.lookup(index, layout, digests))
            except (OSError, StoreError) as error:
                self._reads.failed(str(error))
            else:
                self._reads.worked()
                return found
        return Found(nothing, nothing.copy(), no_places(layout))

    def catalogue(self) -> Iterator[Batch]:
        """Everything that is stored, about a thousand nodes at a time.

        What changes meanwhile may be seen or not.  Raises StoreError, OSError.
        """
        after = -1
        while True:
            after, batches = self._index.run(functools.partial(lookups.catalogue, after=after))
            if not batches:
                return
            yield from batches

    def changes(self, since: int) -> Changes:
        """What was published and removed since a number that an earlier call gave (0: since ever).  Thread-safe."""
        return self._index.run(lambda index: lookups.changes(index, since))

    # Reading

    def read(self, places: Places, into: npt.NDArray[np.uint8], offsets: IntArray) -> ReadResult:
        """Read objects, verify them, and put their payloads into ``into`` at ``offsets``.

        Args:
            places: from ``lookup``.
            into: uint8 ``[bytes]``, writable; only the bytes of objects that are ``OK`` were written.
            offsets: int64 ``[m]``.

        Thread-safe.  Raises InputError when an object would not lie within ``into``.
        """
        ends = offsets + places.entries["length"].astype(np.int64)
        if len(offsets) != len(places) or (len(ends) and (offsets.min() < 0 or int(ends.max()) > len(into))):
            raise InputError("the objects do not fit at the offsets that they are to be read to")
        starts = offsets.tolist()

        def deliver(i: int, payload: npt.NDArray[np.uint8]) -> None:
            into[starts[i] : starts[i] + len(payload)] = payload

        return self.read_each(places, deliver)

    def read_each(self, places: Places, deliver: Deliver, stop: Callable[[], bool] = lambda: False) -> ReadResult:
        """Read objects and hand every verified one to ``deliver``, in any order, from several threads.

        ``stop`` is asked before every piece; what was not read then is ``STOPPED``.  No object is delivered after the
        call ended.  Thread-safe.
        """
        return self._reader.read(places, deliver, stop)

    # Inside

    def _cap(self, index: Index) -> Cap:
        with index.read() as db:
            return Cap(meta(db, "capacity"))

    def _rebuild(self, index: Index) -> None:
        """Nothing yet."""


class _IncompleteError(Exception):
    """Takes a transaction back."""
