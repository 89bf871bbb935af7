"""Finding the children of a node by their tokens: a hash proposes, the tokens decide.

A node names its first segment child; the others, and all checkpoints, are in one open-addressed table of the index.
"""

from __future__ import annotations

import numpy as np

from kvloom.core._jit import inlined, jit
from kvloom.core.arrays import Arrays
from kvloom.core.fields import FIRST_CHECKPOINT, FIRST_CHILD, KEY, NTOKENS, PARENT, SIBLING_NEXT
from kvloom.core.token_runs import same_run
from kvloom.types import AnyArray

SAMPLES = 8


@jit
def hash_segment(parent: int, tokens: AnyArray, start: int, count: int) -> int:
    """31-bit hash of the parent, the count and a sample of the tokens: a place to look, never an identity."""
    h = np.uint64(parent) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(count) * np.uint64(0x632BE59BD9B4E019)
    step = max(1, count // SAMPLES)
    for i in range(count - 1, -1, -step):
        h = (h ^ np.uint64(tokens[start + i])) * np.uint64(0xFF51AFD7ED558CCD)
        h ^= h >> np.uint64(32)
    return np.int64(h >> np.uint64(33))  # type: ignore[return-value] # compiled code knows no other int


@inlined
def same_tokens(a: Arrays, n: int, tokens: AnyArray, start: int) -> bool:
    """Whether node ``n`` holds exactly ``tokens[start:start + NTOKENS]`` (the caller checked the length)."""
    return same_run(a.tokens, n, tokens, start, a.trunk[n, NTOKENS])


@inlined
def _look_up(a: Arrays, parent: int, tokens: AnyArray, start: int, count: int) -> int:
    h = hash_segment(parent, tokens, start, count)
    mask = len(a.table) - 1
    at = h & mask
    while a.table[at] >= 0:
        n = a.table[at]
        if (
            a.node[n, KEY] == h
            and a.trunk[n, PARENT] == parent
            and a.trunk[n, NTOKENS] == count
            and same_tokens(a, n, tokens, start)
        ):
            return n
        at = (at + 1) & mask
    return -1


@inlined
def find_child(a: Arrays, parent: int, tokens: AnyArray, start: int) -> int:
    """The segment child of ``parent`` with these tokens (one whole segment from ``start``), or -1.

    Most nodes have one child, which a link names; only the others are in the hash table.
    """
    first = a.trunk[parent, FIRST_CHILD]
    if first < 0 or same_tokens(a, first, tokens, start):
        return first
    if a.node[first, SIBLING_NEXT] < 0:
        return -1
    return _look_up(a, parent, tokens, start, a.tokens.shape[1])


@jit
def find_checkpoint(a: Arrays, parent: int, tokens: AnyArray, start: int, count: int) -> int:
    """The checkpoint of ``parent`` that holds exactly ``tokens[start:start + count]``, or -1."""
    if a.node[parent, FIRST_CHECKPOINT] < 0:
        return -1
    return _look_up(a, parent, tokens, start, count)


@jit
def table_insert(a: Arrays, n: int) -> None:
    """Enter node ``n`` under its parent and tokens."""
    a.node[n, KEY] = hash_segment(a.trunk[n, PARENT], a.tokens[n], 0, a.trunk[n, NTOKENS])
    mask = len(a.table) - 1
    at = a.node[n, KEY] & mask
    while a.table[at] >= 0:
        at = (at + 1) & mask
    a.table[at] = n


@jit
def table_remove(a: Arrays, n: int) -> None:
    """Take node ``n`` out: linear probing with backward shift, so that no tombstones pile up."""
    mask = len(a.table) - 1
    hole = a.node[n, KEY] & mask
    while a.table[hole] != n:
        hole = (hole + 1) & mask
    at = hole
    while True:
        at = (at + 1) & mask
        moved = a.table[at]
        if moved < 0:
            break
        home = a.node[moved, KEY] & mask
        if ((at - home) & mask) >= ((at - hole) & mask):
            a.table[hole] = moved
            hole = at
    a.table[hole] = -1
