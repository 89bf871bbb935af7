"""Publishing what a row computed: whole segments become nodes of the prefix index."""

from __future__ import annotations

from kvloom.core._jit import inlined, jit
from kvloom.core.arrays import Arrays
from kvloom.core.block_pool import release
from kvloom.core.child_table import find_child
from kvloom.core.fields import (
    ANCHORS,
    BLOCK_TOKENS,
    COL_BASE,
    COLUMNS,
    COMMITS,
    DEPTH,
    FIRST_CHILD,
    FREE_NODES,
    GRADE,
    LEASED,
    NODES_USED,
    NTOKENS,
    OWNER,
    OWNER_COL,
    PARENT,
    PINNED,
    PINS,
    RESIDENT,
    ROOT,
    RULE,
    RULE_PREFIX,
    RULE_SNAPSHOT,
    RULE_WINDOW,
    SLOT_BASE,
    SPINE,
    STATE,
)
from kvloom.core.heat import pass_node
from kvloom.core.lifecycle import ALLOCATED, COMMITTED, READY, move
from kvloom.core.objects import adopt
from kvloom.core.page_table import FIRST, LAST, NODE, OFFSET, PUBLISHED, SHARED, Rows, put, slot_at
from kvloom.core.prefix_index import add_anchor, clean_node, new_node, touch
from kvloom.core.rules import block_of, needed_from
from kvloom.core.token_runs import copy_run
from kvloom.core.worth import value_branch
from kvloom.types import SLOT_EVICTED, AnyArray


@inlined
def mark_computed(a: Arrays, r: Rows, q: int, length: int, more: int, grade: int) -> None:
    """The engine wrote the state of ``more`` tokens after ``length``: whole blocks become READY, all take the grade."""
    for g in range(a.group.shape[0]):
        if a.group[g, RULE] == RULE_SNAPSHOT:
            s = slot_at(a, r, q, g, 0)
            a.slot[s, GRADE] = min(a.slot[s, GRADE], grade)
            continue
        size = a.group[g, BLOCK_TOKENS]
        # the block that holds the first new entry may have been begun earlier
        for block in range(max(block_of(a, g, length), r.span[q, g, FIRST]), r.span[q, g, LAST]):
            s = slot_at(a, r, q, g, block)
            a.slot[s, GRADE] = min(a.slot[s, GRADE], grade)
            if a.slot[s, STATE] == ALLOCATED and (block + 1) * size <= length + more:
                move(a.slot, s, READY)


@inlined
def _publish_prefix(a: Arrays, r: Rows, q: int, g: int, n: int) -> int:
    """Hand the row's next segment of blocks to node ``n``; where the node has one as good, the row takes that instead.

    Returns the worst grade of what the node has then.
    """
    worst = 2
    origin = r.span[q, g, SHARED]
    for i in range(a.group[g, COLUMNS]):
        s = slot_at(a, r, q, g, origin + i)
        c = a.group[g, COL_BASE] + i
        if a.slot[s, OWNER] < 0:
            adopt(a, n, c, g, s)
        kept = a.group[g, SLOT_BASE] + a.columns[n, c]
        if kept != s:
            put(a, r, q, g, origin + i, kept)
        worst = min(worst, a.slot[kept, GRADE])
        release(a, g, s)
    r.span[q, g, SHARED] = origin + a.group[g, COLUMNS]
    a.group[g, LEASED] += a.group[g, COLUMNS]
    return worst


@inlined
def _publish_window(a: Arrays, r: Rows, q: int, g: int, n: int, start: int) -> None:
    """Publish the row's window blocks that the segment's end needs; the row keeps holding its own."""
    end = start + a.tokens.shape[1]
    lowest = needed_from(a, g, end)
    if lowest >= end:
        return
    origin = block_of(a, g, start)
    useful = origin if lowest <= start else block_of(a, g, lowest)
    for block in range(max(useful, r.span[q, g, FIRST]), origin + a.group[g, COLUMNS]):
        s = slot_at(a, r, q, g, block)
        if a.slot[s, OWNER] < 0 and a.slot[s, STATE] == READY:
            adopt(a, n, a.group[g, COL_BASE] + block - origin, g, s)


@inlined
def commit_segment(a: Arrays, r: Rows, q: int, parent: int, tokens: AnyArray, offset: int, start: int) -> int:
    """Publish the blocks of the segment at position ``start``, ``tokens[offset:]``, below ``parent``.

    Returns its node with an anchor for the caller, or -1 when the index is full.
    """
    n = find_child(a, parent, tokens, offset)
    if n >= 0:
        add_anchor(a, n)
    else:
        n = new_node(a, parent, tokens, offset, a.tokens.shape[1])
        if n < 0:
            return -1
        value_branch(a, n)
    worst = 2
    for g in range(a.group.shape[0]):
        if a.group[g, RULE] == RULE_PREFIX:
            worst = min(worst, _publish_prefix(a, r, q, g, n))
        elif a.group[g, RULE] == RULE_WINDOW:
            _publish_window(a, r, q, g, n, start)
    a.trunk[n, SPINE] = worst
    touch(a, n)
    pass_node(a, n)
    return n


@inlined
def _hand_over_prefix(a: Arrays, r: Rows, q: int, g: int, n: int, origin: int) -> int:
    """Give the row's blocks from ``origin`` to the new node ``n``; returns the worst grade."""
    worst = 2
    at = r.shape[g, OFFSET] + origin
    for i in range(a.group[g, COLUMNS]):
        local = r.table[q, at + i]
        s = a.group[g, SLOT_BASE] + local
        move(a.slot, s, COMMITTED)
        a.slot[s, OWNER] = n
        a.slot[s, OWNER_COL] = a.group[g, COL_BASE] + i
        a.slot[s, PINS] -= 1
        a.group[g, PINNED] -= a.slot[s, PINS] == 0
        a.columns[n, a.group[g, COL_BASE] + i] = local
        worst = min(worst, a.slot[s, GRADE])
    return worst


@jit
def publish_fresh(a: Arrays, r: Rows, q: int, ids: AnyArray, used: int, count: int) -> None:
    """``commit_segment`` for the ``count`` whole segments ``ids[used:]``, much faster.

    The caller knows that the row's node has no children, that it ends where ``ids[used:]`` begins, and that ``count``
    nodes are free.
    """
    segment = a.tokens.shape[1]
    parent, depth = r.state[q, NODE], r.state[q, PUBLISHED]
    for i in range(count):
        a.scalars[FREE_NODES] -= 1
        n = a.free_nodes[a.scalars[FREE_NODES]]
        a.trunk[parent, FIRST_CHILD] = n
        clean_node(a, n)
        resident, worst = 0, 2
        for g in range(a.group.shape[0]):
            if a.group[g, RULE] == RULE_PREFIX:
                worst = min(worst, _hand_over_prefix(a, r, q, g, n, depth * a.group[g, COLUMNS]))
                resident += a.group[g, COLUMNS]
        a.trunk[n, PARENT] = parent
        a.node[n, ROOT] = a.node[parent, ROOT]
        a.node[n, DEPTH] = depth + 1
        a.trunk[n, NTOKENS] = segment
        a.node[n, RESIDENT] = resident
        a.node[n, ANCHORS] = 1
        a.trunk[n, SPINE] = worst
        pass_node(a, n)
        copy_run(a.tokens, n, ids, used + i * segment, segment)
        for g in range(a.group.shape[0]):
            if a.group[g, RULE] == RULE_WINDOW:
                _publish_window(a, r, q, g, n, depth * segment)
        parent, depth = n, depth + 1
    a.scalars[NODES_USED] += count
    for g in range(a.group.shape[0]):
        if a.group[g, RULE] == RULE_PREFIX:
            r.span[q, g, SHARED] += count * a.group[g, COLUMNS]
            a.group[g, LEASED] += count * a.group[g, COLUMNS]
            a.counters[g, COMMITS] += count * a.group[g, COLUMNS]
    r.state[q, NODE] = parent
    r.state[q, PUBLISHED] = depth


@jit
def republish(a: Arrays, r: Rows, q: int) -> None:
    """Put the row's own windows back into its segments where an equal object was evicted.

    Two sequences that computed the same keep a window each, and only one of the two is in the index.  When that one
    went, what the other published further down could not be reached.
    """
    segment = a.tokens.shape[1]
    n, end = r.state[q, NODE], r.state[q, PUBLISHED] * segment
    while end > 0:
        held = False
        for g in range(a.group.shape[0]):
            if a.group[g, RULE] != RULE_WINDOW:
                continue
            begin = max(block_of(a, g, end - segment), r.span[q, g, FIRST])
            for block in range(begin, min(block_of(a, g, end), r.span[q, g, LAST])):
                held = True
                c = a.group[g, COL_BASE] + block - block_of(a, g, end - segment)
                s = slot_at(a, r, q, g, block)
                if a.columns[n, c] == SLOT_EVICTED and a.slot[s, OWNER] < 0 and a.slot[s, STATE] == READY:
                    adopt(a, n, c, g, s)
        if not held:
            return
        n, end = a.trunk[n, PARENT], end - segment
