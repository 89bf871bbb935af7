"""The leaves that may be evicted whole, oldest first: a binary heap in an array.

A node is in the heap exactly while it has objects and no anchors.  Order: last use, then node id, so that every run
of the same operations evicts the same nodes.
"""

from __future__ import annotations

from kvloom.core._jit import jit
from kvloom.core.arrays import Arrays
from kvloom.core.block_pool import page_of, pin_page, unpin_page
from kvloom.core.fields import COL_BASE, COLUMNS, HEAP_AT, HEAP_SIZE, NTOKENS, PINS, RULE, RULE_PREFIX, SLOT_BASE


@jit
def older(a: Arrays, n: int, m: int) -> bool:
    """Whether ``n`` goes before ``m``."""
    return a.node_stamp[n] < a.node_stamp[m] or (a.node_stamp[n] == a.node_stamp[m] and n < m)


@jit
def _put(a: Arrays, at: int, n: int) -> None:
    a.heap[at] = n
    a.node[n, HEAP_AT] = at


@jit
def _rise(a: Arrays, at: int) -> None:
    n = a.heap[at]
    while at > 0:
        above = (at - 1) >> 1
        if not older(a, n, a.heap[above]):
            break
        _put(a, at, a.heap[above])
        at = above
    _put(a, at, n)


@jit
def _sink(a: Arrays, at: int) -> None:
    size = a.scalars[HEAP_SIZE]
    n = a.heap[at]
    while True:
        below = 2 * at + 1
        if below >= size:
            break
        if below + 1 < size and older(a, a.heap[below + 1], a.heap[below]):
            below += 1
        if not older(a, a.heap[below], n):
            break
        _put(a, at, a.heap[below])
        at = below
    _put(a, at, n)


@jit
def _loosen(a: Arrays, n: int, loose: bool) -> None:
    """Tell the pages of the node's objects that these can (not) be evicted now.  Auxiliary objects do so themselves."""
    whole = a.node[n, NTOKENS] == a.tokens.shape[1]
    for g in range(a.group.shape[0]):
        if whole and a.group[g, RULE] != RULE_PREFIX:
            continue
        first = a.group[g, COL_BASE]
        for c in range(first, first + a.group[g, COLUMNS]):
            if a.columns[n, c] >= 0:
                s = a.group[g, SLOT_BASE] + a.columns[n, c]
                if a.slot[s, PINS] == 0:
                    if loose:
                        unpin_page(a, g, page_of(a, g, s))
                    else:
                        pin_page(a, g, page_of(a, g, s))


@jit
def enter_heap(a: Arrays, n: int) -> None:
    """``n`` lost its last anchor and still has objects."""
    at = a.scalars[HEAP_SIZE]
    a.scalars[HEAP_SIZE] += 1
    _put(a, at, n)
    _rise(a, at)
    _loosen(a, n, True)


@jit
def succeed(a: Arrays, n: int, parent: int) -> None:
    """``n`` lost its last object, and ``parent`` with it its last anchor: it takes the place of ``n``.

    Paths are evicted from their ends up, and a parent is about as old as its child, so this rarely moves anything.
    """
    at = a.node[n, HEAP_AT]
    a.node[n, HEAP_AT] = -1
    _put(a, at, parent)
    _rise(a, at)
    _sink(a, a.node[parent, HEAP_AT])
    _loosen(a, parent, True)


@jit
def leave_heap(a: Arrays, n: int) -> None:
    """``n`` got an anchor, or loses its objects."""
    at = a.node[n, HEAP_AT]
    a.scalars[HEAP_SIZE] -= 1
    last = a.heap[a.scalars[HEAP_SIZE]]
    a.node[n, HEAP_AT] = -1
    if last != n:
        _put(a, at, last)
        _rise(a, at)
        _sink(a, a.node[last, HEAP_AT])
    _loosen(a, n, False)
