"""An object that comes in parts: they are taken in their order, whichever is read first and whoever has it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kvloom.tiers.disk.format import ALIGN, CHECK_AT, HEADER
from kvloom.tiers.disk.pieces import Piece
from kvloom.tiers.disk.sinks import Bytes, Stream
from kvloom.tiers.values import Result
from kvloom.types import AnyArray


@dataclass(frozen=True, slots=True)
class Read:
    """What became of a piece: ``data`` are the first bytes of ``buffer``, which goes back; None: nothing to check."""

    piece: Piece
    buffer: Bytes | None = None
    data: Bytes | None = None


class Large:
    """One of them.  Thread-safe.

    ``entry``: its ``PLACE``; ``expected``: its header, uint8 ``[1, 240]``; ``give_back`` gets every ``Read`` that was
    used up.
    """

    def __init__(
        self, entry: AnyArray, expected: Callable[[], Bytes], stream: Stream, give_back: Callable[[Read], None]
    ) -> None:
        self._entry, self._expected, self._stream, self._give_back = entry, expected, stream, give_back
        self._lock = threading.Lock()
        self._waiting: dict[int, Read] = {}
        self._next, self._busy = 0, False
        self._touched = False
        self._good, self._lost = int(entry["offset"]) % ALIGN == 0, False

    def take(self, read: Read) -> Result | None:
        """Take a part, and those that waited for it.  How it ended, once; None before, and where the disk failed."""
        with self._lock:
            self._waiting[read.piece.first] = read
            if self._busy:
                return None
            self._busy = True
        while True:
            with self._lock:
                ready = self._waiting.pop(self._next, None)
                if ready is None:
                    self._busy = False
                    return None
            try:
                self._add(ready)
            finally:
                self._give_back(ready)
            if self._next == int(self._entry["length"]):
                return self._end()

    def _add(self, read: Read) -> None:
        piece, size = read.piece, read.piece.size or 0
        self._next += size
        if read.data is None:
            self._lost = True
        else:
            at = int(self._entry["offset"]) - piece.begin
            payload = read.data[at + HEADER + piece.first :][:size]
            if not piece.first:
                self._good = self._good and np.array_equal(read.data[at : at + CHECK_AT], self._expected()[0])
            self._good = self._good and len(payload) == size
            if self._good and not self._lost:
                self._touched = True
                self._stream.add(payload)

    def _end(self) -> Result | None:
        whole = self._good and not self._lost
        good = self._touched and self._stream.end(self._entry["check"].tobytes() if whole else b"")
        if self._lost:
            return None
        return Result.OK if good else Result.INTEGRITY

    def abandon(self) -> None:
        """Nobody reads any more: nothing of an object that did not come whole stays where it was put."""
        for read in self._waiting.values():
            self._give_back(read)
        self._waiting.clear()
        if self._touched and self._next < int(self._entry["length"]):
            self._stream.end(b"")
