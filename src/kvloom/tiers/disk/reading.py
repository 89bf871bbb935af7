"""Reading many objects: neighbours in one large direct read, several reads at once, every object checked on the way.

Threads that read do nothing else, so a disk that has answered gets the next request at once.  Whoever asked for the
objects checks and delivers meanwhile what arrived, with one thread to help.

What is expected of an object's header is known to the last byte from the index, so a header is compared as a whole;
the payload is compared by its checksum.
"""

from __future__ import annotations

import functools
import os
import queue
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvloom.tiers.disk.extents import Pins
from kvloom.tiers.disk.files import FileOps, aligned
from kvloom.tiers.disk.format import ALIGN, CHECK_AT, HEADER, PAGE
from kvloom.tiers.disk.large import Large, Read
from kvloom.tiers.disk.pieces import BUFFER, Piece, padded_lengths, pieces
from kvloom.tiers.disk.runs import object_headers
from kvloom.tiers.disk.sinks import Arrived, Bytes, Sink
from kvloom.tiers.values import Places, ReadResult, Result
from kvloom.types import IntArray

LARGEST_KEPT = 16 << 20
THREADS = 4
AHEAD = 3
"""Buffers more than threads, for what arrived and waits for being checked."""
HELPERS = 1 if (os.cpu_count() or 1) > 2 else 0
"""Threads beside those that ask; with two cores one has to be free for whoever reads."""


@dataclass(slots=True)
class _Job:
    """One call of ``read``.  Of every piece in ``left`` one ``Read`` comes to ``arrived``.

    ``large``: those of the objects that come in parts.
    """

    places: Places
    sink: Sink
    stop: Callable[[], bool]
    held: dict[int, int]
    results: npt.NDArray[np.uint8]
    left: deque[Piece] = field(default_factory=deque)
    large: dict[int, Large] = field(default_factory=dict)
    awaited: int = 0
    arrived: queue.SimpleQueue[Read] = field(default_factory=queue.SimpleQueue)
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
            self.arrived.put(Read(piece))

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


class Reader:
    """A few threads that read for everybody.  Thread-safe.

    A few pieces of memory are all that it holds; calls beyond that wait in line.
    """

    def __init__(self, pins: Pins, ops: FileOps, threads: int = THREADS) -> None:
        self._pins, self._ops, self._threads = pins, ops, threads
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="kvloom-read")
        self._helpers = ThreadPoolExecutor(max(1, HELPERS), thread_name_prefix="kvloom-check")
        self._buffers: queue.LifoQueue[Bytes] = queue.LifoQueue()  # the last one is in the cache
        for _ in range(threads + AHEAD):
            self._buffers.put(np.empty(0, np.uint8))

    def read(self, places: Places, sink: Sink, stop: Callable[[], bool] = lambda: False) -> ReadResult:
        """Read, verify and deliver; never raises for what the disk does.  Raises what the sink raises.

        Nothing is read and nothing delivered any more when it ends, in either way.
        """
        results = np.full(len(places), Result.MISSING, np.uint8)
        try:
            with self._pins.hold(np.unique(places.entries["extent"]).tolist()) as held:
                job = _Job(places, sink, stop, held, results)
                self._plan(job)
                self._run(job)
        except OSError as error:
            results[:] = Result.IO_ERROR
            return ReadResult(results, 0, 0, str(error))
        return ReadResult(results, job.bytes_read, job.reads, job.reason)

    def _plan(self, job: _Job) -> None:
        """What to read for it, and which objects come in parts."""
        entries = job.places.entries
        cut = HEADER + padded_lengths(entries) > BUFFER - 2 * PAGE
        for i in np.flatnonzero(cut).tolist():
            stream = job.sink.stream(i, int(entries["length"][i]))
            if stream is None:
                cut[i] = False
            else:
                header = functools.partial(job.expected, np.array([i]))
                job.large[i] = Large(entries[i], header, stream, self._give_back)
        job.left.extend(piece for piece in pieces(entries, cut) if piece.extent in job.held)
        job.awaited = len(job.left)

    def _run(self, job: _Job) -> None:
        beside: list[Future[None]] = []
        count = min(self._threads, len(job.left))
        try:
            if len(job.left) == 1:
                self._fetch(job)  # no other thread has to wake up for it
            elif count:
                beside += [self._pool.submit(self._fetch, job) for _ in range(count)]
                beside += [self._helpers.submit(self._deliver, job) for _ in range(HELPERS)]
            self._deliver(job)
        finally:
            job.abandon()
            while job.awaits():
                self._give_back(job.arrived.get())
            failures = [work.exception() for work in beside if not work.cancel()]
            for large in job.large.values():
                large.abandon()
        for failure in failures:
            if failure is not None:
                raise failure

    def _fetch(self, job: _Job) -> None:
        """Read pieces until none is left."""
        try:
            while job.left:
                # A buffer first: then parts of a large object never wait for one before them that gets no buffer.
                buffer = self._buffers.get()
                piece = job.next()
                if piece is None:
                    self._buffers.put(buffer)
                else:
                    self._piece(job, piece, buffer)
        finally:
            job.abandon()  # whatever ended this, nobody waits for what was not read

    def _piece(self, job: _Job, piece: Piece, buffer: Bytes) -> None:
        which, size = piece.which, piece.end - piece.begin
        data = None
        try:
            if job.stop():
                job.results[which] = Result.STOPPED
            else:
                if len(buffer) < size:
                    buffer = aligned(max(BUFFER, size))
                count = self._ops.read(job.held[piece.extent], buffer[:size].data, piece.begin)
                with job.lock:
                    job.bytes_read += count
                    job.reads += 1
                data = buffer[:count]
        except OSError as error:
            job.results[which] = Result.IO_ERROR
            job.reason = str(error)
        finally:
            job.arrived.put(Read(piece, buffer, data))

    def _give_back(self, read: Read) -> None:
        """Its buffer serves again; larger ones than usual are not kept."""
        if read.buffer is not None:
            self._buffers.put(read.buffer if len(read.buffer) <= LARGEST_KEPT else np.empty(0, np.uint8))

    def _deliver(self, job: _Job) -> None:
        """Check and deliver what arrives, until all has."""
        while job.awaits():
            job.stop()  # it may let this thread rest; what was read is delivered all the same
            read = job.arrived.get()
            if read.piece.size is not None:
                number = int(read.piece.which[0])
                done = job.large[number].take(read)
                if done is not None:
                    job.results[number] = done
                continue
            try:
                if read.data is not None:
                    self._check(job, read.data, read.piece)
            finally:
                self._give_back(read)

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
