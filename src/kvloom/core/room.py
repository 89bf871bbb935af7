"""Whether an operation can have the slots it needs, asked before anything is evicted for it.

What fails leaves the cache as it was.  A page that holds something in use serves only its own group; any other page
serves any group.  Quick answers come first; only when they do not tell is what can be evicted counted.
"""

from __future__ import annotations

from kvloom.core._jit import inlined, jit
from kvloom.core.arrays import Arrays
from kvloom.core.block_pool import head_of, page_of
from kvloom.core.fields import (
    ANCHORS,
    BUSY,
    CARRIED,
    COL_BASE,
    COLUMNS,
    EMPTIABLE,
    FREE_PAGES,
    FRUGAL,
    HELD,
    LEASED,
    NEED,
    NEXT,
    NTOKENS,
    PAGE_GROUP,
    PAGE_HELD,
    PAGE_PINNED,
    PAGE_USED,
    PAGES,
    PARENT,
    PASSES,
    PINNED,
    PINS,
    QUEUE_SIZE,
    RULE,
    RULE_PREFIX,
    SLOT_BASE,
    SLOTS_PER_PAGE,
    STATIC,
    USED,
)
from kvloom.core.policies import HEAPS

OFTEN = 4


@jit
def need_nothing(a: Arrays) -> None:
    """Begin to add up what an operation needs."""
    for g in range(a.group.shape[0]):
        a.group[g, NEED] = 0


@jit
def _free_room(a: Arrays) -> bool:
    """Whether free slots and free pages are enough."""
    pages = a.scalars[FREE_PAGES]
    for g in range(a.group.shape[0]):
        per_page = a.group[g, SLOTS_PER_PAGE]
        lacking = a.group[g, NEED] - (a.group[g, PAGES] * per_page - a.group[g, USED])
        if lacking > 0:
            if a.scalars[STATIC] == 1:
                return False
            pages -= (lacking + per_page - 1) // per_page
    return pages >= 0


@jit
def _pages_wanted(a: Arrays) -> int:
    """Pages that are enough however badly slots are scattered over them."""
    wanted = 2 * a.group.shape[0]
    for g in range(a.group.shape[0]):
        wanted += a.group[g, NEED]
    return wanted


@jit
def _loose_room(a: Arrays) -> bool:
    """Whether what can be evicted right now is enough."""
    if a.scalars[STATIC] == 0:
        return a.scalars[FREE_PAGES] + a.scalars[EMPTIABLE] >= _pages_wanted(a)
    for g in range(a.group.shape[0]):
        if a.group[g, NEED] > a.group[g, SLOTS_PER_PAGE] - a.page[g, PAGE_PINNED]:
            return False
    return True


@jit
def _bounded_room(a: Arrays) -> bool:
    """Whether there is enough even if every slot held were another one, on a page of its own, that cannot be evicted.

    Not known while transfers hold nodes, whose paths nobody may stand on any more.
    """
    if a.scalars[CARRIED] > 0:
        return False
    spare = a.page.shape[0]
    for g in range(a.group.shape[0]):
        held = a.group[g, PINNED] + a.group[g, LEASED]
        if a.scalars[STATIC] == 1:
            if a.group[g, NEED] > a.group[g, SLOTS_PER_PAGE] - held:
                return False
        else:
            spare -= min(a.group[g, PAGES], held)
    return a.scalars[STATIC] == 1 or spare >= _pages_wanted(a)


@jit
def _begin_count(a: Arrays) -> None:
    """Take everything that is used for held."""
    a.scalars[PASSES] += 1
    for g in range(a.group.shape[0]):
        a.group[g, HELD] = a.group[g, USED]
        a.group[g, BUSY] = a.group[g, PAGES]
    for p in range(a.page.shape[0]):
        a.page[p, PAGE_HELD] = a.page[p, PAGE_USED] if a.page[p, PAGE_GROUP] >= 0 else 0


@inlined
def _count_slot(a: Arrays, g: int, s: int) -> None:
    p = page_of(a, g, s)
    a.group[g, HELD] -= 1
    a.page[p, PAGE_HELD] -= 1
    if a.page[p, PAGE_HELD] == 0:
        a.group[g, BUSY] -= 1


@jit
def _count_node(a: Arrays, n: int) -> None:
    """Count what goes with node ``n``; auxiliary objects go by themselves."""
    whole = a.trunk[n, NTOKENS] == a.tokens.shape[1]
    for g in range(a.group.shape[0]):
        if whole and a.group[g, RULE] != RULE_PREFIX:
            continue
        first = a.group[g, COL_BASE]
        for c in range(first, first + a.group[g, COLUMNS]):
            if a.columns[n, c] >= 0:
                s = a.group[g, SLOT_BASE] + a.columns[n, c]
                if a.slot[s, PINS] == 0:
                    _count_slot(a, g, s)


@jit
def _spare_pages(a: Arrays) -> int:
    spare = a.page.shape[0]
    for g in range(a.group.shape[0]):
        spare -= a.group[g, BUSY]
    return spare


@jit
def _short_group(a: Arrays) -> int:
    """The first group that cannot get its slots even if everything that was counted went, or -1."""
    spare = _spare_pages(a)
    for g in range(a.group.shape[0]):
        per_page = a.group[g, SLOTS_PER_PAGE]
        if a.scalars[STATIC] == 1:
            if a.group[g, NEED] > per_page - a.group[g, HELD]:
                return g
            continue
        lacking = a.group[g, NEED] - (a.group[g, BUSY] * per_page - a.group[g, HELD])
        if lacking > 0:
            spare -= (lacking + per_page - 1) // per_page
            if spare < 0:
                return g
    return -1


@jit
def _enough(a: Arrays) -> bool:
    """Whether what was counted so far is enough, with pages to spare."""
    return (a.scalars[STATIC] == 1 or _spare_pages(a) >= _pages_wanted(a)) and _short_group(a) < 0


@jit
def _count(a: Arrays) -> bool:
    """Count what can be evicted: single objects, and from every leaf up as far as nobody holds anything.

    Returns True, perhaps early, when that is enough and pages are not scarce.
    """
    _begin_count(a)
    for g in range(a.group.shape[0]):
        for worth in range(3):
            s = a.group[g, head_of(worth)]
            while s >= 0:
                _count_slot(a, g, s)
                s = a.slot[s, NEXT]
    begun = a.scalars[PASSES] << 32
    nodes = 0
    for q in range(min(HEAPS, a.heap.shape[0])):
        for i in range(a.policy[QUEUE_SIZE + q]):
            n = a.heap[q, i]
            while n >= 0:
                _count_node(a, n)
                nodes += 1
                if nodes % OFTEN == 0 and _enough(a):
                    return True
                n = a.trunk[n, PARENT]
                if n >= 0:
                    a.reached[n] = max(a.reached[n], begun) + 1
                    if a.reached[n] - begun < a.node[n, ANCHORS]:
                        break
    return _enough(a)


@jit
def lacks_room(a: Arrays) -> int:
    """A group that cannot get its ``NEED`` slots even if everything evictable went, or -1 when each can.

    Also notes whether pages are so scarce that slots must come from pages that their group keeps anyway.
    """
    a.scalars[FRUGAL] = 0
    if _free_room(a) or _loose_room(a) or _bounded_room(a) or _count(a):
        return -1
    short = _short_group(a)
    if short < 0 and a.scalars[STATIC] == 0:
        a.scalars[FRUGAL] = 1
    return short
