"""The leaves that may be evicted whole, in the order of the policy: binary heaps in arrays.

A node is in a queue exactly while it has objects and no anchors.  Every queue is a heap with the lowest ``order`` at
the top, in a tie the lowest node id, so that every run of the same operations evicts the same nodes.  Under ``cost``
the queue of every class has a second heap of the same nodes with the highest order at the top.
"""

from __future__ import annotations

from kvloom.core._jit import inlined, jit
from kvloom.core.arrays import Arrays
from kvloom.core.block_pool import page_of, pin_page, unpin_page
from kvloom.core.fields import (
    COL_BASE,
    COLUMNS,
    DEPTH,
    FIRST_CHECKPOINT,
    HEAP_AT,
    HEAP_SIZE,
    NTOKENS,
    PARENT,
    PINS,
    QUEUE,
    QUEUE_SIZE,
    RULE,
    RULE_PREFIX,
    RULES,
    SIBLING_NEXT,
    SLOT_BASE,
    SPENT,
    YOUNG_AT,
)
from kvloom.core.policies import BY_CLASSES, BY_FIFO, CLASSES, HEAPS, STRANDED, rank, resumable
from kvloom.core.worth import give_up_boundary, next_below, reach, value_leaf


@inlined
def older(a: Arrays, n: int, m: int) -> bool:
    """Whether ``n`` goes before ``m``."""
    return a.order[n] < a.order[m] or (a.order[n] == a.order[m] and n < m)


@inlined
def _put(a: Arrays, row: int, at: int, n: int) -> None:
    a.heap[row, at] = n
    if row < HEAPS:
        a.node[n, HEAP_AT] = at
    else:
        a.heat[n, YOUNG_AT] = at


@inlined
def _place(a: Arrays, row: int, n: int) -> int:
    return a.node[n, HEAP_AT] if row < HEAPS else a.heat[n, YOUNG_AT]


@inlined
def _above(a: Arrays, row: int, n: int, m: int) -> bool:
    """Whether ``n`` belongs nearer to the top of heap ``row`` than ``m``."""
    return older(a, n, m) if row < HEAPS else older(a, m, n)


@jit
def _rise(a: Arrays, row: int, at: int) -> None:
    n = a.heap[row, at]
    while at > 0:
        above = (at - 1) >> 1
        if not _above(a, row, n, a.heap[row, above]):
            break
        _put(a, row, at, a.heap[row, above])
        at = above
    _put(a, row, at, n)


@jit
def _sink(a: Arrays, row: int, at: int, size: int) -> None:
    n = a.heap[row, at]
    while True:
        below = 2 * at + 1
        if below >= size:
            break
        if below + 1 < size and _above(a, row, a.heap[row, below + 1], a.heap[row, below]):
            below += 1
        if not _above(a, row, a.heap[row, below], n):
            break
        _put(a, row, at, a.heap[row, below])
        at = below
    _put(a, row, at, n)


@inlined
def _queue(a: Arrays, n: int) -> int:
    """The queue that leaf ``n`` is in."""
    rule = a.policy[RULES]
    return a.heat[n, QUEUE] if rule in (BY_CLASSES, BY_FIFO) else 0


@inlined
def _take_out(a: Arrays, row: int, n: int, size: int) -> None:
    """Heap ``row`` has ``size`` nodes without ``n``, which is one of them now."""
    at = _place(a, row, n)
    last = a.heap[row, size]
    if last != n:
        _put(a, row, at, last)
        _rise(a, row, at)
        _sink(a, row, _place(a, row, last), size)


@inlined
def _count_above(a: Arrays, n: int, by: int) -> None:
    """Tell the segments that may have a part of its windows that checkpoint ``n`` is a leaf, or is not any more."""
    if a.policy[RULES] != BY_CLASSES or a.trunk[n, NTOKENS] == a.tokens.shape[1]:
        return
    m = a.trunk[n, PARENT]
    for _ in range(reach(a) + 1):
        if a.trunk[m, NTOKENS] == 0:
            return
        a.heat[m, SPENT] += by
        m = a.trunk[m, PARENT]


@jit
def join_queue(a: Arrays, n: int, q: int) -> None:
    """Add ``n`` to queue ``q``."""
    _count_above(a, n, 1)
    size = a.policy[QUEUE_SIZE + q]
    a.policy[QUEUE_SIZE + q] = size + 1
    a.scalars[HEAP_SIZE] += 1
    _put(a, q, size, n)
    _rise(a, q, size)
    if a.policy[RULES] == BY_CLASSES and q < CLASSES:
        _put(a, HEAPS + q, size, n)
        _rise(a, HEAPS + q, size)


@jit
def quit_queue(a: Arrays, n: int) -> None:
    """Take ``n`` out of its queue."""
    _count_above(a, n, -1)
    q = _queue(a, n)
    size = a.policy[QUEUE_SIZE + q] - 1
    a.policy[QUEUE_SIZE + q] = size
    a.scalars[HEAP_SIZE] -= 1
    _take_out(a, q, n, size)
    if a.policy[RULES] == BY_CLASSES and q < CLASSES:
        _take_out(a, HEAPS + q, n, size)
    a.node[n, HEAP_AT] = -1


@jit
def _loosen(a: Arrays, n: int, loose: bool) -> None:
    """Tell the pages of the node's objects that these can (not) be evicted now.  Auxiliary objects do so themselves."""
    whole = a.trunk[n, NTOKENS] == a.tokens.shape[1]
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
    q = rank(a, n)
    join_queue(a, n, q)
    if a.policy[RULES] == BY_CLASSES and q != STRANDED:
        value_leaf(a, n)
    _loosen(a, n, True)


@inlined
def _replace(a: Arrays, row: int, n: int, parent: int, size: int) -> None:
    at = _place(a, row, n)
    _put(a, row, at, parent)
    _rise(a, row, at)
    _sink(a, row, _place(a, row, parent), size)


@jit
def succeed(a: Arrays, n: int, parent: int) -> None:
    """``n`` lost its last object, and ``parent`` with it its last anchor: it takes the place of ``n``.

    Paths are evicted from their ends up, and a parent is about as old as its child, so this rarely moves anything.
    """
    old, q = _queue(a, n), rank(a, parent)
    if q == old:
        size = a.policy[QUEUE_SIZE + q]
        _count_above(a, n, -1)
        _replace(a, q, n, parent, size)
        if a.policy[RULES] == BY_CLASSES and q < CLASSES:
            _replace(a, HEAPS + q, n, parent, size)
        a.node[n, HEAP_AT] = -1
    else:
        quit_queue(a, n)
        join_queue(a, parent, q)
    if a.policy[RULES] == BY_CLASSES and q != STRANDED:
        value_leaf(a, parent)
    _loosen(a, parent, True)


@jit
def leave_heap(a: Arrays, n: int) -> None:
    """``n`` got an anchor, or loses its objects."""
    quit_queue(a, n)
    _loosen(a, n, False)


@inlined
def _strand(a: Arrays, n: int) -> None:
    """A leaf that nothing can resume from any more goes next."""
    if a.node[n, HEAP_AT] >= 0 and a.heat[n, QUEUE] != STRANDED and not resumable(a, n):
        quit_queue(a, n)
        a.heat[n, QUEUE] = STRANDED
        join_queue(a, n, STRANDED)


@jit
def strand_checkpoints(a: Arrays, n: int) -> None:
    """``n`` lost a window: checkpoints within reach that nothing can resume from any more go next."""
    if a.heat[n, SPENT] == 0:
        return
    depth, m = a.node[n, DEPTH] + reach(a), n
    while m >= 0:
        c = a.node[m, FIRST_CHECKPOINT]
        while c >= 0:
            _strand(a, c)
            c = a.node[c, SIBLING_NEXT]
        m = next_below(a, n, m, depth)


@jit
def first_stranded(a: Arrays) -> int:
    """The first stranded leaf, or -1; those that somebody can resume from after all leave the queue."""
    while a.policy[QUEUE_SIZE + STRANDED] > 0:
        n = a.heap[STRANDED, 0]
        if not resumable(a, n):
            return n
        quit_queue(a, n)
        join_queue(a, n, rank(a, n))
        value_leaf(a, n)
    return -1


@inlined
def give_up(a: Arrays, n: int) -> None:
    """What only the end of segment ``n`` or its checkpoints need goes first if nothing can resume there any more."""
    if a.trunk[n, NTOKENS] == a.tokens.shape[1] and not resumable(a, n):
        _strand(a, n)
        give_up_boundary(a, n)
    c = a.node[n, FIRST_CHECKPOINT]
    while c >= 0:
        if not resumable(a, c):
            _strand(a, c)
            give_up_boundary(a, c)
        c = a.node[c, SIBLING_NEXT]


@jit
def reconsider(a: Arrays, n: int) -> None:
    """``n`` lost a window or snapshot that was kept: boundaries that needed it end there, or not far below."""
    depth = a.node[n, DEPTH] + reach(a)
    m = n
    while m >= 0:
        give_up(a, m)
        m = next_below(a, n, m, depth)
