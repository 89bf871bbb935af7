"""Which sequences run, in which rows of the block tables, and what the index gave up that they may still read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol, TypeVar

import numpy as np

from kvloom.core.arrays import Arrays
from kvloom.core.fields import CLOCK, GRAVE_HEAD, SLOT_BASE, STATE
from kvloom.core.graves import reap, reap_unread
from kvloom.core.lifecycle import QUARANTINED
from kvloom.core.page_table import EPOCH, OFFSET, SHARED, Rows
from kvloom.types import AnyArray


class Runs(Protocol):
    """What the roster asks of a sequence."""

    @property
    def node(self) -> int:
        """The deepest index node that it holds."""

    def plan_abandoned(self, ticket: int) -> None:
        """Plan ``ticket`` will not be executed."""

    def distrust(self, failed: AnyArray) -> None:
        """The slots of ``failed`` (bool, global slots) cannot be trusted."""


S = TypeVar("S", bound=Runs)


class Roster:
    """The sequences that run, by row.

    Attributes:
        changes: grows whenever a sequence ends or breaks: batches check theirs again.
    """

    def __init__(self, arrays: Arrays, rows: Rows) -> None:
        self._arrays, self._rows = arrays, rows
        self._free = list(range(len(rows.state) - 1, -1, -1))
        self._running: dict[int, Runs] = {}
        self.changes = 0

    def __len__(self) -> int:
        return len(self._running)

    def __iter__(self) -> Iterator[Runs]:
        return iter(self._running.values())

    def start(self, make: Callable[[int], S]) -> S | None:
        """Run ``make`` with a free row and note the sequence that it returns; None when every row is taken."""
        if not self._free:  # an interrupt may have lost one
            self._free = [row for row in range(len(self._rows.state)) if row not in self._running]
            if not self._free:
                return None
        row = self._free.pop()
        try:
            sequence = make(row)
        except BaseException:
            self._free.append(row)
            raise
        self._running[row] = sequence
        return sequence

    def retire(self, row: int) -> None:
        """The sequence of ``row`` was closed."""
        if self._running.pop(row, None) is not None:
            self._free.append(row)
        self.changes += 1
        if self._arrays.scalars[GRAVE_HEAD] >= 0:
            self._reap()

    def changed(self) -> None:
        """A sequence broke."""
        self.changes += 1

    def nodes(self) -> dict[int, int]:
        """The deepest node of each, by row."""
        return {row: sequence.node for row, sequence in self._running.items()}

    # ---------------------------------------------------------------- what they read

    def distrust(self) -> None:
        """Break the sequences that read a quarantined slot."""
        failed = self._arrays.slot[:, STATE] == QUARANTINED
        for sequence in self:
            sequence.distrust(failed)
        self.collect()

    def _reap(self) -> None:
        """Give back what the index gave up while sequences that have ended since could still read it."""
        latest = int(self._arrays.scalars[CLOCK]) + 1
        reap(self._arrays, min((int(self._rows.state[row, EPOCH]) for row in self._running), default=latest))

    def collect(self) -> bool:
        """Like ``_reap``, by looking at every block table: slow and exact, for when there is no room.

        Returns whether anything went.
        """
        a, r = self._arrays, self._rows
        if a.scalars[GRAVE_HEAD] < 0:
            return False
        read = np.zeros(len(a.slot), dtype=np.bool_)
        for row in self._running:
            for g in range(len(a.group)):
                first = r.shape[g, OFFSET]
                read[a.group[g, SLOT_BASE] + r.table[row, first : first + r.span[row, g, SHARED]]] = True
        return int(reap_unread(a, read)) > 0
