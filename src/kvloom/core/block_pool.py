"""Slots and pages: take, give back, hold, release.

A page moves between groups only when it is empty.  ``PAGE_PINNED`` counts its slots that cannot be evicted on their own
right now; a page whose count is zero can be emptied at once and waits in the steal list of its group, in the
order in which that came about.

Windows and snapshots of segments ("auxiliary" objects) are evictable one by one while nobody holds them: exactly these
are in an auxiliary list of their group, least recently released first; which one is their ``worth``.  Everything else
goes with its node.
"""

from __future__ import annotations

from kvloom.core._jit import inlined, jit
from kvloom.core.arrays import Arrays
from kvloom.core.bitmap import lowest_bit, mark_free, mark_range_free, next_free, take_bits, take_range
from kvloom.core.fields import (
    ALLOCS,
    AUX_HEAD,
    CLOCK,
    EMPTIABLE,
    FREE_PAGES,
    GRADE,
    HEAP_AT,
    KEPT,
    KEPT_HEAD,
    NEXT,
    NTOKENS,
    OWNER,
    PAGE_BASE,
    PAGE_GROUP,
    PAGE_NEXT,
    PAGE_PINNED,
    PAGE_PREV,
    PAGE_SHIFT,
    PAGE_USED,
    PAGES,
    PART_HEAD,
    PINNED,
    PINS,
    PREV,
    REST_HEAD,
    RULE,
    RULE_PREFIX,
    SLOT_BASE,
    SLOTS_PER_PAGE,
    STATIC,
    STEAL_HEAD,
    STEAL_NEXT,
    STEAL_PREV,
    STEAL_TAIL,
    SURPLUS,
    USED,
)
from kvloom.core.lifecycle import ALLOCATED, FREE, move
from kvloom.types import AnyArray


@inlined
def page_of(a: Arrays, g: int, s: int) -> int:
    """Page that holds global slot ``s`` of group ``g``."""
    local, shift = s - a.group[g, SLOT_BASE], a.group[g, PAGE_SHIFT]
    return a.group[g, PAGE_BASE] + (local >> shift if shift >= 0 else local // a.group[g, SLOTS_PER_PAGE])


@inlined
def _list_page(a: Arrays, g: int, p: int) -> None:
    head = a.group[g, PART_HEAD]
    a.page[p, PAGE_PREV] = -1
    a.page[p, PAGE_NEXT] = head
    if head >= 0:
        a.page[head, PAGE_PREV] = p
    a.group[g, PART_HEAD] = p


@inlined
def _unlist_page(a: Arrays, g: int, p: int) -> None:
    before, after = a.page[p, PAGE_PREV], a.page[p, PAGE_NEXT]
    if before >= 0:
        a.page[before, PAGE_NEXT] = after
    else:
        a.group[g, PART_HEAD] = after
    if after >= 0:
        a.page[after, PAGE_PREV] = before


@inlined
def pin_page(a: Arrays, g: int, p: int) -> None:
    """One slot more of page ``p`` that cannot be evicted on its own."""
    if a.page[p, PAGE_PINNED] == 0 and a.page[p, PAGE_USED] > 0:
        before, after = a.page[p, STEAL_PREV], a.page[p, STEAL_NEXT]
        if before >= 0:
            a.page[before, STEAL_NEXT] = after
        else:
            a.group[g, STEAL_HEAD] = after
        if after >= 0:
            a.page[after, STEAL_PREV] = before
        else:
            a.group[g, STEAL_TAIL] = before
        a.scalars[EMPTIABLE] -= 1
    a.page[p, PAGE_PINNED] += 1


@inlined
def unpin_page(a: Arrays, g: int, p: int) -> None:
    """One slot less of page ``p`` that cannot be evicted on its own."""
    a.page[p, PAGE_PINNED] -= 1
    if a.page[p, PAGE_PINNED] == 0 and a.page[p, PAGE_USED] > 0:
        tail = a.group[g, STEAL_TAIL]
        a.page[p, STEAL_PREV] = tail
        a.page[p, STEAL_NEXT] = -1
        if tail >= 0:
            a.page[tail, STEAL_NEXT] = p
        else:
            a.group[g, STEAL_HEAD] = p
        a.group[g, STEAL_TAIL] = p
        a.scalars[EMPTIABLE] += 1
        a.page_stamp[p] = a.scalars[CLOCK]


@jit
def _acquire_page(a: Arrays, g: int) -> bool:
    """Give group ``g`` a free page; False when there is none."""
    if a.scalars[STATIC] == 1 or a.scalars[FREE_PAGES] == 0:
        return False
    a.scalars[FREE_PAGES] -= 1
    p = a.free_pages[a.scalars[FREE_PAGES]]
    per_page = a.group[g, SLOTS_PER_PAGE]
    first = a.group[g, SLOT_BASE] + p * per_page
    mark_range_free(a, first, first + per_page)
    a.page[p, PAGE_GROUP] = g
    a.page[p, PAGE_USED] = 0
    a.page[p, PAGE_PINNED] = 0
    a.group[g, PAGES] += 1
    _list_page(a, g, p)
    return True


@jit
def serve_next(a: Arrays, g: int, p: int) -> None:
    """Let the next slot of group ``g`` come from its page ``p``, which has a free one."""
    _unlist_page(a, g, p)
    _list_page(a, g, p)


@inlined
def first_slot(a: Arrays, g: int, p: int) -> int:
    """The first global slot of page ``p`` of group ``g``."""
    return a.group[g, SLOT_BASE] + (p - a.group[g, PAGE_BASE]) * a.group[g, SLOTS_PER_PAGE]


@inlined
def _front_page(a: Arrays, g: int) -> int:
    """The page that serves the group's next slot, or -1."""
    if a.group[g, PART_HEAD] < 0 and not _acquire_page(a, g):
        return -1
    return a.group[g, PART_HEAD]


@inlined
def _count_taken(a: Arrays, g: int, p: int, most: int) -> int:
    """Count up to ``most`` free slots of page ``p`` as taken; returns how many."""
    free = a.group[g, SLOTS_PER_PAGE] - a.page[p, PAGE_USED]
    count = min(most, free)
    pin_page(a, g, p)
    a.page[p, PAGE_PINNED] += count - 1
    a.page[p, PAGE_USED] += count
    if count == free:
        _unlist_page(a, g, p)
    a.group[g, USED] += count
    a.group[g, PINNED] += count
    a.counters[g, ALLOCS] += count
    return count


@inlined
def _begin_life(a: Arrays, s: int) -> None:
    move(a.slot, s, ALLOCATED)
    a.generation[s] += 1
    a.slot[s, PINS] = 1
    a.slot[s, GRADE] = 2
    a.slot[s, OWNER] = -1


@inlined
def take_slot(a: Arrays, g: int) -> int:
    """Take a slot without evicting: ALLOCATED, one holder.  Returns the global slot, or -1.

    It is the lowest free one of the page that the group opened last.
    """
    p = _front_page(a, g)
    if p < 0:
        return -1
    _count_taken(a, g, p, 1)
    s = next_free(a, first_slot(a, g, p))
    take_bits(a, s >> 6, 1 << (s & 63))
    _begin_life(a, s)
    return s


@inlined
def _take_page(a: Arrays, g: int, locals_: AnyArray, generations: AnyArray, at: int) -> int:
    """Take a free page and all of its slots; returns how many.  What ``take_slots`` comes to, without the lists."""
    a.scalars[FREE_PAGES] -= 1
    p = a.free_pages[a.scalars[FREE_PAGES]]
    count = a.group[g, SLOTS_PER_PAGE]
    first = first_slot(a, g, p)
    a.page[p, PAGE_GROUP] = g
    a.page[p, PAGE_USED] = count
    a.page[p, PAGE_PINNED] = count
    a.group[g, PAGES] += 1
    a.group[g, USED] += count
    a.group[g, PINNED] += count
    a.counters[g, ALLOCS] += count
    for i in range(count):
        _begin_life(a, first + i)
        locals_[at + i] = first + i - a.group[g, SLOT_BASE]
        generations[at + i] = a.generation[first + i]
    return count


@jit
def take_slots(a: Arrays, g: int, most: int, locals_: AnyArray, generations: AnyArray, at: int) -> int:
    """Like ``take_slot``, up to ``most`` times; returns how many.

    Local slots and generations go to ``locals_[at:]`` and ``generations[at:]`` (int32).
    """
    done = 0
    per_page = a.group[g, SLOTS_PER_PAGE]
    if a.group[g, PART_HEAD] < 0 and a.scalars[STATIC] == 0:
        while done + per_page <= most and a.scalars[FREE_PAGES] > 0:
            done += _take_page(a, g, locals_, generations, at + done)
    while done < most:
        p = _front_page(a, g)
        if p < 0:
            break
        count = _count_taken(a, g, p, most - done)
        s = first_slot(a, g, p)
        while count > 0:
            s = next_free(a, s)
            word, taken = s >> 6, 0
            here = a.free_bits[word] & (-1 << (s & 63))
            while here != 0 and count > 0:
                s = (word << 6) + lowest_bit(here)
                taken |= here & -here
                here &= here - 1
                _begin_life(a, s)
                locals_[at + done] = s - a.group[g, SLOT_BASE]
                generations[at + done] = a.generation[s]
                done += 1
                count -= 1
            take_bits(a, word, taken)
    return done


@inlined
def put_back(a: Arrays, g: int, s: int) -> None:
    """``give_slot``, for hot loops."""
    move(a.slot, s, FREE)
    a.generation[s] += 1
    a.slot[s, OWNER] = -1
    a.group[g, USED] -= 1
    p = page_of(a, g, s)
    a.page[p, PAGE_USED] -= 1
    unpin_page(a, g, p)
    if a.page[p, PAGE_USED] == a.group[g, SLOTS_PER_PAGE] - 1:
        _list_page(a, g, p)
    mark_free(a, s)
    if a.page[p, PAGE_USED] == 0 and a.scalars[STATIC] == 0:
        _unlist_page(a, g, p)
        first = first_slot(a, g, p)
        take_range(a, first, first + a.group[g, SLOTS_PER_PAGE])
        a.page[p, PAGE_GROUP] = -1
        a.group[g, PAGES] -= 1
        a.free_pages[a.scalars[FREE_PAGES]] = p
        a.scalars[FREE_PAGES] += 1


@jit
def give_slot(a: Arrays, g: int, s: int) -> None:
    """Give back a slot that nobody holds, that is in no list and counted as pinned; an empty page returns."""
    put_back(a, g, s)


@jit
def give_run(a: Arrays, g: int, first: int, count: int) -> None:
    """``put_back`` for ``count`` slots from ``first`` on that lie on one page, their own records done by the caller."""
    per_page = a.group[g, SLOTS_PER_PAGE]
    p = page_of(a, g, first)
    used = a.page[p, PAGE_USED] - count
    a.group[g, USED] -= count
    a.page[p, PAGE_USED] = used
    a.page[p, PAGE_PINNED] -= count - 1
    unpin_page(a, g, p)
    whole = used == 0 and a.scalars[STATIC] == 0
    if used + count == per_page:
        if not whole:
            _list_page(a, g, p)
    elif whole:
        _unlist_page(a, g, p)
        start = first_slot(a, g, p)
        take_range(a, start, start + per_page)
    if whole:
        a.page[p, PAGE_GROUP] = -1
        a.group[g, PAGES] -= 1
        a.free_pages[a.scalars[FREE_PAGES]] = p
        a.scalars[FREE_PAGES] += 1
    else:
        mark_range_free(a, first, first + count)


@inlined
def is_auxiliary(a: Arrays, g: int, s: int) -> bool:
    """Whether the object in ``s`` may be evicted without its node: a window or snapshot of a whole segment."""
    n = a.slot[s, OWNER]
    return a.group[g, RULE] != RULE_PREFIX and n >= 0 and a.trunk[n, NTOKENS] == a.tokens.shape[1]


@inlined
def head_of(worth: int) -> int:
    """Column of the group that has the head of a list of auxiliary objects; its tail comes next."""
    return AUX_HEAD if worth == SURPLUS else KEPT_HEAD if worth == KEPT else REST_HEAD


@inlined
def link_auxiliary(a: Arrays, g: int, s: int) -> None:
    """Make an auxiliary object evictable: last in its list of the group."""
    head = head_of(a.worth[s])
    tail = a.group[g, head + 1]
    a.slot[s, PREV] = tail
    a.slot[s, NEXT] = -1
    if tail >= 0:
        a.slot[tail, NEXT] = s
    else:
        a.group[g, head] = s
    a.group[g, head + 1] = s
    a.slot_stamp[s] = a.scalars[CLOCK]
    unpin_page(a, g, page_of(a, g, s))


@inlined
def unlink_auxiliary(a: Arrays, g: int, s: int) -> None:
    """Take an auxiliary object out of its list: it is held, or about to go."""
    head = head_of(a.worth[s])
    before, after = a.slot[s, PREV], a.slot[s, NEXT]
    if before >= 0:
        a.slot[before, NEXT] = after
    else:
        a.group[g, head] = after
    if after >= 0:
        a.slot[after, PREV] = before
    else:
        a.group[g, head + 1] = before
    pin_page(a, g, page_of(a, g, s))


@inlined
def set_worth(a: Arrays, g: int, s: int, worth: int) -> None:
    """Move the auxiliary object in ``s`` to the end of a list."""
    if a.slot[s, PINS] > 0:
        a.worth[s] = worth
    else:
        unlink_auxiliary(a, g, s)
        a.worth[s] = worth
        link_auxiliary(a, g, s)


@inlined
def _goes_with_leaf(a: Arrays, s: int) -> bool:
    """Whether the object in ``s`` belongs to a leaf that may be evicted now."""
    n = a.slot[s, OWNER]
    return n >= 0 and a.node[n, HEAP_AT] >= 0


@inlined
def hold(a: Arrays, g: int, s: int) -> None:
    """Add a holder to a slot in use."""
    if a.slot[s, PINS] == 0:
        a.group[g, PINNED] += 1
        if is_auxiliary(a, g, s):
            unlink_auxiliary(a, g, s)
        elif _goes_with_leaf(a, s):
            pin_page(a, g, page_of(a, g, s))
    a.slot[s, PINS] += 1


@inlined
def release(a: Arrays, g: int, s: int) -> None:
    """Remove a holder; without holders a private slot is given back, and an auxiliary object becomes evictable."""
    a.slot[s, PINS] -= 1
    if a.slot[s, PINS] == 0:
        a.group[g, PINNED] -= 1
        if a.slot[s, OWNER] < 0:
            give_slot(a, g, s)
        elif is_auxiliary(a, g, s):
            link_auxiliary(a, g, s)
        elif _goes_with_leaf(a, s):
            unpin_page(a, g, page_of(a, g, s))
