"""Recomputing the books of the core from scratch.  Slow, complete, and shared by every stateful test."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from kvloom.core.arrays import FREE_NODES, FREE_PAGES, GHOST_HEAD, NODES_USED, PINNED, PINNED_PAGES, Arrays
from kvloom.core.block_pool import page_of
from kvloom.core.lifecycle import ALLOCATED, COMMITTED, FREE, QUARANTINED, READY
from kvloom.core.page_table import Rows, place, slot_at
from kvloom.core.prefix_index import find_child
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
    _check_slots(a, geometry, wrong)
    _check_pages(a, wrong)
    _check_nodes(a, roots, [*running.values(), *in_flight[1]], wrong)
    if wrong:
        raise IntegrityError("; ".join(wrong[:20]))


def _check_holds(
    a: Arrays, r: Rows, running: Mapping[int, int], holds: Sequence[tuple[int, int]], wrong: list[str]
) -> None:
    pins = np.zeros_like(a.pins)
    for row in running:
        for g in range(len(a.rule)):
            for block in range(int(r.first[row, g]), int(r.last[row, g])):
                s = int(slot_at(a, r, row, g, block))
                pins[s] += 1
                if a.generation[s] != r.generation[row, place(a, r, row, g, block)]:
                    wrong.append(f"row {row} group {g} block {block} is stale")
                if a.state[s] == FREE:
                    wrong.append(f"row {row} group {g} block {block} names a free slot")
    for _, slot in holds:
        pins[slot] += 1
    wrong += [
        f"slot {s} has {a.pins[s]} holders on record, {pins[s]} in fact"
        for s in np.flatnonzero(pins != a.pins).tolist()
    ]


def _check_slots(a: Arrays, geometry: ArenaGeometry, wrong: list[str]) -> None:
    for g in range(len(a.rule)):
        slots = range(int(a.slot_base[g]), int(a.slot_base[g + 1]))
        listed: list[int] = []
        s, before = int(a.lru_head[g]), -1
        while s >= 0 and len(listed) <= len(slots):
            if a.prev[s] != before:
                wrong.append(f"group {g}: LRU back link of slot {s} is wrong")
            listed.append(s)
            before, s = s, int(a.next[s])
        if before != a.lru_tail[g]:
            wrong.append(f"group {g}: LRU tail is wrong")
        stamps = a.stamp[listed] if listed else np.zeros(0)
        if (np.diff(stamps) < 0).any():
            wrong.append(f"group {g}: LRU list is not in order of release")
        state, pins, owner = (x[slots.start : slots.stop] for x in (a.state, a.pins, a.owner))
        evictable = set((np.flatnonzero((state == COMMITTED) & (pins == 0)) + slots.start).tolist())
        if evictable != set(listed):
            wrong.append(f"group {g}: LRU list differs from the evictable slots by {evictable ^ set(listed)}")
        if ((owner >= 0) != (state == COMMITTED)).any():
            wrong.append(f"group {g}: an indexed slot is not COMMITTED or the other way round")
        if ((pins == 0) & np.isin(state, (ALLOCATED, READY, QUARANTINED))).any():
            wrong.append(f"group {g}: a private slot has no holder (leak)")
        if int(np.count_nonzero(state != FREE)) != int(a.used[g]):
            wrong.append(f"group {g}: {a.used[g]} slots in use on record, {np.count_nonzero(state != FREE)} in fact")
    if int((a.used * geometry.slot_bytes).sum()) > geometry.arena_bytes:
        wrong.append("bytes in use exceed the arena")


def _check_pages(a: Arrays, wrong: list[str]) -> None:
    used = np.zeros_like(a.page_used)
    pinned = np.zeros_like(a.page_pinned)
    for g in range(len(a.rule)):
        for s in range(int(a.slot_base[g]), int(a.slot_base[g + 1])):
            if a.state[s] != FREE:
                p = int(page_of(a, g, s))
                used[p] += 1
                pinned[p] += not (a.state[s] == COMMITTED and a.pins[s] == 0)
                if a.page_group[p] != g:
                    wrong.append(f"slot {s} of group {g} lies on page {p} of group {a.page_group[p]}")
    if (used != a.page_used).any() or (pinned != a.page_pinned).any():
        wrong.append("page counts are wrong")
    for g in range(len(a.rule)):
        mine = pinned[a.page_group == g]
        if (mine.sum(), np.count_nonzero(mine)) != (a.group[PINNED, g], a.group[PINNED_PAGES, g]):
            wrong.append(f"group {g}: counts of pinned slots and pages are wrong")
    free = set(a.free_pages[: int(a.scalars[FREE_PAGES])].tolist())
    if free != set(np.flatnonzero(a.page_group < 0).tolist()):
        wrong.append("free page stack is wrong")
    for g in range(len(a.rule)):
        _check_free_slots(a, g, wrong)


def _check_free_slots(a: Arrays, g: int, wrong: list[str]) -> None:
    listed: set[int] = set()
    p = int(a.part_head[g])
    while p >= 0 and p not in listed:
        listed.add(p)
        p = int(a.page_next[p])
    partly = {p for p in np.flatnonzero(a.page_group == g).tolist() if a.page_used[p] < a.slots_per_page[g]}
    if listed != partly:
        wrong.append(f"group {g}: list of pages with free slots is wrong: {listed} against {partly}")
    for p in listed:
        count, s = 0, int(a.page_free[p])
        while s >= 0 and count <= a.slots_per_page[g]:
            count += 1
            if a.state[s] != FREE:
                wrong.append(f"slot {s} is in a free list but in use")
            s = int(a.next[s])
        if count + a.page_used[p] != a.slots_per_page[g]:
            wrong.append(f"page {p}: free list and use count disagree")


def _check_nodes(a: Arrays, roots: Sequence[int], held: Sequence[int], wrong: list[str]) -> None:
    nodes = np.flatnonzero(a.ntokens >= 0).tolist()
    if len(nodes) != int(a.scalars[NODES_USED]) or len(nodes) + int(a.scalars[FREE_NODES]) != len(a.parent):
        wrong.append("node counts are wrong")
    if {n for n in nodes if a.parent[n] < 0} != set(roots):
        wrong.append("roots of the index and the namespaces differ")
    weight = np.zeros_like(a.weight)
    for n in held:
        weight[n] += 1
    named = 0
    for n in nodes:
        resident = 0
        for g in range(len(a.rule)):
            for c in range(int(a.col_base[g]), int(a.col_base[g + 1])):
                if a.columns[n, c] >= 0:
                    resident += 1
                    s = int(a.slot_base[g]) + int(a.columns[n, c])
                    if a.owner[s] != n or a.owner_col[s] != c:
                        wrong.append(f"node {n} column {c} and slot {s} disagree")
        if resident != a.resident[n]:
            wrong.append(f"node {n}: resident count is wrong")
        named += resident
        weight[n] += resident
    if named != int(np.count_nonzero(a.owner >= 0)):
        wrong.append("a slot names an owner that does not name it")
    _check_tree(a, nodes, weight, wrong)


def _check_tree(a: Arrays, nodes: Sequence[int], weight: AnyArray, wrong: list[str]) -> None:
    segment = a.tokens.shape[1]
    children: dict[int, set[int]] = {}
    for n in nodes:
        if a.parent[n] >= 0:
            children.setdefault(int(a.parent[n]), set()).add(n)
    # a node counts for its parent when it has weight itself: add from the leaves up
    for n in sorted((n for n in nodes if a.parent[n] >= 0), key=lambda n: (-a.depth[n], a.ntokens[n] == segment)):
        if weight[n] > 0:
            weight[a.parent[n]] += 1
    for n in nodes:
        if weight[n] != a.weight[n]:
            wrong.append(f"node {n}: weight {a.weight[n]} on record, {weight[n]} in fact")
        if a.parent[n] >= 0 and bool(a.is_ghost[n]) != (a.weight[n] == 0):
            wrong.append(f"node {n}: ghost mark is wrong")
        linked = _siblings(a, int(a.first_child[n])) | _siblings(a, int(a.first_checkpoint[n]))
        if linked != children.get(n, set()):
            wrong.append(f"node {n}: child lists are wrong")
        if a.ntokens[n] == segment and find_child(a, int(a.parent[n]), a.tokens[n], 0) != n:
            wrong.append(f"node {n} is not found by its own tokens")
    _check_ghosts(a, nodes, wrong)


def _siblings(a: Arrays, head: int) -> set[int]:
    linked: set[int] = set()
    while head >= 0 and head not in linked:
        linked.add(head)
        head = int(a.sibling_next[head])
    return linked


def _check_ghosts(a: Arrays, nodes: Sequence[int], wrong: list[str]) -> None:
    ghosts: list[int] = []
    n = int(a.scalars[GHOST_HEAD])
    while n >= 0 and len(ghosts) <= len(nodes):
        ghosts.append(n)
        n = int(a.ghost_next[n])
    if set(ghosts) != {n for n in nodes if a.is_ghost[n]}:
        wrong.append("ghost list is wrong")
    position = {n: i for i, n in enumerate(ghosts)}
    for n in ghosts:
        if a.parent[n] in position and position[int(a.parent[n])] < position[n]:
            wrong.append(f"ghost {n} would be recycled after its parent")
