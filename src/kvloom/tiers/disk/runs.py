"""Writing one run: payloads are filled into page-aligned buffers, hashed there, written while the next one fills."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvloom.tiers.disk.files import FileOps, aligned
from kvloom.tiers.disk.format import (
    ALIGN,
    HEADER,
    PAGE,
    PLACE,
    TYPE_OBJECT,
    TYPE_RUN,
    Manifest,
    checksum,
    headers,
    padded,
    seal,
    stored_bytes,
)
from kvloom.tiers.values import Fill, NewObject
from kvloom.types import AnyArray, IntArray

CHUNK = 4 << 20
"""Bytes of one write."""
BUFFER = CHUNK + (64 << 10)
"""So that an object of 4 MiB with its header fits into what is kept."""
BATCH = 1 << 20
"""Bytes of objects whose headers are made together, so that small objects cost little beside their bytes."""
LARGEST_KEPT = 16 << 20
BUFFERS = 6
WRITERS = 4


@dataclass(frozen=True, slots=True)
class Run:
    """Objects to write together, the nodes (uint8 ``[objects, 32]``) that they belong to, and what goes before them.

    ``what`` is ``unplaced`` of the objects.
    """

    layout: bytes
    nodes: npt.NDArray[np.uint8]
    objects: Sequence[NewObject]
    what: AnyArray
    manifest: bytes
    size: int

    @classmethod
    def of(
        cls, layout: bytes, nodes: AnyArray, objects: Sequence[NewObject], what: AnyArray, manifest: Manifest
    ) -> Run:
        """A run whose manifest says its size (``manifest.run_bytes`` is not looked at)."""
        encoded = bytearray(Manifest(manifest.nodes, manifest.boundaries, len(objects), 0).encode())
        size = padded(stored_bytes(len(encoded)) + int(steps(what).sum()), PAGE)
        Manifest.put_run_bytes(encoded, size)
        return cls(layout, nodes, objects, what, bytes(encoded), size)

    def places(self, extent: int, start: int) -> AnyArray:
        """``PLACE[objects]`` of the run at ``start``, its checksums not yet filled in."""
        places, taken = self.what.copy(), steps(self.what)
        places["extent"] = extent
        places["offset"] = start + stored_bytes(len(self.manifest)) + np.cumsum(taken) - taken
        return places


def unplaced(objects: Sequence[NewObject]) -> AnyArray:
    """``PLACE[objects]`` with everything but where they lie and their checksums."""
    places = np.zeros(len(objects), PLACE)
    for name in ("group", "column", "form", "grade"):
        places[name] = np.fromiter((getattr(item, name) for item in objects), np.int64, len(objects))
    places["length"] = np.fromiter((item.size for item in objects), np.int64, len(objects))
    return places


def steps(places: AnyArray) -> IntArray:
    """Bytes that every one of ``PLACE[n]`` takes in an extent."""
    taken: IntArray = HEADER + (places["length"].astype(np.int64) + ALIGN - 1) // ALIGN * ALIGN
    return taken


def object_headers(layout: bytes, nodes: AnyArray, places: AnyArray) -> AnyArray:
    """``RECORD[n]`` of objects, unsealed: everything that a header says but its own checksum."""
    made = headers(len(places), TYPE_OBJECT)
    made["layout"] = np.frombuffer(layout, np.uint8)
    made["node"] = nodes
    for name in ("length", "extent", "offset", "group", "column", "form", "grade"):
        made[name] = places[name]
    made["payload"] = places["check"]
    return made


def run_header(run: Run, extent: int, start: int) -> AnyArray:
    """``RECORD[1]`` of a run, sealed."""
    head = headers(1, TYPE_RUN)
    head["layout"] = np.frombuffer(run.layout, np.uint8)
    head["extent"], head["offset"], head["length"] = extent, start, len(run.manifest)
    head["payload"] = np.frombuffer(checksum(run.manifest), np.uint8)
    return seal(head)


class Staging:
    """Buffers and threads for writing runs, one run at a time.  Not thread-safe: its owner holds a lock."""

    def __init__(self, ops: FileOps) -> None:
        self._ops = ops
        self._pool = ThreadPoolExecutor(WRITERS, thread_name_prefix="kvloom-write")
        self._free: queue.SimpleQueue[npt.NDArray[np.uint8]] = queue.SimpleQueue()
        for _ in range(BUFFERS):
            self._free.put(np.empty(0, np.uint8))

    def write(self, run: Run, fd: int, extent: int, start: int, meanwhile: Callable[[AnyArray], None]) -> AnyArray:
        """Write a run at ``start`` of an extent; returns its ``PLACE[objects]``.

        ``meanwhile`` gets them once they are known; the last writes are still under way then.

        Nothing is synced.  Raises OSError when a write fails; and whatever a ``Fill`` or ``meanwhile`` raises.  No
        write is under way any more when it ends, in either way.
        """
        places = run.places(extent, start)
        made = object_headers(run.layout, run.nodes, places)
        stream = _Stream(self, fd, start)
        try:
            room = stream.room(stored_bytes(len(run.manifest)))
            room[:HEADER] = run_header(run, extent, start).view(np.uint8)
            room[HEADER : HEADER + len(run.manifest)] = np.frombuffer(run.manifest, np.uint8)
            room[HEADER + len(run.manifest) :] = 0
            for part, begins, size in batches(steps(places)):
                room = stream.room(size)
                made["payload"][part] = _filled(run.objects[part], begins, places["length"][part], room)
                room.reshape(-1, HEADER)[begins // HEADER] = (
                    seal(made[part]).view(np.uint8).reshape(len(begins), HEADER)
                )
            places["check"] = made["payload"]
            stream.send_rest()
            meanwhile(places)
            stream.finish()
        finally:
            stream.drain()
        return places

    def take(self, size: int) -> npt.NDArray[np.uint8]:
        """A buffer of at least ``size`` bytes; waits for one."""
        buffer = self._free.get()
        return buffer if len(buffer) >= size else aligned(padded(max(size, BUFFER), PAGE))

    def put(self, buffer: npt.NDArray[np.uint8]) -> None:
        """Give a buffer back; larger ones than usual are not kept."""
        self._free.put(buffer if len(buffer) <= LARGEST_KEPT else np.empty(0, np.uint8))

    def submit(self, fd: int, buffer: npt.NDArray[np.uint8], size: int, offset: int) -> Future[None]:
        """Write the first ``size`` bytes of a buffer and give it back."""

        def work() -> None:
            try:
                self._ops.write(fd, buffer[:size].data, offset)
            finally:
                self.put(buffer)

        return self._pool.submit(work)

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()


def batches(taken: IntArray) -> Iterator[tuple[slice, IntArray, int]]:
    """Objects to be made together: which, where each one's header begins, and the bytes that they take in all."""
    ends = np.cumsum(taken)
    first, before = 0, 0
    while first < len(taken):
        last = max(first + 1, int(np.searchsorted(ends, before + BATCH, "right")))
        begins = np.concatenate([np.zeros(1, np.int64), ends[first : last - 1] - before])
        yield slice(first, last), begins, int(ends[last - 1]) - before
        first, before = last, int(ends[last - 1])


class _Stream:
    """Consecutive bytes of a file, handed out piece by piece for filling in."""

    def __init__(self, staging: Staging, fd: int, start: int) -> None:
        self._staging, self._fd = staging, fd
        self._offset, self._filled = start, 0
        self._buffer: npt.NDArray[np.uint8] | None = staging.take(BUFFER)
        self._writes: list[Future[None]] = []
        self._sent = False

    def room(self, size: int) -> npt.NDArray[np.uint8]:
        """The next ``size`` bytes, all in one buffer; whatever was in it before is still there."""
        assert self._buffer is not None
        # The first write is a small one, so that the disk need not wait long for it.
        if self._filled + size > len(self._buffer) or (self._filled >= BATCH and not self._sent):
            self._flush(size)
        room = self._buffer[self._filled : self._filled + size]
        self._filled += size
        return room

    def _flush(self, size: int) -> None:
        """Send the whole pages off; what is left of the last one goes on in the next buffer."""
        assert self._buffer is not None
        whole = self._filled // PAGE * PAGE
        rest = self._buffer[whole : self._filled].copy()
        if whole:
            self._send(whole)
        else:
            self._staging.put(self._buffer)
            self._buffer = None
        self._buffer = self._staging.take(size + PAGE)
        self._buffer[: len(rest)] = rest
        self._filled = len(rest)

    def _send(self, size: int) -> None:
        assert self._buffer is not None
        buffer, self._buffer = self._buffer, None
        self._sent = True
        for done in [write for write in self._writes if write.done()]:
            done.result()
            self._writes.remove(done)
        self._writes.append(self._staging.submit(self._fd, buffer, size, self._offset))
        self._offset += size

    def send_rest(self) -> None:
        """Send off what is left, padded to a page."""
        assert self._buffer is not None
        end = padded(self._filled, PAGE)
        self._buffer[self._filled : end] = 0
        self._send(end)

    def finish(self) -> None:
        """Wait until all is written."""
        for write in self._writes:
            write.result()
        self._writes.clear()

    def drain(self) -> None:
        """Wait for writes that are under way, whatever becomes of them, and give the buffer back."""
        if self._buffer is not None:
            self._staging.put(self._buffer)
            self._buffer = None
        for write in self._writes:
            write.exception()


def _filled(
    objects: Sequence[NewObject], begins: IntArray, lengths: IntArray, room: npt.NDArray[np.uint8]
) -> npt.NDArray[np.uint8]:
    """Put payloads where they belong, their padding zero; returns their checksums, uint8 ``[n, 16]``."""
    checks = []
    starts, sizes = (begins + HEADER).tolist(), lengths.tolist()
    for item, start, size in zip(objects, starts, sizes, strict=True):
        end = start + size
        payload = room[start:end]
        _fill(item, payload)
        if size % ALIGN:
            room[end : padded(end)] = 0
        checks.append(checksum(payload))
    return np.frombuffer(b"".join(checks), np.uint8).reshape(-1, 16)


def _fill(item: NewObject, room: npt.NDArray[np.uint8]) -> None:
    if isinstance(item.payload, Fill):
        item.payload.write(room.data)
    elif isinstance(item.payload, np.ndarray):
        room[:] = np.ascontiguousarray(item.payload).reshape(-1).view(np.uint8)
    else:
        room[:] = np.frombuffer(item.payload, np.uint8)
