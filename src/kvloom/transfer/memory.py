"""The bytes of a device arena, as transfers need them."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvloom.types import IntArray


class SlotMemory(Protocol):
    """An arena whose slots are read and written by transfers, in threads of their own."""

    def settle(self) -> None:
        """Wait until all that was queued to change the arena is done: the next reads come from another thread."""

    def read_slot(self, offset: int, into: memoryview) -> None:
        """Copy ``len(into)`` bytes from ``offset`` of the arena to host memory."""

    def host_memory(self) -> npt.NDArray[np.uint8] | None:
        """The arena itself where it is host memory, so that nothing need be copied twice; else None."""

    def write_slots(self, offsets: IntArray, lengths: IntArray, data: npt.NDArray[np.uint8]) -> None:
        """Copy pieces of ``data`` that lie one after the other to ``offsets`` of the arena."""
