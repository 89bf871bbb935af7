"""Block tables of running sequences: dense arrays that map logical blocks to slots.

Row ``q`` of ``table`` holds, from ``offset[g]``, the local slot of logical block ``i`` of group ``g`` at column
``i % width[g]`` (a ring for windows; other groups never wrap).  ``first`` and ``last`` bound the logical
blocks in use; snapshot groups have one column, their live slot.  Rows are allocated once at their largest
shape, so that addresses stay valid for the life of the process.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kvloom.core._jit import jit
from kvloom.core.arrays import (
    BLOCK_TOKENS,
    DEPTH,
    GENERATION,
    GRADE,
    HITS,
    NEED,
    OWNER,
    PARENT,
    RATIO,
    RULE,
    RULE_SNAPSHOT,
    STATE,
    UNKEPT,
    Arrays,
)
from kvloom.core.block_pool import hold, lacks_room, release
from kvloom.core.eviction import take_or_evict
from kvloom.core.lifecycle import ALLOCATED, READY, move
from kvloom.core.prefix_index import add_weight, adopt, find_child, new_node
from kvloom.core.rules import block_useful, blocks_at, first_block_needed, snapshot_kept, snapshot_needed
from kvloom.plan import ArenaGeometry
from kvloom.spec.model_spec import ModelSpec
from kvloom.types import SLOT_EVICTED, AnyArray


class Rows(NamedTuple):
    """Block tables of all running sequences; see the module docstring."""

    table: AnyArray  # int32 [Q, sum of widths] local slots, -1 = none
    offset: AnyArray  # int32 [G] first column of each group
    width: AnyArray  # int32 [G]
    first: AnyArray  # int32 [Q, G]
    last: AnyArray  # int32 [Q, G]
    generation: AnyArray  # int32, like table: generation of the slot when the row took it


def allocate_rows(spec: ModelSpec, geometry: ArenaGeometry, max_sequences: int) -> Rows:
    """Rows for ``max_sequences``; a group's width is bounded by the model's length and by what the arena can hold."""
    widths = []
    for g, group in enumerate(spec.groups):
        most = int(geometry.num_slots[g])
        if group.is_snapshot:
            widths.append(1)
        elif spec.max_positions:
            widths.append(min(-(-spec.max_positions // group.block_tokens), most))
        else:
            widths.append(most)
    offset = np.concatenate([[0], np.cumsum(widths)]).astype(np.int32)
    shape = (max_sequences, int(offset[-1]))
    counts = (max_sequences, len(spec.groups))
    return Rows(
        table=np.full(shape, -1, dtype=np.int32),
        offset=offset[:-1].copy(),
        width=np.array(widths, dtype=np.int32),
        first=np.zeros(counts, dtype=np.int32),
        last=np.zeros(counts, dtype=np.int32),
        generation=np.zeros(shape, dtype=np.int32),
    )


@jit
def place(a: Arrays, r: Rows, q: int, g: int, block: int) -> int:
    """Column of ``table`` that holds logical block ``block``."""
    return r.offset[g] + block % r.width[g]


@jit
def slot_at(a: Arrays, r: Rows, q: int, g: int, block: int) -> int:
    """Global slot of logical block ``block``."""
    return a.slot_base[g] + r.table[q, place(a, r, q, g, block)]


@jit
def put(a: Arrays, r: Rows, q: int, g: int, block: int, s: int) -> None:
    """Enter global slot ``s``, which the row now holds, as logical block ``block``."""
    at = place(a, r, q, g, block)
    r.table[q, at] = s - a.slot_base[g]
    r.generation[q, at] = a.slot[GENERATION, s]


@jit
def shrink(a: Arrays, r: Rows, q: int, g: int, first: int, last: int) -> None:
    """Release every block outside [first, last), deepest first."""
    for block in range(r.last[q, g] - 1, r.first[q, g] - 1, -1):
        if block < first or block >= last:
            release(a, g, slot_at(a, r, q, g, block))
            r.table[q, place(a, r, q, g, block)] = -1
    r.first[q, g] = max(r.first[q, g], min(first, last))
    r.last[q, g] = max(r.first[q, g], min(r.last[q, g], last))


@jit
def release_row(a: Arrays, r: Rows, q: int) -> None:
    """Release everything a row holds."""
    for g in range(a.group.shape[1]):
        shrink(a, r, q, g, 0, 0)
        r.first[q, g] = 0
        r.last[q, g] = 0


@jit
def grow(a: Arrays, r: Rows, q: int, length: int, more: int) -> int:
    """Reserve the blocks that ``more`` tokens after ``length`` write; -1, or the group without room (nothing kept)."""
    for g in range(a.group.shape[1]):
        a.group[NEED, g] = 0
        if a.group[RULE, g] != RULE_SNAPSHOT:
            want = blocks_at(a, g, length + more)
            if want - r.first[q, g] > r.width[g]:
                return g
            a.group[NEED, g] = max(0, want - r.last[q, g])
    short = lacks_room(a)
    if short >= 0:
        return short
    for g in range(a.group.shape[1]):
        if a.group[RULE, g] == RULE_SNAPSHOT:
            continue
        want = blocks_at(a, g, length + more)
        had = r.last[q, g]
        for block in range(had, want):
            s = take_or_evict(a, g)
            if s < 0:  # pages that are only partly in use, scattered over the groups
                for undo in range(g + 1):
                    if a.group[RULE, undo] != RULE_SNAPSHOT:
                        shrink(a, r, q, undo, r.first[q, undo], max(r.first[q, undo], blocks_at(a, undo, length)))
                return g
            put(a, r, q, g, block, s)
            r.last[q, g] = block + 1
    return -1


@jit
def lease(a: Arrays, r: Rows, q: int, path: AnyArray, depth: int, checkpoint: int, position: int) -> int:
    """Hold every object that ``position`` needs and enter the shared blocks into row ``q``.

    Blocks of the checkpoint that are only partly filled are held too, and must be replaced by private
    copies before the first append; snapshots are held by ``hold_snapshots``.  Returns the worst grade.
    """
    segment = a.tokens.shape[1]
    worst = 2
    for g in range(a.group.shape[1]):
        if a.group[RULE, g] == RULE_SNAPSHOT:
            continue
        per_segment = segment // a.group[BLOCK_TOKENS, g]
        first = first_block_needed(a, g, position)
        last = blocks_at(a, g, position)
        r.first[q, g] = min(first, last)
        r.last[q, g] = last
        for block in range(first, last):
            k = block // per_segment
            n = path[k + 1] if k < depth else checkpoint
            s = a.slot_base[g] + a.columns[n, a.col_base[g] + block % per_segment]
            hold(a, g, s)
            put(a, r, q, g, block, s)
            worst = min(worst, a.slot[GRADE, s])
        a.counters[g, HITS] += max(0, last - first)
    return worst


@jit
def commit_segment(a: Arrays, r: Rows, q: int, parent: int, tokens: AnyArray, start: int) -> int:
    """Publish the blocks of the segment that begins at token ``start`` below ``parent``.

    Returns its node with one weight for the caller, or -1 when the index is full.
    """
    segment = a.tokens.shape[1]
    end = start + segment
    n = find_child(a, parent, tokens, start)
    if n >= 0:
        add_weight(a, n)
    else:
        n = new_node(a, parent, tokens, start, segment)
        if n < 0:
            return -1
    for g in range(a.group.shape[1]):
        if a.group[RULE, g] == RULE_SNAPSHOT:
            continue
        origin = start // a.group[BLOCK_TOKENS, g]
        for block in range(max(origin, r.first[q, g]), end // a.group[BLOCK_TOKENS, g]):
            if block_useful(a, g, block, end):
                s = slot_at(a, r, q, g, block)
                if a.slot[OWNER, s] < 0 and a.slot[STATE, s] == READY:
                    adopt(a, n, a.col_base[g] + block - origin, g, s)
    return n


@jit
def republish(a: Arrays, r: Rows, q: int, n: int) -> None:
    """Put the row's own blocks back into segment ``n`` and those before it where an equal object was evicted.

    Two sequences that computed the same keep a block each, and only one of the two is in the index.  When that one
    went, all that the other published further down could not be reached.
    """
    while a.node[PARENT, n] >= 0:
        start = (a.node[DEPTH, n] - 1) * a.tokens.shape[1]
        for g in range(a.group.shape[1]):
            if a.group[RULE, g] == RULE_SNAPSHOT:
                continue
            origin = start // a.group[BLOCK_TOKENS, g]
            for c in range(a.col_base[g], a.col_base[g + 1]):
                block = origin + c - a.col_base[g]
                if a.columns[n, c] == SLOT_EVICTED and r.first[q, g] <= block < r.last[q, g]:
                    s = slot_at(a, r, q, g, block)
                    if a.slot[OWNER, s] < 0 and a.slot[STATE, s] == READY:
                        adopt(a, n, c, g, s)
        n = a.node[PARENT, n]


@jit
def mark_computed(a: Arrays, r: Rows, q: int, length: int, more: int, grade: int) -> None:
    """The engine wrote the state of ``more`` tokens after ``length``: blocks become READY and take the grade."""
    for g in range(a.group.shape[1]):
        if a.group[RULE, g] == RULE_SNAPSHOT:
            s = slot_at(a, r, q, g, 0)
            a.slot[GRADE, s] = min(a.slot[GRADE, s], grade)
            continue
        # the block that holds the first new entry may have been begun earlier
        begun = length // a.group[BLOCK_TOKENS, g]
        for block in range(max(begun, r.first[q, g]), r.last[q, g]):
            s = slot_at(a, r, q, g, block)
            a.slot[GRADE, s] = min(a.slot[GRADE, s], grade)
            if a.slot[STATE, s] == ALLOCATED and (block + 1) * a.group[BLOCK_TOKENS, g] <= length + more:
                move(a.slot[STATE], s, READY)


@jit
def _snapshot_wanted(a: Arrays, n: int, g: int, position: int, asked: bool, grade: int) -> bool:
    wanted = snapshot_needed(a, g, position) if asked else snapshot_kept(a, g, position)
    local = a.columns[n, a.col_base[g]]
    return wanted and (local < 0 or a.slot[GRADE, a.slot_base[g] + local] < grade)


@jit
def lease_lacks_room(a: Arrays, r: Rows, q: int, start: int) -> int:
    """The group without room for live slots of row ``q`` and copies of its blocks from token ``start`` (-1: none)."""
    for g in range(a.group.shape[1]):
        a.group[NEED, g] = 0
        if a.group[RULE, g] == RULE_SNAPSHOT:
            a.group[NEED, g] = 1
        elif start >= 0:
            a.group[NEED, g] = max(0, r.last[q, g] - max(start // a.group[BLOCK_TOKENS, g], r.first[q, g]))
    return lacks_room(a)


@jit
def fork_lacks_room(a: Arrays, r: Rows, q: int, child: int) -> int:
    """The group without room for copies of the blocks of row ``q`` that ``child`` does not share."""
    for g in range(a.group.shape[1]):
        a.group[NEED, g] = r.last[q, g] - r.last[child, g]
    return lacks_room(a)


@jit
def checkpoint_lacks_room(a: Arrays, n: int, start: int, position: int, grade: int) -> int:
    """The group without room for what checkpoint ``n`` at ``position`` keeps."""
    for g in range(a.group.shape[1]):
        a.group[NEED, g] = 0
        if a.group[RULE, g] == RULE_SNAPSHOT:
            if _snapshot_wanted(a, n, g, position, True, grade):
                a.group[NEED, g] = 1
        else:
            origin = start // a.group[BLOCK_TOKENS, g]
            a.group[NEED, g] = max(0, blocks_at(a, g, position) - max(origin, first_block_needed(a, g, position)))
    return lacks_room(a)


@jit
def reserve_snapshots(
    a: Arrays,
    r: Rows,
    q: int,
    n: int,
    position: int,
    asked: bool,
    grade: int,
    out: AnyArray,
) -> int:
    """Take slots for the snapshots that node ``n`` keeps at ``position`` and does not have as good already.

    ``asked``: a checkpoint, so the interval does not matter.  ``out`` int64 [groups] gets global slots or -1.
    Returns -1, or the group without room (then nothing is kept).
    """
    out[:] = -1
    for g in range(a.group.shape[1]):
        wanted = a.group[RULE, g] == RULE_SNAPSHOT and _snapshot_wanted(a, n, g, position, asked, grade)
        a.group[NEED, g] = 1 if wanted else 0
    short = lacks_room(a)
    if short >= 0:
        a.counters[short, UNKEPT] += 1
        return short
    for g in range(a.group.shape[1]):
        if a.group[NEED, g] == 0:
            continue
        s = take_or_evict(a, g)
        if s < 0:
            for h in range(g):
                if out[h] >= 0:
                    release(a, h, out[h])
            out[:] = -1
            a.counters[g, UNKEPT] += 1
            return g
        a.slot[GRADE, s] = grade
        out[g] = s
    return -1


@jit
def reserve_sealed(
    a: Arrays,
    r: Rows,
    q: int,
    start: int,
    position: int,
    out: AnyArray,
) -> int:
    """Take slots for the sealed copies of every block that a checkpoint at ``position`` needs of its own segment.

    ``out`` int64 [blocks, 4]: group, logical block, source slot, destination slot (global).  Returns how many, or
    -1 when there is no room (then nothing is kept).
    """
    count = 0
    for g in range(a.group.shape[1]):
        if a.group[RULE, g] == RULE_SNAPSHOT:
            continue
        origin = start // a.group[BLOCK_TOKENS, g]
        for block in range(max(origin, first_block_needed(a, g, position)), blocks_at(a, g, position)):
            s = take_or_evict(a, g)
            if s < 0:
                for i in range(count):
                    release(a, out[i, 0], out[i, 3])
                a.counters[g, UNKEPT] += 1
                return -1
            source = slot_at(a, r, q, g, block)
            a.slot[GRADE, s] = a.slot[GRADE, source]
            out[count, 0] = g
            out[count, 1] = block
            out[count, 2] = source
            out[count, 3] = s
            count += 1
    return count


@jit
def share_row(a: Arrays, r: Rows, q: int, child: int, length: int) -> None:
    """Let row ``child`` hold every full block of row ``q``; partly filled ones and live slots stay out."""
    for g in range(a.group.shape[1]):
        if a.group[RULE, g] == RULE_SNAPSHOT:
            continue
        full = (length // a.group[RATIO, g]) // (a.group[BLOCK_TOKENS, g] // a.group[RATIO, g])
        r.first[child, g] = min(r.first[q, g], r.last[q, g])
        r.last[child, g] = max(r.first[child, g], min(full, r.last[q, g]))
        for block in range(r.first[child, g], r.last[child, g]):
            s = slot_at(a, r, q, g, block)
            hold(a, g, s)
            put(a, r, child, g, block, s)


@jit
def stale(a: Arrays, r: Rows, q: int) -> int:
    """The first group in which the row names a slot whose generation changed, or -1."""
    for g in range(a.group.shape[1]):
        for block in range(r.first[q, g], r.last[q, g]):
            s = slot_at(a, r, q, g, block)
            if a.slot[GENERATION, s] != r.generation[q, place(a, r, q, g, block)]:
                return g
    return -1


@jit
def checkpoint_complete(a: Arrays, n: int, start: int, position: int, grade: int) -> bool:
    """Whether checkpoint ``n`` already has every object of its own that ``position`` needs, at this grade or better."""
    for g in range(a.group.shape[1]):
        if a.group[RULE, g] == RULE_SNAPSHOT:
            local = a.columns[n, a.col_base[g]]
            if snapshot_needed(a, g, position) and (local < 0 or a.slot[GRADE, a.slot_base[g] + local] < grade):
                return False
            continue
        origin = start // a.group[BLOCK_TOKENS, g]
        for block in range(max(origin, first_block_needed(a, g, position)), blocks_at(a, g, position)):
            local = a.columns[n, a.col_base[g] + block - origin]
            if local < 0 or a.slot[GRADE, a.slot_base[g] + local] < grade:
                return False
    return True
