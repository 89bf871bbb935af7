"""Reading many objects: neighbours in one large direct read, several reads at once, every object checked on the way.

What is expected of an object's header is known to the last byte from the index, so a header is compared as a whole;
the payload is compared by its checksum.  Verifying one piece overlaps with reading the next ones.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvloom.tiers.disk.extents import Pins
from kvloom.tiers.disk.files import FileOps, aligned
from kvloom.tiers.disk.format import ALIGN, CHECK_AT, HEADER, PAGE, padded
from kvloom.tiers.disk.runs import object_headers
from kvloom.tiers.disk.sinks import Arrived, Sink, Stream
from kvloom.tiers.values import Places, ReadResult, Result
from kvloom.types import AnyArray, IntArray

CHUNK = 2 << 20
"""Bytes of one read at most, unless a single object is larger."""
BUFFER = CHUNK + (64 << 10)
"""So that an object of 2 MiB with its header fits without another buffer."""
LARGEST_KEPT = 16 << 20
GAP = 128 << 10
"""Unwanted bytes that are read along rather than making two reads."""
THREADS = 8


@dataclass(slots=True)
class _Job:
    """One call of ``read``."""

    places: Places
    expected: npt.NDArray[np.uint8]
    sink: Sink
    stop: Callable[[], bool]
    results: npt.NDArray[np.uint8]
    lock: threading.Lock = field(default_factory=threading.Lock)
    bytes_read: int = 0
    reads: int = 0
    reason: str = ""


def pieces(places: AnyArray) -> Iterator[tuple[int, int, int, IntArray]]:
    """Reads that cover all of ``PLACE[m]``: extent, first byte, end, and the objects in them, by where they lie."""
    begin = places["offset"].astype(np.int64)
    end = begin + HEADER + padded_lengths(places)
    order = np.lexsort((begin, places["extent"]))
    extents = places["extent"][order].astype(np.int64).tolist()
    begins, ends = (begin[order] // PAGE * PAGE).tolist(), (-(-end[order] // PAGE) * PAGE).tolist()
    first = 0
    for i in range(1, len(order) + 1):
        if i < len(order) and extents[i] == extents[first]:
            reach = max(ends[i], ends[i - 1])
            if begins[i] - ends[i - 1] <= GAP and reach - begins[first] <= BUFFER:
                continue
        yield extents[first], begins[first], max(ends[first:i]), order[first:i]
        first = i


def padded_lengths(places: AnyArray) -> IntArray:
    """Bytes that the payloads take with their padding."""
    lengths: IntArray = (places["length"].astype(np.int64) + ALIGN - 1) // ALIGN * ALIGN
    return lengths


class Reader:
    """A few threads that read for everybody.  Thread-safe.

    A piece of memory for every thread is all that it holds; calls beyond that wait in line.
    """

    def __init__(self, pins: Pins, ops: FileOps, threads: int = THREADS) -> None:
        self._pins, self._ops = pins, ops
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="kvloom-read")
        self._buffers: queue.SimpleQueue[npt.NDArray[np.uint8]] = queue.SimpleQueue()
        for _ in range(threads):
            self._buffers.put(np.empty(0, np.uint8))

    def read(self, places: Places, sink: Sink, stop: Callable[[], bool] = lambda: False) -> ReadResult:
        """Read, verify and deliver; never raises for what the disk does."""
        count = len(places)
        headers = object_headers(places.layout, places.digests, places.entries)
        # Of a header only its own checksum is not known, and it follows from the rest.
        expected = headers.view(np.uint8).reshape(count, HEADER)[:, :CHECK_AT]
        results = np.full(count, Result.MISSING, np.uint8)
        job = _Job(places, expected, sink, stop, results)
        wanted = np.unique(places.entries["extent"]).tolist()
        try:
            with self._pins.hold(wanted) as held:
                running = [
                    self._pool.submit(self._piece, job, held[extent], begin, end, which)
                    for extent, begin, end, which in pieces(places.entries)
                    if extent in held
                ]
                failures = [work.exception() for work in running]
        except OSError as error:
            results[:] = Result.IO_ERROR
            return ReadResult(results, 0, 0, str(error))
        for failure in failures:
            if failure is not None:
                raise failure
        return ReadResult(results, job.bytes_read, job.reads, job.reason)

    def _piece(self, job: _Job, fd: int, begin: int, end: int, which: IntArray) -> None:
        if job.stop():
            job.results[which] = Result.STOPPED
            return
        stream = None
        if end - begin > BUFFER and len(which) == 1:
            stream = job.sink.stream(int(which[0]), int(job.places.entries["length"][which[0]]))
        size = BUFFER + PAGE if stream is not None else max(BUFFER, end - begin)
        buffer = self._buffers.get()
        try:
            if len(buffer) < size:
                buffer = aligned(size)
            if stream is not None:
                self._in_parts(job, fd, begin, end, int(which[0]), buffer, stream)
            else:
                self._check(job, self._read(job, fd, buffer[: end - begin], begin), begin, which)
        except OSError as error:
            if stream is not None:
                stream.end(b"")
            job.results[which] = Result.IO_ERROR
            job.reason = str(error)
        finally:
            self._buffers.put(buffer if len(buffer) <= LARGEST_KEPT else np.empty(0, np.uint8))

    def _read(self, job: _Job, fd: int, into: npt.NDArray[np.uint8], offset: int) -> npt.NDArray[np.uint8]:
        count = self._ops.read(fd, into.data, offset)
        with job.lock:
            job.bytes_read += count
            job.reads += 1
        return into[:count]

    def _in_parts(
        self, job: _Job, fd: int, begin: int, end: int, number: int, buffer: npt.NDArray[np.uint8], stream: Stream
    ) -> None:
        """One large object, through a buffer that it does not fit into."""
        entry = job.places.entries[number]
        at = int(entry["offset"]) - begin
        left, good = int(entry["length"]), at % ALIGN == 0
        # Even parts: a last one of a few pages would cost as much time as a large one.
        count = -(-(end - begin) // BUFFER)
        step = padded((end - begin) // count + PAGE, PAGE)
        for offset in range(begin, end, step):
            part = self._read(job, fd, buffer[: min(step, end - offset)], offset)
            if offset == begin:
                good = good and np.array_equal(part[at : at + CHECK_AT], job.expected[number])
                part = part[at + HEADER :]
            part = part[:left]
            left -= len(part)
            stream.add(part)
        # A wrong header makes no difference to where the bytes were put: they have to go from there too.
        good = stream.end(entry["check"].tobytes() if good else b"")
        job.results[number] = Result.OK if good else Result.INTEGRITY

    def _check(self, job: _Job, data: npt.NDArray[np.uint8], begin: int, which: IntArray) -> None:
        entries = job.places.entries[which]
        at = entries["offset"].astype(np.int64) - begin
        lengths = entries["length"].astype(np.int64)
        # What lies beyond the end of the file was cut off.
        whole = (at >= 0) & (at % ALIGN == 0) & (at + HEADER + lengths <= len(data))
        good = np.zeros(len(which), np.bool_)
        lines = data[: len(data) // HEADER * HEADER].reshape(-1, HEADER)
        good[whole] = (lines[at[whole] // HEADER, :CHECK_AT] == job.expected[which[whole]]).all(axis=1)
        job.results[which[~good]] = Result.INTEGRITY
        which = which[good]
        checks = entries["check"][good].tobytes()
        parts = [checks[i : i + 16] for i in range(0, len(checks), 16)]
        starts = (at[good] + HEADER).tolist()
        delivered = job.sink.take(Arrived(data, which.tolist(), starts, lengths[good].tolist(), parts))
        job.results[which] = np.where(delivered, Result.OK, Result.INTEGRITY)

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()
