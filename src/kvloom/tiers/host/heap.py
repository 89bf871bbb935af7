"""Compiled steps: units in a binary heap, the one that goes next on top.

The counter of a unit halves with every round of the clock.  A decayed counter ``h`` at the moment ``t`` is worth what
``log2(h) + t`` says: the order of two units does not change as time goes by, so nothing is ever sorted anew.
"""

from __future__ import annotations

import math
from typing import Any

from kvloom.tiers.host.arrays import AT, DEPTH, HEAT, KEY, PARENT, PLACE, UNITS
from kvloom.tiers.host.pages import jit
from kvloom.types import AnyArray


@jit
def _sooner(a: Any, x: int, y: int) -> bool:
    """Whether the unit at ``x`` goes before the one at ``y``: less worth, used longer ago, longer."""
    if a.heat[x, KEY] != a.heat[y, KEY]:
        return a.heat[x, KEY] < a.heat[y, KEY]
    if a.heat[x, AT] != a.heat[y, AT]:
        return a.heat[x, AT] < a.heat[y, AT]
    if a.node[x, DEPTH] != a.node[y, DEPTH]:
        return a.node[x, DEPTH] > a.node[y, DEPTH]
    return x < y


@jit
def _put(a: Any, at: int, n: int) -> None:
    a.heap[at] = n
    a.node[n, PLACE] = at


@jit
def _settle(a: Any, at: int) -> None:
    """Move the unit at a place of the heap to where it belongs."""
    n = a.heap[at]
    while at > 0 and _sooner(a, n, a.heap[(at - 1) >> 1]):
        _put(a, at, a.heap[(at - 1) >> 1])
        at = (at - 1) >> 1
    while True:
        below = 2 * at + 1
        if below >= a.scalars[UNITS]:
            break
        if below + 1 < a.scalars[UNITS] and _sooner(a, a.heap[below + 1], a.heap[below]):
            below += 1
        if not _sooner(a, a.heap[below], n):
            break
        _put(a, at, a.heap[below])
        at = below
    _put(a, at, n)


@jit
def use(a: Any, n: int, now: float) -> None:
    """The unit that ends at ``n`` was used, or is new."""
    a.heat[n, HEAT] = a.heat[n, HEAT] * math.pow(2.0, a.heat[n, AT] - now) + 1.0
    a.heat[n, AT] = now
    a.heat[n, KEY] = math.log2(a.heat[n, HEAT]) + now
    if a.node[n, PLACE] < 0:
        _put(a, a.scalars[UNITS], n)
        a.scalars[UNITS] += 1
    _settle(a, a.node[n, PLACE])


@jit
def forget(a: Any, n: int) -> None:
    """No unit ends at ``n`` any more."""
    at = a.node[n, PLACE]
    a.node[n, PLACE] = -1
    a.heat[n, HEAT] = 0.0
    a.scalars[UNITS] -= 1
    last = a.heap[a.scalars[UNITS]]
    if last != n:
        _put(a, at, last)
        _settle(a, at)


@jit
def walk(a: Any, ahead: AnyArray, size: AnyArray, out: AnyArray) -> int:
    """The next units in the order in which they go, as many as ``out`` takes; how many.  The heap stays as it is.

    In a heap what goes next after some is below one of them: ``ahead`` holds these places, ``size[0]`` of them, itself
    a heap.  It begins with place 0, and takes as many places as there are units.
    """
    count = 0
    while count < len(out) and size[0] > 0:
        place, last = ahead[0], ahead[size[0] - 1]
        size[0] -= 1
        at = 0
        while 2 * at + 1 < size[0]:
            down = 2 * at + 1
            if down + 1 < size[0] and _sooner(a, a.heap[ahead[down + 1]], a.heap[ahead[down]]):
                down += 1
            if not _sooner(a, a.heap[ahead[down]], a.heap[last]):
                break
            ahead[at] = ahead[down]
            at = down
        ahead[at] = last
        out[count] = a.heap[place]
        count += 1
        for child in range(2 * place + 1, min(2 * place + 3, a.scalars[UNITS])):
            at = size[0]
            size[0] += 1
            while at > 0 and _sooner(a, a.heap[child], a.heap[ahead[(at - 1) >> 1]]):
                ahead[at] = ahead[(at - 1) >> 1]
                at = (at - 1) >> 1
            ahead[at] = child
    return count


@jit
def below(a: Any, node: int, out: AnyArray) -> int:
    """Units that end at or below a node, in ``out``; how many."""
    count = 0
    for i in range(a.scalars[UNITS]):
        n = a.heap[i]
        while n >= 0 and n != node and a.node[n, DEPTH] > a.node[node, DEPTH]:
            n = a.node[n, PARENT]
        if n == node:
            out[count] = a.heap[i]
            count += 1
    return count


@jit
def out_of_order(a: Any) -> int:
    """Places of the heap that are wrong."""
    wrong = 0
    for i in range(a.scalars[UNITS]):
        n = a.heap[i]
        wrong += a.node[n, PLACE] != i or (i > 0 and _sooner(a, n, a.heap[(i - 1) >> 1]))
    return wrong
