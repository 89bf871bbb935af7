"""What windows and snapshots are worth: which boundaries keep theirs.

Prefix blocks serve every deeper boundary, windows and snapshots only their own.  ``cost`` keeps those of the ends of
requests, of forks and of every so many tokens (*rests*); all others are surplus and go first.
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
    REST,
    REST_INTERVAL,
    RULE,
    RULE_PREFIX,
    RULE_SNAPSHOT,
    RULES,
    SLOT_BASE,
    SURPLUS,
)
from kvloom.core.policies import BY_CLASSES
from kvloom.core.rules import block_of, blocks_at, first_block_needed


@inlined
def _revalue(a: Arrays, g: int, n: int, c: int, worth: int) -> None:
    local = a.columns[n, c]
    if local >= 0:
        s = a.group[g, SLOT_BASE] + local
        if worth == OF_LEAF:
            set_worth(a, g, s, KEPT)
        elif worth == SURPLUS:
            if a.worth[s] == KEPT:
                set_worth(a, g, s, SURPLUS)
        elif a.worth[s] < worth or (a.worth[s] == KEPT and worth == KEPT):
            set_worth(a, g, s, worth)


@jit
def value_boundary(a: Arrays, n: int, worth: int) -> None:
    """The windows and snapshots that resuming at the end of segment ``n`` needs are worth this much, or more.

    SURPLUS takes back what was KEPT, OF_LEAF makes everything KEPT, and both that and KEPT make it as new.
    """
    segment = a.tokens.shape[1]
    if a.policy[RULES] != BY_CLASSES or a.node[n, NTOKENS] != segment:
        return
    position = a.node[n, DEPTH] * segment
    for g in range(a.group.shape[0]):
        if a.group[g, RULE] == RULE_PREFIX:
            continue
        if a.group[g, RULE] == RULE_SNAPSHOT:
            _revalue(a, g, n, a.group[g, COL_BASE], worth)
            continue
        m, begin = n, block_of(a, g, position - segment)
        for block in range(blocks_at(a, g, position) - 1, first_block_needed(a, g, position) - 1, -1):
            if block < begin:
                m = a.node[m, PARENT]
                begin -= a.group[g, COLUMNS]
            _revalue(a, g, m, a.group[g, COL_BASE] + block - begin, worth)


@inlined
def value_resumed(a: Arrays, n: int) -> None:
    """A request resumes at ``n``: where others went on before, there is a fork; else it leaves the end behind."""
    value_boundary(a, n, SURPLUS if a.node[n, FIRST_CHILD] < 0 else KEPT)


@inlined
def value_published(a: Arrays, n: int) -> None:
    """Segment ``n`` was published."""
    every = a.scalars[REST_INTERVAL]
    if every > 0 and a.node[n, DEPTH] * a.tokens.shape[1] % every == 0:
        value_boundary(a, n, REST)
