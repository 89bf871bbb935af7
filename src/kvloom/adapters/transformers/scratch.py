"""Scratch memory for what layers read back: large buffers that are used again as soon as nothing refers to them.

A layer's keys are dead once its attention is done, so the next layer can have the same, still warm memory.
Asking the allocator for megabytes at every layer of every step would cost page faults instead.
"""

from __future__ import annotations

import mmap
import sys

import numpy as np
import numpy.typing as npt
import torch

SMALLEST = 128 * 1024
"""Below this the allocator is as good."""
_MOST = 8
_IDLE = 3  # references to a buffer that no tensor uses: the list, the loop variable, the argument of getrefcount


class Scratch:
    """The scratch buffers of one engine on a CPU.

    A buffer is lent as a tensor and is free again when every tensor on it is gone; who keeps one (layers that share
    keys, an autograd graph) keeps the buffer, and others are made.
    """

    def __init__(self) -> None:
        self._buffers: list[npt.NDArray[np.uint8]] = []

    @property
    def n_bytes(self) -> int:
        """Bytes of all buffers, used or free."""
        return sum(buffer.nbytes for buffer in self._buffers)

    def take(self, shape: tuple[int, ...], dtype: torch.dtype, count: int, n_bytes: int) -> torch.Tensor:
        """An uninitialised contiguous tensor of ``shape``: ``count`` elements, ``n_bytes`` bytes, page aligned."""
        for buffer in self._buffers:
            if buffer.nbytes >= n_bytes and sys.getrefcount(buffer) == _IDLE:
                return torch.frombuffer(buffer, dtype=dtype, count=count).view(shape)
        return torch.frombuffer(self._new(n_bytes), dtype=dtype, count=count).view(shape)

    def _new(self, n_bytes: int) -> npt.NDArray[np.uint8]:
        """A buffer with room to grow by a quarter; idle buffers that are too small go."""
        self._buffers = [b for b in self._buffers if sys.getrefcount(b) > _IDLE or b.nbytes >= n_bytes]
        buffer: npt.NDArray[np.uint8] = np.frombuffer(mmap.mmap(-1, n_bytes + n_bytes // 4), dtype=np.uint8)
        self._buffers = [buffer, *self._buffers[: _MOST - 1]]
        return buffer
