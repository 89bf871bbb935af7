"""Buffers for the ids of appends that are not committed yet."""

from __future__ import annotations

import numpy as np

from kvloom.types import Int32Array

_KEPT = 8
_SMALLEST = 4096


class TokenBuffers:
    """Buffers that are used again: fresh ones would cost page faults, several times the copy itself."""

    def __init__(self) -> None:
        self._idle: list[Int32Array] = []

    def copy(self, ids: Int32Array) -> Int32Array:
        """A copy of ``ids`` (int32 [n]), valid until ``give``."""
        for i, buffer in enumerate(self._idle):
            if len(buffer) >= len(ids):
                del self._idle[i]
                break
        else:
            buffer = np.empty(max(_SMALLEST, len(ids)), dtype=np.int32)
        taken = buffer[: len(ids)]
        taken[:] = ids
        return taken

    def give(self, ids: Int32Array) -> None:
        """A copy is not needed any more."""
        buffer = ids.base
        if isinstance(buffer, np.ndarray) and len(self._idle) < _KEPT:
            self._idle.append(buffer)
