"""The prefix index: a tree of segments and checkpoints, found by hash (``child_table``), trusted only token by token.

Every node names, per group and block, the slot that holds its object (``columns``), or a code that says why there is
none (``objects``).  A node without objects and anchors is a ghost that only serves to explain misses, and is the first
to be recycled.

A lease on a prefix holds its deepest node; that protects everything above, since only leaves are evicted.
"""

from __future__ import annotations

from kvloom.core._jit import inlined, jit
from kvloom.core.arrays import Arrays
from kvloom.core.child_table import table_insert, table_remove
from kvloom.core.fields import (
    ANCHORS,
    CLOCK,
    DEPTH,
    FIRST_CHECKPOINT,
    FIRST_CHILD,
    FREE_NODES,
    GHOST_HEAD,
    GHOST_NEXT,
    GHOST_PREV,
    GHOST_TAIL,
    HEAP_AT,
    NODES_USED,
    NTOKENS,
    PARENT,
    RECYCLED,
    RESIDENT,
    ROOT,
    RULES,
    SIBLING_NEXT,
    SIBLING_PREV,
    SPINE,
)
from kvloom.core.heat import clean_heat, fold, revive
from kvloom.core.leaf_heap import enter_heap, leave_heap, succeed
from kvloom.core.policies import BY_CLASSES
from kvloom.core.reuse import expire
from kvloom.core.token_runs import copy_run
from kvloom.types import AnyArray

OUT_OF_LIST = -2


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
        table_remove(a, n)
    if before >= 0:
        a.node[before, SIBLING_NEXT] = after
    elif is_segment:
        a.trunk[parent, FIRST_CHILD] = after
        if after >= 0:
            table_remove(a, after)
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
            table_insert(a, head)
    else:
        head = a.node[parent, FIRST_CHECKPOINT]
        a.node[parent, FIRST_CHECKPOINT] = n
        table_insert(a, n)
    a.node[n, SIBLING_NEXT] = head
    if head >= 0:
        a.node[head, SIBLING_PREV] = n
    return n
