"""The private slots that a lease needs besides the shared ones: live state, and copies of a checkpoint's blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from kvloom.core.block_pool import hold, release
from kvloom.core.eviction import take_or_evict
from kvloom.core.fields import BLOCK_TOKENS, GRADE, RULE, RULE_SNAPSHOT
from kvloom.core.page_table import FIRST, LAST, put, slot_at
from kvloom.manager.books import Books
from kvloom.manager.tickets import Copy

if TYPE_CHECKING:
    from kvloom.verify.hit import VerifiedHit


class NoSlot(Exception):  # noqa: N818 - never leaves the manager
    """Group ``group`` has no slot to give, everything is in use; becomes a CapacityError once all is released."""

    def __init__(self, group: int) -> None:
        super().__init__(group)
        self.group = group


def require_room(books: Books, short: Callable[[], int]) -> None:
    """Raise NoSlot when ``short`` names a group without room, even once what nobody reads is given back."""
    full = int(short())
    if full >= 0 and books.roster.collect():
        full = int(short())
    if full >= 0:
        raise NoSlot(full)


def take(books: Books, row: int, g: int, block: int) -> int:
    """Take a slot for logical block ``block`` of ``row``; raises NoSlot."""
    a, r = books.arrays, books.rows
    s = int(take_or_evict(a, g))
    if s < 0:
        raise NoSlot(g)
    put(a, r, row, g, block, s)
    r.span[row, g, LAST] = max(int(r.span[row, g, LAST]), block + 1)
    return s


def take_live(books: Books, row: int, snapshots: dict[int, int]) -> list[Copy]:
    """A live slot per snapshot group, filled from its snapshot or with zeros."""
    a = books.arrays
    copies = []
    for g in np.flatnonzero(a.group[:, RULE] == RULE_SNAPSHOT).tolist():
        live = take(books, row, g, 0)
        source = snapshots.get(g, -1)
        if source >= 0:
            a.slot[live, GRADE] = a.slot[source, GRADE]
        copies.append(Copy(g, source, live))
    return copies


def own_checkpoint_blocks(
    books: Books, row: int, hit: VerifiedHit, replaced: list[tuple[int, int]]
) -> tuple[list[Copy], list[int]]:
    """Private copies of the blocks that a checkpoint owns: the sequence goes on writing and publishes them itself.

    The shared originals, still held, are appended to ``replaced``.  Returns the copies and those that are whole blocks.
    """
    if hit.checkpoint < 0:
        return [], []
    a, r = books.arrays, books.rows
    copies, ready = [], []
    for g in np.flatnonzero(a.group[:, RULE] != RULE_SNAPSHOT).tolist():
        size = int(a.group[g, BLOCK_TOKENS])
        origin = hit.depth * books.spec.segment_tokens // size
        for block in range(max(origin, int(r.span[row, g, FIRST])), int(r.span[row, g, LAST])):
            shared = int(slot_at(a, r, row, g, block))
            hold(a, g, shared)
            replaced.append((g, shared))
            own = int(take_or_evict(a, g))
            if own < 0:
                raise NoSlot(g)
            release(a, g, shared)
            put(a, r, row, g, block, own)
            a.slot[own, GRADE] = a.slot[shared, GRADE]
            copies.append(Copy(g, shared, own))
            if (block + 1) * size <= hit.position:
                ready.append(own)
    return copies, ready
