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
    KEPT_HEAD,
    NTOKENS,
    OWNER,
    OWNER_COL,
    PAGES,
    PARENT,
    PINS,
    QUEUE,
    QUEUE_SIZE,
    RESIDENT,
    REST_HEAD,
    RULE,
    RULE_PREFIX,
    RULES,
    SLOT_BASE,
    SLOTS_PER_PAGE,
    SPINE,
    STATIC,
    STEAL_HEAD,
    TICK,
    USED,
)
from kvloom.core.leaf_heap import leave_heap, older, succeed
from kvloom.core.lifecycle import EVICTED, READY, move
from kvloom.core.objects import forget_object
from kvloom.core.policies import BY_CLASSES, BY_FIFO, CLASSES, HEAPS, STRANDED, rank
from kvloom.core.prefix_index import bury, drop_anchor
from kvloom.core.worth import give_up_boundary, value_leaf
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
    parent = a.trunk[n, PARENT]
    _forget_all(a, n)
    if a.policy[RULES] == BY_CLASSES and a.node[parent, ANCHORS] > 0:
        give_up_boundary(a, n)


@inlined
def _forget_all(a: Arrays, n: int) -> None:
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
            else:
                a.trunk[n, SPINE] = -1
                if loose:
                    pin_page(a, g, page_of(a, g, s))
            move(a.slot, s, EVICTED)
            put_back(a, g, s)
    a.node[n, RESIDENT] = 0


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
def _second(a: Arrays, row: int, size: int, young: bool) -> int:
    """The first but one of heap ``row``, or -1; ``young``: its first has the highest order."""
    second = -1
    for i in range(1, min(3, size)):
        n = a.heap[row, i]
        if second < 0 or (older(a, second, n) if young else older(a, n, second)):
            second = n
    return second


@inlined
def _tied(a: Arrays, n: int) -> bool:
    """Whether the order of leaf ``n`` does not tell it from an end of another class."""
    for q in range(CLASSES):
        known = a.policy[QUEUE_SIZE + q] > 0 and q != a.heat[n, QUEUE]
        if known and a.order[n] in (a.order[a.heap[q, 0]], a.order[a.heap[HEAPS + q, 0]]):
            return True
    return False


@inlined
def _pages_to_empty(a: Arrays, g: int) -> bool:
    """Whether a page of another group than ``g`` may be worth emptying: see ``kvloom.core.eviction``."""
    for h in range(a.group.shape[0]):
        spare = a.group[h, PAGES] * a.group[h, SLOTS_PER_PAGE] - a.group[h, USED]
        if h != g and a.group[h, REST_HEAD] >= 0 and spare >= 2 * a.group[h, SLOTS_PER_PAGE]:
            return True
    return False


@inlined
def _oldest_own(a: Arrays, g: int, learns: bool) -> int:
    """The time since which an auxiliary object of group ``g`` (-1: of any) may go instead of a leaf."""
    oldest = NEVER
    for h in range(a.group.shape[0]):
        s = a.group[h, KEPT_HEAD if learns else AUX_HEAD]
        if (h == g or g < 0) and s >= 0:
            oldest = min(oldest, a.slot_stamp[s])
    return oldest


@jit
def evict_path(a: Arrays, n: int, g: int, want: int, most: int) -> int:
    """Evict leaf ``n``, the one that goes next, and what becomes a leaf by that as long as it would go next.

    Ends when group ``g`` (-1: no matter) has room for ``want`` slots, or ``most`` leaves went; returns how many.
    """
    learns = a.policy[RULES] == BY_CLASSES
    row = a.heat[n, QUEUE] if learns else 0
    classed = learns and row != STRANDED
    if (
        a.policy[RULES] == BY_FIFO
        or a.trunk[n, NTOKENS] != a.tokens.shape[1]
        or _held(a, n)
        or (classed and (_tied(a, n) or _pages_to_empty(a, g)))
    ):
        evict_leaf(a, n)
        return 1
    size = a.policy[QUEUE_SIZE + row]
    young = classed and a.heap[row, 0] != n
    second = _second(a, HEAPS + row if young else row, size, young)
    order, tick = a.order[n], a.heat[n, TICK]
    oldest_own = NEVER if learns and not classed else _oldest_own(a, g, learns)
    oldest_page = NEVER if learns or g < 0 else _oldest_page(a, g)
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
            if learns and a.node[parent, ANCHORS] > 0:
                give_up_boundary(a, n)
            return count
        when = a.node_stamp[parent]
        if (
            count == most
            or (g >= 0 and room_of(a, g) >= want)
            or oldest_own <= when
            or oldest_page < when
            or _held(a, parent)
            or rank(a, parent) != row
            or (classed and (a.order[parent] != order or a.heat[parent, TICK] != tick or _pages_to_empty(a, g)))
            or (second >= 0 and not (older(a, second, parent) if young else older(a, parent, second)))
        ):
            succeed(a, first, parent)
            return count
        if classed:
            value_leaf(a, parent)
        n = parent
