"""Compiled steps: which unit needs which object.

A unit holds a count on every object that it needs and that was there when it was published.
"""

from __future__ import annotations

from typing import Any

from kvloom.tiers.host.arrays import (
    BORN,
    COLUMN,
    DEPTH,
    FIRST,
    GROUP,
    HELD,
    LENGTH,
    NEXT,
    OBJ_NODE,
    PARENT,
    REFS,
    STATE,
    TOP_OBJECT,
)
from kvloom.tiers.host.pages import jit
from kvloom.tiers.host.records import drop_object
from kvloom.types import AnyArray


@jit
def _asks(needs: AnyArray, k: int, group: int, depth: int, column: int) -> bool:
    """Whether need ``k`` (group, first node, first column, count) asks for an object."""
    if needs[k, 0] != group:
        return False
    return depth > needs[k, 1] or (depth == needs[k, 1] and column >= needs[k, 2])


@jit
def _needed(needs: AnyArray, group: int, depth: int, column: int) -> bool:
    for k in range(len(needs)):
        if _asks(needs, k, group, depth, column):
            return True
    return False


@jit
def needs_object(a: Any, x: int, needs: AnyArray) -> bool:
    """Whether a unit at or below the node of an object needs it."""
    return _needed(needs, a.obj[x, GROUP], a.node[a.obj[x, OBJ_NODE], DEPTH], a.obj[x, COLUMN])


@jit
def tally(a: Any, end: int, needs: AnyArray, counts: AnyArray) -> int:
    """Add to ``counts`` what is held for every need of a unit at or below ``end``; returns pages of it all."""
    total = 0
    while end >= 0:
        x = a.node[end, FIRST]
        while x >= 0:
            depth, group, column = a.node[end, DEPTH], a.obj[x, GROUP], a.obj[x, COLUMN]
            for k in range(len(needs)):
                if _asks(needs, k, group, depth, column):
                    counts[k] += 1
            if _needed(needs, group, depth, column):
                total += (a.obj[x, LENGTH] + 4095) >> 12
            x = a.obj[x, NEXT]
        end = a.node[end, PARENT]
    return total


@jit
def tally_new(about: AnyArray, held: AnyArray, needs: AnyArray, counts: AnyArray) -> None:
    """Add what is not held yet."""
    for i in range(len(about)):
        for k in range(len(needs)):
            if held[i] < 0 and _asks(needs, k, about[i, 1], about[i, 0], about[i, 2]):
                counts[k] += 1


@jit
def add_refs(a: Any, end: int, needs: AnyArray, serial: int) -> None:
    """Count a unit on all that it needs and that was born no later than it."""
    while end >= 0:
        x = a.node[end, FIRST]
        while x >= 0:
            if a.obj64[x, BORN] <= serial and _needed(needs, a.obj[x, GROUP], a.node[end, DEPTH], a.obj[x, COLUMN]):
                a.obj[x, REFS] += 1
            x = a.obj[x, NEXT]
        end = a.node[end, PARENT]


@jit
def drop_refs(a: Any, end: int, needs: AnyArray, serial: int) -> None:
    """Take the counts of a unit back; what has none left is dropped."""
    while end >= 0:
        x = a.node[end, FIRST]
        while x >= 0:
            after = a.obj[x, NEXT]
            if a.obj64[x, BORN] <= serial and _needed(needs, a.obj[x, GROUP], a.node[end, DEPTH], a.obj[x, COLUMN]):
                a.obj[x, REFS] -= 1
                if a.obj[x, REFS] <= 0:
                    drop_object(a, x)
            x = after
        end = a.node[end, PARENT]


@jit
def pass_over(a: Any, end: int, needs: AnyArray, serial: int, passed: AnyArray, out: AnyArray, count: int) -> int:
    """``drop_refs`` on paper: ``passed`` counts units that are passed over, by object.

    Appends the objects that nobody else needs to the ``count`` ones in ``out``; how many these are then.
    """
    while end >= 0:
        x = a.node[end, FIRST]
        while x >= 0:
            if a.obj64[x, BORN] <= serial and _needed(needs, a.obj[x, GROUP], a.node[end, DEPTH], a.obj[x, COLUMN]):
                passed[x] += 1
                if passed[x] == a.obj[x, REFS]:
                    out[count] = x
                    count += 1
            x = a.obj[x, NEXT]
        end = a.node[end, PARENT]
    return count


@jit
def reset_refs(a: Any) -> None:
    """No counts on anything."""
    for x in range(a.scalars[TOP_OBJECT]):
        if a.obj[x, STATE] == HELD:
            a.obj[x, REFS] = 0
