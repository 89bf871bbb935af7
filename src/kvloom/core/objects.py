"""The objects of nodes: how a slot becomes a column of a node, and how it goes."""

from __future__ import annotations

from kvloom.core._jit import inlined, jit
from kvloom.core.arrays import Arrays
from kvloom.core.block_pool import give_slot, is_auxiliary, link_auxiliary, page_of, pin_page, unlink_auxiliary
from kvloom.core.fields import (
    ANCHORS,
    COL_BASE,
    COLUMNS,
    COMMITS,
    EVICTIONS,
    GRADE,
    HEAP_AT,
    NTOKENS,
    OWNER,
    OWNER_COL,
    PINS,
    RESIDENT,
    RULE,
    RULE_PREFIX,
    RULE_SNAPSHOT,
    SLOT_BASE,
    SPINE,
)
from kvloom.core.graves import give_up
from kvloom.core.lifecycle import COMMITTED, EVICTED, QUARANTINED, READY, move
from kvloom.core.prefix_index import drop_resident
from kvloom.core.worth import base_worth, value_rest
from kvloom.types import SLOT_EVICTED, SLOT_QUARANTINED


@inlined
def refresh_spine(a: Arrays, n: int) -> None:
    """Recompute the worst grade of the node's prefix-group objects, -1 when one is missing."""
    worst = 2
    for g in range(a.group.shape[0]):
        if a.group[g, RULE] == RULE_PREFIX:
            first = a.group[g, COL_BASE]
            for c in range(first, first + a.group[g, COLUMNS]):
                local = a.columns[n, c]
                worst = min(worst, a.slot[a.group[g, SLOT_BASE] + local, GRADE] if local >= 0 else -1)
    a.trunk[n, SPINE] = worst


@jit
def forget_object(a: Arrays, g: int, s: int, code: int) -> None:
    """Take the object in slot ``s`` out of the index, leaving ``code``.

    A slot that somebody may still read stays with them: private holders keep it; sequences that run below its node
    keep it until they end.
    """
    n, c = a.slot[s, OWNER], a.slot[s, OWNER_COL]
    auxiliary = is_auxiliary(a, g, s)
    in_use = a.slot[s, PINS] > 0
    # what runs below a segment reads its prefix blocks without holding them; a checkpoint's readers hold theirs
    below = a.group[g, RULE] == RULE_PREFIX and a.trunk[n, NTOKENS] == a.tokens.shape[1] and a.node[n, ANCHORS] > 0
    a.columns[n, c] = code
    if code == SLOT_EVICTED:
        a.counters[g, EVICTIONS] += 1
    if not in_use:
        if auxiliary:
            unlink_auxiliary(a, g, s)
        elif a.node[n, HEAP_AT] >= 0:
            pin_page(a, g, page_of(a, g, s))
    a.slot[s, OWNER] = -1
    a.slot[s, OWNER_COL] = -1
    if in_use or below:
        move(a.slot, s, QUARANTINED if code == SLOT_QUARANTINED else READY)
        if below:
            give_up(a, s)
    else:
        move(a.slot, s, QUARANTINED if code == SLOT_QUARANTINED else EVICTED)
        give_slot(a, g, s)
    if a.group[g, RULE] == RULE_PREFIX:
        a.trunk[n, SPINE] = -1
    drop_resident(a, n)


@inlined
def adopt(a: Arrays, n: int, c: int, g: int, s: int) -> bool:
    """Publish the READY slot ``s`` as column ``c`` of the anchored node ``n`` unless something as good is there.

    An object of a worse grade is replaced.  Returns whether the index took the slot; its holders stay.  The caller
    refreshes the node's spine.
    """
    local, worth = a.columns[n, c], base_worth(a, g, n, c)
    if local >= 0:
        old = a.group[g, SLOT_BASE] + local
        if old == s or a.slot[old, GRADE] >= a.slot[s, GRADE]:
            return False
        worth = max(worth, a.worth[old])
        forget_object(a, g, old, -1)
    if a.group[g, RULE] != RULE_PREFIX:
        a.worth[s] = worth
    move(a.slot, s, COMMITTED)
    a.columns[n, c] = s - a.group[g, SLOT_BASE]
    a.slot[s, OWNER] = n
    a.slot[s, OWNER_COL] = c
    a.node[n, RESIDENT] += 1
    a.counters[g, COMMITS] += 1
    if a.slot[s, PINS] == 0 and is_auxiliary(a, g, s):
        link_auxiliary(a, g, s)
    if a.group[g, RULE] == RULE_SNAPSHOT:
        value_rest(a, n)
    return True
