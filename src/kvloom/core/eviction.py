"""Making room: the oldest of what can go, group-complete, page by page between groups.

What can go is a whole leaf of the index (all groups of a segment, or a checkpoint), or one window block or snapshot of
a segment.  A prefix block never goes before what needs it, since only leaves go.
"""

from __future__ import annotations

from kvloom.core._jit import inlined, jit
from kvloom.core.arrays import Arrays
from kvloom.core.block_pool import first_slot, head_of, is_auxiliary, page_of, serve_next, take_slot, take_slots
from kvloom.core.fields import (
    FREE_NODES,
    FRUGAL,
    GHOST_HEAD,
    HEAP_SIZE,
    KEPT,
    OWNER,
    PAGE_BASE,
    PAGE_GROUP,
    PAGE_HELD,
    PAGE_NEXT,
    PAGE_USED,
    PAGES,
    PART_HEAD,
    QUEUE_SIZE,
    REST,
    REST_HEAD,
    RULES,
    SLOT_BASE,
    SLOTS_PER_PAGE,
    STATE,
    STATIC,
    STEAL_HEAD,
    STEAL_NEXT,
    SURPLUS,
    USED,
)
from kvloom.core.leaf_heap import first_stranded, reconsider, strand_checkpoints
from kvloom.core.lifecycle import COMMITTED
from kvloom.core.objects import forget_object
from kvloom.core.paths import NEVER, evict_leaf, evict_path, room_of
from kvloom.core.policies import BY_CLASSES, STRANDED
from kvloom.core.victim import victim
from kvloom.types import SLOT_EVICTED, AnyArray

LOOKED_AT = 64
NOTHING, LEAF, AUXILIARY, PAGE = range(4)


@jit
def evict_auxiliary(a: Arrays, g: int, s: int) -> None:
    """Evict the auxiliary object in ``s``; what else only its boundary needs is surplus from now on."""
    n, worth = a.slot[s, OWNER], a.worth[s]
    forget_object(a, g, s, SLOT_EVICTED)
    if a.policy[RULES] == BY_CLASSES:
        if worth == SURPLUS:
            strand_checkpoints(a, n)
        else:
            reconsider(a, n)


@jit
def _empty_page(a: Arrays, g: int, p: int) -> None:
    """Evict everything on a page whose objects can all go now."""
    per_page = a.group[g, SLOTS_PER_PAGE]
    first = a.group[g, SLOT_BASE] + (p - a.group[g, PAGE_BASE]) * per_page
    for s in range(first, first + per_page):
        if a.slot[s, STATE] == COMMITTED and a.slot[s, OWNER] >= 0:
            if is_auxiliary(a, g, s):
                evict_auxiliary(a, g, s)
            else:
                evict_leaf(a, a.slot[s, OWNER])


@jit
def _only_rests(a: Arrays, g: int, p: int) -> bool:
    """Whether page ``p`` of group ``g``, which can be emptied now, has nothing on it but rests."""
    first = first_slot(a, g, p)
    for s in range(first, first + a.group[g, SLOTS_PER_PAGE]):
        if a.slot[s, STATE] == COMMITTED and (a.worth[s] == KEPT or not is_auxiliary(a, g, s)):
            return False
    return True


@jit
def _oldest_head(a: Arrays, worth: int) -> int:
    """The group with the oldest auxiliary object of this worth, or -1."""
    head = head_of(worth)
    oldest = -1
    for g in range(a.group.shape[0]):
        s = a.group[g, head]
        if s >= 0 and (oldest < 0 or a.slot_stamp[s] < a.slot_stamp[a.group[oldest, head]]):
            oldest = g
    return oldest


@jit
def _evict_listed(a: Arrays, g: int, worth: int) -> bool:
    """Evict the oldest auxiliary object of this worth, of group ``g`` (-1: any) where it has some."""
    head = head_of(worth)
    h = g
    if g < 0 or a.group[g, head] < 0:
        h = _oldest_head(a, worth) if g < 0 or a.scalars[STATIC] == 0 else -1
    if h >= 0:
        evict_auxiliary(a, h, a.group[h, head])
    return h >= 0


@jit
def _evacuate(a: Arrays, g: int) -> bool:
    """Empty a page that only rests are on, at most half of it used, of another group that uses half of its pages."""
    for h in range(a.group.shape[0]):
        per_page = a.group[h, SLOTS_PER_PAGE]
        spare = a.group[h, PAGES] * per_page - a.group[h, USED]
        if h == g or a.group[h, REST_HEAD] < 0 or spare < max(2 * per_page, a.group[h, USED]):
            continue
        best, least = -1, per_page // 2 + 1
        p, looked = a.group[h, STEAL_HEAD], 0
        while p >= 0 and looked < LOOKED_AT:
            if a.page[p, PAGE_USED] < least and _only_rests(a, h, p):
                best, least = p, a.page[p, PAGE_USED]
            p = a.page[p, STEAL_NEXT]
            looked += 1
        if best >= 0:
            _empty_page(a, h, best)
            return True
    return False


@jit
def _evict_useless(a: Arrays, g: int, want: int, most: int) -> bool:
    """Evict what ``cost`` gives first: stranded leaves, surplus, rests.  Of group ``g`` (-1: any) where it has some.

    ``want`` and ``most``: see ``evict_path``.  False when there is nothing that can help the group.
    """
    stranded = first_stranded(a)
    if stranded >= 0:
        evict_path(a, stranded, g, want, most)
        return True
    if _evict_listed(a, g, SURPLUS):
        while g >= 0 and a.policy[QUEUE_SIZE + STRANDED] == 0 and room_of(a, g) < want:
            if not _evict_listed(a, g, SURPLUS):
                break
        return True
    return _evict_listed(a, g, REST) if g >= 0 and a.scalars[STATIC] == 1 else _evacuate(a, g)


@jit
def evict_any(a: Arrays, most: int) -> bool:
    """Evict the next thing of any group, or up to ``most`` leaves of a path; False when nothing can go."""
    if a.policy[RULES] == BY_CLASSES and _evict_useless(a, -1, 0, most):
        return True
    leaf, when = victim(a) if a.scalars[HEAP_SIZE] > 0 else (-1, 0)
    for worth in (SURPLUS, KEPT):
        g = _oldest_head(a, worth)
        if g >= 0 and (leaf < 0 or a.slot_stamp[a.group[g, head_of(worth)]] <= when):
            evict_auxiliary(a, g, a.group[g, head_of(worth)])
            return True
    if leaf >= 0:
        evict_path(a, leaf, -1, 0, most)
    return leaf >= 0 or _evict_listed(a, -1, REST)


@jit
def make_room(a: Arrays, g: int, want: int) -> bool:
    """Evict the oldest thing that can give group ``g`` a slot, sooner or later; False when nothing can go.

    More may go that would go next anyway, until the group has room for ``want`` slots.

    Candidates: the leaf that the policy picks, the group's own oldest auxiliary object, and the oldest page of another
    group that can be emptied at once.  Under ``cost`` what is useless goes first, and pages only without a leaf.
    """
    learns = a.policy[RULES] == BY_CLASSES
    if learns and _evict_useless(a, g, want, NEVER):
        return True
    what, which, when = NOTHING, -1, 0
    if a.scalars[HEAP_SIZE] > 0:
        what = LEAF
        which, when = victim(a)
    own = a.group[g, head_of(KEPT if learns else SURPLUS)]
    if own >= 0 and (what == NOTHING or a.slot_stamp[own] <= when):
        what, which, when = AUXILIARY, own, a.slot_stamp[own]
    if a.scalars[STATIC] == 0 and (what == NOTHING or not learns):
        for h in range(a.group.shape[0]):
            p = a.group[h, STEAL_HEAD]
            if h != g and p >= 0 and (what == NOTHING or a.page_stamp[p] < when):
                what, which, when = PAGE + h, p, a.page_stamp[p]
    if what == NOTHING:
        return _evict_listed(a, g, REST)
    if what == LEAF:
        evict_path(a, which, g, want, NEVER)
    elif what == AUXILIARY:
        evict_auxiliary(a, g, which)
    else:
        _empty_page(a, what - PAGE, which)
    return True


@jit
def make_node_room(a: Arrays) -> bool:
    """Evict leaves until the index has a place or a ghost to recycle; False when every node is in use."""
    while a.scalars[FREE_NODES] == 0 and a.scalars[GHOST_HEAD] < 0:
        if a.scalars[HEAP_SIZE] == 0:
            return False
        evict_leaf(a, victim(a)[0])
    return True


@jit
def _prefer_busy_page(a: Arrays, g: int) -> None:
    """Let the next slot of ``g`` come from a page that ``g`` keeps anyway, whatever has to go for that."""
    per_page = a.group[g, SLOTS_PER_PAGE]
    for p in range(a.page.shape[0]):
        if a.page[p, PAGE_GROUP] == g and 0 < a.page[p, PAGE_HELD] < per_page:
            while a.page[p, PAGE_USED] == per_page and make_room(a, g, 1):
                pass
            if a.page[p, PAGE_USED] < per_page:
                serve_next(a, g, p)
            return


@jit
def _take_frugally(a: Arrays, g: int) -> int:
    _prefer_busy_page(a, g)
    s = take_slot(a, g)
    while s < 0:
        if not make_room(a, g, 1):
            return -1
        s = take_slot(a, g)
    a.page[page_of(a, g, s), PAGE_HELD] += 1
    return s


@jit
def make_room_for(a: Arrays, g: int, count: int) -> None:
    """Evict until group ``g`` has room for ``count`` slots, or nothing can go."""
    while room_of(a, g) < count and make_room(a, g, count):
        pass


@inlined
def take_or_evict(a: Arrays, g: int) -> int:
    """Take a slot of group ``g``, evicting as needed; the global slot, or -1 when everything is in use."""
    if a.scalars[FRUGAL] == 1:
        return _take_frugally(a, g)
    s = take_slot(a, g)
    while s < 0:
        if not make_room(a, g, 1):
            return -1
        s = take_slot(a, g)
    return s


@jit
def _lasting_page(a: Arrays, g: int) -> int:
    """Of the pages of group ``g`` that have room, the one with most on it that stays for long, or -1."""
    best, most = -1, 0
    p, looked = a.group[g, PART_HEAD], 0
    while p >= 0 and looked < LOOKED_AT:
        count, first = 0, first_slot(a, g, p)
        for s in range(first, first + a.group[g, SLOTS_PER_PAGE]):
            if a.slot[s, STATE] == COMMITTED and (a.worth[s] != SURPLUS or not is_auxiliary(a, g, s)):
                count += 1
        if count > most:
            best, most = p, count
        p = a.page[p, PAGE_NEXT]
        looked += 1
    return best


@jit
def take_lasting(a: Arrays, g: int) -> int:
    """``take_or_evict`` for what will stay for long: under ``cost`` beside other such things.

    Else every page would soon have one of them, and none could go to another group.
    """
    if a.policy[RULES] == BY_CLASSES and a.scalars[STATIC] == 0 and a.scalars[FRUGAL] == 0:
        p = _lasting_page(a, g)
        if p >= 0:
            serve_next(a, g, p)
    return take_or_evict(a, g)


@jit
def take_many(a: Arrays, g: int, most: int, locals_: AnyArray, generations: AnyArray, at: int) -> int:
    """Take up to ``most`` slots, for which the caller made room, into ``locals_[at:]`` and ``generations[at:]``.

    Returns how many; the caller asks again until it has enough or gets none.
    """
    if a.scalars[FRUGAL] == 1:
        s = _take_frugally(a, g)
        if s < 0:
            return 0
        locals_[at] = s - a.group[g, SLOT_BASE]
        generations[at] = a.generation[s]
        return 1
    return take_slots(a, g, most, locals_, generations, at)
