"""What windows and snapshots are worth: which boundaries keep theirs.

Prefix blocks serve every deeper boundary, windows and snapshots only their own.  ``cost`` keeps those of the ends of
requests, of forks and of rests (see ``next_rest``); all others are surplus and go first.
"""

from __future__ import annotations

from kvloom.core._jit import inlined, jit
from kvloom.core.arrays import Arrays
from kvloom.core.block_pool import set_worth
from kvloom.core.fields import (
    ANCHORS,
    COL_BASE,
    COLUMNS,
    DEPTH,
    FIRST_CHECKPOINT,
    FIRST_CHILD,
    KEPT,
    NTOKENS,
    OF_LEAF,
    PARENT,
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
from kvloom.core.policies import BY_CLASSES, resumable
from kvloom.core.rules import block_of, blocks_at, first_block_needed, next_rest, snapshot_needed

GONE = 4
"""Besides the lists: what only a boundary needed that is no more."""
LOOKED_AT = 256
LATEST = 8
"""Checkpoints of a segment that may be ends of requests, the latest first."""


@inlined
def _has_snapshots(a: Arrays) -> bool:
    for g in range(a.group.shape[0]):
        if a.group[g, RULE] == RULE_SNAPSHOT:
            return True
    return False


@jit
def _rest_below(a: Arrays, n: int, rest: int) -> bool:
    """Whether the path through segment ``n`` goes on to a rest at which something can resume; yes if hard to find."""
    depth, looked, m = rest // a.tokens.shape[1], 0, n
    while m >= 0:
        looked += 1
        if looked > LOOKED_AT or (a.node[m, DEPTH] == depth and resumable(a, m)):
            return True
        m = next_below(a, n, m, depth)
    return False


@inlined
def next_below(a: Arrays, n: int, m: int, depth: int) -> int:
    """The segment after ``m`` in a walk over ``n`` and what is below it, down to a depth; -1 at the end."""
    if a.node[m, DEPTH] < depth and a.trunk[m, FIRST_CHILD] >= 0:
        return a.trunk[m, FIRST_CHILD]
    while m != n and a.node[m, SIBLING_NEXT] < 0:
        m = a.trunk[m, PARENT]
    return a.node[m, SIBLING_NEXT] if m != n else -1


@inlined
def base_worth(a: Arrays, g: int, n: int, c: int) -> int:
    """What the object in column ``c`` of node ``n`` is worth while no end or fork needs it: REST or SURPLUS.

    A window is there when its rest is published, but a snapshot may never be taken; until it is, nothing is REST.
    """
    segment = a.tokens.shape[1]
    end = a.node[n, DEPTH] * segment
    rest = next_rest(a, end) if a.group[g, RULE] != RULE_PREFIX and a.trunk[n, NTOKENS] == segment else 0
    if rest == 0:
        return SURPLUS
    if a.group[g, RULE] == RULE_SNAPSHOT and end != rest:
        return SURPLUS
    if a.group[g, RULE] != RULE_SNAPSHOT:
        block = block_of(a, g, end - segment) + c - a.group[g, COL_BASE]
        if first_block_needed(a, g, rest) > block:
            return SURPLUS
    return REST if not _has_snapshots(a) or _rest_below(a, n, rest) else SURPLUS


@jit
def _serves(a: Arrays, g: int, n: int, block: int) -> bool:
    """Whether anything can resume below ``n`` that needs its block of window group ``g``; yes if that is much work."""
    segment = a.tokens.shape[1]
    looked, m = 0, n
    while m >= 0:
        position = a.node[m, DEPTH] * segment
        near = first_block_needed(a, g, position) <= block
        if near and resumable(a, m):
            return True
        c = a.node[m, FIRST_CHECKPOINT]
        while c >= 0:
            if first_block_needed(a, g, position + a.trunk[c, NTOKENS]) <= block and resumable(a, c):
                return True
            looked += 1
            c = a.node[c, SIBLING_NEXT]
        looked += 1
        if looked > LOOKED_AT:
            return True
        m = next_below(a, n, m, a.node[m, DEPTH] + (1 if near else 0))
    return False


@inlined
def _give_up(a: Arrays, g: int, n: int, c: int, position: int) -> None:
    """Nothing can resume at ``position`` any more: what serves nothing else goes first, unless it waits for a rest."""
    s = a.group[g, SLOT_BASE] + a.columns[n, c]
    if a.worth[s] == SURPLUS:
        return
    segment = a.tokens.shape[1]
    end = a.node[n, DEPTH] * segment
    if a.group[g, RULE] == RULE_SNAPSHOT:
        if resumable(a, n):
            return
    elif _serves(a, g, n, block_of(a, g, end - segment) + c - a.group[g, COL_BASE]):
        return
    if next_rest(a, end) == position:
        set_worth(a, g, s, SURPLUS)
    elif a.worth[s] == KEPT:
        set_worth(a, g, s, base_worth(a, g, n, c))


@inlined
def _revalue(a: Arrays, g: int, n: int, c: int, worth: int, position: int) -> None:
    if a.columns[n, c] < 0:
        return
    s = a.group[g, SLOT_BASE] + a.columns[n, c]
    if worth == GONE:
        _give_up(a, g, n, c, position)
    elif worth == SURPLUS:
        if a.worth[s] == KEPT:
            set_worth(a, g, s, base_worth(a, g, n, c))
    elif worth == REST:
        if a.worth[s] == SURPLUS:
            set_worth(a, g, s, REST)
    elif worth == OF_LEAF or a.worth[s] <= KEPT:
        set_worth(a, g, s, KEPT)


@jit
def _value(a: Arrays, n: int, worth: int, floor: int) -> None:
    """Say what the windows and snapshots are worth that resuming at ``n`` needs, of segments deeper than ``floor``.

    Deepest first, so that of what is only a part of a window the end goes first.  What a checkpoint has itself goes
    with it.
    """
    segment = a.tokens.shape[1]
    whole = a.trunk[n, NTOKENS] == segment
    own = (a.node[n, DEPTH] - (1 if whole else 0)) * segment
    position = own + a.trunk[n, NTOKENS]
    for g in range(a.group.shape[0]):
        if a.group[g, RULE] == RULE_PREFIX:
            continue
        if a.group[g, RULE] == RULE_SNAPSHOT:
            if whole:
                _revalue(a, g, n, a.group[g, COL_BASE], worth, position)
            continue
        m, begin = n, block_of(a, g, own)
        last = max(first_block_needed(a, g, position), floor * a.group[g, COLUMNS])
        for block in range((blocks_at(a, g, position) if whole else begin) - 1, last - 1, -1):
            if block < begin:
                m = a.trunk[m, PARENT]
                begin -= a.group[g, COLUMNS]
            _revalue(a, g, m, a.group[g, COL_BASE] + block - begin, worth, position)


@jit
def value_leaf(a: Arrays, n: int) -> None:
    """Segment ``n`` is a leaf, at which something can resume: what it needs is KEPT, and goes with it at last."""
    if a.policy[RULES] == BY_CLASSES and a.trunk[n, NTOKENS] == a.tokens.shape[1]:
        _value(a, n, OF_LEAF, 0)


@jit
def value_end(a: Arrays, n: int) -> None:
    """A request ends at segment ``n``, or at a checkpoint below it: what that needs is KEPT, and counts as new.

    What rests have stays with them.
    """
    if a.policy[RULES] != BY_CLASSES:
        return
    if a.trunk[n, NTOKENS] > 0 and resumable(a, n):
        _value(a, n, KEPT, 0)
    c, looked = a.node[n, FIRST_CHECKPOINT], 0
    while c >= 0 and looked < LATEST:
        if a.node[c, ANCHORS] > 0 or resumable(a, c):
            _value(a, c, KEPT, 0)
        c = a.node[c, SIBLING_NEXT]
        looked += 1


@inlined
def value_rest(a: Arrays, n: int) -> None:
    """Segment ``n`` got a snapshot: if it is a rest, and whole now, that stays."""
    position = a.node[n, DEPTH] * a.tokens.shape[1]
    if next_rest(a, position) == position > 0 and a.trunk[n, NTOKENS] == a.tokens.shape[1] and resumable(a, n):
        _value(a, n, REST, 0)


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
        value_end(a, n)
        return
    above, floor = n, 0
    for _ in range(reach(a)):
        above = a.trunk[above, PARENT]
        if a.trunk[above, NTOKENS] == 0:
            break
        if _stays(a, above):
            floor = a.node[above, DEPTH]
            break
    _value(a, n, SURPLUS, floor)


@jit
def give_up_boundary(a: Arrays, n: int) -> None:
    """Nothing can resume at segment or checkpoint ``n`` any more: what only that needed goes first."""
    _value(a, n, GONE, 0)


@inlined
def value_branch(a: Arrays, n: int) -> None:
    """The new segment ``n`` was put below its parent: if that has another child, there is a fork."""
    parent = a.trunk[n, PARENT]
    forked = a.policy[RULES] == BY_CLASSES and a.node[n, SIBLING_NEXT] >= 0
    if forked and a.trunk[parent, NTOKENS] > 0 and resumable(a, parent):
        _value(a, parent, KEPT, 0)
