"""Reading objects of the host tier: pinned, copied block by block with the GIL released, and checked as they arrive.

What is checked is what is delivered: bytes are hashed on their way, or where they were put.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import xxhash

from kvloom.tiers.hashing.xxh3 import SECRET, scratch
from kvloom.tiers.host import checked, nodes, pages, records
from kvloom.tiers.host.arrays import CHECK, RUN
from kvloom.tiers.host.books import Books, words
from kvloom.tiers.values import OBJECT, Places, ReadResult, Result
from kvloom.types import AnyArray, IntArray

BLOCK = 256 << 10
"""Bytes of a very large object that are hashed while the cache of the core has them from copying."""
AT_ONCE = 8 << 20
"""Bytes of the largest object that is copied and checked without asking whether to stop."""
TASK = 4 << 20
"""Bytes after which the caller is asked whether to stop, and that one thread takes at a time."""
ALONE = 1 << 20
"""Reads of no more than this stay in the caller's thread."""

PLACE = np.dtype([*OBJECT.descr, ("row", "<u4"), ("generation", "<u4")])
"""What was looked up, and where it is as long as its row keeps its generation."""


def about_places(places: Places) -> IntArray:
    """int64 ``[m, 6]``: generation, group, column, form, grade, length."""
    names = ("generation", "group", "column", "form", "grade", "length")
    return np.stack([places.entries[name].astype(np.int64) for name in names], axis=1)


def seeds_of(layout: bytes, digests: AnyArray, about: IntArray) -> AnyArray:
    """What the checksums of objects start from, uint64; ``digests`` int64 ``[m, 4]``."""
    out = np.empty(len(about), np.uint64)
    name = np.frombuffer(bytearray(layout), np.uint64)
    nodes.seeds(name, digests.view(np.uint64), about, out)
    return out


class Pinned:
    """Objects that stay where they are until ``release``, whatever is evicted.

    ``codes`` int64 ``[m]``: 0 for those that are pinned, else a ``Result``.
    """

    def __init__(self, books: Books, places: Places) -> None:
        self._books = books
        self.layout = places.layout
        self.about = about_places(places)
        self.rows = places.entries["row"].astype(np.int64)
        self.digests = words(places.digests)
        self.codes = np.full(len(places), int(Result.MISSING), np.int64)
        with books.lock:
            records.pin(books.a, self.rows, self.about, self.digests, self.codes)
            pinned = self.codes == 0
            self.checks = np.zeros((len(places), 2), np.int64)
            self.checks[pinned] = books.a.obj64[self.rows[pinned], CHECK : CHECK + 2]
        self._held = self.codes.copy()

    def only(self, which: IntArray) -> Pinned:
        """Some of them, which stay pinned by this one."""
        made = object.__new__(Pinned)
        made.layout, made._books = self.layout, self._books
        for name in ("about", "rows", "digests", "codes", "checks"):
            setattr(made, name, getattr(self, name)[which])
        return made

    def release(self) -> None:
        """Let go of them; a second time does nothing."""
        with self._books.lock:
            records.unpin(self._books.a, self.rows, self._held)
            self._held[:] = int(Result.MISSING)

    def give_up(self, wrong: npt.NDArray[np.bool_]) -> None:
        """Some turned out not to be what was stored."""
        if wrong.any():
            with self._books.lock:
                self._books.quarantine(self.rows[wrong], self.about[wrong, 0])


class Copy:
    """One read of pinned objects into ``into`` at ``offsets``; ``results`` uint8 ``[m]`` fills up."""

    def __init__(self, books: Books, pinned: Pinned, into: AnyArray, offsets: IntArray, *, check: bool) -> None:
        self._a, self._pinned, self._into = books.a, pinned, into
        self._view = into.data
        self._lengths = np.ascontiguousarray(pinned.about[:, 5])
        self._addresses = np.ascontiguousarray(offsets, np.int64) + into.ctypes.data
        self._offsets = offsets
        self._which = np.flatnonzero(pinned.codes == 0)
        self._rows = pinned.rows
        self.results = pinned.codes.astype(np.uint8)
        self.results[self._which] = Result.STOPPED
        self._check = check
        if check:
            self._seeds = seeds_of(pinned.layout, pinned.digests, pinned.about)

    def run(self, stop: Callable[[], bool], pool: ThreadPoolExecutor | None) -> None:
        """Copy everything; no thread writes any more when this returns, however it does."""
        tasks = deque(self._tasks())
        total = int(self._lengths[self._which].sum())
        other = None
        if pool is not None and total > ALONE:
            with contextlib.suppress(RuntimeError):  # the tier is being closed
                other = pool.submit(self._work, tasks, stop)
        try:
            self._work(tasks, stop)
        finally:
            if other is not None:
                tasks.clear()
                if not other.cancel():
                    other.result()

    def _tasks(self) -> list[tuple[int, int]]:
        """Ranges of objects that lie together in number, of about ``TASK`` bytes; pinned ones only."""
        made, begin = [], 0
        lengths = self._lengths[self._which]
        parts = np.cumsum(lengths) // TASK
        ends = [*(np.flatnonzero(np.diff(parts)) + 1).tolist(), len(parts)] if len(parts) else []
        for end in ends:
            made.append((begin, end))
            begin = end
        return made

    def _work(self, tasks: deque[tuple[int, int]], stop: Callable[[], bool]) -> None:
        while True:
            try:
                begin, end = tasks.popleft()
            except IndexError:
                return
            if stop():
                tasks.clear()
                return
            which = self._which[begin:end]
            if self._check:
                self._checked(which, stop)
            else:
                rows, lengths, addresses = self._rows[which], self._lengths[which], self._addresses[which]
                good = np.zeros(len(which), np.uint8)
                pages.gather_many(self._a, rows, lengths, addresses, 0, len(which), good, pages.PAST)
                self.results[which] = np.where(good == 1, Result.OK, Result.INTEGRITY)

    def _checked(self, which: IntArray, stop: Callable[[], bool]) -> None:
        large = self._lengths[which] > AT_ONCE
        for i in which[large].tolist():
            self.results[i] = self._large(i, stop)
        rest = which[~large]
        good = np.zeros(len(rest), np.uint8)
        checked.check_many(
            self._a,
            self._rows[rest],
            self._lengths[rest],
            self._addresses[rest],
            self._seeds[rest],
            self._pinned.checks[rest],
            SECRET,
            *scratch(),
            good,
        )
        self.results[rest] = np.where(good == checked.GOOD, Result.OK, Result.INTEGRITY)
        for i in rest[good == checked.UNCHECKED].tolist():
            self.results[i] = self._short(i)

    def _short(self, i: int) -> Result:
        """Of what was copied already."""
        at, size = int(self._offsets[i]), int(self._lengths[i])
        if xxhash.xxh3_128_digest(self._view[at : at + size], int(self._seeds[i])) == self._checks(i):
            return Result.OK
        self._into[at : at + size] = 0
        return Result.INTEGRITY

    def _checks(self, i: int) -> bytes:
        made: bytes = self._pinned.checks[i].tobytes()
        return made

    def _large(self, i: int, stop: Callable[[], bool]) -> Result:
        state = xxhash.xxh3_128(seed=int(self._seeds[i]))
        length, at, to = int(self._lengths[i]), int(self._offsets[i]), int(self._addresses[i])
        run = int(self._a.obj[self._rows[i], RUN])
        result = Result.OK
        for begin in range(0, length, BLOCK):
            size = min(BLOCK, length - begin)
            if not pages.gather(self._a, run, begin, size, to + begin):
                result = Result.INTEGRITY
                break
            state.update(self._view[at + begin : at + begin + size])
            if begin and begin % TASK == 0 and stop():
                result = Result.STOPPED
                break
        if result is Result.OK and state.digest() != self._checks(i):
            result = Result.INTEGRITY
        if result is not Result.OK:
            self._into[at : at + length] = 0
        return result


def read(
    books: Books,
    places: Places,
    into: AnyArray,
    offsets: IntArray,
    stop: Callable[[], bool],
    *,
    check: bool,
    pool: ThreadPoolExecutor | None,
) -> ReadResult:
    """See ``HostStore.read``."""
    pinned = Pinned(books, places)
    try:
        copy = Copy(books, pinned, into, offsets, check=check)
        copy.run(stop, pool)
    finally:
        pinned.release()
    pinned.give_up(copy.results == Result.INTEGRITY)
    arrived = int(copy._lengths[copy.results == Result.OK].sum())
    return ReadResult(copy.results, arrived, int((copy.results == Result.OK).sum()))
