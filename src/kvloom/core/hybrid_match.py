"""The one-pass match: the deepest boundary at which every group can resume.

``walk`` follows the tokens down the index while every prefix group is complete (the prefix-AND).  ``best_boundary``
then looks from the deepest position up for the first at which windows (run length) and snapshots (point presence) are
there too. ``diagnose`` says what was missing further down.
"""

from __future__ import annotations

from kvloom.core._jit import inlined, jit
from kvloom.core.arrays import Arrays
from kvloom.core.child_table import find_checkpoint, find_child, same_tokens
from kvloom.core.fields import (
    BLOCK_TOKENS,
    CHUNKED,
    COL_BASE,
    COLUMNS,
    FIRST_CHECKPOINT,
    FIRST_CHILD,
    GRADE,
    NTOKENS,
    PARENT,
    RESIDENT,
    RULE,
    RULE_PREFIX,
    RULE_SNAPSHOT,
    RULE_WINDOW,
    SIBLING_NEXT,
    SLOT_BASE,
    SPINE,
    STATE,
)
from kvloom.core.lifecycle import COMMITTED
from kvloom.core.rules import blocks_at, first_block_needed, needed_from, snapshot_needed
from kvloom.types import AnyArray

SCANNED = 8
"""Checkpoints of a node that are looked at one by one; those of a longer list are found by hash."""
EXPLAINED = 256
"""Children and checkpoints that an explanation looks at, newest first."""
FAULT_GRADE = -5
"""Besides the column codes of ``kvloom.types``: the object is there, but below the floor."""


@jit
def walk(a: Arrays, root: int, tokens: AnyArray, limit: int, floor: int, path: AnyArray) -> tuple[int, int]:
    """Follow ``tokens`` (int32) from ``root`` while whole segments fit into ``limit`` tokens.

    ``path[0]`` is the root and ``path[k]`` the node of segment k - 1.  Returns the depth reached, and down to which
    depth every prefix-group object is there, at ``floor`` or better.
    """
    segment = a.tokens.shape[1]
    path[0] = root
    depth = 0
    complete = -1
    n = root
    while (depth + 1) * segment <= limit:
        # Most children lie right behind their parent; guessing so frees the processor from waiting for the link.
        while (
            (depth + 1) * segment <= limit
            and a.trunk[n, FIRST_CHILD] == n + 1
            and same_tokens(a, n + 1, tokens, depth * segment)
        ):
            n += 1
            if a.trunk[n, SPINE] < floor and complete < 0:
                complete = depth
            depth += 1
            path[depth] = n
        if (depth + 1) * segment > limit:
            break
        n = find_child(a, n, tokens, depth * segment)
        if n < 0:
            break
        if a.trunk[n, SPINE] < floor and complete < 0:
            complete = depth
        depth += 1
        path[depth] = n
    return depth, depth if complete < 0 else complete


@inlined
def fault(a: Arrays, n: int, c: int, g: int, floor: int) -> int:
    """0 when column ``c`` of ``n`` may be used by a request with this floor, else the code that says why not."""
    local = a.columns[n, c]
    if local < 0:
        return local
    s = a.group[g, SLOT_BASE] + local
    if a.slot[s, GRADE] < floor or a.slot[s, STATE] != COMMITTED:
        return FAULT_GRADE
    return 0


@inlined
def _node_of(path: AnyArray, depth: int, checkpoint: int, k: int) -> int:
    """Node that holds the blocks of segment ``k`` (0-based) for a boundary after ``depth`` segments."""
    return path[k + 1] if k < depth else checkpoint


@jit
def _first_fault(
    a: Arrays, g: int, path: AnyArray, depth: int, checkpoint: int, position: int, floor: int
) -> tuple[int, int]:
    """The last (deepest) block at fault for group ``g`` at a boundary: (block, code), code 0 when there is none.

    Prefix groups are only checked inside the checkpoint: ``walk`` covers their segments.
    """
    rule = a.group[g, RULE]
    if rule == RULE_SNAPSHOT:
        if snapshot_needed(a, g, position):
            n = path[depth] if checkpoint < 0 else checkpoint
            return 0, fault(a, n, a.group[g, COL_BASE], g, floor)
        return 0, 0
    per_segment = a.group[g, COLUMNS]
    first = first_block_needed(a, g, position)
    if rule == RULE_PREFIX:
        first = max(first, depth * per_segment)
    for block in range(blocks_at(a, g, position) - 1, first - 1, -1):
        k = block // per_segment
        code = fault(a, _node_of(path, depth, checkpoint, k), a.group[g, COL_BASE] + block - k * per_segment, g, floor)
        if code != 0:
            return block, code
    return 0, 0


@jit
def _ceiling(a: Arrays, path: AnyArray, depth: int, checkpoint: int, position: int, floor: int) -> int:
    """``position`` when every group can resume there, else a bound: no boundary above it and below ``position`` can
    either.

    A missing window block spoils every later position up to ``position``.  A checkpoint brings its own blocks of its
    segment, so those of the segment with the hole may still do; and a chunked window needs nothing from before its
    chunk.
    """
    ceiling = position
    for g in range(a.group.shape[0]):
        block, code = _first_fault(a, g, path, depth, checkpoint, position, floor)
        if code != 0:
            bound = position - 1
            if a.group[g, RULE] == RULE_WINDOW:
                segment_of_hole = block // a.group[g, COLUMNS]
                bound = (segment_of_hole + 1) * a.tokens.shape[1] - 1
                if a.group[g, CHUNKED]:
                    bound = max(bound, needed_from(a, g, position))
                bound = min(bound, position - 1)
            ceiling = min(ceiling, bound)
    return ceiling


@jit
def _best_of_many(
    a: Arrays, path: AnyArray, k: int, tokens: AnyArray, ceiling: int, floor: int, best: int, best_checkpoint: int
) -> tuple[int, int]:
    """The best checkpoint of a node that has many, longest first by hash: (position, node), or the best so far."""
    segment = a.tokens.shape[1]
    start = k * segment
    for position in range(min(start + segment - 1, ceiling), best, -1):
        n = find_checkpoint(a, path[k], tokens, start, position - start)
        if n >= 0 and a.node[n, RESIDENT] > 0 and _ceiling(a, path, k, n, position, floor) == position:
            return position, n
    return best, best_checkpoint


@jit
def best_boundary(
    a: Arrays, path: AnyArray, complete: int, tokens: AnyArray, limit: int, floor: int
) -> tuple[int, int, int]:
    """The best boundary on ``path`` up to ``limit``: (position, segments before it, checkpoint node or -1).

    ``complete``: the depth down to which the prefix groups are complete.
    """
    segment = a.tokens.shape[1]
    ceiling = limit
    for k in range(complete, -1, -1):
        start = k * segment
        best, best_checkpoint = start, -1
        checkpoint = a.node[path[k], FIRST_CHECKPOINT]
        looked = 0
        while checkpoint >= 0 and looked < SCANNED:
            position = start + a.trunk[checkpoint, NTOKENS]
            if (
                best < position <= ceiling
                and a.node[checkpoint, RESIDENT] > 0
                and same_tokens(a, checkpoint, tokens, start)
                and _ceiling(a, path, k, checkpoint, position, floor) == position
            ):
                best, best_checkpoint = position, checkpoint
            checkpoint = a.node[checkpoint, SIBLING_NEXT]
            looked += 1
        if checkpoint >= 0:
            best, best_checkpoint = _best_of_many(a, path, k, tokens, ceiling, floor, best, best_checkpoint)
        if best_checkpoint >= 0:
            return best, k, best_checkpoint
        if k > 0 and start <= ceiling:
            below = _ceiling(a, path, k, -1, start, floor)
            if below == start:
                return start, k, -1
            ceiling = below
    return 0, 0, -1


@jit
def first_bad_group(a: Arrays, path: AnyArray, depth: int, checkpoint: int, position: int, floor: int) -> int:
    """The first group that cannot resume at this boundary, or -1: verification repeats what the match found."""
    for k in range(1, depth + 1):
        n = path[k]
        if a.trunk[n, PARENT] != path[k - 1]:
            return 0
        if a.trunk[n, SPINE] < floor:
            for g in range(a.group.shape[0]):
                first = a.group[g, COL_BASE]
                for c in range(first, first + a.group[g, COLUMNS]):
                    if a.group[g, RULE] == RULE_PREFIX and fault(a, n, c, g, floor) != 0:
                        return g
            return 0
    for g in range(a.group.shape[0]):
        if _first_fault(a, g, path, depth, checkpoint, position, floor)[1] != 0:
            return g
    return -1


@jit
def known_prefix(a: Arrays, path: AnyArray, depth: int, tokens: AnyArray, limit: int) -> tuple[int, int]:
    """How far any cached sequence agrees with ``tokens``: (tokens known, checkpoint node or -1).

    The checkpoint is the deepest up to ``limit`` that agrees.  Looks at the newest children and checkpoints of the
    deepest node only, token by token: a root may have thousands, and this is not worth more.
    """
    n = path[depth]
    start = depth * a.tokens.shape[1]
    most, at = 0, -1
    for side in range(2):
        child = a.trunk[n, FIRST_CHILD] if side == 0 else a.node[n, FIRST_CHECKPOINT]
        looked = 0
        while child >= 0 and looked < EXPLAINED:
            looked += 1
            count = 0
            end = min(a.trunk[child, NTOKENS], len(tokens) - start)
            while count < end and a.tokens[child, count] == tokens[start + count]:
                count += 1
            whole = side == 1 and count == a.trunk[child, NTOKENS] and start + count <= limit
            if whole and (at < 0 or count > a.trunk[at, NTOKENS]):
                at = child
            most = max(most, count)
            child = a.node[child, SIBLING_NEXT]
    return start + most, at


@jit
def diagnose(a: Arrays, path: AnyArray, depth: int, floor: int, checkpoint: int, out: AnyArray) -> None:
    """For every group, why it cannot resume at the end of ``path`` or at ``checkpoint`` below it.

    ``out`` int64 [groups, 2]: token position of the first object at fault, and its code (0 = no fault).
    """
    segment = a.tokens.shape[1]
    end = depth * segment
    position = end if checkpoint < 0 else end + a.trunk[checkpoint, NTOKENS]
    for g in range(a.group.shape[0]):
        out[g, 0] = position
        out[g, 1] = 0
        if a.group[g, RULE] == RULE_SNAPSHOT:
            if snapshot_needed(a, g, position):
                n = path[depth] if checkpoint < 0 else checkpoint
                out[g, 1] = fault(a, n, a.group[g, COL_BASE], g, floor)
            continue
        per_segment = a.group[g, COLUMNS]
        for block in range(first_block_needed(a, g, position), blocks_at(a, g, position)):
            k = block // per_segment
            n = _node_of(path, depth, checkpoint, k)
            code = fault(a, n, a.group[g, COL_BASE] + block - k * per_segment, g, floor)
            if code != 0:
                out[g, 0] = block * a.group[g, BLOCK_TOKENS]
                out[g, 1] = code
                break
