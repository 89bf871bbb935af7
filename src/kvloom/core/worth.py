"""What windows and snapshots are worth: which boundaries keep theirs.

Prefix blocks serve every deeper boundary, windows and snapshots only their own.  ``cost`` keeps those of the ends of
requests, of forks and of rests (see ``next_rest``); all others are surplus and go first.
"""

from __future__ import annotations

from kvloom.core._jit import inlined, jit
from kvloom.core.arrays import Arrays
from kvloom.core.block_pool import set_worth
from kvloom.core.fields import (
    COL_BASE,
    COLUMNS,
    DEPTH,
    FIRST_CHILD,
    KEPT,
    NTOKENS,
    OF_LEAF,
    PARENT,
    PINS,
    REST,
    RULE,
    RULE_PREFIX,
    RULE_SNAPSHOT,
    RULES,
    SIBLING_NEXT,
    SLOT_BASE,
    SURPLUS,
    WINDOW,
)
from kvloom.core.policies import BY_CLASSES
from kvloom.core.rules import block_of, blocks_at, first_block_needed, next_rest, snapshot_needed


@inlined
def base_worth(a: Arrays, g: int, n: int, c: int) -> int:
    """What the object in column ``c`` of node ``n`` is worth while no end or fork needs it: REST or SURPLUS."""
    segment = a.tokens.shape[1]
    end = a.node[n, DEPTH] * segment
    rest = next_rest(a, end) if a.group[g, RULE] != RULE_PREFIX and a.trunk[n, NTOKENS] == segment else 0
    if rest == 0:
        return SURPLUS
    if a.group[g, RULE] == RULE_SNAPSHOT:
        return REST if end == rest else SURPLUS
    block = block_of(a, g, end - segment) + c - a.group[g, COL_BASE]
    return REST if first_block_needed(a, g, rest) <= block else SURPLUS


@inlined
def _lower(a: Arrays, g: int, n: int, c: int, when: int) -> None:
    """Take back what was KEPT, not after ``when``."""
    s = a.group[g, SLOT_BASE] + a.columns[n, c]
    if a.worth[s] == KEPT and (when < 0 or (a.slot[s, PINS] == 0 and a.slot_stamp[s] <= when)):
        set_worth(a, g, s, base_worth(a, g, n, c))


@inlined
def _lower_rest(a: Arrays, g: int, n: int, c: int, position: int) -> None:
    """What serves the rest at ``position`` and no other is surplus."""
    s = a.group[g, SLOT_BASE] + a.columns[n, c]
    segment = a.tokens.shape[1]
    end = a.node[n, DEPTH] * segment
    if a.worth[s] == REST and next_rest(a, end) == position:
        if a.group[g, RULE] != RULE_SNAPSHOT:
            block = block_of(a, g, end - segment) + c - a.group[g, COL_BASE]
            if first_block_needed(a, g, next_rest(a, position + 1)) <= block:
                return
        set_worth(a, g, s, SURPLUS)


@inlined
def _revalue(a: Arrays, g: int, n: int, c: int, worth: int, position: int, when: int) -> None:
    if a.columns[n, c] < 0:
        return
    s = a.group[g, SLOT_BASE] + a.columns[n, c]
    if worth == SURPLUS:
        _lower(a, g, n, c, when)
    elif worth == REST:
        _lower_rest(a, g, n, c, position)
    elif worth == OF_LEAF or a.worth[s] <= KEPT:
        set_worth(a, g, s, KEPT)


@jit
def _value(a: Arrays, n: int, worth: int, floor: int, when: int) -> None:
    """``value_boundary`` for objects of segments deeper than ``floor``; SURPLUS for those not released after ``when``.

    Deepest first, so that of what is only a part of a window the end goes first.
    """
    segment = a.tokens.shape[1]
    position = a.node[n, DEPTH] * segment
    for g in range(a.group.shape[0]):
        if a.group[g, RULE] == RULE_PREFIX:
            continue
        if a.group[g, RULE] == RULE_SNAPSHOT:
            _revalue(a, g, n, a.group[g, COL_BASE], worth, position, when)
            continue
        m, begin = n, block_of(a, g, position - segment)
        last = max(first_block_needed(a, g, position), floor * a.group[g, COLUMNS])
        for block in range(blocks_at(a, g, position) - 1, last - 1, -1):
            if block < begin:
                m = a.trunk[m, PARENT]
                begin -= a.group[g, COLUMNS]
            _revalue(a, g, m, a.group[g, COL_BASE] + block - begin, worth, position, when)


@jit
def value_boundary(a: Arrays, n: int, worth: int) -> None:
    """Windows and snapshots that resuming at the end of segment ``n`` needs serve an end or a fork, and count as new.

    They are KEPT, but for those that rests have; OF_LEAF makes all of them KEPT, so that they go with the leaf.
    """
    if a.policy[RULES] == BY_CLASSES and a.trunk[n, NTOKENS] == a.tokens.shape[1]:
        _value(a, n, worth, 0, -1)


@inlined
def reach(a: Arrays) -> int:
    """How many segments before the one at whose end a window is needed may have a part of it."""
    segment, most = a.tokens.shape[1], 0
    for g in range(a.group.shape[0]):
        if a.group[g, RULE] != RULE_PREFIX and a.group[g, RULE] != RULE_SNAPSHOT:
            most = max(most, (a.group[g, WINDOW] - 1 + segment - 1) // segment - 1)
    return most


@jit
def _stays(a: Arrays, n: int) -> bool:
    """Whether all that resuming at the end of segment ``n`` needs is there and stays: KEPT, or for a rest."""
    segment = a.tokens.shape[1]
    position = a.node[n, DEPTH] * segment
    for g in range(a.group.shape[0]):
        if a.group[g, RULE] == RULE_PREFIX:
            continue
        c = a.group[g, COL_BASE]
        if a.group[g, RULE] == RULE_SNAPSHOT:
            if snapshot_needed(a, g, position) and not _is_kept(a, g, n, c):
                return False
            continue
        m, begin = n, block_of(a, g, position - segment)
        for block in range(blocks_at(a, g, position) - 1, first_block_needed(a, g, position) - 1, -1):
            if block < begin:
                m = a.trunk[m, PARENT]
                begin -= a.group[g, COLUMNS]
            if not _is_kept(a, g, m, c + block - begin):
                return False
    return True


@inlined
def _is_kept(a: Arrays, g: int, n: int, c: int) -> bool:
    return a.columns[n, c] >= 0 and a.worth[a.group[g, SLOT_BASE] + a.columns[n, c]] != SURPLUS


@jit
def value_resumed(a: Arrays, n: int) -> None:
    """A request resumes at ``n``: where others went on before, there is a fork; else it leaves the end behind.

    What an end or a fork further up needs too stays: the nearest one needs all that others further up do.
    """
    if a.policy[RULES] != BY_CLASSES or a.trunk[n, NTOKENS] == 0:
        return
    if a.trunk[n, FIRST_CHILD] >= 0:
        value_boundary(a, n, KEPT)
        return
    above, floor = n, 0
    for _ in range(reach(a)):
        above = a.trunk[above, PARENT]
        if a.trunk[above, NTOKENS] == 0:
            break
        if _stays(a, above):
            floor = a.node[above, DEPTH]
            break
    _value(a, n, SURPLUS, floor, -1)


@jit
def give_up_boundary(a: Arrays, n: int, when: int) -> None:
    """Nothing can resume at the end of segment ``n``: what was kept for that, not after ``when``, is surplus."""
    _value(a, n, SURPLUS, 0, when)
    position = a.node[n, DEPTH] * a.tokens.shape[1]
    if next_rest(a, position) == position:
        _value(a, n, REST, 0, -1)


@inlined
def value_branch(a: Arrays, n: int) -> None:
    """The new segment ``n`` was put below its parent: if that has another child, there is a fork."""
    if a.node[n, SIBLING_NEXT] >= 0:
        value_boundary(a, a.trunk[n, PARENT], KEPT)
