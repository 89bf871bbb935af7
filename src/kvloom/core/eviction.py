"""Making room: least recently released first, group-complete, page by page between groups.

Dropping one block of a prefix group drops what only that block made reachable: the other objects of its node
and everything below.  A checkpoint goes as a whole.  A window block or snapshot goes alone.
"""

from __future__ import annotations

from kvloom.core._jit import jit
from kvloom.core.arrays import (
    FIRST_CHECKPOINT,
    FIRST_CHILD,
    FREE_NODES,
    FRUGAL,
    GHOST_HEAD,
    LRU_HEAD,
    NTOKENS,
    OWNER,
    PAGE_BASE,
    PAGE_FREE,
    PAGE_GROUP,
    PAGE_PINNED,
    PARENT,
    PINS,
    RESIDENT,
    RULE,
    RULE_PREFIX,
    SIBLING_NEXT,
    SLOTS_PER_PAGE,
    WEIGHT,
    Arrays,
)
from kvloom.core.block_pool import serve_next, take_slot
from kvloom.core.prefix_index import add_weight, drop_weight, forget_object
from kvloom.types import SLOT_EVICTED


@jit
def group_of_column(a: Arrays, c: int) -> int:
    """Group that column ``c`` belongs to."""
    g = 0
    while a.col_base[g + 1] <= c:
        g += 1
    return g


@jit
def drop_node_objects(a: Arrays, n: int, code: int) -> None:
    """Drop every object of node ``n`` that nobody holds.  The caller holds the node."""
    if a.node[RESIDENT, n] == 0:
        return
    for g in range(a.group.shape[1]):
        for c in range(a.col_base[g], a.col_base[g + 1]):
            local = a.columns[n, c]
            if local >= 0 and a.slot[PINS, a.slot_base[g] + local] == 0:
                forget_object(a, g, a.slot_base[g] + local, code)


@jit
def _drop_with_checkpoints(a: Arrays, n: int, code: int) -> None:
    checkpoint = a.node[FIRST_CHECKPOINT, n]
    while checkpoint >= 0:
        after = a.node[SIBLING_NEXT, checkpoint]
        if a.node[RESIDENT, checkpoint] > 0:
            add_weight(a, checkpoint)
            drop_node_objects(a, checkpoint, code)
            drop_weight(a, checkpoint)
        checkpoint = after
    drop_node_objects(a, n, code)


@jit
def _first_leaf(a: Arrays, n: int) -> int:
    while a.node[FIRST_CHILD, n] >= 0 and a.node[WEIGHT, n] > 0:
        n = a.node[FIRST_CHILD, n]
    return n


@jit
def drop_subtree(a: Arrays, top: int, code: int) -> None:
    """Drop every object in and below ``top`` that nobody holds, children before parents."""
    add_weight(a, top)
    n = _first_leaf(a, top)
    while True:
        if a.node[WEIGHT, n] > 0:
            add_weight(a, n)
            _drop_with_checkpoints(a, n, code)
            drop_weight(a, n)
        if n == top:
            break
        if a.node[SIBLING_NEXT, n] >= 0:
            n = _first_leaf(a, a.node[SIBLING_NEXT, n])
        else:
            n = a.node[PARENT, n]
    drop_weight(a, top)


@jit
def evict_object(a: Arrays, g: int, s: int) -> None:
    """Evict the evictable object in slot ``s`` and what is useless without it."""
    n = a.slot[OWNER, s]
    if a.node[NTOKENS, n] < a.tokens.shape[1]:
        add_weight(a, n)
        drop_node_objects(a, n, SLOT_EVICTED)
        drop_weight(a, n)
    elif a.group[RULE, g] == RULE_PREFIX:
        drop_subtree(a, n, SLOT_EVICTED)
    else:
        forget_object(a, g, s, SLOT_EVICTED)


@jit
def _oldest_page(a: Arrays, g: int) -> int:
    """The page of ``g`` that can be emptied whose youngest object is oldest, or -1."""
    best, best_stamp = -1, 0
    per_page = a.group[SLOTS_PER_PAGE, g]
    for p in range(a.page.shape[1]):
        if a.page[PAGE_GROUP, p] != g or a.page[PAGE_PINNED, p] > 0:
            continue
        first = a.slot_base[g] + (p - a.group[PAGE_BASE, g]) * per_page
        youngest = 0
        for s in range(first, first + per_page):
            if a.slot[OWNER, s] >= 0 and a.stamp[s] > youngest:
                youngest = a.stamp[s]
        if best < 0 or youngest < best_stamp:
            best, best_stamp = p, youngest
    return best


@jit
def _empty_page(a: Arrays, g: int) -> bool:
    """Evict a whole page of group ``g``; False when every page of it holds something in use."""
    p = _oldest_page(a, g)
    if p < 0:
        return False
    first = a.slot_base[g] + (p - a.group[PAGE_BASE, g]) * a.group[SLOTS_PER_PAGE, g]
    for s in range(first, first + a.group[SLOTS_PER_PAGE, g]):
        if a.slot[OWNER, s] >= 0:
            evict_object(a, g, s)
    return True


@jit
def _group_with_oldest(a: Arrays, skip: int) -> int:
    """The group (other than ``skip``) whose LRU head was released first, or -1."""
    best, best_stamp = -1, 0
    for g in range(a.group.shape[1]):
        head = a.group[LRU_HEAD, g]
        if g != skip and head >= 0 and (best < 0 or a.stamp[head] < best_stamp):
            best, best_stamp = g, a.stamp[head]
    return best


@jit
def make_room(a: Arrays, g: int) -> bool:
    """Evict so that group ``g`` can take a slot; False when everything is in use."""
    own = a.group[LRU_HEAD, g]
    if a.static_pages[0]:
        if own < 0:
            return False
        evict_object(a, g, own)
        return True
    other = _group_with_oldest(a, g)
    if own >= 0 and (other < 0 or a.stamp[own] <= a.stamp[a.group[LRU_HEAD, other]]):
        evict_object(a, g, own)
        return True
    if other >= 0 and _empty_page(a, other):
        return True
    if own >= 0:
        evict_object(a, g, own)
        return True
    for h in range(a.group.shape[1]):
        if h not in (g, other) and a.group[LRU_HEAD, h] >= 0 and _empty_page(a, h):
            return True
    return False


@jit
def _oldest_head(a: Arrays, prefix_only: bool) -> int:
    """The group whose LRU head was released first, of all or of the prefix groups; -1 when nothing can go."""
    best, best_stamp = -1, 0
    for g in range(a.group.shape[1]):
        head = a.group[LRU_HEAD, g]
        wanted = not prefix_only or a.group[RULE, g] == RULE_PREFIX
        if wanted and head >= 0 and (best < 0 or a.stamp[head] < best_stamp):
            best, best_stamp = g, a.stamp[head]
    return best


@jit
def make_node_room(a: Arrays) -> bool:
    """Evict until the index has a place or a ghost to recycle; False when every node is in use.

    Objects of prefix groups go first, since they take their node with them.
    """
    while a.scalars[FREE_NODES] == 0 and a.scalars[GHOST_HEAD] < 0:
        g = _oldest_head(a, True)
        if g < 0:
            g = _oldest_head(a, False)
        if g < 0:
            return False
        evict_object(a, g, a.group[LRU_HEAD, g])
    return True


@jit
def _prefer_busy_page(a: Arrays, g: int) -> None:
    """Let the next slot of ``g`` come from a page that ``g`` keeps anyway; the oldest object on it may have to go."""
    per_page = a.group[SLOTS_PER_PAGE, g]
    for p in range(a.page.shape[1]):
        if a.page[PAGE_GROUP, p] != g or a.page[PAGE_PINNED, p] == 0 or a.page[PAGE_PINNED, p] == per_page:
            continue
        if a.page[PAGE_FREE, p] < 0:
            first = a.slot_base[g] + p * per_page
            oldest = -1
            for s in range(first, first + per_page):
                if a.slot[OWNER, s] >= 0 and a.slot[PINS, s] == 0 and (oldest < 0 or a.stamp[s] < a.stamp[oldest]):
                    oldest = s
            evict_object(a, g, oldest)
        serve_next(a, g, p)
        return


@jit
def take_or_evict(a: Arrays, g: int) -> int:
    """Take a slot of group ``g``, evicting as needed; the global slot, or -1 when everything is in use."""
    if a.scalars[FRUGAL] == 1:
        _prefer_busy_page(a, g)
    s = take_slot(a, g)
    while s < 0:
        if not make_room(a, g):
            return -1
        s = take_slot(a, g)
    return s
