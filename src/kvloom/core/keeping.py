"""Room and slots for what a row needs or keeps besides its blocks: live state, snapshots, sealed copies, forks."""

from __future__ import annotations

from kvloom.core._jit import inlined, jit
from kvloom.core.arrays import Arrays
from kvloom.core.block_pool import release
from kvloom.core.eviction import take_lasting, take_or_evict
from kvloom.core.fields import COL_BASE, GRADE, NEED, RULE, RULE_SNAPSHOT, SLOT_BASE, UNKEPT
from kvloom.core.page_table import FIRST, LAST, PARTS, Rows, slot_at
from kvloom.core.room import lacks_room
from kvloom.core.rules import block_of, blocks_at, first_block_needed, next_rest, snapshot_kept, snapshot_needed
from kvloom.types import AnyArray


@inlined
def _snapshot_wanted(a: Arrays, n: int, g: int, position: int, asked: bool, grade: int) -> bool:
    wanted = snapshot_needed(a, g, position) if asked else snapshot_kept(a, g, position)
    local = a.columns[n, a.group[g, COL_BASE]]
    return wanted and (local < 0 or a.slot[a.group[g, SLOT_BASE] + local, GRADE] < grade)


@jit
def lease_lacks_room(a: Arrays, r: Rows, q: int, start: int) -> int:
    """The group without room for live slots of row ``q`` and copies of its blocks from token ``start`` (-1: none)."""
    for g in range(a.group.shape[0]):
        a.group[g, NEED] = 0
        if a.group[g, RULE] == RULE_SNAPSHOT:
            a.group[g, NEED] = 1
        elif start >= 0:
            a.group[g, NEED] = max(0, r.span[q, g, LAST] - max(block_of(a, g, start), r.span[q, g, FIRST]))
    return lacks_room(a)


@jit
def fork_lacks_room(a: Arrays, r: Rows, q: int, child: int) -> int:
    """The group without room for copies of the blocks of row ``q`` that ``child`` does not share."""
    for g in range(a.group.shape[0]):
        a.group[g, NEED] = r.span[q, g, LAST] - r.span[child, g, LAST]
    return lacks_room(a)


@jit
def checkpoint_lacks_room(a: Arrays, n: int, start: int, position: int, grade: int) -> int:
    """The group without room for what checkpoint ``n`` at ``position`` keeps."""
    for g in range(a.group.shape[0]):
        a.group[g, NEED] = 0
        if a.group[g, RULE] == RULE_SNAPSHOT:
            if _snapshot_wanted(a, n, g, position, True, grade):
                a.group[g, NEED] = 1
        else:
            first = max(block_of(a, g, start), first_block_needed(a, g, position))
            a.group[g, NEED] = max(0, blocks_at(a, g, position) - first)
    short = lacks_room(a)
    if short >= 0:
        a.counters[short, UNKEPT] += 1
    return short


@jit
def reserve_snapshots(a: Arrays, r: Rows, q: int, n: int, position: int, asked: bool, grade: int, out: AnyArray) -> int:
    """Take slots for the snapshots that node ``n`` keeps at ``position`` and does not have as good already.

    ``asked``: a checkpoint, so the interval does not matter; nor does it where a fork begins.
    ``out`` int64 [groups] gets global slots or -1.
    Returns -1, or the group without room (then nothing is kept).
    """
    asked = asked or (r.state[q, PARTS] > 0 and r.state[q, PARTS] * a.tokens.shape[1] == position)
    for g in range(a.group.shape[0]):
        out[g] = -1
        wanted = a.group[g, RULE] == RULE_SNAPSHOT and _snapshot_wanted(a, n, g, position, asked, grade)
        a.group[g, NEED] = 1 if wanted else 0
    short = lacks_room(a)
    if short >= 0:
        a.counters[short, UNKEPT] += 1
        return short
    for g in range(a.group.shape[0]):
        if a.group[g, NEED] == 0:
            continue
        lasting = asked or next_rest(a, position) == position
        s = take_lasting(a, g) if lasting else take_or_evict(a, g)
        if s < 0:
            for h in range(g):
                if out[h] >= 0:
                    release(a, h, out[h])
                    out[h] = -1
            a.counters[g, UNKEPT] += 1
            return g
        a.slot[s, GRADE] = grade
        out[g] = s
    return -1


@jit
def reserve_sealed(a: Arrays, r: Rows, q: int, start: int, position: int, out: AnyArray) -> int:
    """Take slots for the sealed copies of every block that a checkpoint at ``position`` needs of its own segment.

    ``out`` int64 [blocks, 4]: group, logical block, source slot, destination slot (global).  Returns how many, or
    -1 when there is no room (then nothing is kept).
    """
    count = 0
    for g in range(a.group.shape[0]):
        if a.group[g, RULE] == RULE_SNAPSHOT:
            continue
        origin = block_of(a, g, start)
        for block in range(max(origin, first_block_needed(a, g, position)), blocks_at(a, g, position)):
            s = take_lasting(a, g)
            if s < 0:
                for i in range(count):
                    release(a, out[i, 0], out[i, 3])
                a.counters[g, UNKEPT] += 1
                return -1
            source = slot_at(a, r, q, g, block)
            a.slot[s, GRADE] = a.slot[source, GRADE]
            out[count, 0] = g
            out[count, 1] = block
            out[count, 2] = source
            out[count, 3] = s
            count += 1
    return count


@jit
def checkpoint_complete(a: Arrays, n: int, start: int, position: int, grade: int) -> bool:
    """Whether checkpoint ``n`` already has every object of its own that ``position`` needs, at this grade or better."""
    for g in range(a.group.shape[0]):
        if a.group[g, RULE] == RULE_SNAPSHOT:
            local = a.columns[n, a.group[g, COL_BASE]]
            if snapshot_needed(a, g, position) and (local < 0 or a.slot[a.group[g, SLOT_BASE] + local, GRADE] < grade):
                return False
            continue
        origin = block_of(a, g, start)
        for block in range(max(origin, first_block_needed(a, g, position)), blocks_at(a, g, position)):
            local = a.columns[n, a.group[g, COL_BASE] + block - origin]
            if local < 0 or a.slot[a.group[g, SLOT_BASE] + local, GRADE] < grade:
                return False
    return True
