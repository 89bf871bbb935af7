"""The one-pass match: the deepest boundary at which every group can resume.

``walk`` follows the tokens down the index; ``best_boundary`` turns "present here" into "resumable here" for
every group at once (prefix-AND, run length, point presence) and keeps the best position; ``diagnose``
says what was missing further down.
"""

from __future__ import annotations

from kvloom.core._jit import jit
from kvloom.core.arrays import (
    BLOCK_TOKENS,
    FIRST_CHECKPOINT,
    FIRST_CHILD,
    GRADE,
    NTOKENS,
    RESIDENT,
    RULE,
    RULE_PREFIX,
    RULE_WINDOW,
    SIBLING_NEXT,
    STATE,
    Arrays,
)
from kvloom.core.lifecycle import COMMITTED
from kvloom.core.prefix_index import find_child, same_tokens
from kvloom.core.rules import blocks_at, first_block_needed, snapshot_needed
from kvloom.types import AnyArray

FAULT_GRADE = -5
"""Besides the column codes of ``kvloom.types``: the object is there, but below the floor."""


@jit
def walk(a: Arrays, root: int, tokens: AnyArray, limit: int, path: AnyArray) -> int:
    """Follow ``tokens`` (int32) from ``root`` while whole segments fit into ``limit`` tokens.

    ``path[0]`` is the root and ``path[k]`` the node of segment k - 1; returns the depth reached.
    """
    segment = a.tokens.shape[1]
    path[0] = root
    depth = 0
    while (depth + 1) * segment <= limit:
        child = find_child(a, path[depth], tokens, depth * segment)
        if child < 0:
            break
        depth += 1
        path[depth] = child
    return depth


@jit
def fault(a: Arrays, n: int, c: int, g: int, floor: int) -> int:
    """0 when column ``c`` of ``n`` may be used by a request with this floor, else the code that says why not."""
    local = a.columns[n, c]
    if local < 0:
        return local
    s = a.slot_base[g] + local
    if a.slot[GRADE, s] < floor or a.slot[STATE, s] != COMMITTED:
        return FAULT_GRADE
    return 0


@jit
def _segment_step(a: Arrays, n: int, floor: int, complete: AnyArray, run: AnyArray) -> None:
    """Fold the blocks of segment ``n`` into the prefix-ANDs (``complete``) and run lengths (``run``, in blocks)."""
    for g in range(a.group.shape[1]):
        first, last = a.col_base[g], a.col_base[g + 1]
        if a.group[RULE, g] == RULE_PREFIX:
            for c in range(first, last):
                if complete[g] and fault(a, n, c, g, floor) != 0:
                    complete[g] = 0
        elif a.group[RULE, g] == RULE_WINDOW:
            for c in range(first, last):
                if fault(a, n, c, g, floor) != 0:
                    run[g] = 0
                else:
                    run[g] += 1


@jit
def _segment_fault(a: Arrays, g: int, n: int, position: int, floor: int, complete: AnyArray, run: AnyArray) -> bool:
    """Whether group ``g`` cannot resume at ``position``, the end of segment ``n``."""
    if a.group[RULE, g] == RULE_PREFIX:
        return not complete[g]
    if a.group[RULE, g] == RULE_WINDOW:
        return run[g] < position // a.group[BLOCK_TOKENS, g] - first_block_needed(a, g, position)
    return snapshot_needed(a, g, position) and fault(a, n, a.col_base[g], g, floor) != 0


@jit
def _checkpoint_fault(
    a: Arrays,
    g: int,
    n: int,
    start: int,
    floor: int,
    complete: AnyArray,
    run: AnyArray,
) -> bool:
    """Whether group ``g`` cannot resume at checkpoint ``n``, whose segment begins at ``start``."""
    position = start + a.node[NTOKENS, n]
    if a.group[BLOCK_TOKENS, g] == 0:
        return snapshot_needed(a, g, position) and fault(a, n, a.col_base[g], g, floor) != 0
    origin = start // a.group[BLOCK_TOKENS, g]
    lowest = first_block_needed(a, g, position)
    if a.group[RULE, g] == RULE_PREFIX:
        if not complete[g]:
            return True
    elif run[g] < origin - lowest:
        return True
    for block in range(max(lowest, origin), blocks_at(a, g, position)):
        if fault(a, n, a.col_base[g] + block - origin, g, floor) != 0:
            return True
    return False


@jit
def _segment_possible(a: Arrays, n: int, position: int, floor: int, complete: AnyArray, run: AnyArray) -> bool:
    for g in range(a.group.shape[1]):
        if _segment_fault(a, g, n, position, floor, complete, run):
            return False
    return True


@jit
def _checkpoint_possible(a: Arrays, n: int, start: int, floor: int, complete: AnyArray, run: AnyArray) -> bool:
    for g in range(a.group.shape[1]):
        if _checkpoint_fault(a, g, n, start, floor, complete, run):
            return False
    return True


@jit
def _any_hope(complete: AnyArray) -> bool:
    """False once a prefix-AND failed: no deeper boundary can be resumed."""
    for g in range(len(complete)):
        if complete[g] == 0:
            return False
    return True


@jit
def best_boundary(
    a: Arrays, path: AnyArray, depth: int, tokens: AnyArray, limit: int, floor: int, scratch: AnyArray
) -> tuple[int, int, int]:
    """The best boundary on ``path`` up to ``limit``: (position, segments before it, checkpoint node or -1).

    ``scratch``: int64 [2, groups], overwritten.
    """
    segment = a.tokens.shape[1]
    complete, run = scratch[0], scratch[1]
    complete[:] = 1
    run[:] = 0
    best, best_depth, best_checkpoint = 0, 0, -1
    for k in range(depth + 1):
        n = path[k]
        start = k * segment
        if k > 0:
            _segment_step(a, n, floor, complete, run)
            if _segment_possible(a, n, start, floor, complete, run):
                best, best_depth, best_checkpoint = start, k, -1
        if not _any_hope(complete):
            break
        checkpoint = a.node[FIRST_CHECKPOINT, n]
        while checkpoint >= 0:
            position = start + a.node[NTOKENS, checkpoint]
            if (
                best < position <= limit
                and a.node[RESIDENT, checkpoint] > 0
                and same_tokens(a, checkpoint, tokens, start)
                and _checkpoint_possible(a, checkpoint, start, floor, complete, run)
            ):
                best, best_depth, best_checkpoint = position, k, checkpoint
            checkpoint = a.node[SIBLING_NEXT, checkpoint]
    return best, best_depth, best_checkpoint


@jit
def known_prefix(a: Arrays, path: AnyArray, depth: int, tokens: AnyArray, limit: int) -> tuple[int, int]:
    """How far any cached sequence agrees with ``tokens``: (tokens known, checkpoint node or -1).

    The checkpoint is the deepest up to ``limit`` that agrees.  Looks at the children and checkpoints of the deepest
    node only, token by token.
    """
    n = path[depth]
    start = depth * a.tokens.shape[1]
    most, at = 0, -1
    for side in range(2):
        child = a.node[FIRST_CHILD, n] if side == 0 else a.node[FIRST_CHECKPOINT, n]
        while child >= 0:
            count = 0
            while (
                count < a.node[NTOKENS, child]
                and start + count < len(tokens)
                and a.tokens[child, count] == tokens[start + count]
            ):
                count += 1
            whole = side == 1 and count == a.node[NTOKENS, child] and start + count <= limit
            if whole and (at < 0 or count > a.node[NTOKENS, at]):
                at = child
            most = max(most, count)
            child = a.node[SIBLING_NEXT, child]
    return start + most, at


@jit
def diagnose(a: Arrays, path: AnyArray, depth: int, floor: int, checkpoint: int, out: AnyArray) -> None:
    """For every group, why it cannot resume at the end of ``path`` or at ``checkpoint`` below it.

    ``out`` int64 [groups, 2]: token position of the first object at fault, and its code (0 = no fault).
    """
    segment = a.tokens.shape[1]
    end = depth * segment
    position = end if checkpoint < 0 else end + a.node[NTOKENS, checkpoint]
    for g in range(a.group.shape[1]):
        out[g, 0] = position
        out[g, 1] = 0
        if a.group[BLOCK_TOKENS, g] == 0:
            if snapshot_needed(a, g, position):
                n = path[depth] if checkpoint < 0 else checkpoint
                out[g, 1] = fault(a, n, a.col_base[g], g, floor)
            continue
        per_segment = a.col_base[g + 1] - a.col_base[g]
        for block in range(first_block_needed(a, g, position), blocks_at(a, g, position)):
            k = block // per_segment
            n = path[k + 1] if k < depth else checkpoint
            code = fault(a, n, a.col_base[g] + block % per_segment, g, floor)
            if code != 0:
                out[g, 0] = block * a.group[BLOCK_TOKENS, g]
                out[g, 1] = code
                break
