"""Bringing records of a tier to their places in an arena: straight, or through other memory and a codec."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvloom.errors import StoreError
from kvloom.tiers.contract import Tier
from kvloom.tiers.values import Places, ReadResult, Result
from kvloom.transfer.forms import Forms
from kvloom.transfer.memory import SlotMemory
from kvloom.transfer.parts import Parts
from kvloom.types import AnyArray, IntArray, PayloadForm

STAGED = 32 << 20
"""Bytes that lie between a tier and an arena that is no host memory."""
_CODES = len(Result)

Results = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Bringer:
    """Of one tier, to one arena.  Used by the lane that reads there."""

    tier: Tier
    memory: SlotMemory
    parts: Parts
    forms: Forms

    def read(self, places: Places, offsets: IntArray, stop: Callable[[], bool]) -> Results:
        """Read what lies as it is straight into the arena, where that can be; the rest through other memory.

        Where it says that something is there, anybody may read it.
        """
        memory = self.memory.host_memory()
        raw = places.entries["form"] == PayloadForm.RAW
        if memory is None or not raw.any():
            return self._read_staged(places, offsets, stop)
        if raw.all():
            return _checked(self.tier.read(places, memory, offsets, stop), len(places))
        results = np.empty(len(places), dtype=np.uint8)
        results[raw] = _checked(self.tier.read(places.take(raw), memory, offsets[raw], stop), int(raw.sum()))
        results[~raw] = self._read_staged(places.take(~raw), offsets[~raw], stop)
        return results

    def _read_staged(self, places: Places, offsets: IntArray, stop: Callable[[], bool]) -> Results:
        lengths = places.entries["length"].astype(np.int64)
        results = np.full(len(places), Result.STOPPED, dtype=np.uint8)
        staging = np.empty(0, dtype=np.uint8)
        for piece in _pieces(lengths, STAGED):
            if stop():
                break
            size = lengths[piece]
            if int(size.sum()) > len(staging):
                staging = np.zeros(int(size.sum()), dtype=np.uint8)
            begin = np.cumsum(size) - size
            results[piece] = _checked(self.tier.read(places.take(piece), staging, begin, stop), len(piece))
            for i in np.flatnonzero(results[piece] == Result.OK).tolist():
                if stop():
                    results[piece[i]] = Result.STOPPED
                    continue
                payload = staging[int(begin[i]) : int(begin[i] + size[i])]
                if not self._put(places.entries[piece[i]], payload, int(offsets[piece[i]])):
                    results[piece[i]] = Result.INTEGRITY
        self.memory.settle()
        return results

    def _put(self, entry: AnyArray, payload: npt.NDArray[np.uint8], offset: int) -> bool:
        """Bring the verified payload of a part to its place; False when it is not what its form says."""
        group, form = int(entry["group"]), int(entry["form"])
        part = int(entry["column"]) % int(self.parts.count[group])
        memory, size = self.memory.host_memory(), int(self.parts.size[group, part])
        if form == PayloadForm.RAW:
            slot = payload
        elif memory is not None:
            return self.forms.decode(form, (group, part), payload, memory[offset : offset + size])
        else:
            slot = np.empty(-(-size // 8), np.uint64).view(np.uint8)[:size]
            if not self.forms.decode(form, (group, part), payload, slot):
                return False
        self.memory.write_slots(np.array([offset]), np.array([size]), slot)
        return True


def _checked(read: ReadResult, count: int) -> Results:
    """The results of a read; StoreError when they are not one known code for each of ``count`` objects."""
    results = read.results
    if results.shape != (count,) or (results >= _CODES).any():
        raise StoreError(f"a tier says what became of {results.shape} objects of {count}, or in unknown codes")
    return results


def _pieces(lengths: IntArray, most: int) -> list[IntArray]:
    """Runs of indices whose lengths are ``most`` together, or a single one that is longer."""
    ends = np.cumsum(lengths)
    begin, found = 0, []
    while begin < len(lengths):
        base = int(ends[begin - 1]) if begin else 0
        end = max(begin + 1, int(np.searchsorted(ends, base + most, side="right")))
        found.append(np.arange(begin, end))
        begin = end
    return found
