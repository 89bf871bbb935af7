"""``DiskStore``: the door of the disk tier."""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt

from kvloom.config import check_bytes, exact_size
from kvloom.errors import InputError, StoreError
from kvloom.tiers.contract import Usage
from kvloom.tiers.disk import lookups
from kvloom.tiers.disk.activity import Activity, activity
from kvloom.tiers.disk.archive import Exported, export, stored_chain, units
from kvloom.tiers.disk.checking import (
    Contents,
    Progress,
    UnitInfo,
    Verified,
    check_index,
    contents,
    count_results,
    in_parts,
    unit_list,
)
from kvloom.tiers.disk.directory import Directory, why_unusable
from kvloom.tiers.disk.extents import Pins
from kvloom.tiers.disk.files import FileOps
from kvloom.tiers.disk.format import PLACE
from kvloom.tiers.disk.health import Health
from kvloom.tiers.disk.index import Index, meta, set_meta
from kvloom.tiers.disk.opened import OpenIndex
from kvloom.tiers.disk.publisher import Publisher, capacity
from kvloom.tiers.disk.reading import THREADS, Reader
from kvloom.tiers.disk.reads import Reads
from kvloom.tiers.disk.rebuild import Rebuilt, rebuild
from kvloom.tiers.disk.sinks import Copying, Deliver, Handing, Sink
from kvloom.tiers.disk.space import MINIMUM, add_parent_index
from kvloom.tiers.disk.sweeping import Swept
from kvloom.tiers.disk.usage import Usages
from kvloom.tiers.values import (
    Batch,
    Digests,
    Found,
    Outcome,
    Places,
    Published,
    ReadResult,
    Result,
    Unit,
    check_digests,
    check_layout,
    no_places,
)
from kvloom.types import IntArray


class DiskStore:
    """Prefix units on disk.  Several handles, threads and processes may use one directory at a time.

    Nothing here raises for what the disk does: what cannot be stored, found or read is reported as such.
    """

    def __init__(self, directory: Directory, ops: FileOps, clock: Callable[[], float], threads: int) -> None:
        """Use ``open``."""
        self._directory, self._ops = directory, ops
        self._writes, self._reads = Health(clock), Health(clock)
        self._reader = Reader(Pins(directory, ops), ops, threads)
        self._publisher = Publisher(directory, ops, self._reader, self._writes)
        self._reading = Reads(self._reader)
        self._index = OpenIndex(directory, self._rebuild, self._publisher.writer.disown)
        self._capacity: int | None = None
        self._capacity_of_new: int | None = None
        self._closed = False
        self._usages = Usages()
        self.rebuilt: Rebuilt | None = None
        """What this handle made a new index of, when it found the old one damaged; None when it did not."""

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
        capacity_of_new: int | None = None,
    ) -> DiskStore:
        """Open a store, making it if there is none and ``create``.

        Args:
            directory: for the store alone; made with mode 0700.
            capacity_bytes: cap on everything in the directory, for all who use it; None: as it was last set.  Where it
                is lowered, what is worth least goes now.
            ops: file operations (tests replace them).
            clock: monotonic seconds, for pauses after failures.
            threads: that read.
            capacity_of_new: cap of a store that has none yet, where ``capacity_bytes`` is None.

        Raises StoreError for a directory that is not ours or not usable, FormatError for a store of a newer kvloom,
        InputError for a cap that is too small, above 1024 TiB, or no whole number, for ``threads`` that are none, and
        for a directory that is no path.
        """
        _check_rest(directory, threads)
        for cap in (capacity_bytes, capacity_of_new):
            _check_cap(directory, cap)
        ops = ops or FileOps()
        try:
            place = Directory(Path(directory), ops, create=create)
            made = cls(place, ops, clock, threads)
            made._capacity, made._capacity_of_new = capacity_bytes, capacity_of_new
            made._index.create()
            made._index.run(made._settle)
        except OSError as error:
            raise StoreError(
                f"{directory} cannot be used as a store: {why_unusable(Path(directory), error)}"
            ) from error
        return made

    def _settle(self, index: Index) -> None:
        with index.read() as db:
            have = meta(db, "capacity")
        asked = self._capacity or (None if have else self._directory.known_cap() or self._capacity_of_new)
        if asked is None and not have:
            raise InputError(f"the store {self.directory} has no cap yet; name one, such as 16GiB")
        self._capacity = asked or have
        if asked not in {None, have}:
            with index.write() as db:
                set_meta(db, "capacity", self._capacity)
        cap = capacity(index)
        if asked is not None and have and asked < have:
            self._publisher.sweeper.make_room(index, cap, 0)
        else:
            self._publisher.sweeper.collect(index)
        add_parent_index(index, cap)

    @property
    def name(self) -> str:
        """``"disk"``."""
        return "disk"

    @property
    def durable(self) -> bool:
        """True."""
        return True

    @property
    def directory(self) -> Path:
        """Where it is, absolute."""
        return self._directory.path

    @property
    def capacity(self) -> int:
        """Cap in bytes, as it was when this handle was opened."""
        return self._capacity or 0

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._closed

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Give everything back.  What was published stays; from now on nothing is found and nothing stored."""
        self._closed = True
        self._publisher.close(self._index)
        self._reader.close()
        self._index.close()

    # Storing

    def publish(self, unit: Unit) -> Published:
        """Store a unit; when this returns ``PUBLISHED`` it survives a loss of power.

        Blocks for as long as the disk takes; units of one handle are stored one after the other.  Thread-safe.  Raises
        only what a ``Fill`` raises.
        """
        if self._closed:
            return Published(Outcome.UNAVAILABLE, reason="the store is closed")
        return self._publisher.publish(self._index, unit)

    def touch(self, layout: bytes, digest: bytes) -> None:
        """The unit that ends at a node was used: it is worth keeping.  It is entered later.  Thread-safe."""
        if self._publisher.heat.note(layout, digest) and self._writes.ready() and not self._closed:
            with contextlib.suppress(OSError, StoreError):
                self._index.run(self._publisher.flush)

    # Finding

    def lookup(self, layout: bytes, digests: Digests, *, root: bytes | None = None) -> Found:
        """What is stored of a chain of nodes.

        Args:
            layout: 32 bytes; objects of another layout are not found.
            digests: uint8 ``[n, 32]``.
            root: digest of the empty prefix, for ``Found.tails`` where no node is known.

        The places may be read until the objects are removed; a read says so then.  Nothing is found while the index
        cannot be read.  Thread-safe.
        """
        check_layout(layout)
        check_digests(digests)
        nothing = np.zeros(len(digests), np.bool_)
        if self._reads.ready() and not self._closed:
            try:
                found = self._index.run(lambda index: lookups.lookup(index, layout, digests, root))
            except (OSError, StoreError) as error:
                self._reads.failed(str(error))
            else:
                self._reads.worked()
                return replace(found, places=self._reading.visible(found.places))
        return Found(nothing, nothing.copy(), no_places(layout, PLACE))

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

    # Reading

    def read(
        self,
        places: Places,
        into: npt.NDArray[np.uint8],
        offsets: IntArray,
        stop: Callable[[], bool] = lambda: False,
    ) -> ReadResult:
        """Read objects, verify them, and put their payloads into ``into`` at ``offsets``.

        Args:
            places: from ``lookup``.
            into: uint8 ``[bytes]``, writable, contiguous.
            offsets: int64 ``[m]``; regions of different objects do not overlap.
            stop: asked before every piece; what was not read then is ``STOPPED``.

        Where an object is not ``OK``, its region is as it was, or zero: bytes that were not verified are never left.
        Nothing is written after the call ended.

        Thread-safe.  Raises InputError when an object would not lie within ``into``.
        """
        ends = offsets + places.entries["length"].astype(np.int64)
        if len(offsets) != len(places) or (len(ends) and (offsets.min() < 0 or int(ends.max()) > len(into))):
            raise InputError("the objects do not fit at the offsets that they are to be read to")
        return self._read(places, Copying(into, offsets), stop)

    def read_each(self, places: Places, deliver: Deliver, stop: Callable[[], bool] = lambda: False) -> ReadResult:
        """Read objects and hand every verified one to ``deliver``, in any order, from several threads.

        ``stop`` is asked before every piece; what was not read then is ``STOPPED``.  No object is delivered after the
        call ended.  Thread-safe.
        """
        return self._read(places, Handing(deliver), stop)

    def _read(self, places: Places, sink: Sink, stop: Callable[[], bool]) -> ReadResult:
        if self._closed:
            return ReadResult(np.full(len(places), Result.MISSING, np.uint8), 0, 0, "the store is closed")
        return self._reading.read(self._index, places, sink, stop)

    # Keeping house

    def usage(self) -> Usage:
        """How full it is, for all who use the directory; the last that is known while the index cannot be read."""
        if not self._closed and self._reads.ready():
            try:
                return self._index.run(self._usages.ask)
            except (OSError, StoreError) as error:
                self._reads.failed(str(error))
        return self._usages.last

    def gc(self) -> Swept:
        """Collect what crashed writers left, drop what no unit needs, and copy extents together that are mostly waste.

        It also happens by itself whenever room is needed.  Raises StoreError, OSError.
        """
        with self._publisher.lock:
            self._index.run(self._publisher.writer.release)
            self._index.run(lambda index: self._publisher.sweeper.gc(index, capacity(index)))
            self._index.run(Index.shrink)
            self._index.run(Index.checkpoint)
            return replace(self._publisher.sweeper.done)

    def clear(self, layout: bytes | None = None, root: bytes | None = None) -> int:
        """Remove everything, or all of one namespace of one layout; returns how many units.

        Their bytes are gone from the disk afterwards, but for those in an extent that another process still appends to.
        Raises StoreError, OSError.
        """
        with self._publisher.lock:
            if layout is None or root is None:
                return self._index.renew(self._remove_extents)
            self._index.run(self._publisher.writer.release)
            return self._index.run(lambda index: self._publisher.clear(index, layout, root))

    def verify(self, progress: Progress = lambda _done, _all: None) -> Verified:
        """Read and check everything; what is damaged is quarantined.  Raises StoreError, OSError."""
        done = Verified()
        before = self._index.rebuilds
        total = self.contents().payload
        for batch in self.catalogue():
            for part in in_parts(batch.places):
                count_results(done, part, self.read_each(part, _nowhere).results)
                progress(done.bytes, total)
        self._index.run(lambda index: check_index(index, self._directory, done))
        if self._index.rebuilds > before:
            done.problems.append("the index was damaged; a new one was made from the extents")
        return done

    def contents(self) -> Contents:
        """What is stored, for all who use the directory; reads the whole index.  Raises StoreError, OSError."""
        return self._index.run(lambda index: contents(index, self._directory))

    def units(self) -> list[UnitInfo]:
        """Every stored unit, the one worth most first; reads the whole index.  Raises StoreError, OSError."""
        return self._index.run(unit_list)

    def activity(self) -> Activity:
        """What this handle has done.  Thread-safe; asks nothing of the disk."""
        return activity(self._publisher, self._reading, self._index, self._writes, self._reads)

    def export_archive(self, path: str | Path) -> Exported:
        """Write everything to a new file.  Raises StoreError when it exists, OSError."""

        def read(places: Places, deliver: Deliver) -> npt.NDArray[np.uint8]:
            return self.read_each(places, deliver).results

        return self._index.run(lambda index: export(index, Path(path), read))

    def import_archive(self, path: str | Path) -> Counter[Outcome]:
        """Publish every unit of an archive; returns how many ended how.

        What is in the archive must be right, as nobody can tell: take archives only from those you trust.  That it is
        well-formed is checked.  Raises FormatError where it is not, and then units before that place are there.
        """
        done: Counter[Outcome] = Counter()
        for unit in units(Path(path), lambda layout, at: self._index.run(lambda i: stored_chain(i, layout, at))):
            done[Outcome.INCOMPLETE if unit is None else self.publish(unit).outcome] += 1
        return done

    # Inside

    def _remove_extents(self) -> None:
        for path in self._directory.extent_files().values():
            self._ops.unlink(path)
        self._ops.sync_directory(self._directory.extents)

    def _rebuild(self, index: Index) -> None:
        cap = self._capacity or self._directory.known_cap()
        self.rebuilt = rebuild(index, self._directory, self._ops, cap)


def _check_cap(directory: str | Path, cap: int | None) -> None:
    if cap is None:
        return
    check_bytes(cap, f"store {directory}")
    if cap < MINIMUM:
        least = exact_size(MINIMUM)
        raise InputError(f"store {directory}: {exact_size(cap)} are too few; use at least {least}")


def _check_rest(directory: object, threads: object) -> None:
    if not isinstance(threads, int) or threads < 1:
        raise InputError(f"store {directory}: {threads!r} threads cannot read; use 1 or more")
    if not isinstance(directory, str | os.PathLike):
        raise InputError(f"a store is named by the path of its directory, not by {type(directory).__name__}")
    if "\0" in str(directory):
        raise StoreError(f"{directory!r} is no path of a directory; name one")


def _nowhere(_number: int, _payload: npt.NDArray[np.uint8]) -> None:
    """Takes what is only to be checked."""
