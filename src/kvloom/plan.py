"""Frozen values through which deciding (manager) and doing (tiers, adapters) meet.

Nothing here holds a reference to the manager.  Arrays are read-only by convention: a receiver
must not write to them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from kvloom.types import Grade, Int32Array, IntArray, Kind, Reason


def _empty() -> Int32Array:
    return np.empty(0, dtype=np.int32)


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """Slot-to-slot copies inside one device arena, to run in order, before the next forward.

    Copy i: if ``src[i] < 0`` the slot ``dst[i]`` of group ``group[i]`` is filled with zero bytes,
    otherwise slot ``src[i]`` is copied over it.  Then, when ``entries[i] >= 0``, the rows of entry
    ``entries[i]`` and later are set to zero in the destination (a sealed, zero-padded partial block).

    ``ticket`` names the plan in ``Manager.complete`` / ``Manager.abandon``.  Objects that the plan
    publishes stay invisible until it is completed.
    """

    ticket: int
    group: Int32Array = field(default_factory=_empty)
    src: Int32Array = field(default_factory=_empty)
    dst: Int32Array = field(default_factory=_empty)
    entries: Int32Array = field(default_factory=_empty)

    def __len__(self) -> int:
        return len(self.group)


MEANING: Mapping[Reason, str] = MappingProxyType(
    {
        Reason.EMPTY: "nothing is cached",
        Reason.TOKENS: "no cached prefix goes on with these tokens",
        Reason.LAST_TOKEN: "it is as long as it can be, the last prompt token is always recomputed",
        Reason.NOT_KEPT: "the state there was never kept",
        Reason.EVICTED: "dropped to make room",
        Reason.CLEARED: "dropped on request",
        Reason.QUARANTINED: "it failed a check",
        Reason.GRADE: "its grade is below the floor",
        Reason.STALE: "it changed between lookup and use",
        Reason.ABI: "it was made with another layout",
    }
)
"""Every reason in words, as the end of a ``Limit``."""


@dataclass(frozen=True, slots=True)
class Limit:
    """One thing that kept a hit from reaching ``position``; ``str`` says it in words.

    ``kind`` and ``group`` are None when no object is at fault (tokens differ, last token).
    """

    reason: Reason
    position: int
    tier: str = "device"
    kind: Kind | None = None
    group: str | None = None

    def __str__(self) -> str:
        subject = "the hit" if self.kind is None else f"{self.kind.name.lower()} ({self.group})"
        return f"stopped at {self.position:,} in tier {self.tier}, {subject}: {MEANING[self.reason]}"


@dataclass(frozen=True, slots=True)
class Explanation:
    """What a lookup found and what stopped it; ``str`` says it in one sentence.

    ``boundary`` is the number of reused tokens, ``grade`` the grade of the hit (None for a miss).
    ``limits`` says, for the deepest boundary that the tokens would have allowed, the first thing that each
    group lacked there, and then why the tokens allowed no deeper one; ``known_tokens`` is how many leading
    tokens are known to the index at all.
    """

    boundary: int
    grade: Grade | None
    prompt_tokens: int
    known_tokens: int
    limits: Sequence[Limit]

    def with_limits(self, more: Sequence[Limit]) -> Explanation:
        """The same with more limits, for example what ``ColderTiers.explain_load`` says of a colder tier."""
        return replace(self, limits=(*self.limits, *more))

    def __str__(self) -> str:
        found = "miss" if self.grade is None else f"{self.grade} hit"
        reused = f"{found}: {self.boundary:,} of {self.prompt_tokens:,} tokens reused"
        return "; ".join([reused, *map(str, self.limits)])


@dataclass(frozen=True, slots=True)
class ArenaGeometry:
    """Where the slots of every KV cache group lie inside the one arena of a tier.

    A slot id is local to its group.  Slot ``s`` of group ``g`` starts at byte ``base[g] + (s // slots_per_page[g]) *
    page_bytes[g] + (s % slots_per_page[g]) * slot_bytes[g]``.  All offsets are multiples of 256.

    Attributes:
        arena_bytes: size of the arena.
        base, page_bytes, slots_per_page, slot_bytes, num_slots: int64 ``[groups]``.
        static_split: True when the arena is too small for moving pages, so every group has a fixed part of it.
        alignment: bytes that every slot offset is a multiple of.
    """

    arena_bytes: int
    base: IntArray
    page_bytes: IntArray
    slots_per_page: IntArray
    slot_bytes: IntArray
    num_slots: IntArray
    static_split: bool
    alignment: int = field(init=False)

    def __post_init__(self) -> None:
        numbers = np.concatenate([self.base, self.page_bytes, self.slot_bytes])
        object.__setattr__(self, "alignment", int(np.gcd.reduce(numbers)))

    def slot_offset(self, group: int, slot: int) -> int:
        """Byte offset of a slot; raises IndexError for a slot the group cannot have."""
        if not 0 <= slot < self.num_slots[group]:
            raise IndexError(f"group {group} has slots 0 to {self.num_slots[group] - 1}, not {slot}")
        page, within = divmod(slot, int(self.slots_per_page[group]))
        return int(self.base[group] + page * self.page_bytes[group] + within * self.slot_bytes[group])

    def slot_offsets(self, group: int, slots: Int32Array) -> IntArray:
        """Byte offsets of many slots of one group, int64 of the same shape (unchecked)."""
        page, within = np.divmod(slots.astype(np.int64), self.slots_per_page[group])
        offsets: IntArray = self.base[group] + page * self.page_bytes[group] + within * self.slot_bytes[group]
        return offsets


@dataclass(frozen=True, slots=True)
class Chain:
    """The names of a prompt in colder tiers: one row for every segment, and one for a shorter rest.

    Attributes:
        root: 32 bytes, digest of the empty prefix of the namespace; shows nothing of its salt.
        digests: uint8 ``[rows, 32]``, of the boundary at the end of every row.
        tokens: int32, of all rows.
        segment: tokens of every row but the last.
    """

    root: bytes
    digests: npt.NDArray[np.uint8]
    tokens: Int32Array
    segment: int


@dataclass(frozen=True, slots=True)
class StoredObjects:
    """What a colder tier has of a chain: int32 arrays of one length, in any order.

    Attributes:
        row: of the chain.
        group: KV cache group.
        column: block of the group within the row; 0 for snapshots.
        grade: ``Grade``.
    """

    row: Int32Array
    group: Int32Array
    column: Int32Array
    grade: Int32Array


@dataclass(frozen=True, slots=True)
class TransferPlan:
    """Objects to move between slots of the device arena and a colder tier: a whole prefix unit, or what it lacks.

    ``ticket`` names the plan in the manager's ``finish_load`` or ``finish_store``; until then its slots are held, and
    what it loads stays invisible.

    Attributes:
        position: tokens of the boundary.
        row, group, column, grade: int32 ``[n]``, as in ``StoredObjects``.
        slot: int32 ``[n]``, local to the group: the destination of a load, the source of a store.
        needs: int32 ``[k, 4]``: group, first row, first column and count of the objects that the boundary needs.
    """

    ticket: int
    position: int
    row: Int32Array
    group: Int32Array
    column: Int32Array
    grade: Int32Array
    slot: Int32Array
    needs: Int32Array

    def __len__(self) -> int:
        return len(self.row)
