"""Passes over the whole core that are off the critical path: forgetting, evicting by bytes, counting."""

from __future__ import annotations

from kvloom.core._jit import jit
from kvloom.core.arrays import Arrays
from kvloom.core.eviction import evict_any
from kvloom.core.fields import (
    ANCHORS,
    BLOCK_TOKENS,
    BROKEN,
    COL_BASE,
    COLUMNS,
    DEPTH,
    FIRST_CHECKPOINT,
    FIRST_CHILD,
    MISSES,
    NTOKENS,
    PARENT,
    PASSES,
    PINNED,
    PINS,
    RESIDENT,
    ROOT,
    RULE,
    RULE_PREFIX,
    RULE_SNAPSHOT,
    RULES,
    SLOT_BASE,
    USED,
)
from kvloom.core.leaf_heap import give_up
from kvloom.core.objects import forget_object
from kvloom.core.policies import BY_CLASSES
from kvloom.core.prefix_index import free_node
from kvloom.core.rules import blocks_at, first_block_needed, snapshot_needed
from kvloom.types import AnyArray


@jit
def object_begin(a: Arrays, n: int, c: int, g: int) -> int:
    """Token at which the object of column ``c`` begins; a snapshot "begins" where it was taken."""
    segment = a.tokens.shape[1]
    is_segment = a.trunk[n, NTOKENS] == segment
    start = (a.node[n, DEPTH] - 1 if is_segment else a.node[n, DEPTH]) * segment
    if a.group[g, RULE] == RULE_SNAPSHOT:
        return start + a.trunk[n, NTOKENS]
    return start + (c - a.group[g, COL_BASE]) * a.group[g, BLOCK_TOKENS]


@jit
def forget(a: Arrays, root: int, group: int, at: int, code: int) -> int:
    """Forget objects, leaving ``code``: of one root or all (-1), one group or all (-1), one position or all (-1)."""
    count = 0
    for n in range(a.node.shape[0]):
        if a.trunk[n, NTOKENS] < 1 or a.node[n, RESIDENT] == 0 or (root >= 0 and a.node[n, ROOT] != root):
            continue
        for g in range(a.group.shape[0]):
            if group >= 0 and g != group:
                continue
            first = a.group[g, COL_BASE]
            for c in range(first, first + a.group[g, COLUMNS]):
                local = a.columns[n, c]
                if local >= 0 and (at < 0 or object_begin(a, n, c, g) == at):
                    forget_object(a, g, a.group[g, SLOT_BASE] + local, code)
                    count += 1
                    if a.group[g, RULE] == RULE_PREFIX:
                        a.scalars[BROKEN] = 1
    if count > 0:
        reconsider_all(a)
    return count


@jit
def reconsider_all(a: Arrays) -> None:
    """Let what serves no boundary any more go first."""
    if a.policy[RULES] != BY_CLASSES:
        return
    for n in range(a.node.shape[0]):
        if a.trunk[n, NTOKENS] >= 0:
            give_up(a, n)


@jit
def bytes_used(a: Arrays, slot_bytes: AnyArray) -> int:
    """Bytes of the slots that are not free."""
    total = 0
    for g in range(a.group.shape[0]):
        total += a.group[g, USED] * slot_bytes[g]
    return total


@jit
def bytes_held(a: Arrays, ends: AnyArray, slot_bytes: AnyArray) -> int:
    """Bytes of the slots that cannot be evicted now: those with holders, and those of the paths to ``ends`` (int64)."""
    total = 0
    for g in range(a.group.shape[0]):
        total += a.group[g, PINNED] * slot_bytes[g]
    a.scalars[PASSES] += 1
    seen = a.scalars[PASSES] << 32
    for i in range(len(ends)):
        n = ends[i]
        while n >= 0 and a.reached[n] < seen:
            a.reached[n] = seen
            whole = a.trunk[n, NTOKENS] == a.tokens.shape[1]
            for g in range(a.group.shape[0]):
                if whole and a.group[g, RULE] != RULE_PREFIX:
                    continue
                first = a.group[g, COL_BASE]
                for c in range(first, first + a.group[g, COLUMNS]):
                    if a.columns[n, c] >= 0 and a.slot[a.group[g, SLOT_BASE] + a.columns[n, c], PINS] == 0:
                        total += slot_bytes[g]
            n = a.trunk[n, PARENT]
    return total


@jit
def evict_bytes(a: Arrays, slot_bytes: AnyArray, wanted: int) -> int:
    """Evict the oldest things until ``wanted`` bytes are free that were not; returns the bytes freed."""
    before = bytes_used(a, slot_bytes)
    segment = 0
    for g in range(a.group.shape[0]):
        segment += a.group[g, COLUMNS] * slot_bytes[g]
    freed = 0
    while freed < wanted:
        if not evict_any(a, max(1, (wanted - freed) // segment)):
            break
        freed = before - bytes_used(a, slot_bytes)
    return freed


@jit
def count_misses(a: Arrays, limit: int, reused: int) -> None:
    """Count, per group, the objects that resuming at ``limit`` would have needed beyond the hit at ``reused``."""
    for g in range(a.group.shape[0]):
        if a.group[g, RULE] == RULE_SNAPSHOT:
            if reused < limit and snapshot_needed(a, g, limit):
                a.counters[g, MISSES] += 1
            continue
        first = first_block_needed(a, g, limit)
        had = blocks_at(a, g, reused) if a.group[g, RULE] == RULE_PREFIX else max(first, blocks_at(a, g, reused))
        a.counters[g, MISSES] += max(0, blocks_at(a, g, limit) - max(first, had))


@jit
def free_empty_root(a: Arrays, root: int) -> bool:
    """Free a namespace's root that nothing hangs on; False when something does."""
    if a.node[root, ANCHORS] > 0 or a.trunk[root, FIRST_CHILD] >= 0 or a.node[root, FIRST_CHECKPOINT] >= 0:
        return False
    free_node(a, root)
    return True
