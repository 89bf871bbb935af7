"""Block tables of running sequences: dense arrays that map logical blocks to slots.

Row ``q`` of ``table`` holds, from ``OFFSET`` of the group, the local slot of logical block ``i`` at column ``i %
WIDTH`` (a ring for windows; other groups never wrap).  ``FIRST`` and ``LAST`` bound the logical blocks in use;
snapshot groups have one column, their live slot.  Rows are allocated once at their largest shape, so that addresses
stay valid for the life of the process.

Who holds what: blocks of a prefix group below ``SHARED`` belong to the index, held through the row's deepest node;
all others are held by the row itself.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kvloom.core._jit import inlined, jit
from kvloom.core.arrays import Arrays
from kvloom.core.block_pool import hold, release
from kvloom.core.eviction import take_or_evict
from kvloom.core.fields import (
    BLOCK_TOKENS,
    COL_BASE,
    COLUMNS,
    GENERATION,
    GRADE,
    HITS,
    NEED,
    OWNER,
    PARENT,
    RULE,
    RULE_PREFIX,
    RULE_SNAPSHOT,
    RULE_WINDOW,
    SLOT_BASE,
    SPINE,
    STATE,
    UNKEPT,
)
from kvloom.core.lifecycle import ALLOCATED, READY, move
from kvloom.core.prefix_index import (
    add_anchor,
    adopt,
    find_child,
    new_node,
    touch,
)
from kvloom.core.room import lacks_room
from kvloom.core.rules import (
    block_of,
    blocks_at,
    first_block_needed,
    needed_from,
    snapshot_kept,
    snapshot_needed,
)
from kvloom.plan import ArenaGeometry
from kvloom.spec.model_spec import ModelSpec
from kvloom.types import SLOT_EVICTED, AnyArray

# span: int32 [Q, G, 3]
FIRST, LAST, SHARED = range(3)
# shape: int32 [G, 2]
OFFSET, WIDTH = range(2)
# state: int64 [Q, 8]
(
    LENGTH,  # tokens computed
    PENDING,  # tokens appended, not computed yet
    PUBLISHED,  # segments published or reused
    NODE,  # deepest of them, anchored by the row
    STATE_GRADE,  # worst grade of the state
    EPOCH,  # clock when the row, or the one it was forked from, was opened
    DETACHED,  # 1 when the index was full and nothing more is published
    STEPPED,  # 1 when the pending token was reserved by a batch, which has put its id into the tail
) = range(8)


class Rows(NamedTuple):
    """Block tables of all running sequences; see the module docstring."""

    table: AnyArray  # int32 [Q, sum of widths] local slots; only blocks in [FIRST, LAST) mean anything
    generation: AnyArray  # int32, like table: generation of the slot when the row took it
    span: AnyArray  # int32 [Q, G, 3]
    shape: AnyArray  # int32 [G, 2]
    state: AnyArray  # int64 [Q, 8]
    tail: AnyArray  # int32 [Q, segment] tokens of the segment that is being filled


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
    offsets = np.concatenate([[0], np.cumsum(widths)])
    shape = (max_sequences, int(offsets[-1]))
    return Rows(
        table=np.zeros(shape, dtype=np.int32),
        generation=np.zeros(shape, dtype=np.int32),
        span=np.zeros((max_sequences, len(spec.groups), 3), dtype=np.int32),
        shape=np.stack([offsets[:-1], widths], axis=1).astype(np.int32),
        state=np.zeros((max_sequences, 8), dtype=np.int64),
        tail=np.zeros((max_sequences, spec.segment_tokens), dtype=np.int32),
    )


@inlined
def place(r: Rows, g: int, block: int) -> int:
    """Column of ``table`` that holds logical block ``block``."""
    width = r.shape[g, WIDTH]
    return r.shape[g, OFFSET] + (block if block < width else block % width)


@inlined
def slot_at(a: Arrays, r: Rows, q: int, g: int, block: int) -> int:
    """Global slot of logical block ``block``."""
    return a.group[g, SLOT_BASE] + r.table[q, place(r, g, block)]


@inlined
def put(a: Arrays, r: Rows, q: int, g: int, block: int, s: int) -> None:
    """Enter global slot ``s`` as logical block ``block``."""
    at = place(r, g, block)
    r.table[q, at] = s - a.group[g, SLOT_BASE]
    r.generation[q, at] = a.slot[s, GENERATION]


@jit
def shrink(a: Arrays, r: Rows, q: int, g: int, first: int, last: int) -> None:
    """Give up every block outside [first, last), deepest first."""
    shared = r.span[q, g, SHARED]
    for block in range(r.span[q, g, LAST] - 1, max(r.span[q, g, FIRST], shared) - 1, -1):
        if block < first or block >= last:
            release(a, g, slot_at(a, r, q, g, block))
    r.span[q, g, FIRST] = max(r.span[q, g, FIRST], min(first, last))
    r.span[q, g, LAST] = max(r.span[q, g, FIRST], min(r.span[q, g, LAST], last))


@jit
def release_row(a: Arrays, r: Rows, q: int) -> None:
    """Release everything a row holds itself; the caller drops the anchor of its deepest node."""
    for g in range(a.group.shape[0]):
        shrink(a, r, q, g, 0, 0)
        r.span[q, g, FIRST] = 0
        r.span[q, g, LAST] = 0
        r.span[q, g, SHARED] = 0


@jit
def need_growth(a: Arrays, r: Rows, q: int, end: int) -> int:
    """Add to ``NEED`` the blocks that row ``q`` lacks up to token ``end``; -1, or a group whose table is too narrow."""
    for g in range(a.group.shape[0]):
        if a.group[g, RULE] != RULE_SNAPSHOT:
            more = blocks_at(a, g, end) - r.span[q, g, LAST]
            if more > 0:
                if r.span[q, g, LAST] + more - r.span[q, g, FIRST] > r.shape[g, WIDTH]:
                    return g
                a.group[g, NEED] += more
    return -1


@jit
def grow(a: Arrays, r: Rows, q: int, length: int, more: int) -> int:
    """Reserve the blocks that ``more`` tokens after ``length`` write; -1, or the group without room (nothing kept).

    The caller knows that there should be room.
    """
    for g in range(a.group.shape[0]):
        if a.group[g, RULE] == RULE_SNAPSHOT:
            continue
        want = blocks_at(a, g, length + more)
        for block in range(r.span[q, g, LAST], want):
            s = take_or_evict(a, g)
            if s < 0:  # pages that are only partly in use, scattered over the groups
                undo_growth(a, r, q, g, length)
                return g
            put(a, r, q, g, block, s)
            r.span[q, g, LAST] = block + 1
    return -1


@jit
def undo_growth(a: Arrays, r: Rows, q: int, upto: int, length: int) -> None:
    """Give back what groups up to ``upto`` hold beyond ``length`` tokens."""
    for g in range(upto + 1):
        if a.group[g, RULE] != RULE_SNAPSHOT:
            first = r.span[q, g, FIRST]
            shrink(a, r, q, g, first, max(first, blocks_at(a, g, length)))


@jit
def lease(a: Arrays, r: Rows, q: int, path: AnyArray, depth: int, checkpoint: int, position: int) -> int:
    """Enter the blocks that ``position`` needs into row ``q`` and hold them.  Returns the worst grade.

    Prefix blocks of whole segments are held through the deepest node, which gets an anchor; windows, and everything
    that belongs to the checkpoint, are held one by one (private copies must replace the latter before the first
    append).
    """
    end = path[depth]
    add_anchor(a, end)
    touch(a, end)
    worst = 2
    for k in range(1, depth + 1):
        worst = min(worst, a.node[path[k], SPINE])
    for g in range(a.group.shape[0]):
        if a.group[g, RULE] == RULE_SNAPSHOT:
            continue
        per_segment = a.group[g, COLUMNS]
        last = blocks_at(a, g, position)
        first = min(first_block_needed(a, g, position), last)
        shared = depth * per_segment if a.group[g, RULE] == RULE_PREFIX else 0
        r.span[q, g, FIRST] = first
        r.span[q, g, LAST] = last
        r.span[q, g, SHARED] = shared
        base = a.group[g, COL_BASE]
        for k in range(shared // per_segment):
            n = path[k + 1]
            for i in range(per_segment):
                local = a.columns[n, base + i]
                at = r.shape[g, OFFSET] + k * per_segment + i
                r.table[q, at] = local
                r.generation[q, at] = a.slot[a.group[g, SLOT_BASE] + local, GENERATION]
        for block in range(max(first, shared), last):
            k = block // per_segment
            n = path[k + 1] if k < depth else checkpoint
            s = a.group[g, SLOT_BASE] + a.columns[n, base + block - k * per_segment]
            hold(a, g, s)
            put(a, r, q, g, block, s)
            worst = min(worst, a.slot[s, GRADE])
        a.counters[g, HITS] += last - first
    return worst


@inlined
def _publish_prefix(a: Arrays, r: Rows, q: int, g: int, n: int) -> int:
    """Hand the row's next segment of blocks to node ``n``; where the node has one as good, the row takes that instead.

    Returns the worst grade of what the node has then.
    """
    worst = 2
    origin = r.span[q, g, SHARED]
    for i in range(a.group[g, COLUMNS]):
        s = slot_at(a, r, q, g, origin + i)
        c = a.group[g, COL_BASE] + i
        if a.slot[s, OWNER] < 0:
            adopt(a, n, c, g, s)
        kept = a.group[g, SLOT_BASE] + a.columns[n, c]
        if kept != s:
            put(a, r, q, g, origin + i, kept)
        worst = min(worst, a.slot[kept, GRADE])
        release(a, g, s)
    r.span[q, g, SHARED] = origin + a.group[g, COLUMNS]
    return worst


@inlined
def _publish_window(a: Arrays, r: Rows, q: int, g: int, n: int, start: int) -> None:
    """Publish the row's window blocks that the segment's end needs; the row keeps holding its own."""
    end = start + a.tokens.shape[1]
    lowest = needed_from(a, g, end)
    if lowest >= end:
        return
    origin = block_of(a, g, start)
    useful = origin if lowest <= start else block_of(a, g, lowest)
    for block in range(max(useful, r.span[q, g, FIRST]), origin + a.group[g, COLUMNS]):
        s = slot_at(a, r, q, g, block)
        if a.slot[s, OWNER] < 0 and a.slot[s, STATE] == READY:
            adopt(a, n, a.group[g, COL_BASE] + block - origin, g, s)


@inlined
def commit_segment(a: Arrays, r: Rows, q: int, parent: int, tokens: AnyArray, offset: int, start: int) -> int:
    """Publish the blocks of the segment at position ``start``, ``tokens[offset:]``, below ``parent``.

    Returns its node with an anchor for the caller, or -1 when the index is full.
    """
    n = find_child(a, parent, tokens, offset)
    if n >= 0:
        add_anchor(a, n)
    else:
        n = new_node(a, parent, tokens, offset, a.tokens.shape[1])
        if n < 0:
            return -1
    worst = 2
    for g in range(a.group.shape[0]):
        if a.group[g, RULE] == RULE_PREFIX:
            worst = min(worst, _publish_prefix(a, r, q, g, n))
        elif a.group[g, RULE] == RULE_WINDOW:
            _publish_window(a, r, q, g, n, start)
    a.node[n, SPINE] = worst
    touch(a, n)
    return n


@jit
def republish(a: Arrays, r: Rows, q: int) -> None:
    """Put the row's own windows back into its segments where an equal object was evicted.

    Two sequences that computed the same keep a window each, and only one of the two is in the index.  When that one
    went, what the other published further down could not be reached.
    """
    segment = a.tokens.shape[1]
    n, end = r.state[q, NODE], r.state[q, PUBLISHED] * segment
    while end > 0:
        held = False
        for g in range(a.group.shape[0]):
            if a.group[g, RULE] != RULE_WINDOW:
                continue
            begin = max(block_of(a, g, end - segment), r.span[q, g, FIRST])
            for block in range(begin, min(block_of(a, g, end), r.span[q, g, LAST])):
                held = True
                c = a.group[g, COL_BASE] + block - block_of(a, g, end - segment)
                s = slot_at(a, r, q, g, block)
                if a.columns[n, c] == SLOT_EVICTED and a.slot[s, OWNER] < 0 and a.slot[s, STATE] == READY:
                    adopt(a, n, c, g, s)
        if not held:
            return
        n, end = a.node[n, PARENT], end - segment


@jit
def mark_computed(a: Arrays, r: Rows, q: int, length: int, more: int, grade: int) -> None:
    """The engine wrote the state of ``more`` tokens after ``length``: whole blocks become READY, all take the grade."""
    for g in range(a.group.shape[0]):
        if a.group[g, RULE] == RULE_SNAPSHOT:
            s = slot_at(a, r, q, g, 0)
            a.slot[s, GRADE] = min(a.slot[s, GRADE], grade)
            continue
        size = a.group[g, BLOCK_TOKENS]
        # the block that holds the first new entry may have been begun earlier
        for block in range(max(block_of(a, g, length), r.span[q, g, FIRST]), r.span[q, g, LAST]):
            s = slot_at(a, r, q, g, block)
            a.slot[s, GRADE] = min(a.slot[s, GRADE], grade)
            if a.slot[s, STATE] == ALLOCATED and (block + 1) * size <= length + more:
                move(a.slot, s, READY)


@jit
def shrink_windows(a: Arrays, r: Rows, q: int, length: int) -> None:
    """Give up the window blocks that ``length`` no longer needs."""
    for g in range(a.group.shape[0]):
        if a.group[g, RULE] == RULE_WINDOW:
            first = first_block_needed(a, g, length)
            if first > r.span[q, g, FIRST]:
                shrink(a, r, q, g, first, r.span[q, g, LAST])


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

    ``asked``: a checkpoint, so the interval does not matter.  ``out`` int64 [groups] gets global slots or -1.
    Returns -1, or the group without room (then nothing is kept).
    """
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
        s = take_or_evict(a, g)
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
            s = take_or_evict(a, g)
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
def share_row(a: Arrays, r: Rows, q: int, child: int, start: int) -> None:
    """Let row ``child`` have the blocks of row ``q`` before ``start``, where its published segments end."""
    for g in range(a.group.shape[0]):
        if a.group[g, RULE] == RULE_SNAPSHOT:
            continue
        first = r.span[q, g, FIRST]
        r.span[child, g, FIRST] = first
        r.span[child, g, LAST] = max(first, min(start // a.group[g, BLOCK_TOKENS], r.span[q, g, LAST]))
        r.span[child, g, SHARED] = r.span[q, g, SHARED]
        for block in range(first, r.span[child, g, LAST]):
            s = slot_at(a, r, q, g, block)
            if block >= r.span[q, g, SHARED]:
                hold(a, g, s)
            put(a, r, child, g, block, s)


@jit
def stale(a: Arrays, r: Rows, q: int) -> int:
    """The first group in which the row names a slot whose generation changed, or -1."""
    for g in range(a.group.shape[0]):
        for block in range(r.span[q, g, FIRST], r.span[q, g, LAST]):
            s = slot_at(a, r, q, g, block)
            if a.slot[s, GENERATION] != r.generation[q, place(r, g, block)]:
                return g
    return -1


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
