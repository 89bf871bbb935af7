"""What a sequence holds from its first moment: the blocks that it shares, and private slots with their copies.

A lease is all or nothing: CapacityError leaves everything as it was.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kvloom.core.block_pool import hold, release
from kvloom.core.calls import lease_row
from kvloom.core.eviction import take_or_evict
from kvloom.core.fields import BLOCK_TOKENS, COL_BASE, GRADE, HITS, RULE, RULE_SNAPSHOT, SLOT_BASE
from kvloom.core.heat import use_checkpoint
from kvloom.core.keeping import fork_lacks_room, lease_lacks_room
from kvloom.core.page_table import (
    DETACHED,
    FIRST,
    LAST,
    LENGTH,
    NODE,
    PARTS,
    PUBLISHED,
    STATE_GRADE,
    put,
    release_row,
    share_row,
    slot_at,
)
from kvloom.core.prefix_index import add_anchor, drop_anchor, touch
from kvloom.core.rules import snapshot_needed
from kvloom.manager.books import Books
from kvloom.manager.explain import Findings
from kvloom.manager.tickets import NOTHING, Copy
from kvloom.plan import CopyPlan, Explanation
from kvloom.types import Grade, Int32Array
from kvloom.verify.hit import VerifiedHit


class _NoSlot(Exception):  # noqa: N818 - never leaves the manager
    """Group ``group`` has no slot to give, everything is in use; becomes a CapacityError once all is released."""

    def __init__(self, group: int) -> None:
        super().__init__(group)
        self.group = group


def take_hit(
    books: Books, row: int, hit: VerifiedHit, prompt: Int32Array, found: Findings, priority: int
) -> tuple[Explanation, CopyPlan]:
    """Hold for ``row`` everything that ``hit`` needs, and take the live slots.

    Returns why the hit is no longer, and the copies to run before the first forward.
    """
    a, r = books.arrays, books.rows
    worst = lease_row(books.handle, row, hit.path, hit.depth, hit.checkpoint, hit.position, priority)
    if hit.checkpoint < 0 and not books.snapshot_groups:  # nothing private is needed
        return found.explanation(hit.position, len(prompt), Grade(worst)), NOTHING
    node = int(hit.path[hit.depth])
    end = hit.checkpoint if hit.checkpoint >= 0 else node
    if end != node:  # a checkpoint is used now, and may not go to make room for its own copies
        add_anchor(a, end)
        touch(a, end)
        use_checkpoint(a, end)
    snapshots = {
        g: int(a.group[g, SLOT_BASE] + a.columns[end, a.group[g, COL_BASE]])
        for g in books.snapshot_groups
        if snapshot_needed(a, g, hit.position)
    }
    for g, source in snapshots.items():
        hold(a, g, source)
        a.counters[g, HITS] += 1
        worst = min(worst, int(a.slot[source, GRADE]))
    replaced: list[tuple[int, int]] = []
    try:
        begin = hit.depth * a.tokens.shape[1] if hit.checkpoint >= 0 else -1
        _require_room(books, lambda: lease_lacks_room(a, r, row, begin))
        copies = _take_live(books, row, snapshots)
        sealed, ready = _own_checkpoint_blocks(books, row, hit, replaced)
    except BaseException as error:
        books.release_slots(replaced)
        release_row(a, r, row)
        books.release_slots(list(snapshots.items()))
        if end != node:
            drop_anchor(a, end)
        drop_anchor(a, node)
        if isinstance(error, _NoSlot):
            raise books.capacity.no_room(error.group, len(prompt), "open") from None
        raise
    r.state[row, [STATE_GRADE, PARTS]] = worst, found.parts
    tail = hit.position - hit.depth * books.spec.segment_tokens
    r.tail[row, :tail] = prompt[hit.position - tail : hit.position]
    explanation = found.explanation(hit.position, len(prompt), Grade(worst))
    restore = books.tickets.issue(copies + sealed, ready=ready)
    books.release_slots(replaced)
    books.release_slots(list(snapshots.items()))
    if end != node:
        drop_anchor(a, end)
    return explanation, restore


def take_fork(books: Books, parent: int, row: int) -> CopyPlan:
    """Hold for ``row`` what row ``parent`` has: published segments shared, everything else in copies of its own.

    Returns these copies.
    """
    a, r = books.arrays, books.rows
    state, length = r.state[parent], int(r.state[parent, LENGTH])
    # a block can only be published below one node, so an unpublished one is not shared
    shared = length if state[DETACHED] else int(state[PUBLISHED]) * books.spec.segment_tokens
    share_row(a, r, parent, row, shared)
    copies, ready = [], []
    try:
        _require_room(books, lambda: fork_lacks_room(a, r, parent, row))
        for g in range(len(a.group)):
            for block in range(int(r.span[row, g, LAST]), int(r.span[parent, g, LAST])):
                source = int(slot_at(a, r, parent, g, block))
                own = _take(books, row, g, block)
                a.slot[own, GRADE] = a.slot[source, GRADE]
                copies.append(Copy(g, source, own))
                if a.group[g, RULE] != RULE_SNAPSHOT and (block + 1) * int(a.group[g, BLOCK_TOKENS]) <= length:
                    ready.append(own)
    except BaseException as error:
        release_row(a, r, row)
        if isinstance(error, _NoSlot):
            raise books.capacity.no_room(error.group, length, "fork") from None
        raise
    r.state[row] = state
    r.tail[row] = r.tail[parent]
    add_anchor(a, int(state[NODE]))
    return books.tickets.issue(copies, ready=ready)


def _require_room(books: Books, short: Callable[[], int]) -> None:
    """Raise _NoSlot when ``short`` names a group without room, even once what nobody reads is given back."""
    full = int(short())
    if full >= 0 and books.roster.collect():
        full = int(short())
    if full >= 0:
        raise _NoSlot(full)


def _take(books: Books, row: int, g: int, block: int) -> int:
    """Take a slot for logical block ``block`` of ``row``; raises _NoSlot."""
    a, r = books.arrays, books.rows
    s = int(take_or_evict(a, g))
    if s < 0:
        raise _NoSlot(g)
    put(a, r, row, g, block, s)
    r.span[row, g, LAST] = max(int(r.span[row, g, LAST]), block + 1)
    return s


def _take_live(books: Books, row: int, snapshots: dict[int, int]) -> list[Copy]:
    """A live slot per snapshot group, filled from its snapshot or with zeros."""
    a = books.arrays
    copies = []
    for g in np.flatnonzero(a.group[:, RULE] == RULE_SNAPSHOT).tolist():
        live = _take(books, row, g, 0)
        source = snapshots.get(g, -1)
        if source >= 0:
            a.slot[live, GRADE] = a.slot[source, GRADE]
        copies.append(Copy(g, source, live))
    return copies


def _own_checkpoint_blocks(
    books: Books, row: int, hit: VerifiedHit, replaced: list[tuple[int, int]]
) -> tuple[list[Copy], list[int]]:
    """Private copies of the blocks that a checkpoint owns: the sequence goes on writing and publishes them itself.

    The shared originals, still held, are appended to ``replaced``.  Returns the copies and those that are whole blocks.
    """
    if hit.checkpoint < 0:
        return [], []
    a, r = books.arrays, books.rows
    copies, ready = [], []
    for g in np.flatnonzero(a.group[:, RULE] != RULE_SNAPSHOT).tolist():
        size = int(a.group[g, BLOCK_TOKENS])
        origin = hit.depth * books.spec.segment_tokens // size
        for block in range(max(origin, int(r.span[row, g, FIRST])), int(r.span[row, g, LAST])):
            shared = int(slot_at(a, r, row, g, block))
            hold(a, g, shared)
            replaced.append((g, shared))
            own = int(take_or_evict(a, g))
            if own < 0:
                raise _NoSlot(g)
            release(a, g, shared)
            put(a, r, row, g, block, own)
            a.slot[own, GRADE] = a.slot[shared, GRADE]
            copies.append(Copy(g, shared, own))
            if (block + 1) * size <= hit.position:
                ready.append(own)
    return copies, ready
