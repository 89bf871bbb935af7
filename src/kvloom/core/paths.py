"""Evicting a path from its end up in one sweep.

When a leaf goes, its parent often becomes a leaf that is about as old and would go next.  Choosing it anew each time,
and putting it in a queue in between, takes several times as long as evicting it; here that is left out where the
choice is known.  What goes, and in which order, is the same.
"""

from __future__ import annotations

from kvloom.core._jit import inlined, jit
from kvloom.core.arrays import Arrays
from kvloom.core.block_pool import page_of, pin_page, put_back, unlink_auxiliary
from kvloom.core.fields import (
    ANCHORS,
    AUX_HEAD,
    COL_BASE,
    COLUMNS,
    EVICTIONS,
    FREE_PAGES,
    NTOKENS,
    OWNER,
    OWNER_COL,
    PAGES,
    PINS,
    QUEUE,
    QUEUE_SIZE,
    RESIDENT,
    RULE,
    RULE_PREFIX,
    RULES,
    SLOT_BASE,
    SLOTS_PER_PAGE,
    SPINE,
    STATIC,
    STEAL_HEAD,
    USED,
)
from kvloom.core.leaf_heap import leave_heap, older, succeed
from kvloom.core.lifecycle import EVICTED, READY, move
from kvloom.core.policies import BY_CLASSES, BY_FIFO, STRANDED, rank
from kvloom.core.prefix_index import bury, drop_anchor, forget_object
from kvloom.types import SLOT_EVICTED

NEVER = 1 << 62


@inlined
def room_of(a: Arrays, g: int) -> int:
    """Slots that group ``g`` can take without evicting."""
    per_page = a.group[g, SLOTS_PER_PAGE]
    pages = a.scalars[FREE_PAGES] if a.scalars[STATIC] == 0 else 0
    return (a.group[g, PAGES] + pages) * per_page - a.group[g, USED]


@jit
def evict_leaf(a: Arrays, n: int) -> None:
    """Evict every object of leaf ``n``."""
    for g in range(a.group.shape[0]):
        first = a.group[g, COL_BASE]
        for c in range(first, first + a.group[g, COLUMNS]):
            if a.columns[n, c] >= 0:
                forget_object(a, g, a.group[g, SLOT_BASE] + a.columns[n, c], SLOT_EVICTED)
                if a.node[n, RESIDENT] == 0:
                    return


@inlined
def _held(a: Arrays, n: int) -> bool:
    """Whether a transfer holds a prefix block of segment ``n``."""
    for g in range(a.group.shape[0]):
        if a.group[g, RULE] == RULE_PREFIX:
            first = a.group[g, COL_BASE]
            for c in range(first, first + a.group[g, COLUMNS]):
                if a.columns[n, c] >= 0 and a.slot[a.group[g, SLOT_BASE] + a.columns[n, c], PINS] > 0:
                    return True
    return False


@inlined
def _drop_objects(a: Arrays, n: int, loose: bool) -> None:
    """Free every object of segment ``n``; ``loose``: its pages know already that they can be evicted."""
    for g in range(a.group.shape[0]):
        first = a.group[g, COL_BASE]
        prefix = a.group[g, RULE] == RULE_PREFIX
        for c in range(first, first + a.group[g, COLUMNS]):
            local = a.columns[n, c]
            if local < 0:
                continue
            s = a.group[g, SLOT_BASE] + local
            a.columns[n, c] = SLOT_EVICTED
            a.counters[g, EVICTIONS] += 1
            a.slot[s, OWNER] = -1
            a.slot[s, OWNER_COL] = -1
            if a.slot[s, PINS] > 0:  # a window that a running sequence holds
                move(a.slot, s, READY)
                continue
            if not prefix:
                unlink_auxiliary(a, g, s)
            elif loose:
                pin_page(a, g, page_of(a, g, s))
            move(a.slot, s, EVICTED)
            put_back(a, g, s)
    a.node[n, RESIDENT] = 0
    a.node[n, SPINE] = -1


@inlined
def _oldest_page(a: Arrays, g: int) -> int:
    """The time since which a page of another group than ``g`` could be emptied."""
    oldest = NEVER
    if a.scalars[STATIC] == 0:
        for h in range(a.group.shape[0]):
            if h != g and a.group[h, STEAL_HEAD] >= 0:
                oldest = min(oldest, a.page_stamp[a.group[h, STEAL_HEAD]])
    return oldest


@inlined
def _goes_next(a: Arrays, n: int, row: int, second: int) -> bool:
    """Whether ``n``, as a leaf, would be the first of queue ``row``, in which ``second`` is the first but one now."""
    if rank(a, n) != row:
        return False
    return second < 0 or older(a, n, second)


@jit
def evict_path(a: Arrays, n: int, g: int, want: int, most: int) -> int:
    """Evict leaf ``n``, the first of its queue, and what becomes a leaf by that as long as it would go next.

    Ends when group ``g`` (-1: no matter) has room for ``want`` slots, or ``most`` leaves went; returns how many.
    """
    segment = a.tokens.shape[1]
    row = a.heat[n, QUEUE] if a.policy[RULES] == BY_CLASSES else 0
    learns = a.policy[RULES] == BY_CLASSES
    if a.policy[RULES] == BY_FIFO or (learns and row != STRANDED) or a.node[n, NTOKENS] != segment or _held(a, n):
        evict_leaf(a, n)
        return 1
    second = -1
    for i in range(1, min(3, a.policy[QUEUE_SIZE + row])):
        if second < 0 or older(a, a.heap[row, i], second):
            second = a.heap[row, i]
    oldest_own, oldest_page = NEVER, NEVER
    if not learns:
        for h in range(a.group.shape[0]):
            if (h == g or g < 0) and a.group[h, AUX_HEAD] >= 0:
                oldest_own = min(oldest_own, a.slot_stamp[a.group[h, AUX_HEAD]])
        oldest_page = _oldest_page(a, g) if g >= 0 else NEVER
    first, count = n, 0
    while True:
        _drop_objects(a, n, n == first)
        count += 1
        parent = bury(a, n)
        a.node[parent, ANCHORS] -= 1
        if a.node[parent, ANCHORS] > 0 or a.node[parent, RESIDENT] == 0:
            a.node[parent, ANCHORS] += 1
            leave_heap(a, first)
            drop_anchor(a, parent)
            return count
        when = a.node_stamp[parent]
        if (
            count == most
            or (g >= 0 and room_of(a, g) >= want)
            or oldest_own <= when
            or oldest_page < when
            or _held(a, parent)
            or not _goes_next(a, parent, row, second)
        ):
            succeed(a, first, parent)
            return count
        n = parent
