"""The writing side of a handle: one unit after the other, with the room that each one needs."""

from __future__ import annotations

import contextlib
import threading

from kvloom.errors import StoreError
from kvloom.tiers.disk import publishing
from kvloom.tiers.disk.directory import PUBLISH_BYTE, Directory
from kvloom.tiers.disk.extents import extent_rows, put_extent
from kvloom.tiers.disk.files import FileOps
from kvloom.tiers.disk.format import PAGE
from kvloom.tiers.disk.health import Health
from kvloom.tiers.disk.heat import Heat
from kvloom.tiers.disk.index import OPEN, Index, meta
from kvloom.tiers.disk.marks import Keep
from kvloom.tiers.disk.moving import Mover
from kvloom.tiers.disk.opened import OpenIndex
from kvloom.tiers.disk.publishing import Draft
from kvloom.tiers.disk.reading import Reader
from kvloom.tiers.disk.rows import layout_id, next_layout
from kvloom.tiers.disk.space import EXTENT_EXTRA, Cap, fits
from kvloom.tiers.disk.sweeping import Sweeper
from kvloom.tiers.disk.writer import NoRoomError, Writer
from kvloom.tiers.values import Outcome, Published, Unit
from kvloom.types import AnyArray

TRIES = 4

Ready = tuple[tuple[str, int], int, publishing.Entry]
"""A version of the index, the number of the unit's layout in it, and what the unit changes there."""


class _LostError(Exception):
    """While the unit was written others took the room, what it builds on, or the extent; the transaction goes back."""


class Publisher:
    """Thread-safe: whoever writes holds ``lock``."""

    def __init__(self, directory: Directory, ops: FileOps, reader: Reader, health: Health) -> None:
        self.lock = threading.RLock()
        self.heat = Heat()
        self.writer = Writer(directory, ops)
        self.mover = Mover(self.writer, reader)
        self.sweeper = Sweeper(directory, ops, self.mover)
        self.units = 0
        self.bytes_stored = 0
        self._health = health
        self._directory = directory

    def publish(self, indexes: OpenIndex, unit: Unit) -> Published:
        """See ``DiskStore.publish``."""
        if not self._health.ready():
            return Published(Outcome.UNAVAILABLE, reason=self._health.reason)
        with self.lock:
            try:
                done = self._publish(indexes, unit)
            except NoRoomError:
                return Published(Outcome.NO_ROOM)
            except (OSError, StoreError) as error:
                self.failed(indexes, str(error))
                return Published(Outcome.UNAVAILABLE, reason=str(error))
        self._health.worked()
        return done

    def failed(self, indexes: OpenIndex, reason: str) -> None:
        """Writing failed.  After a failed write or sync nobody knows what is in the file: it gets no more."""
        self._health.failed(reason)
        with self.lock:
            try:
                indexes.run(lambda index: self.writer.release(index, failed=True))
            except (OSError, StoreError):
                self.writer.forget()

    def _publish(self, indexes: OpenIndex, unit: Unit) -> Published:
        for _ in range(TRIES):
            try:
                return self._try(indexes, unit)
            except _LostError:
                continue
        return Published(Outcome.INCOMPLETE)

    def _try(self, indexes: OpenIndex, unit: Unit) -> Published:
        made = indexes.run(lambda index: publishing.draft(index, unit))
        if not made.complete:
            return Published(Outcome.INCOMPLETE)
        if made.known:
            self.heat.note(unit.layout, made.chain[-1])
            return Published(Outcome.KNOWN)
        run = made.run()
        indexes.run(lambda index: self._room(index, made, run.size))
        ready: list[Ready] = []
        places = self.writer.append(run, lambda places: self._prepare(indexes, made, places, ready))
        done = indexes.run(lambda index: self._enter(index, made, places, run.size, ready))
        self.units += 1
        self.bytes_stored += run.size
        return done

    def _room(self, index: Index, made: Draft, size: int) -> None:
        """Have room for a run and for what the index grows by.  Raises NoRoomError."""
        cap = capacity(index)
        if made.held + size > cap.largest_run:
            raise NoRoomError
        keep = Keep(made.unit.layout, made.chain, made.needs)
        growth = made.growth + cap.headroom
        for _ in range(TRIES):
            try:
                self.writer.claim(index, cap, size, headroom=growth)
                with index.read() as db:
                    if fits(db, index, cap, made.growth):
                        return
                more = growth
            except NoRoomError:
                more = max(cap.extent, size + PAGE) + EXTENT_EXTRA + growth
            if not self.sweeper.make_room(index, cap, more, keep):
                raise NoRoomError
        raise NoRoomError

    def _prepare(self, indexes: OpenIndex, made: Draft, places: AnyArray, ready: list[Ready]) -> None:
        """While the disk is busy: what the transaction will write, if nothing changes until then."""
        extent = self.writer.extent

        def work(index: Index) -> None:
            version = index.version()
            with index.read() as db:
                number = layout_id(db, made.unit.layout) or next_layout(db)
                if extent is not None:
                    ready.append((version, number, publishing.entry(db, made, places, extent.id, number)))

        with contextlib.suppress(OSError, StoreError):  # then the transaction finds out
            indexes.run(work)

    def _enter(self, index: Index, made: Draft, places: AnyArray, size: int, ready: list[Ready]) -> Published:
        extent = self.writer.extent
        if extent is None or not self.writer.usable:
            raise _LostError  # the index was made anew, or the file is gone
        with self._directory.locked(PUBLISH_BYTE, exclusive=False), index.write() as db:
            if not fits(db, index, Cap(meta(db, "capacity")), made.growth):
                raise _LostError
            row = extent_rows(db).get(extent.id)
            if row is None or row.state != OPEN:
                self.writer.forget()  # the index was made anew, and the extent is a sealed one in it
                raise _LostError
            number = layout_id(db, made.unit.layout, make=True)
            assert number is not None
            if ready and ready[0][:2] == (index.version(), number):
                entry = ready[0][2]
            else:
                entry = publishing.entry(db, made, places, extent.id, number)
            if entry.changed is None:
                raise _LostError
            publishing.enter(db, made, entry.changed, number, extent.id, size)
            self.heat.flush(db)
            put_extent(db, extent.row())
        return Published(Outcome.PUBLISHED, len(made.objects), size)

    def clear(self, index: Index, layout: bytes, root: bytes) -> int:
        """Drop the units of a namespace."""
        with index.read() as db:
            number = layout_id(db, layout)
        return 0 if number is None else self.sweeper.clear(index, capacity(index), number, root)

    def flush(self, index: Index) -> None:
        """Enter what was used."""
        if self.heat.waiting():
            with index.write() as db:
                self.heat.flush(db)

    def close(self, indexes: OpenIndex) -> None:
        """Give the extent and the threads back."""
        with self.lock:
            try:
                indexes.run(self.flush)
                indexes.run(self.writer.release)
            except (OSError, StoreError):
                self.writer.forget()
            self.writer.close()


def capacity(index: Index) -> Cap:
    """The cap as it is at present."""
    with index.read() as db:
        return Cap(meta(db, "capacity"))
