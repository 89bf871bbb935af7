"""The blocks of one sequence as byte offsets, and the forward in progress."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from kvloom.errors import SequenceError
from kvloom.plan import ArenaGeometry
from kvloom.spec.model_spec import GroupSpec
from kvloom.types import Int32Array, IntArray

CLOSED = "the engine of this session is closed, so the session cannot go on; attach the model again and open the prompt"


class Sequence(Protocol):
    """The part of the manager's sequence that tells where state lies."""

    def block_table(self, group: int) -> Int32Array:
        """Slots by logical block; entry ``i % len``."""

    def first_block(self, group: int) -> int:
        """First logical block that is held."""

    def num_blocks(self, group: int) -> int:
        """One past the last logical block that is reserved."""

    def published_blocks(self, group: int) -> int:
        """Leading blocks that belong to the index; their entries may change in the commit that publishes them."""

    def live_slot(self, group: int) -> int:
        """The one slot of a snapshot group."""


class Attachment(Protocol):
    """What a flight asks of the engine's hooks."""

    removed: bool


class Gate(Protocol):
    """What a sequence waits at before it reads state that may still be on its way."""

    def wait(self, group: int, layer: int) -> None:
        """Return once the state of a layer (by its place in its group) is there."""


class Flight:
    """The forward in progress: the tokens of positions [start, end) are being computed; idle when ``end`` is -1."""

    __slots__ = ("_attachment", "end", "start")

    def __init__(self, attachment: Attachment | None = None) -> None:
        self.start = -1
        self.end = -1
        self._attachment = attachment

    def check(self, end: int) -> None:
        """SequenceError unless a layer that now reaches ``end`` does so within the forward in progress."""
        if end != self.end:
            self.require()
            raise SequenceError(
                f"a layer was updated to position {end} in the forward that computes up to {self.end}: the model calls "
                "this layer with other tokens than the forward got, which kvloom does not understand"
            )

    def require(self) -> None:
        """SequenceError unless a forward is in progress."""
        if self.end >= 0:
            return
        if self._attachment is not None and self._attachment.removed:
            raise SequenceError(CLOSED)
        raise SequenceError(
            "the cache was used outside a forward of the model that kvloom is attached to; "
            "call the attached model itself, not one of its parts or another model"
        )


class BlockTable:
    """The blocks of one sequence in one block group, as byte offsets; ``refresh`` after every reservation.

    Attributes:
        group: the group.
        entries: entries per block.
        first, last: logical blocks in use, half open.
        offsets: byte offsets of their slots, int64 ``[last - first]``.
        version: grows when anything changed; ``epoch``: grows when a block may have moved.
        index: of the group; ``gate``: what every read waits at, None when all state is there.
    """

    def __init__(self, sequence: Sequence, index: int, group: GroupSpec, geometry: ArenaGeometry) -> None:
        self.group = group
        self.entries = group.block_entries
        self.first = self.last = 0
        self.version = self.epoch = 0
        self._published = 0
        self._sequence = sequence
        self.index = index
        self.gate: Gate | None = None
        self._geometry = geometry
        self.offsets: IntArray = np.empty(0, dtype=np.int64)
        self._runs: dict[tuple[int, int], list[tuple[int, int, int, int]]] = {}
        self.refresh()

    def refresh(self) -> None:
        """Take over what the manager reserved or released since the last call."""
        first, last = self._sequence.first_block(self.index), self._sequence.num_blocks(self.index)
        self._take_over_published()
        if first == self.first and last == self.last:
            return
        self.version += 1
        self._runs.clear()
        if last < self.last or first >= self.last:
            # Blocks were given back (or none was held): a block of the same number may be another slot now.
            self.epoch += 1
            self.offsets = self.offsets[:0]
            self.first = self.last = first
        kept = self.offsets[first - self.first :]
        table = self._sequence.block_table(self.index)
        slots = table.take(range(self.last, last), mode="wrap")
        self.offsets = np.concatenate([kept, self._geometry.slot_offsets(self.index, slots)])
        self.first, self.last = first, last

    def _take_over_published(self) -> None:
        """A commit may have replaced blocks of ours by equal ones that the index had already."""
        published = self._sequence.published_blocks(self.index)
        begin, end = max(self._published, self.first), min(published, self.last)
        self._published = published
        if begin >= end:
            return
        slots = self._sequence.block_table(self.index).take(range(begin, end), mode="wrap")
        now = self._geometry.slot_offsets(self.index, slots)
        here = slice(begin - self.first, end - self.first)
        if (self.offsets[here] != now).any():
            self.offsets[here] = now
            self.version += 1
            self.epoch += 1
            self._runs.clear()

    def offset(self, block: int) -> int:
        """Byte offset of a logical block's slot; SequenceError when the sequence does not hold it."""
        if not self.first <= block < self.last:
            raise SequenceError(
                f"group {self.group.name!r}: block {block} is not held; the sequence holds [{self.first}, {self.last})"
            )
        return int(self.offsets[block - self.first])

    def runs(self, begin: int, end: int) -> list[tuple[int, int, int, int]]:
        """Blocks [begin, end) as (first block, count, byte offset, byte stride) runs of equally spaced slots."""
        key = (begin, end)
        found = self._runs.get(key)
        if found is None:
            found = self._runs[key] = _runs(begin, self.offsets[begin - self.first : end - self.first].tolist())
        return found


def _runs(begin: int, offsets: list[int]) -> list[tuple[int, int, int, int]]:
    runs: list[tuple[int, int, int, int]] = []
    at, count = 0, len(offsets)
    while at < count:
        stop = at + 1
        stride = max(0, offsets[stop] - offsets[at]) if stop < count else 0
        if stride:
            while stop < count and offsets[stop] - offsets[stop - 1] == stride:
                stop += 1
        runs.append((begin + at, stop - at, offsets[at], stride))
        at = stop
    return runs
