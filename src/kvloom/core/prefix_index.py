"""The prefix index: a tree of segments and checkpoints, found by hash, trusted only token by token.

Every node names, per group and block, the slot that holds its object (``columns``), or a code that
says why there is none.  A node without objects, children, checkpoints and holders has weight 0: it is
a ghost that only serves to explain misses, and is the first to be recycled.
"""

from __future__ import annotations

import numpy as np

from kvloom.core._jit import jit
from kvloom.core.arrays import (
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
    IS_GHOST,
    NODES_USED,
    NTOKENS,
    OWNER,
    OWNER_COL,
    PARENT,
    PINS,
    RESIDENT,
    ROOT,
    SIBLING_NEXT,
    SIBLING_PREV,
    STATE,
    WEIGHT,
    Arrays,
)
from kvloom.core.block_pool import give_slot, hold, link_lru, unlink_lru
from kvloom.core.lifecycle import COMMITTED, EVICTED, QUARANTINED, READY, move
from kvloom.types import SLOT_EVICTED, SLOT_QUARANTINED, AnyArray

SAMPLES = 8


@jit
def hash_segment(parent: int, tokens: AnyArray, start: int, count: int) -> np.uint64:
    """Hash of the parent and a sample of the tokens: a place to look, never an identity."""
    h = np.uint64(parent) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(0x632BE59BD9B4E019)
    step = max(1, count // SAMPLES)
    for i in range(count - 1, -1, -step):
        h = (h ^ np.uint64(tokens[start + i])) * np.uint64(0xFF51AFD7ED558CCD)
        h ^= h >> np.uint64(32)
    return h


@jit
def same_tokens(a: Arrays, n: int, tokens: AnyArray, start: int) -> bool:
    """Whether node ``n`` holds exactly ``tokens[start:start + ntokens[n]]`` (the caller checked the length)."""
    row = a.tokens[n]
    difference = 0
    for i in range(a.node[NTOKENS, n]):
        difference |= row[i] ^ tokens[start + i]
    return difference == 0


@jit
def find_child(a: Arrays, parent: int, tokens: AnyArray, start: int) -> int:
    """The segment child of ``parent`` with these tokens (one whole segment from ``start``), or -1."""
    h = hash_segment(parent, tokens, start, a.tokens.shape[1])
    mask = np.uint64(len(a.table) - 1)
    at = h & mask
    while a.table[at] >= 0:
        n = a.table[at]
        if a.key[n] == h and a.node[PARENT, n] == parent and same_tokens(a, n, tokens, start):
            return n
        at = (at + np.uint64(1)) & mask
    return -1


@jit
def find_checkpoint(a: Arrays, parent: int, tokens: AnyArray, start: int, count: int) -> int:
    """The checkpoint of ``parent`` that holds exactly ``tokens[start:start + count]``, or -1."""
    n = a.node[FIRST_CHECKPOINT, parent]
    while n >= 0:
        if a.node[NTOKENS, n] == count and same_tokens(a, n, tokens, start):
            return n
        n = a.node[SIBLING_NEXT, n]
    return -1


@jit
def _table_insert(a: Arrays, n: int) -> None:
    mask = np.uint64(len(a.table) - 1)
    at = a.key[n] & mask
    while a.table[at] >= 0:
        at = (at + np.uint64(1)) & mask
    a.table[at] = n


@jit
def _table_remove(a: Arrays, n: int) -> None:
    """Linear probing with backward shift, so that no tombstones pile up."""
    mask = np.uint64(len(a.table) - 1)
    one = np.uint64(1)
    hole = a.key[n] & mask
    while a.table[hole] != n:
        hole = (hole + one) & mask
    at = hole
    while True:
        at = (at + one) & mask
        moved = a.table[at]
        if moved < 0:
            break
        home = a.key[moved] & mask
        if ((at - home) & mask) >= ((at - hole) & mask):
            a.table[hole] = moved
            hole = at
    a.table[hole] = -1


@jit
def _ghost_unlink(a: Arrays, n: int) -> None:
    before, after = a.node[GHOST_PREV, n], a.node[GHOST_NEXT, n]
    if before >= 0:
        a.node[GHOST_NEXT, before] = after
    else:
        a.scalars[GHOST_HEAD] = after
    if after >= 0:
        a.node[GHOST_PREV, after] = before
    else:
        a.scalars[GHOST_TAIL] = before
    a.node[GHOST_PREV, n] = -1
    a.node[GHOST_NEXT, n] = -1
    a.node[IS_GHOST, n] = False


@jit
def _ghost_append(a: Arrays, n: int) -> None:
    tail = a.scalars[GHOST_TAIL]
    a.node[GHOST_PREV, n] = tail
    a.node[GHOST_NEXT, n] = -1
    if tail >= 0:
        a.node[GHOST_NEXT, tail] = n
    else:
        a.scalars[GHOST_HEAD] = n
    a.scalars[GHOST_TAIL] = n
    a.node[IS_GHOST, n] = True


@jit
def add_weight(a: Arrays, n: int) -> None:
    """One more reason for ``n`` to live; wakes its ancestors when it was a ghost."""
    while n >= 0:
        a.node[WEIGHT, n] += 1
        if a.node[WEIGHT, n] > 1:
            return
        if a.node[IS_GHOST, n]:
            _ghost_unlink(a, n)
        n = a.node[PARENT, n]


@jit
def drop_weight(a: Arrays, n: int) -> None:
    """One reason less; a node that has none left becomes a ghost, and so may its ancestors."""
    while n >= 0:
        a.node[WEIGHT, n] -= 1
        if a.node[WEIGHT, n] > 0:
            return
        if a.node[PARENT, n] >= 0:
            _ghost_append(a, n)
        n = a.node[PARENT, n]


@jit
def _detach(a: Arrays, n: int) -> None:
    """Unlink a ghost leaf from its parent and the table; its place is free."""
    parent = a.node[PARENT, n]
    before, after = a.node[SIBLING_PREV, n], a.node[SIBLING_NEXT, n]
    if before >= 0:
        a.node[SIBLING_NEXT, before] = after
    elif a.node[FIRST_CHILD, parent] == n:
        a.node[FIRST_CHILD, parent] = after
    else:
        a.node[FIRST_CHECKPOINT, parent] = after
    if after >= 0:
        a.node[SIBLING_PREV, after] = before
    if a.node[NTOKENS, n] == a.tokens.shape[1]:
        _table_remove(a, n)
    free_node(a, n)


@jit
def free_node(a: Arrays, n: int) -> None:
    """Put an unlinked node back on the free stack."""
    a.node[PARENT, n] = -1
    a.node[ROOT, n] = -1
    a.node[NTOKENS, n] = -1
    a.node[SIBLING_PREV, n] = -1
    a.node[SIBLING_NEXT, n] = -1
    a.free_nodes[a.scalars[FREE_NODES]] = n
    a.scalars[FREE_NODES] += 1
    a.scalars[NODES_USED] -= 1


@jit
def take_node(a: Arrays) -> int:
    """A clean node, recycling the oldest ghost when none is free; -1 when every node is needed.

    A ghost's children lost their weight before it did, so the head of the list is a leaf.
    """
    if a.scalars[FREE_NODES] == 0:
        ghost = a.scalars[GHOST_HEAD]
        if ghost < 0:
            return -1
        _ghost_unlink(a, ghost)
        _detach(a, ghost)
    a.scalars[FREE_NODES] -= 1
    a.scalars[NODES_USED] += 1
    n = a.free_nodes[a.scalars[FREE_NODES]]
    a.columns[n, :] = -1
    a.node[RESIDENT, n] = 0
    a.node[WEIGHT, n] = 0
    a.node[FIRST_CHILD, n] = -1
    a.node[FIRST_CHECKPOINT, n] = -1
    a.node[DEPTH, n] = 0
    a.node[NTOKENS, n] = 0
    a.node[ROOT, n] = n
    return n


@jit
def new_node(a: Arrays, parent: int, tokens: AnyArray, start: int, count: int) -> int:
    """A segment (``count`` = segment length) or checkpoint below ``parent``, weight 1 for the caller; -1 when full."""
    add_weight(a, parent)  # the parent must not be recycled to make room for its child
    n = take_node(a)
    if n < 0:
        drop_weight(a, parent)
        return -1
    is_segment = count == a.tokens.shape[1]
    a.node[PARENT, n] = parent
    a.node[ROOT, n] = a.node[ROOT, parent]
    a.node[DEPTH, n] = a.node[DEPTH, parent] + (1 if is_segment else 0)
    a.node[NTOKENS, n] = count
    for i in range(count):
        a.tokens[n, i] = tokens[start + i]
    head = a.node[FIRST_CHILD, parent] if is_segment else a.node[FIRST_CHECKPOINT, parent]
    a.node[SIBLING_PREV, n] = -1
    a.node[SIBLING_NEXT, n] = head
    if head >= 0:
        a.node[SIBLING_PREV, head] = n
    if is_segment:
        a.node[FIRST_CHILD, parent] = n
        a.key[n] = hash_segment(parent, tokens, start, count)
        _table_insert(a, n)
    else:
        a.node[FIRST_CHECKPOINT, parent] = n
    a.node[WEIGHT, n] = 1  # the weight added to the parent above is this node's
    return n


@jit
def forget_object(a: Arrays, g: int, s: int, code: int) -> None:
    """Take the object in slot ``s`` out of the index, leaving ``code``; holders keep the slot as a private one."""
    n, c = a.slot[OWNER, s], a.slot[OWNER_COL, s]
    a.columns[n, c] = code
    a.slot[OWNER, s] = -1
    a.slot[OWNER_COL, s] = -1
    a.node[RESIDENT, n] -= 1
    if code == SLOT_EVICTED:
        a.counters[g, EVICTIONS] += 1
    if a.slot[PINS, s] == 0:
        unlink_lru(a, g, s)
        move(a.slot[STATE], s, QUARANTINED if code == SLOT_QUARANTINED else EVICTED)
        give_slot(a, g, s)
    else:
        move(a.slot[STATE], s, QUARANTINED if code == SLOT_QUARANTINED else READY)
    drop_weight(a, n)


@jit
def adopt(a: Arrays, n: int, c: int, g: int, s: int) -> bool:
    """Publish the READY slot ``s`` as column ``c`` of node ``n`` unless something as good is there.

    An object of a worse grade is replaced.  Returns whether the index took the slot; its holders stay.
    """
    local = a.columns[n, c]
    if local >= 0:
        old = a.slot_base[g] + local
        if old == s or a.slot[GRADE, old] >= a.slot[GRADE, s]:
            return False
        add_weight(a, n)
        forget_object(a, g, old, -1)
        drop_weight(a, n)
    move(a.slot[STATE], s, COMMITTED)
    a.columns[n, c] = s - a.slot_base[g]
    a.slot[OWNER, s] = n
    a.slot[OWNER_COL, s] = c
    a.node[RESIDENT, n] += 1
    a.counters[g, COMMITS] += 1
    if a.slot[PINS, s] == 0:
        link_lru(a, g, s)
    add_weight(a, n)
    return True


@jit
def hold_column(a: Arrays, n: int, c: int, g: int) -> int:
    """Hold the object of column ``c`` and return its global slot."""
    s = a.slot_base[g] + a.columns[n, c]
    hold(a, g, s)
    return s
