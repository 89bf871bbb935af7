"""Kinds whose objects are snapshots of state that the engine updates in place: tails and recurrent state."""

from __future__ import annotations

from typing import ClassVar

from kvloom.kinds.cache_state import CacheState, Check, MatchRule, Recovery
from kvloom.types import Kind


class SnapshotState(CacheState):
    """One live slot per sequence; a snapshot is a copy of it at one position."""

    rule: ClassVar[MatchRule] = MatchRule.POINT
    recovery: ClassVar[tuple[Recovery, ...]] = (Recovery.SNAPSHOT_RESTORE, Recovery.RECOMPUTE)
    checks: ClassVar[tuple[Check, ...]] = (Check.EXACT_POSITION, Check.LAYOUT)
    strands_deeper: ClassVar[bool] = False

    def needed(self, position: int) -> range:
        """``range(1)`` where a snapshot is needed, otherwise empty."""
        g = self.group
        off_grid = g.needed_unless_multiple_of == 0 or position % g.needed_unless_multiple_of != 0
        return range(1 if position >= g.first_needed and off_grid else 0)

    def written(self, start: int, count: int) -> range:
        """Every append updates the live slot in place."""
        return range(1 if count else 0)


class TailState(SnapshotState):
    """Tokens not yet compressed, and what overlapping compression still needs of the last group."""

    kind: ClassVar[Kind] = Kind.TAIL


class RecurrentState(SnapshotState):
    """Convolution and recurrent state of linear-attention and SSM layers."""

    kind: ClassVar[Kind] = Kind.RECURRENT
