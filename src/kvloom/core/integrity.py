"""Recomputing the books of the core from scratch.  Slow, complete, and shared by every stateful test."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from kvloom.core.arrays import Arrays
from kvloom.core.block_pool import first_slot, is_auxiliary, page_of
from kvloom.core.child_table import find_child
from kvloom.core.fields import (
    ANCHORS,
    AUX_HEAD,
    BIT_BASE,
    BIT_LEVELS,
    COL_BASE,
    COLUMNS,
    DEPTH,
    EMPTIABLE,
    FIRST_CHECKPOINT,
    FIRST_CHILD,
    FREE_NODES,
    FREE_PAGES,
    GHOST_HEAD,
    GHOST_NEXT,
    GHOST_PREV,
    GRADE,
    GRAVE_HEAD,
    HEAP_AT,
    HEAP_SIZE,
    KEPT_HEAD,
    LEASED,
    NEXT,
    NODES_USED,
    NTOKENS,
    OWNER,
    OWNER_COL,
    PAGE_GROUP,
    PAGE_NEXT,
    PAGE_PINNED,
    PAGE_USED,
    PAGES,
    PARENT,
    PART_HEAD,
    PINNED,
    PINS,
    PREV,
    QUEUE,
    QUEUE_SIZE,
    RESIDENT,
    REST_HEAD,
    RULE,
    RULE_PREFIX,
    SIBLING_NEXT,
    SLOT_BASE,
    SLOTS_PER_PAGE,
    SPINE,
    STATE,
    STEAL_HEAD,
    STEAL_NEXT,
    USED,
    YOUNG_AT,
)
from kvloom.core.leaf_heap import older
from kvloom.core.lifecycle import ALLOCATED, COMMITTED, FREE, QUARANTINED, READY
from kvloom.core.page_table import FIRST, LAST, SHARED, Rows, place, slot_at
from kvloom.core.policies import HEAPS
from kvloom.core.prefix_index import OUT_OF_LIST
from kvloom.errors import IntegrityError
from kvloom.plan import ArenaGeometry
from kvloom.types import AnyArray


def check_books(
    a: Arrays,
    r: Rows,
    geometry: ArenaGeometry,
    roots: Sequence[int],
    running: Mapping[int, int],
    in_flight: tuple[Sequence[tuple[int, int]], Sequence[int]],
) -> None:
    """Raise IntegrityError listing everything that disagrees.

    ``roots``: nodes of the namespaces; ``running``: row -> deepest node of the sequence in it; ``in_flight``: the
    (group, global slot) holds and the nodes of the plans that are not completed.
    """
    wrong: list[str] = []
    _check_holds(a, r, running, in_flight[0], wrong)
    for g in range(len(a.group)):
        _check_slots(a, geometry, g, wrong)
        _check_free_slots(a, g, wrong)
    _check_bitmap(a, wrong)
    _check_pages(a, geometry, wrong)
    _check_nodes(a, roots, wrong)
    _check_tree(a, [*running.values(), *in_flight[1]], wrong)
    _check_leaves(a, wrong)
    if wrong:
        raise IntegrityError("; ".join(wrong[:20]))


def _chain(links: AnyArray, head: int, most: int) -> list[int]:
    found: list[int] = []
    while head >= 0 and len(found) <= most:
        found.append(int(head))
        head = int(links[head])
    return found


def _slots_of(a: Arrays, g: int) -> int:
    end = a.group[g + 1, SLOT_BASE] if g + 1 < len(a.group) else len(a.slot)
    return int(end - a.group[g, SLOT_BASE])


def _span(a: Arrays, g: int, geometry: ArenaGeometry) -> slice:
    first = int(a.group[g, SLOT_BASE])
    return slice(first, first + int(geometry.num_slots[g]))


def _check_holds(
    a: Arrays, r: Rows, running: Mapping[int, int], holds: Sequence[tuple[int, int]], wrong: list[str]
) -> None:
    pins = np.zeros(len(a.slot), dtype=np.int64)
    for row in running:
        for g in range(len(a.group)):
            first, last, shared = (int(v) for v in r.span[row, g, [FIRST, LAST, SHARED]])
            for block in range(first, last):
                s = int(slot_at(a, r, row, g, block))
                pins[s] += block >= shared
                if a.generation[s] != r.generation[row, place(r, g, block)]:
                    wrong.append(f"row {row} group {g} block {block} is stale")
                if a.slot[s, STATE] == FREE:
                    wrong.append(f"row {row} group {g} block {block} names a free slot")
    for _, slot in holds:
        pins[slot] += 1
    for slot in _chain(a.slot[:, NEXT], int(a.scalars[GRAVE_HEAD]), len(a.slot)):
        pins[slot] += 1
    for g in range(len(a.group)):
        first, shared = int(a.group[g, SLOT_BASE]), sum(int(r.span[row, g, SHARED]) for row in running)
        pinned = int(np.count_nonzero(pins[first : first + _slots_of(a, g)]))
        if (pinned, shared) != (a.group[g, PINNED], a.group[g, LEASED]):
            wrong.append(f"group {g}: held slots {a.group[g, [PINNED, LEASED]]} on record, {pinned, shared} in fact")
    used = a.slot[:, STATE] != FREE
    wrong += [
        f"slot {s} has {a.slot[s, PINS]} holders on record, {pins[s]} in fact"
        for s in np.flatnonzero((pins != a.slot[:, PINS]) & used).tolist()
    ]


def _check_slots(a: Arrays, geometry: ArenaGeometry, g: int, wrong: list[str]) -> None:
    span = _span(a, g, geometry)
    listed: list[int] = []
    for worth, head in enumerate((AUX_HEAD, KEPT_HEAD, REST_HEAD)):
        part = _chain(a.slot[:, NEXT], int(a.group[g, head]), span.stop - span.start)
        backward = _chain(a.slot[:, PREV], int(a.group[g, head + 1]), span.stop - span.start)
        if part != backward[::-1]:
            wrong.append(f"group {g}: an auxiliary list differs forwards and backwards")
        if (np.diff(a.slot_stamp[part]) < 0).any():
            wrong.append(f"group {g}: an auxiliary list is not in order of release")
        if (a.worth[part] != worth).any():
            wrong.append(f"group {g}: an auxiliary object is in the wrong list")
        listed += part
    state, pins, owner = a.slot[span, STATE], a.slot[span, PINS], a.slot[span, OWNER]
    loose = np.flatnonzero((state == COMMITTED) & (pins == 0)) + span.start
    evictable = {s for s in loose.tolist() if is_auxiliary(a, g, s)}
    if evictable != set(listed) or len(evictable) != len(listed):
        wrong.append(f"group {g}: auxiliary list differs from what is evictable by {evictable ^ set(listed)}")
    if ((owner >= 0) & (state != FREE) != (state == COMMITTED)).any():
        wrong.append(f"group {g}: an indexed slot is not COMMITTED or the other way round")
    if ((pins == 0) & np.isin(state, (ALLOCATED, READY, QUARANTINED))).any():
        wrong.append(f"group {g}: a private slot has no holder (leak)")
    if int(np.count_nonzero(state != FREE)) != int(a.group[g, USED]):
        wrong.append(f"group {g}: {a.group[g, USED]} slots in use on record, {np.count_nonzero(state != FREE)} in fact")


def _check_free_slots(a: Arrays, g: int, wrong: list[str]) -> None:
    per_page = int(a.group[g, SLOTS_PER_PAGE])
    listed = set(_chain(a.page[:, PAGE_NEXT], int(a.group[g, PART_HEAD]), len(a.page)))
    mine = np.flatnonzero(a.page[:, PAGE_GROUP] == g).tolist()
    partly = {p for p in mine if a.page[p, PAGE_USED] < per_page}
    if listed != partly:
        wrong.append(f"group {g}: list of pages with free slots is wrong: {listed} against {partly}")
    steal = _chain(a.page[:, STEAL_NEXT], int(a.group[g, STEAL_HEAD]), len(a.page))
    if set(steal) != {p for p in mine if a.page[p, PAGE_PINNED] == 0 and a.page[p, PAGE_USED] > 0}:
        wrong.append(f"group {g}: the list of pages that can be emptied is wrong")
    if (np.diff(a.page_stamp[steal]) < 0).any():
        wrong.append(f"group {g}: the list of pages that can be emptied is out of order")


def _check_bitmap(a: Arrays, wrong: list[str]) -> None:
    below = np.zeros(len(a.slot), dtype=np.bool_)
    for g in range(len(a.group)):
        for p in np.flatnonzero(a.page[:, PAGE_GROUP] == g).tolist():
            first = int(first_slot(a, g, p))
            span = slice(first, first + int(a.group[g, SLOTS_PER_PAGE]))
            below[span] = a.slot[span, STATE] == FREE
    for level in range(int(a.scalars[BIT_LEVELS])):
        first, count = int(a.scalars[BIT_BASE + level]), -(-len(below) // 64)
        words = a.free_bits[first : first + count]
        bits = np.unpackbits(words.view(np.uint8), bitorder="little")[: len(below)].astype(np.bool_)
        if (bits != below).any():
            wrong.append(f"level {level} of the bitmap of free slots is wrong at {np.flatnonzero(bits != below)[:5]}")
        below = words != 0


def _check_pages(a: Arrays, geometry: ArenaGeometry, wrong: list[str]) -> None:
    used = np.zeros(len(a.page), dtype=np.int64)
    pinned = np.zeros(len(a.page), dtype=np.int64)
    for g in range(len(a.group)):
        span = _span(a, g, geometry)
        for s in (np.flatnonzero(a.slot[span, STATE] != FREE) + span.start).tolist():
            p = int(page_of(a, g, s))
            used[p] += 1
            n = int(a.slot[s, OWNER])
            loose = n >= 0 and a.slot[s, PINS] == 0 and (is_auxiliary(a, g, s) or a.node[n, HEAP_AT] >= 0)
            pinned[p] += not loose
            if a.page[p, PAGE_GROUP] != g:
                wrong.append(f"slot {s} of group {g} lies on page {p} of group {a.page[p, PAGE_GROUP]}")
    taken = a.page[:, PAGE_GROUP] >= 0
    if (used[taken] != a.page[taken, PAGE_USED]).any() or used[~taken].any():
        wrong.append("page use counts are wrong")
    if (pinned[taken] != a.page[taken, PAGE_PINNED]).any():
        wrong.append("page pin counts are wrong")
    for g in range(len(a.group)):
        if np.count_nonzero(a.page[:, PAGE_GROUP] == g) != a.group[g, PAGES]:
            wrong.append(f"group {g}: count of pages is wrong")
    if np.count_nonzero(taken & (pinned == 0) & (used > 0)) != a.scalars[EMPTIABLE]:
        wrong.append("count of pages that can be emptied is wrong")
    free = set(a.free_pages[: int(a.scalars[FREE_PAGES])].tolist())
    if free != set(np.flatnonzero(~taken).tolist()):
        wrong.append("free page stack is wrong")
    if int((a.group[:, USED] * geometry.slot_bytes).sum()) > geometry.arena_bytes:
        wrong.append("bytes in use exceed the arena")


def _nodes(a: Arrays) -> list[int]:
    found: list[int] = np.flatnonzero(a.trunk[:, NTOKENS] >= 0).tolist()
    return found


def _check_nodes(a: Arrays, roots: Sequence[int], wrong: list[str]) -> None:
    nodes = _nodes(a)
    if len(nodes) != int(a.scalars[NODES_USED]) or len(nodes) + int(a.scalars[FREE_NODES]) != len(a.node):
        wrong.append("node counts are wrong")
    if {n for n in nodes if a.trunk[n, PARENT] < 0} != set(roots):
        wrong.append("roots of the index and the namespaces differ")
    named = 0
    for n in nodes:
        resident, spine = 0, 2
        for g in range(len(a.group)):
            first = int(a.group[g, COL_BASE])
            for c in range(first, first + int(a.group[g, COLUMNS])):
                local = int(a.columns[n, c])
                s = int(a.group[g, SLOT_BASE]) + local
                if a.group[g, RULE] == RULE_PREFIX:
                    spine = min(spine, int(a.slot[s, GRADE]) if local >= 0 else -1)
                resident += local >= 0
                if local >= 0 and (a.slot[s, OWNER] != n or a.slot[s, OWNER_COL] != c):
                    wrong.append(f"node {n} column {c} and slot {s} disagree")
        if resident != a.node[n, RESIDENT]:
            wrong.append(f"node {n}: resident count is wrong")
        if a.trunk[n, NTOKENS] == a.tokens.shape[1] and spine != a.trunk[n, SPINE]:
            wrong.append(f"node {n}: spine grade {a.trunk[n, SPINE]} on record, {spine} in fact")
        named += resident
    if named != int(np.count_nonzero((a.slot[:, OWNER] >= 0) & (a.slot[:, STATE] != FREE))):
        wrong.append("a slot names an owner that does not name it")


def _check_tree(a: Arrays, held: Sequence[int], wrong: list[str]) -> None:
    segment = a.tokens.shape[1]
    nodes = _nodes(a)
    anchors = np.zeros(len(a.node), dtype=np.int64)
    for n in held:
        anchors[n] += 1
    children: dict[int, set[int]] = {}
    # a node anchors its parent while it is alive itself: count from the leaves up
    for n in sorted(nodes, key=lambda n: (-a.node[n, DEPTH], a.trunk[n, NTOKENS] == segment)):
        parent = int(a.trunk[n, PARENT])
        if parent >= 0:
            children.setdefault(parent, set()).add(n)
            anchors[parent] += bool(anchors[n] or a.node[n, RESIDENT])
    for n in nodes:
        if anchors[n] != a.node[n, ANCHORS]:
            wrong.append(f"node {n}: {a.node[n, ANCHORS]} anchors on record, {anchors[n]} in fact")
        linked = _chain(a.node[:, SIBLING_NEXT], int(a.trunk[n, FIRST_CHILD]), len(nodes))
        linked += _chain(a.node[:, SIBLING_NEXT], int(a.node[n, FIRST_CHECKPOINT]), len(nodes))
        if set(linked) != children.get(n, set()) or len(linked) != len(set(linked)):
            wrong.append(f"node {n}: child lists are wrong")
        if a.trunk[n, NTOKENS] == segment and find_child(a, int(a.trunk[n, PARENT]), a.tokens[n], 0) != n:
            wrong.append(f"node {n} is not found by its own tokens")
    in_table = sorted(a.table[a.table >= 0].tolist())
    hashed = [c for n in nodes for c in _chain(a.node[:, SIBLING_NEXT], int(a.trunk[n, FIRST_CHILD]), len(nodes))[1:]]
    hashed += [n for n in nodes if 0 < a.trunk[n, NTOKENS] < segment]
    if in_table != sorted(hashed):
        wrong.append("the hash table does not hold exactly the checkpoints and the second and later children")


def _check_leaves(a: Arrays, wrong: list[str]) -> None:
    nodes = _nodes(a)
    queued: list[int] = []
    for row in range(len(a.heap)):
        q = row if row < HEAPS else row - HEAPS
        heap = a.heap[row, : int(a.policy[QUEUE_SIZE + q])].tolist()
        places = a.node[heap, HEAP_AT] if row < HEAPS else a.heat[heap, YOUNG_AT]
        if places.tolist() != list(range(len(heap))):
            wrong.append(f"heap {row}: a position is wrong")
        upward = [(heap[i], heap[(i - 1) // 2]) for i in range(1, len(heap))]
        if any(older(a, n, m) if row < HEAPS else older(a, m, n) for n, m in upward):
            wrong.append(f"heap {row} is out of order")
        if len(a.heap) > 1 and any(a.heat[n, QUEUE] != q for n in heap):
            wrong.append(f"heap {row} has a leaf of another queue")
        queued += heap if row < HEAPS else []
    leaves = {n for n in nodes if a.node[n, ANCHORS] == 0 and a.node[n, RESIDENT] > 0}
    if set(queued) != leaves or len(queued) != len(leaves) or len(queued) != a.scalars[HEAP_SIZE]:
        wrong.append("the queues do not hold exactly the evictable leaves")
    ghosts = _chain(a.node[:, GHOST_NEXT], int(a.scalars[GHOST_HEAD]), len(nodes))
    dead = {n for n in nodes if a.trunk[n, PARENT] >= 0 and a.node[n, ANCHORS] == 0 and a.node[n, RESIDENT] == 0}
    if set(ghosts) != dead or any((a.node[n, GHOST_PREV] == OUT_OF_LIST) != (n not in dead) for n in nodes):
        wrong.append("the ghost list is wrong")
    position = {n: i for i, n in enumerate(ghosts)}
    for n in ghosts:
        if position.get(int(a.trunk[n, PARENT]), len(ghosts)) < position[n]:
            wrong.append(f"ghost {n} would be recycled after its parent")
