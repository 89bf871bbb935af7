"""The prefix index: a tree of segments and checkpoints, found by hash, trusted only token by token.

Every node names, per group and block, the slot that holds its object (``columns``), or a code that says why there is
none.  A node without objects and anchors is a ghost that only serves to explain misses, and is the first to be
recycled.

A lease on a prefix holds its deepest node; that protects everything above, since only leaves are evicted.
"""

from __future__ import annotations

import numpy as np

from kvloom.core._jit import inlined, jit
from kvloom.core.arrays import Arrays
from kvloom.core.block_pool import give_slot, is_auxiliary, link_auxiliary, page_of, pin_page, release, unlink_auxiliary
from kvloom.core.fields import (
    ANCHORS,
    CLOCK,
    COL_BASE,
    COLUMNS,
    COMMITS,
    DEPTH,
    EVICTIONS,
    FIRST_CHECKPOINT,
    FIRST_CHILD,
    FREE_NODES,
    GHOST_HEAD,
    GHOST_NEXT,
    GHOST_PREV,
    GHOST_TAIL,
    GRADE,
    GRAVE_HEAD,
    GRAVE_TAIL,
    HEAP_AT,
    KEY,
    NEXT,
    NODES_USED,
    NTOKENS,
    OWNER,
    OWNER_COL,
    PARENT,
    PINNED,
    PINS,
    RECYCLED,
    RESIDENT,
    ROOT,
    RULE,
    RULE_PREFIX,
    RULE_SNAPSHOT,
    RULES,
    SIBLING_NEXT,
    SIBLING_PREV,
    SLOT_BASE,
    SPINE,
)
from kvloom.core.heat import clean_heat, fold, revive
from kvloom.core.leaf_heap import enter_heap, leave_heap, succeed
from kvloom.core.lifecycle import COMMITTED, EVICTED, QUARANTINED, READY, move
from kvloom.core.policies import BY_CLASSES
from kvloom.core.reuse import expire
from kvloom.core.token_runs import copy_run, same_run
from kvloom.core.worth import base_worth, value_rest
from kvloom.types import SLOT_EVICTED, SLOT_QUARANTINED, AnyArray

SAMPLES = 8
OUT_OF_LIST = -2


@jit
def hash_segment(parent: int, tokens: AnyArray, start: int, count: int) -> int:
    """31-bit hash of the parent, the count and a sample of the tokens: a place to look, never an identity."""
    h = np.uint64(parent) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(count) * np.uint64(0x632BE59BD9B4E019)
    step = max(1, count // SAMPLES)
    for i in range(count - 1, -1, -step):
        h = (h ^ np.uint64(tokens[start + i])) * np.uint64(0xFF51AFD7ED558CCD)
        h ^= h >> np.uint64(32)
    return np.int64(h >> np.uint64(33))  # type: ignore[return-value] # compiled code knows no other int


@inlined
def same_tokens(a: Arrays, n: int, tokens: AnyArray, start: int) -> bool:
    """Whether node ``n`` holds exactly ``tokens[start:start + NTOKENS]`` (the caller checked the length)."""
    return same_run(a.tokens, n, tokens, start, a.trunk[n, NTOKENS])


@inlined
def find_child(a: Arrays, parent: int, tokens: AnyArray, start: int) -> int:
    """The segment child of ``parent`` with these tokens (one whole segment from ``start``), or -1.

    Most nodes have one child, which a link names; only the others are in the hash table.
    """
    first = a.trunk[parent, FIRST_CHILD]
    if first < 0 or same_tokens(a, first, tokens, start):
        return first
    if a.node[first, SIBLING_NEXT] < 0:
        return -1
    h = hash_segment(parent, tokens, start, a.tokens.shape[1])
    mask = len(a.table) - 1
    at = h & mask
    while a.table[at] >= 0:
        n = a.table[at]
        if (
            a.node[n, KEY] == h
            and a.trunk[n, PARENT] == parent
            and a.trunk[n, NTOKENS] == a.tokens.shape[1]
            and same_tokens(a, n, tokens, start)
        ):
            return n
        at = (at + 1) & mask
    return -1


@jit
def find_checkpoint(a: Arrays, parent: int, tokens: AnyArray, start: int, count: int) -> int:
    """The checkpoint of ``parent`` that holds exactly ``tokens[start:start + count]``, or -1."""
    if a.node[parent, FIRST_CHECKPOINT] < 0:
        return -1
    h = hash_segment(parent, tokens, start, count)
    mask = len(a.table) - 1
    at = h & mask
    while a.table[at] >= 0:
        n = a.table[at]
        if (
            a.node[n, KEY] == h
            and a.trunk[n, PARENT] == parent
            and a.trunk[n, NTOKENS] == count
            and same_tokens(a, n, tokens, start)
        ):
            return n
        at = (at + 1) & mask
    return -1


@jit
def _table_insert(a: Arrays, n: int) -> None:
    a.node[n, KEY] = hash_segment(a.trunk[n, PARENT], a.tokens[n], 0, a.trunk[n, NTOKENS])
    mask = len(a.table) - 1
    at = a.node[n, KEY] & mask
    while a.table[at] >= 0:
        at = (at + 1) & mask
    a.table[at] = n


@jit
def _table_remove(a: Arrays, n: int) -> None:
    """Linear probing with backward shift, so that no tombstones pile up."""
    mask = len(a.table) - 1
    hole = a.node[n, KEY] & mask
    while a.table[hole] != n:
        hole = (hole + 1) & mask
    at = hole
    while True:
        at = (at + 1) & mask
        moved = a.table[at]
        if moved < 0:
            break
        home = a.node[moved, KEY] & mask
        if ((at - home) & mask) >= ((at - hole) & mask):
            a.table[hole] = moved
            hole = at
    a.table[hole] = -1


@jit
def _ghost_unlink(a: Arrays, n: int) -> None:
    before, after = a.node[n, GHOST_PREV], a.node[n, GHOST_NEXT]
    if before >= 0:
        a.node[before, GHOST_NEXT] = after
    else:
        a.scalars[GHOST_HEAD] = after
    if after >= 0:
        a.node[after, GHOST_PREV] = before
    else:
        a.scalars[GHOST_TAIL] = before
    a.node[n, GHOST_PREV] = OUT_OF_LIST


@inlined
def _ghost_append(a: Arrays, n: int) -> None:
    tail = a.scalars[GHOST_TAIL]
    a.node[n, GHOST_PREV] = tail
    a.node[n, GHOST_NEXT] = -1
    if tail >= 0:
        a.node[tail, GHOST_NEXT] = n
    else:
        a.scalars[GHOST_HEAD] = n
    a.scalars[GHOST_TAIL] = n


@inlined
def add_anchor(a: Arrays, n: int) -> None:
    """One more reason to keep ``n``; wakes its ancestors when it was a ghost."""
    while n >= 0:
        a.node[n, ANCHORS] += 1
        if a.node[n, ANCHORS] > 1:
            return
        if a.node[n, HEAP_AT] >= 0:
            leave_heap(a, n)
        if a.node[n, RESIDENT] > 0 or a.node[n, GHOST_PREV] == OUT_OF_LIST:
            return
        _ghost_unlink(a, n)
        revive(a, n)
        n = a.trunk[n, PARENT]


@jit
def drop_anchor(a: Arrays, n: int) -> None:
    """One reason less; without any, ``n`` becomes an evictable leaf, or a ghost, and so may its ancestors."""
    while n >= 0:
        a.node[n, ANCHORS] -= 1
        if a.node[n, ANCHORS] > 0:
            return
        if a.node[n, RESIDENT] > 0:
            enter_heap(a, n)
            return
        n = bury(a, n)


@inlined
def bury(a: Arrays, n: int) -> int:
    """Make ``n`` a ghost; returns the parent, which loses an anchor, or -1 for a root."""
    parent = a.trunk[n, PARENT]
    if parent >= 0:
        _ghost_append(a, n)
        fold(a, n, parent)
        a.node_stamp[parent] = max(a.node_stamp[parent], a.node_stamp[n])
    return parent


@jit
def drop_resident(a: Arrays, n: int) -> None:
    """``n`` lost an object; a leaf that lost its last one becomes a ghost."""
    a.node[n, RESIDENT] -= 1
    if a.node[n, RESIDENT] == 0 and a.node[n, ANCHORS] == 0:
        parent = bury(a, n)
        if parent >= 0 and a.node[parent, ANCHORS] == 1 and a.node[parent, RESIDENT] > 0:
            a.node[parent, ANCHORS] = 0
            succeed(a, n, parent)
        else:
            leave_heap(a, n)
            drop_anchor(a, parent)


@inlined
def touch(a: Arrays, n: int) -> None:
    """``n`` is used now."""
    a.node_stamp[n] = a.scalars[CLOCK]


@jit
def free_node(a: Arrays, n: int) -> None:
    """Put an unlinked node back on the free stack."""
    a.trunk[n, PARENT] = -1
    a.node[n, ROOT] = -1
    a.trunk[n, NTOKENS] = -1
    a.free_nodes[a.scalars[FREE_NODES]] = n
    a.scalars[FREE_NODES] += 1
    a.scalars[NODES_USED] -= 1


@jit
def _detach(a: Arrays, n: int) -> None:
    """Unlink a ghost leaf from its parent and the table; its place is free."""
    if a.policy[RULES] == BY_CLASSES:
        expire(a, n)
    parent = a.trunk[n, PARENT]
    is_segment = a.trunk[n, NTOKENS] == a.tokens.shape[1]
    before, after = a.node[n, SIBLING_PREV], a.node[n, SIBLING_NEXT]
    if not is_segment or before >= 0:
        _table_remove(a, n)
    if before >= 0:
        a.node[before, SIBLING_NEXT] = after
    elif is_segment:
        a.trunk[parent, FIRST_CHILD] = after
        if after >= 0:
            _table_remove(a, after)
    else:
        a.node[parent, FIRST_CHECKPOINT] = after
    if after >= 0:
        a.node[after, SIBLING_PREV] = before
    free_node(a, n)


@inlined
def recycle(a: Arrays) -> bool:
    """Free the oldest ghosts when no node is free; False when every node is needed.

    A ghost's children became ghosts before it did, so the head of the list is a leaf.  A path dies from its end up;
    freeing many at once hands its nodes out again from its beginning down, in the order in which they lie in memory.
    """
    if a.scalars[FREE_NODES] == 0:
        while a.scalars[FREE_NODES] < a.scalars[RECYCLED] and a.scalars[GHOST_HEAD] >= 0:
            ghost = a.scalars[GHOST_HEAD]
            _ghost_unlink(a, ghost)
            _detach(a, ghost)
    return a.scalars[FREE_NODES] > 0


@inlined
def take_node(a: Arrays) -> int:
    """A clean node, recycling ghosts when none is free; -1 when every node is needed."""
    if not recycle(a):
        return -1
    a.scalars[FREE_NODES] -= 1
    a.scalars[NODES_USED] += 1
    n = a.free_nodes[a.scalars[FREE_NODES]]
    clean_node(a, n)
    return n


@inlined
def clean_node(a: Arrays, n: int) -> None:
    """Write the record of a node that has nothing yet."""
    for c in range(a.columns.shape[1]):
        a.columns[n, c] = -1
    a.trunk[n, PARENT] = -1
    a.node[n, ROOT] = n
    a.node[n, DEPTH] = 0
    a.trunk[n, NTOKENS] = 0
    a.node[n, RESIDENT] = 0
    a.node[n, ANCHORS] = 0
    a.trunk[n, SPINE] = -1
    a.trunk[n, FIRST_CHILD] = -1
    a.node[n, FIRST_CHECKPOINT] = -1
    a.node[n, SIBLING_PREV] = -1
    a.node[n, SIBLING_NEXT] = -1
    a.node[n, GHOST_PREV] = OUT_OF_LIST
    a.node[n, HEAP_AT] = -1
    clean_heat(a, n)
    a.node_stamp[n] = a.scalars[CLOCK]


@inlined
def new_node(a: Arrays, parent: int, tokens: AnyArray, start: int, count: int) -> int:
    """A segment (``count`` = segment length) or checkpoint below ``parent``, anchored for the caller; -1 when full."""
    add_anchor(a, parent)  # this node's; and the parent must not be recycled to make room for its child
    n = take_node(a)
    if n < 0:
        drop_anchor(a, parent)
        return -1
    is_segment = count == a.tokens.shape[1]
    a.trunk[n, PARENT] = parent
    a.node[n, ROOT] = a.node[parent, ROOT]
    a.node[n, DEPTH] = a.node[parent, DEPTH] + (1 if is_segment else 0)
    a.trunk[n, NTOKENS] = count
    a.node[n, ANCHORS] = 1
    copy_run(a.tokens, n, tokens, start, count)
    if is_segment:
        head = a.trunk[parent, FIRST_CHILD]
        a.trunk[parent, FIRST_CHILD] = n
        if head >= 0:
            _table_insert(a, head)
    else:
        head = a.node[parent, FIRST_CHECKPOINT]
        a.node[parent, FIRST_CHECKPOINT] = n
        _table_insert(a, n)
    a.node[n, SIBLING_NEXT] = head
    if head >= 0:
        a.node[head, SIBLING_PREV] = n
    return n


@inlined
def refresh_spine(a: Arrays, n: int) -> None:
    """Recompute the worst grade of the node's prefix-group objects, -1 when one is missing."""
    worst = 2
    for g in range(a.group.shape[0]):
        if a.group[g, RULE] == RULE_PREFIX:
            first = a.group[g, COL_BASE]
            for c in range(first, first + a.group[g, COLUMNS]):
                local = a.columns[n, c]
                worst = min(worst, a.slot[a.group[g, SLOT_BASE] + local, GRADE] if local >= 0 else -1)
    a.trunk[n, SPINE] = worst


@jit
def _give_up(a: Arrays, s: int) -> None:
    """A slot that sequences below its former node may still read waits until all that run now have ended."""
    if a.slot[s, PINS] == 0:
        a.group[group_of_slot(a, s), PINNED] += 1
    a.slot[s, PINS] += 1
    a.slot[s, NEXT] = -1
    tail = a.scalars[GRAVE_TAIL]
    if tail >= 0:
        a.slot[tail, NEXT] = s
    else:
        a.scalars[GRAVE_HEAD] = s
    a.scalars[GRAVE_TAIL] = s
    a.slot_stamp[s] = a.scalars[CLOCK]


@jit
def group_of_slot(a: Arrays, s: int) -> int:
    """Group of a global slot."""
    g = a.group.shape[0] - 1
    while a.group[g, SLOT_BASE] > s:
        g -= 1
    return g


@jit
def reap(a: Arrays, oldest: int) -> None:
    """Give back the slots that were given up before clock ``oldest``, when the oldest running sequence began."""
    s = a.scalars[GRAVE_HEAD]
    while s >= 0 and a.slot_stamp[s] < oldest:
        after = a.slot[s, NEXT]
        a.scalars[GRAVE_HEAD] = after
        if after < 0:
            a.scalars[GRAVE_TAIL] = -1
        release(a, group_of_slot(a, s), s)
        s = after


@jit
def reap_unread(a: Arrays, read: AnyArray) -> int:
    """Give back the slots that were given up and that nobody reads (``read``: bool, global slots); returns how many."""
    s, before, count = a.scalars[GRAVE_HEAD], -1, 0
    while s >= 0:
        after = a.slot[s, NEXT]
        if read[s]:
            before = s
        else:
            if before >= 0:
                a.slot[before, NEXT] = after
            else:
                a.scalars[GRAVE_HEAD] = after
            if after < 0:
                a.scalars[GRAVE_TAIL] = before
            release(a, group_of_slot(a, s), s)
            count += 1
        s = after
    return count


@jit
def forget_object(a: Arrays, g: int, s: int, code: int) -> None:
    """Take the object in slot ``s`` out of the index, leaving ``code``.

    A slot that somebody may still read stays with them: private holders keep it; sequences that run below its node
    keep it until they end.
    """
    n, c = a.slot[s, OWNER], a.slot[s, OWNER_COL]
    auxiliary = is_auxiliary(a, g, s)
    in_use = a.slot[s, PINS] > 0
    # what runs below a segment reads its prefix blocks without holding them; a checkpoint's readers hold theirs
    below = a.group[g, RULE] == RULE_PREFIX and a.trunk[n, NTOKENS] == a.tokens.shape[1] and a.node[n, ANCHORS] > 0
    a.columns[n, c] = code
    if code == SLOT_EVICTED:
        a.counters[g, EVICTIONS] += 1
    if not in_use:
        if auxiliary:
            unlink_auxiliary(a, g, s)
        elif a.node[n, HEAP_AT] >= 0:
            pin_page(a, g, page_of(a, g, s))
    a.slot[s, OWNER] = -1
    a.slot[s, OWNER_COL] = -1
    if in_use or below:
        move(a.slot, s, QUARANTINED if code == SLOT_QUARANTINED else READY)
        if below:
            _give_up(a, s)
    else:
        move(a.slot, s, QUARANTINED if code == SLOT_QUARANTINED else EVICTED)
        give_slot(a, g, s)
    if a.group[g, RULE] == RULE_PREFIX:
        a.trunk[n, SPINE] = -1
    drop_resident(a, n)


@inlined
def adopt(a: Arrays, n: int, c: int, g: int, s: int) -> bool:
    """Publish the READY slot ``s`` as column ``c`` of the anchored node ``n`` unless something as good is there.

    An object of a worse grade is replaced.  Returns whether the index took the slot; its holders stay.  The caller
    refreshes the node's spine.
    """
    local, worth = a.columns[n, c], base_worth(a, g, n, c)
    if local >= 0:
        old = a.group[g, SLOT_BASE] + local
        if old == s or a.slot[old, GRADE] >= a.slot[s, GRADE]:
            return False
        worth = max(worth, a.worth[old])
        forget_object(a, g, old, -1)
    if a.group[g, RULE] != RULE_PREFIX:
        a.worth[s] = worth
    move(a.slot, s, COMMITTED)
    a.columns[n, c] = s - a.group[g, SLOT_BASE]
    a.slot[s, OWNER] = n
    a.slot[s, OWNER_COL] = c
    a.node[n, RESIDENT] += 1
    a.counters[g, COMMITS] += 1
    if a.slot[s, PINS] == 0 and is_auxiliary(a, g, s):
        link_auxiliary(a, g, s)
    if a.group[g, RULE] == RULE_SNAPSHOT:
        value_rest(a, n)
    return True
