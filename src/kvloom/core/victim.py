"""Which leaf goes next."""

from __future__ import annotations

from kvloom.core._jit import inlined, jit
from kvloom.core.arrays import Arrays
from kvloom.core.fields import (
    CLOCK,
    END_INDEX,
    END_NODE,
    END_TICK,
    OPENS,
    QUEUE,
    QUEUE_SIZE,
    RULES,
    SCORED_AT,
    SPENT,
    TICK,
    USES,
)
from kvloom.core.leaf_heap import first_stranded, join_queue, older, quit_queue
from kvloom.core.policies import BY_CLASSES, BY_FIFO, CLASSES, HEAPS, frequency
from kvloom.core.reuse import index_of

SMALL, MAIN = range(2)
SMALL_SHARE = 10
"""The small queue gives first while it has at least one in so many leaves."""
OF_THE_OLDEST = 2, 3
"""Another leaf than the oldest goes only when its index is below 2/3 of that of the oldest."""


@inlined
def _score(a: Arrays, row: int, q: int, n: int) -> int:
    """Index of leaf ``n`` of class ``q``, end ``row`` of all classes; remembered while nothing changes."""
    tick = a.heat[n, TICK]
    if a.policy[END_NODE + row] != n or a.policy[END_TICK + row] != tick:
        a.policy[END_NODE + row] = n
        a.policy[END_TICK + row] = tick
        a.policy[END_INDEX + row] = index_of(a, q, a.policy[OPENS] - tick)
    return a.policy[END_INDEX + row]


@jit
def _least_valuable(a: Arrays) -> tuple[int, int]:
    """Of the oldest and the youngest leaf of every class the one with the lowest index, unless the oldest will do.

    What no request can resume from goes at once.  Also the time before which other things are older than every leaf.
    """
    stranded = first_stranded(a)
    if stranded >= 0:
        return stranded, -1
    if a.policy[SCORED_AT] != a.policy[OPENS]:
        a.policy[SCORED_AT] = a.policy[OPENS]
        for row in range(2 * CLASSES):
            a.policy[END_NODE + row] = -1
    old, of_old, best, of_best = -1, 0, -1, 0
    for q in range(CLASSES):
        if a.policy[QUEUE_SIZE + q] == 0:
            continue
        n = a.heap[q, 0]
        index = _score(a, q, q, n)
        if old < 0 or older(a, n, old):
            old, of_old = n, index
        if best < 0 or index < of_best or (index == of_best and older(a, n, best)):
            best, of_best = n, index
        n = a.heap[HEAPS + q, 0]
        index = _score(a, CLASSES + q, q, n)
        if index < of_best:
            best, of_best = n, index
    if of_best * OF_THE_OLDEST[1] >= of_old * OF_THE_OLDEST[0]:
        best = old
    return best, a.node_stamp[old] - 1


@jit
def _out_of_two_queues(a: Arrays) -> int:
    """S3-FIFO: leaves that were used go to the main queue, or once more around it."""
    while True:
        small, leaves = a.policy[QUEUE_SIZE + SMALL], a.policy[QUEUE_SIZE + SMALL] + a.policy[QUEUE_SIZE + MAIN]
        q = SMALL if small == leaves or (small > 0 and small * SMALL_SHARE >= leaves) else MAIN
        n = a.heap[q, 0]
        used = frequency(a, n)
        if used < 1 or (used < 2 and q == SMALL):
            return n
        quit_queue(a, n)
        a.heat[n, SPENT] = a.node[n, USES] - (0 if q == SMALL else used - 1)
        a.heat[n, QUEUE] = MAIN
        a.order[n] = a.scalars[CLOCK]
        join_queue(a, n, MAIN)


@jit
def victim(a: Arrays) -> tuple[int, int]:
    """The leaf that goes next, and the time until which other things last used go before it.

    There must be a leaf.
    """
    if a.policy[RULES] == BY_CLASSES:
        return _least_valuable(a)
    n = _out_of_two_queues(a) if a.policy[RULES] == BY_FIFO else a.heap[0, 0]
    return n, a.node_stamp[n]
