"""Reading many objects: neighbours in one large direct read, several reads at once, every object checked on the way.

Threads that read do nothing else, so a disk that has answered gets the next request at once.  Whoever asked for the
objects checks and delivers meanwhile what arrived, with one thread to help.

What is expected of an object's header is known to the last byte from the index, so a header is compared as a whole;
the payload is compared by its checksum.
"""

from __future__ import annotations

import itertools
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvloom.tiers.disk.extents import Pins
from kvloom.tiers.disk.files import FileOps, aligned
from kvloom.tiers.disk.format import ALIGN, CHECK_AT, HEADER, PAGE, padded
from kvloom.tiers.disk.runs import object_headers
from kvloom.tiers.disk.sinks import Arrived, Bytes, Sink, Stream
from kvloom.tiers.values import Places, ReadResult, Result
from kvloom.types import AnyArray, IntArray

CHUNK = 4 << 20
"""Bytes of one read at most, unless a single object is larger."""
BUFFER = CHUNK + (64 << 10)
"""So that an object of 4 MiB with its header fits without another buffer."""
LARGEST_KEPT = 16 << 20
GAP = 128 << 10
"""Unwanted bytes that are read along rather than making two reads."""
THREADS = 4
AHEAD = 3
"""Buffers more than threads, for what arrived and waits for being checked."""
HELPERS = 2


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes [``begin``, ``end``) of an extent, whole pages, and the objects in them, by where they lie."""

    extent: int
    begin: int
    end: int
    which: IntArray


@dataclass(frozen=True, slots=True)
class _Read:
    """What became of a piece: ``data`` are the first bytes of ``buffer``, which goes back; None: nothing to check."""

    piece: Piece
    buffer: Bytes | None = None
    data: Bytes | None = None


@dataclass(slots=True)
class _Job:
    """One call of ``read``.  Of every piece in ``left`` one ``_Read`` comes to ``arrived``."""

    places: Places
    sink: Sink
    stop: Callable[[], bool]
    held: dict[int, int]
    results: npt.NDArray[np.uint8]
    left: deque[Piece]
    awaited: int
    arrived: queue.SimpleQueue[_Read] = field(default_factory=queue.SimpleQueue)
    lock: threading.Lock = field(default_factory=threading.Lock)
    bytes_read: int = 0
    reads: int = 0
    reason: str = ""

    def next(self) -> Piece | None:
        """The piece to read now."""
        try:
            return self.left.popleft()
        except IndexError:
            return None

    def abandon(self) -> None:
        """Nothing more is read."""
        while (piece := self.next()) is not None:
            self.arrived.put(_Read(piece))

    def awaits(self) -> bool:
        """Whether one more has to be taken from ``arrived``; whoever is told so takes it."""
        with self.lock:
            self.awaited -= 1
            return self.awaited >= 0

    def expected(self, which: IntArray) -> Bytes:
        """The headers of objects but for their own checksums, which follow from the rest: uint8 ``[n, 240]``."""
        of = self.places
        made = object_headers(of.layout, of.digests[which], of.entries[which])
        return made.view(np.uint8).reshape(len(which), HEADER)[:, :CHECK_AT]


def pieces(places: AnyArray) -> Iterator[Piece]:
    """Reads that cover all of ``PLACE[m]``."""
    begin = places["offset"].astype(np.int64)
    end = begin + HEADER + padded_lengths(places)
    order = np.lexsort((begin, places["extent"]))
    extents, begins, ends = places["extent"][order], begin[order] // PAGE * PAGE, -(-end[order] // PAGE) * PAGE
    for one in _parts(extents[1:] != extents[:-1], len(order)):
        which, starts, reach = order[one], begins[one], np.maximum.accumulate(ends[one])
        for near in _parts(starts[1:] - reach[:-1] > GAP, len(which)):
            first = near.start
            while first < near.stop:
                start = int(starts[first])
                fit = first + int(np.searchsorted(reach[first : near.stop], start + CHUNK, "right"))
                last = max(fit, first + 1)
                yield Piece(int(extents[one.start]), start, int(reach[last - 1]), which[first:last])
                first = last


def _parts(ends: AnyArray, count: int) -> list[slice]:
    """Slices of ``count`` items: one ends after each item for which ``ends`` is true."""
    bounds = [0, *(np.flatnonzero(ends) + 1).tolist(), count]
    return [slice(a, b) for a, b in itertools.pairwise(bounds) if a < b]


def padded_lengths(places: AnyArray) -> IntArray:
    """Bytes that the payloads take with their padding."""
    lengths: IntArray = (places["length"].astype(np.int64) + ALIGN - 1) // ALIGN * ALIGN
    return lengths


class Reader:
    """A few threads that read for everybody.  Thread-safe.

    A few pieces of memory are all that it holds; calls beyond that wait in line.
    """

    def __init__(self, pins: Pins, ops: FileOps, threads: int = THREADS) -> None:
        self._pins, self._ops, self._threads = pins, ops, threads
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="kvloom-read")
        self._helpers = ThreadPoolExecutor(HELPERS, thread_name_prefix="kvloom-check")
        self._buffers: queue.SimpleQueue[Bytes] = queue.SimpleQueue()
        for _ in range(threads + AHEAD):
            self._buffers.put(np.empty(0, np.uint8))

    def read(self, places: Places, sink: Sink, stop: Callable[[], bool] = lambda: False) -> ReadResult:
        """Read, verify and deliver; never raises for what the disk does.  Raises what the sink raises.

        Nothing is read and nothing delivered any more when it ends, in either way.
        """
        results = np.full(len(places), Result.MISSING, np.uint8)
        try:
            with self._pins.hold(np.unique(places.entries["extent"]).tolist()) as held:
                left = deque(piece for piece in pieces(places.entries) if piece.extent in held)
                job = _Job(places, sink, stop, held, results, left, len(left))
                self._run(job)
        except OSError as error:
            results[:] = Result.IO_ERROR
            return ReadResult(results, 0, 0, str(error))
        return ReadResult(results, job.bytes_read, job.reads, job.reason)

    def _run(self, job: _Job) -> None:
        beside: list[Future[None]] = []
        count = min(self._threads, len(job.left))
        try:
            if count == 1:
                self._fetch(job)  # no other thread has to wake up for it
            elif count:
                beside += [self._pool.submit(self._fetch, job) for _ in range(count)]
                beside.append(self._helpers.submit(self._deliver, job))
            self._deliver(job)
        finally:
            job.abandon()
            while job.awaits():
                self._put(job.arrived.get().buffer)
            failures = [work.exception() for work in beside if not work.cancel()]
        for failure in failures:
            if failure is not None:
                raise failure

    def _fetch(self, job: _Job) -> None:
        """Read pieces until none is left."""
        try:
            while (piece := job.next()) is not None:
                self._piece(job, piece)
        finally:
            job.abandon()  # whatever ended this, nobody waits for what was not read

    def _piece(self, job: _Job, piece: Piece) -> None:
        which, size, fd = piece.which, piece.end - piece.begin, job.held[piece.extent]
        buffer, data, stream = None, None, None
        try:
            if job.stop():
                job.results[which] = Result.STOPPED
                return
            if size > BUFFER and len(which) == 1:
                stream = job.sink.stream(int(which[0]), int(job.places.entries["length"][which[0]]))
            buffer = self._take(BUFFER + PAGE if stream is not None else size)
            if stream is None:
                data = self._read(job, fd, buffer[:size], piece.begin)
            else:
                self._in_parts(job, piece, fd, buffer, stream)
        except OSError as error:
            if stream is not None:
                stream.end(b"")
            job.results[which] = Result.IO_ERROR
            job.reason = str(error)
        finally:
            if data is None:
                self._put(buffer)
            job.arrived.put(_Read(piece) if data is None else _Read(piece, buffer, data))

    def _take(self, size: int) -> Bytes:
        """A buffer of at least ``size`` bytes; waits for one."""
        buffer = self._buffers.get()
        return buffer if len(buffer) >= size else aligned(max(BUFFER + PAGE, size))

    def _put(self, buffer: Bytes | None) -> None:
        """Give a buffer back; larger ones than usual are not kept."""
        if buffer is not None:
            self._buffers.put(buffer if len(buffer) <= LARGEST_KEPT else np.empty(0, np.uint8))

    def _read(self, job: _Job, fd: int, into: Bytes, offset: int) -> Bytes:
        count = self._ops.read(fd, into.data, offset)
        with job.lock:
            job.bytes_read += count
            job.reads += 1
        return into[:count]

    def _in_parts(self, job: _Job, piece: Piece, fd: int, buffer: Bytes, stream: Stream) -> None:
        """One large object, through a buffer that it does not fit into."""
        number = int(piece.which[0])
        entry, begin, end = job.places.entries[number], piece.begin, piece.end
        at = int(entry["offset"]) - begin
        left, good = int(entry["length"]), at % ALIGN == 0
        # Even parts: a last one of a few pages would cost as much time as a large one.
        count = -(-(end - begin) // BUFFER)
        step = padded((end - begin) // count + PAGE, PAGE)
        for offset in range(begin, end, step):
            part = self._read(job, fd, buffer[: min(step, end - offset)], offset)
            if offset == begin:
                good = good and np.array_equal(part[at : at + CHECK_AT], job.expected(piece.which)[0])
                part = part[at + HEADER :]
            part = part[:left]
            left -= len(part)
            stream.add(part)
        # A wrong header makes no difference to where the bytes were put: they have to go from there too.
        good = stream.end(entry["check"].tobytes() if good else b"")
        job.results[number] = Result.OK if good else Result.INTEGRITY

    def _deliver(self, job: _Job) -> None:
        """Check and deliver what arrives, until all has."""
        while job.awaits():
            read = job.arrived.get()
            try:
                if read.data is not None:
                    self._check(job, read.data, read.piece)
            finally:
                self._put(read.buffer)

    def _check(self, job: _Job, data: Bytes, piece: Piece) -> None:
        which = piece.which
        entries = job.places.entries[which]
        at = entries["offset"].astype(np.int64) - piece.begin
        lengths = entries["length"].astype(np.int64)
        # What lies beyond the end of the file was cut off.
        good = (at >= 0) & (at % ALIGN == 0) & (at + HEADER + lengths <= len(data))
        lines = data[: len(data) // HEADER * HEADER].reshape(-1, HEADER)
        good[good] = (lines[at[good] // HEADER, :CHECK_AT] == job.expected(which[good])).all(axis=1)
        if not good.all():
            job.results[which[~good]] = Result.INTEGRITY
            which, at, lengths, entries = which[good], at[good], lengths[good], entries[good]
        checks = np.ascontiguousarray(entries["check"])
        delivered = job.sink.take(Arrived(data, which, at + HEADER, lengths, checks))
        job.results[which] = np.where(delivered, Result.OK, Result.INTEGRITY)

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()
        self._helpers.shutdown()
