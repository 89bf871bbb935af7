"""Slots that the index gave up while sequences may still read them: they are held until nobody does."""

from __future__ import annotations

from kvloom.core._jit import jit
from kvloom.core.arrays import Arrays
from kvloom.core.block_pool import release
from kvloom.core.fields import CLOCK, GRAVE_HEAD, GRAVE_TAIL, NEXT, PINNED, PINS, SLOT_BASE
from kvloom.types import AnyArray


@jit
def give_up(a: Arrays, s: int) -> None:
    """A slot that sequences below its former node may still read waits until all that run now have ended."""
    if a.slot[s, PINS] == 0:
        a.group[group_of_slot(a, s), PINNED] += 1
    a.slot[s, PINS] += 1
    a.slot[s, NEXT] = -1
    tail = a.scalars[GRAVE_TAIL]
    if tail >= 0:
        a.slot[tail, NEXT] = s
    else:
        a.scalars[GRAVE_HEAD] = s
    a.scalars[GRAVE_TAIL] = s
    a.slot_stamp[s] = a.scalars[CLOCK]


@jit
def group_of_slot(a: Arrays, s: int) -> int:
    """Group of a global slot."""
    g = a.group.shape[0] - 1
    while a.group[g, SLOT_BASE] > s:
        g -= 1
    return g


@jit
def reap(a: Arrays, oldest: int) -> None:
    """Give back the slots that were given up before clock ``oldest``, when the oldest running sequence began."""
    s = a.scalars[GRAVE_HEAD]
    while s >= 0 and a.slot_stamp[s] < oldest:
        after = a.slot[s, NEXT]
        a.scalars[GRAVE_HEAD] = after
        if after < 0:
            a.scalars[GRAVE_TAIL] = -1
        release(a, group_of_slot(a, s), s)
        s = after


@jit
def reap_unread(a: Arrays, read: AnyArray) -> int:
    """Give back the slots that were given up and that nobody reads (``read``: bool, global slots); returns how many."""
    s, before, count = a.scalars[GRAVE_HEAD], -1, 0
    while s >= 0:
        after = a.slot[s, NEXT]
        if read[s]:
            before = s
        else:
            if before >= 0:
                a.slot[before, NEXT] = after
            else:
                a.scalars[GRAVE_HEAD] = after
            if after < 0:
                a.scalars[GRAVE_TAIL] = before
            release(a, group_of_slot(a, s), s)
            count += 1
        s = after
    return count
