"""Passes over the whole core that are off the critical path: forgetting, evicting by bytes, counting."""

from __future__ import annotations

from kvloom.core._jit import jit
from kvloom.core.arrays import (
    BLOCK_TOKENS,
    DEPTH,
    FIRST_CHECKPOINT,
    FIRST_CHILD,
    LRU_HEAD,
    NTOKENS,
    PINNED,
    RESIDENT,
    ROOT,
    RULE,
    RULE_PREFIX,
    RULE_SNAPSHOT,
    USED,
    WEIGHT,
    Arrays,
)
from kvloom.core.eviction import evict_object
from kvloom.core.prefix_index import forget_object, free_node
from kvloom.core.rules import blocks_at, first_block_needed, snapshot_needed
from kvloom.types import AnyArray


@jit
def object_begin(a: Arrays, n: int, c: int, g: int) -> int:
    """Token at which the object of column ``c`` begins; a snapshot "begins" where it was taken."""
    segment = a.tokens.shape[1]
    is_segment = a.node[NTOKENS, n] == segment
    start = (a.node[DEPTH, n] - 1 if is_segment else a.node[DEPTH, n]) * segment
    if a.group[RULE, g] == RULE_SNAPSHOT:
        return start + a.node[NTOKENS, n]
    return start + (c - a.col_base[g]) * a.group[BLOCK_TOKENS, g]


@jit
def forget(a: Arrays, root: int, group: int, at: int, code: int) -> int:
    """Forget objects, leaving ``code``: of one root or all (-1), one group or all (-1), one position or all (-1)."""
    count = 0
    for n in range(a.node.shape[1]):
        if a.node[NTOKENS, n] < 1 or a.node[RESIDENT, n] == 0 or (root >= 0 and a.node[ROOT, n] != root):
            continue
        for g in range(a.group.shape[1]):
            if group >= 0 and g != group:
                continue
            for c in range(a.col_base[g], a.col_base[g + 1]):
                local = a.columns[n, c]
                if local >= 0 and (at < 0 or object_begin(a, n, c, g) == at):
                    forget_object(a, g, a.slot_base[g] + local, code)
                    count += 1
    return count


@jit
def _bytes_used(a: Arrays, slot_bytes: AnyArray) -> int:
    total = 0
    for g in range(a.group.shape[1]):
        total += a.group[USED, g] * slot_bytes[g]
    return total


@jit
def evict_bytes(a: Arrays, slot_bytes: AnyArray, wanted: int) -> int:
    """Evict the globally oldest objects until ``wanted`` bytes are free that were not; returns the bytes freed."""
    before = _bytes_used(a, slot_bytes)
    freed = 0
    while freed < wanted:
        oldest = -1
        for g in range(a.group.shape[1]):
            head = a.group[LRU_HEAD, g]
            if head >= 0 and (oldest < 0 or a.stamp[head] < a.stamp[a.group[LRU_HEAD, oldest]]):
                oldest = g
        if oldest < 0:
            break
        evict_object(a, oldest, a.group[LRU_HEAD, oldest])
        freed = before - _bytes_used(a, slot_bytes)
    return freed


@jit
def held_bytes(a: Arrays, slot_bytes: AnyArray) -> int:
    """Bytes of slots that are in use and not evictable."""
    total = 0
    for g in range(a.group.shape[1]):
        total += a.group[PINNED, g] * slot_bytes[g]
    return total


@jit
def count_misses(a: Arrays, limit: int, reused: int, column: int) -> None:
    """Count, per group, the objects that resuming at ``limit`` would have needed beyond the hit at ``reused``."""
    for g in range(a.group.shape[1]):
        if a.group[RULE, g] == RULE_SNAPSHOT:
            if reused < limit and snapshot_needed(a, g, limit):
                a.counters[g, column] += 1
            continue
        first = first_block_needed(a, g, limit)
        had = blocks_at(a, g, reused) if a.group[RULE, g] == RULE_PREFIX else max(first, blocks_at(a, g, reused))
        a.counters[g, column] += max(0, blocks_at(a, g, limit) - max(first, had))


@jit
def free_empty_root(a: Arrays, root: int) -> bool:
    """Free a namespace's root that nothing hangs on; False when something does."""
    if a.node[WEIGHT, root] > 0 or a.node[FIRST_CHILD, root] >= 0 or a.node[FIRST_CHECKPOINT, root] >= 0:
        return False
    free_node(a, root)
    return True
