"""From where a request could go on, and with what: what colder tiers would have to bring, and what a replay to make.

Chains, rows and ``cold`` are those of ``core.restoring``, with one ``cold`` for every tier, the nearest first.  Level L
is the device with the first L tiers behind it.
"""

from __future__ import annotations

from kvloom.core._jit import inlined, jit
from kvloom.core.arrays import Arrays
from kvloom.core.fields import COL_BASE, COLUMNS, GRADE, RULE, RULE_PREFIX, SLOT_BASE
from kvloom.core.restoring import needed_blocks, node_of, reachable, there
from kvloom.core.rules import blocks_at
from kvloom.types import AnyArray

RESTORED, REPLAYED = range(2)
"""Second axis of what ``survey`` writes: the boundary that needs no replay, and the one that may need it."""
POSITION, WORST, PLAN_COLUMNS = 0, 1, 2
"""Columns of ``found``: the boundary, and the worst grade of what it uses of prefix groups (-1: nothing)."""


@inlined
def _prefix_there(
    a: Arrays, path: AnyArray, checkpoint: int, cold: AnyArray, position: int, floor: int, row: int
) -> bool:
    """Whether what prefix groups need of ``row`` at ``position`` is on the device or cold."""
    n = node_of(path, checkpoint, position // a.tokens.shape[1], row)
    for g in range(a.group.shape[0]):
        if a.group[g, RULE] == RULE_PREFIX:
            base, per_segment = a.group[g, COL_BASE], a.group[g, COLUMNS]
            last = min(per_segment, blocks_at(a, g, position) - row * per_segment)
            for c in range(base, base + last):
                if cold[row, c] < floor and not there(a, n, c, g, floor):
                    return False
    return True


@jit
def prefix_reachable(a: Arrays, path: AnyArray, checkpoint: int, cold: AnyArray, tail: int, floor: int) -> int:
    """The deepest position of the chain at which every prefix group could resume once what is cold was brought."""
    segment, segments = a.tokens.shape[1], cold.shape[0] - (1 if tail > 0 else 0)
    whole = 0
    while whole < segments and _prefix_there(a, path, checkpoint, cold, (whole + 1) * segment, floor, whole):
        whole += 1
    if tail > 0 and whole == segments:
        position = segments * segment + tail
        if _prefix_there(a, path, checkpoint, cold, position, floor, segments):
            return position
    return whole * segment


@jit
def _count(
    a: Arrays, path: AnyArray, checkpoint: int, cold: AnyArray, position: int, floor: int, counts: AnyArray
) -> int:
    """Where the objects that ``position`` needs and the device lacks would come from.

    ``counts`` int64 [more than tiers, groups]: by the first tier that has them; those in none in the last row.
    Returns the worst grade of the prefix groups' objects, -1 without any.
    """
    segment = a.tokens.shape[1]
    segments = position // segment
    at = checkpoint if position % segment else -1
    worst = -1
    for g in range(a.group.shape[0]):
        base, per_segment = a.group[g, COL_BASE], a.group[g, COLUMNS]
        first, last = needed_blocks(a, g, position)
        for block in range(first, last):
            row = block // per_segment
            c = base + block - row * per_segment
            n = node_of(path, at, segments, row)
            grade = -1
            if there(a, n, c, g, floor):
                grade = a.slot[a.group[g, SLOT_BASE] + a.columns[n, c], GRADE]
            else:
                for t in range(cold.shape[0]):
                    if cold[t, row, c] >= floor:
                        counts[t, g] += 1
                        grade = cold[t, row, c]
                        break
            if grade < 0:
                counts[-1, g] += 1
            elif a.group[g, RULE] == RULE_PREFIX:
                worst = grade if worst < 0 else min(worst, grade)
    return worst


@jit
def survey(
    a: Arrays, path: AnyArray, checkpoint: int, cold: AnyArray, tail: int, floor: int, found: AnyArray, counts: AnyArray
) -> None:
    """For every level and both kinds of boundary: the position, and where its objects come from.

    Args:
        a, path, checkpoint, tail, floor: as in ``restoring.reachable``.
        cold: int8 [tiers + 1, rows, columns]; the first plane is filled with -1 and gets the best of the others.
        found: int64 [levels, 2, 2] gets position and worst grade.
        counts: int64 [levels, 2, tiers + 1, groups], zeros, gets the objects by the first tier that has them; in the
            last row those that no tier of the level has.
    """
    for level in range(cold.shape[0]):
        merged = cold[0]
        for row in range(cold.shape[1]):
            for c in range(cold.shape[2]):
                merged[row, c] = max(merged[row, c], cold[level, row, c])
        for kind in range(2):
            if kind == RESTORED:
                position = reachable(a, path, checkpoint, merged, tail, floor)
            else:
                position = prefix_reachable(a, path, checkpoint, merged, tail, floor)
            found[level, kind, POSITION] = position
            found[level, kind, WORST] = _count(
                a, path, checkpoint, cold[1 : level + 1], position, floor, counts[level, kind]
            )
