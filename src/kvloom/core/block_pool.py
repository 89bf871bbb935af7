"""Slots and pages: take, give back, pin, release, and the LRU list of what may be evicted.

A slot is *evictable* when it is COMMITTED and nobody holds it; exactly these slots are in the LRU list
of their group, least recently released first.  A page moves between groups only when it is empty.
Sequences release their blocks from the deepest to the shallowest, so the head of a prefix group's
list is a leaf of the index unless two sequences raced.
"""

from __future__ import annotations

from kvloom.core._jit import jit
from kvloom.core.arrays import (
    ALLOCS,
    CLOCK,
    FREE_PAGES,
    FRUGAL,
    GENERATION,
    GRADE,
    LRU_HEAD,
    LRU_TAIL,
    NEED,
    NEXT,
    OWNER,
    OWNER_COL,
    PAGE_BASE,
    PAGE_FREE,
    PAGE_GROUP,
    PAGE_NEXT,
    PAGE_PINNED,
    PAGE_PREV,
    PAGE_USED,
    PART_HEAD,
    PINNED,
    PINNED_PAGES,
    PINS,
    PREV,
    SLOTS_PER_PAGE,
    STATE,
    USED,
    Arrays,
)
from kvloom.core.lifecycle import ALLOCATED, FREE, move


@jit
def page_of(a: Arrays, g: int, s: int) -> int:
    """Page that holds global slot ``s`` of group ``g``."""
    return a.group[PAGE_BASE, g] + (s - a.slot_base[g]) // a.group[SLOTS_PER_PAGE, g]


@jit
def _list_page(a: Arrays, g: int, p: int) -> None:
    head = a.group[PART_HEAD, g]
    a.page[PAGE_PREV, p] = -1
    a.page[PAGE_NEXT, p] = head
    if head >= 0:
        a.page[PAGE_PREV, head] = p
    a.group[PART_HEAD, g] = p


@jit
def _unlist_page(a: Arrays, g: int, p: int) -> None:
    before, after = a.page[PAGE_PREV, p], a.page[PAGE_NEXT, p]
    if before >= 0:
        a.page[PAGE_NEXT, before] = after
    else:
        a.group[PART_HEAD, g] = after
    if after >= 0:
        a.page[PAGE_PREV, after] = before
    a.page[PAGE_PREV, p] = -1
    a.page[PAGE_NEXT, p] = -1


@jit
def _acquire_page(a: Arrays, g: int) -> bool:
    """Give group ``g`` a free page; False when there is none."""
    if a.static_pages[0] or a.scalars[FREE_PAGES] == 0:
        return False
    a.scalars[FREE_PAGES] -= 1
    p = a.free_pages[a.scalars[FREE_PAGES]]
    per_page = a.group[SLOTS_PER_PAGE, g]
    first = a.slot_base[g] + p * per_page
    for s in range(first, first + per_page - 1):
        a.slot[NEXT, s] = s + 1
    a.slot[NEXT, first + per_page - 1] = -1
    a.page[PAGE_GROUP, p] = g
    a.page[PAGE_FREE, p] = first
    _list_page(a, g, p)
    return True


@jit
def _pin(a: Arrays, g: int, p: int) -> None:
    """One more slot of page ``p`` cannot be evicted."""
    a.group[PINNED, g] += 1
    a.page[PAGE_PINNED, p] += 1
    if a.page[PAGE_PINNED, p] == 1:
        a.group[PINNED_PAGES, g] += 1


@jit
def _unpin(a: Arrays, g: int, p: int) -> None:
    """One slot less."""
    a.group[PINNED, g] -= 1
    a.page[PAGE_PINNED, p] -= 1
    if a.page[PAGE_PINNED, p] == 0:
        a.group[PINNED_PAGES, g] -= 1


@jit
def lacks_room(a: Arrays) -> int:
    """A group that cannot get its ``NEED`` slots even if everything evictable went, or -1 when each can.

    A page that holds something in use serves only its own group; any other page serves any group.  Asked before
    anything is evicted, so that what fails leaves the cache as it was.  Also notes whether pages are so scarce that
    slots must come from pages that their group keeps anyway.
    """
    pages = a.page.shape[1]
    wanted = 2 * a.group.shape[1]
    for g in range(a.group.shape[1]):
        pages -= a.group[PINNED_PAGES, g]
        wanted += a.group[NEED, g]
    a.scalars[FRUGAL] = 1 if pages < wanted and not a.static_pages[0] else 0
    for g in range(a.group.shape[1]):
        per_page = a.group[SLOTS_PER_PAGE, g]
        if a.static_pages[0]:
            if a.group[NEED, g] > per_page - a.group[PINNED, g]:
                return g
            continue
        lacking = a.group[NEED, g] - (a.group[PINNED_PAGES, g] * per_page - a.group[PINNED, g])
        if lacking > 0:
            pages -= (lacking + per_page - 1) // per_page
            if pages < 0:
                return g
    return -1


@jit
def serve_next(a: Arrays, g: int, p: int) -> None:
    """Let the next slot of group ``g`` come from its page ``p``, which has a free one."""
    _unlist_page(a, g, p)
    _list_page(a, g, p)


@jit
def take_slot(a: Arrays, g: int) -> int:
    """Take a slot without evicting: ALLOCATED, one holder.  Returns the global slot, or -1."""
    if a.group[PART_HEAD, g] < 0 and not _acquire_page(a, g):
        return -1
    p = a.group[PART_HEAD, g]
    s = a.page[PAGE_FREE, p]
    a.page[PAGE_FREE, p] = a.slot[NEXT, s]
    if a.page[PAGE_FREE, p] < 0:
        _unlist_page(a, g, p)
    a.slot[NEXT, s] = -1
    a.page[PAGE_USED, p] += 1
    _pin(a, g, p)
    move(a.slot[STATE], s, ALLOCATED)
    a.slot[GENERATION, s] += 1
    a.slot[PINS, s] = 1
    a.slot[GRADE, s] = 2
    a.slot[OWNER, s] = -1
    a.slot[OWNER_COL, s] = -1
    a.group[USED, g] += 1
    a.counters[g, ALLOCS] += 1
    return s


@jit
def give_slot(a: Arrays, g: int, s: int) -> None:
    """Give back a slot that nobody holds and that is in no list; its page returns when it is empty."""
    move(a.slot[STATE], s, FREE)
    a.slot[GENERATION, s] += 1
    a.slot[OWNER, s] = -1
    a.group[USED, g] -= 1
    p = page_of(a, g, s)
    a.page[PAGE_USED, p] -= 1
    _unpin(a, g, p)
    if a.page[PAGE_FREE, p] < 0:
        _list_page(a, g, p)
    a.slot[NEXT, s] = a.page[PAGE_FREE, p]
    a.page[PAGE_FREE, p] = s
    if a.page[PAGE_USED, p] == 0 and not a.static_pages[0]:
        _unlist_page(a, g, p)
        a.page[PAGE_GROUP, p] = -1
        a.page[PAGE_FREE, p] = -1
        a.free_pages[a.scalars[FREE_PAGES]] = p
        a.scalars[FREE_PAGES] += 1


@jit
def link_lru(a: Arrays, g: int, s: int) -> None:
    """Make a slot evictable: last in the LRU list of its group."""
    tail = a.group[LRU_TAIL, g]
    a.slot[PREV, s] = tail
    a.slot[NEXT, s] = -1
    if tail >= 0:
        a.slot[NEXT, tail] = s
    else:
        a.group[LRU_HEAD, g] = s
    a.group[LRU_TAIL, g] = s
    a.stamp[s] = a.scalars[CLOCK]
    _unpin(a, g, page_of(a, g, s))


@jit
def unlink_lru(a: Arrays, g: int, s: int) -> None:
    """Take a slot out of the LRU list: it is held, or about to be given back."""
    before, after = a.slot[PREV, s], a.slot[NEXT, s]
    if before >= 0:
        a.slot[NEXT, before] = after
    else:
        a.group[LRU_HEAD, g] = after
    if after >= 0:
        a.slot[PREV, after] = before
    else:
        a.group[LRU_TAIL, g] = before
    a.slot[PREV, s] = -1
    a.slot[NEXT, s] = -1
    _pin(a, g, page_of(a, g, s))


@jit
def hold(a: Arrays, g: int, s: int) -> None:
    """Add a holder to a slot that is in use."""
    if a.slot[PINS, s] == 0:
        unlink_lru(a, g, s)
    a.slot[PINS, s] += 1


@jit
def release(a: Arrays, g: int, s: int) -> None:
    """Remove a holder; without holders a private slot is given back and an indexed one becomes evictable."""
    a.slot[PINS, s] -= 1
    if a.slot[PINS, s] == 0:
        if a.slot[OWNER, s] < 0:
            give_slot(a, g, s)
        else:
            link_lru(a, g, s)
