"""Slots and pages: take, give back, pin, release, and the LRU list of what may be evicted.

A slot is *evictable* when it is COMMITTED and nobody holds it; exactly these slots are in the LRU list
of their group, least recently released first.  A page moves between groups only when it is empty.
Sequences release their blocks from the deepest to the shallowest, so the head of a prefix group's
list is a leaf of the index unless two sequences raced.
"""

from __future__ import annotations

from kvloom.core._jit import jit
from kvloom.core.arrays import ALLOCS, CLOCK, FREE_PAGES, Arrays
from kvloom.core.lifecycle import ALLOCATED, FREE, move


@jit
def page_of(a: Arrays, g: int, s: int) -> int:
    """Page that holds global slot ``s`` of group ``g``."""
    return a.page_base[g] + (s - a.slot_base[g]) // a.slots_per_page[g]


@jit
def _list_page(a: Arrays, g: int, p: int) -> None:
    head = a.part_head[g]
    a.page_prev[p] = -1
    a.page_next[p] = head
    if head >= 0:
        a.page_prev[head] = p
    a.part_head[g] = p


@jit
def _unlist_page(a: Arrays, g: int, p: int) -> None:
    before, after = a.page_prev[p], a.page_next[p]
    if before >= 0:
        a.page_next[before] = after
    else:
        a.part_head[g] = after
    if after >= 0:
        a.page_prev[after] = before
    a.page_prev[p] = -1
    a.page_next[p] = -1


@jit
def _acquire_page(a: Arrays, g: int) -> bool:
    """Give group ``g`` a free page; False when there is none."""
    if a.static_pages[0] or a.scalars[FREE_PAGES] == 0:
        return False
    a.scalars[FREE_PAGES] -= 1
    p = a.free_pages[a.scalars[FREE_PAGES]]
    per_page = a.slots_per_page[g]
    first = a.slot_base[g] + p * per_page
    for s in range(first, first + per_page - 1):
        a.next[s] = s + 1
    a.next[first + per_page - 1] = -1
    a.page_group[p] = g
    a.page_free[p] = first
    _list_page(a, g, p)
    return True


@jit
def take_slot(a: Arrays, g: int) -> int:
    """Take a slot without evicting: ALLOCATED, one holder.  Returns the global slot, or -1."""
    if a.part_head[g] < 0 and not _acquire_page(a, g):
        return -1
    p = a.part_head[g]
    s = a.page_free[p]
    a.page_free[p] = a.next[s]
    if a.page_free[p] < 0:
        _unlist_page(a, g, p)
    a.next[s] = -1
    a.page_used[p] += 1
    a.page_pinned[p] += 1
    move(a.state, s, ALLOCATED)
    a.generation[s] += 1
    a.pins[s] = 1
    a.grade[s] = 2
    a.owner[s] = -1
    a.owner_col[s] = -1
    a.used[g] += 1
    a.counters[g, ALLOCS] += 1
    return s


@jit
def give_slot(a: Arrays, g: int, s: int) -> None:
    """Give back a slot that nobody holds and that is in no list; its page returns when it is empty."""
    move(a.state, s, FREE)
    a.generation[s] += 1
    a.owner[s] = -1
    a.used[g] -= 1
    p = page_of(a, g, s)
    a.page_used[p] -= 1
    a.page_pinned[p] -= 1
    if a.page_free[p] < 0:
        _list_page(a, g, p)
    a.next[s] = a.page_free[p]
    a.page_free[p] = s
    if a.page_used[p] == 0 and not a.static_pages[0]:
        _unlist_page(a, g, p)
        a.page_group[p] = -1
        a.page_free[p] = -1
        a.free_pages[a.scalars[FREE_PAGES]] = p
        a.scalars[FREE_PAGES] += 1


@jit
def link_lru(a: Arrays, g: int, s: int) -> None:
    """Make a slot evictable: last in the LRU list of its group."""
    tail = a.lru_tail[g]
    a.prev[s] = tail
    a.next[s] = -1
    if tail >= 0:
        a.next[tail] = s
    else:
        a.lru_head[g] = s
    a.lru_tail[g] = s
    a.stamp[s] = a.scalars[CLOCK]
    a.page_pinned[page_of(a, g, s)] -= 1


@jit
def unlink_lru(a: Arrays, g: int, s: int) -> None:
    """Take a slot out of the LRU list: it is held, or about to be given back."""
    before, after = a.prev[s], a.next[s]
    if before >= 0:
        a.next[before] = after
    else:
        a.lru_head[g] = after
    if after >= 0:
        a.prev[after] = before
    else:
        a.lru_tail[g] = before
    a.prev[s] = -1
    a.next[s] = -1
    a.page_pinned[page_of(a, g, s)] += 1


@jit
def hold(a: Arrays, g: int, s: int) -> None:
    """Add a holder to a slot that is in use."""
    if a.pins[s] == 0:
        unlink_lru(a, g, s)
    a.pins[s] += 1


@jit
def release(a: Arrays, g: int, s: int) -> None:
    """Remove a holder; without holders a private slot is given back and an indexed one becomes evictable."""
    a.pins[s] -= 1
    if a.pins[s] == 0:
        if a.owner[s] < 0:
            give_slot(a, g, s)
        else:
            link_lru(a, g, s)
