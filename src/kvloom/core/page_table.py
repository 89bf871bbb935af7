"""Block tables of running sequences: dense arrays that map logical blocks to slots.

Row ``q`` of ``table`` holds, from ``OFFSET`` of the group, the local slot of logical block ``i`` at column ``i %
WIDTH`` (a ring for windows; other groups never wrap).  ``FIRST`` and ``LAST`` bound the logical blocks in use;
snapshot groups have one column, their live slot.  Rows are allocated once at their largest shape, so that addresses
stay valid for the life of the process.

Who holds what: blocks of a prefix group below ``SHARED`` belong to the index, held through the row's deepest node;
all others are held by the row itself.
"""

from __future__ import annotations

from typing import Annotated

import numpy as np

from kvloom.core._jit import inlined, jit
from kvloom.core.arrays import Arrays
from kvloom.core.block_pool import give_run, hold, release
from kvloom.core.eviction import make_room_for, take_lasting, take_many
from kvloom.core.fields import (
    BLOCK_TOKENS,
    COL_BASE,
    COLUMNS,
    FRUGAL,
    GRADE,
    HITS,
    LEASED,
    NEED,
    OWNER,
    PINNED,
    PINS,
    RULE,
    RULE_PREFIX,
    RULE_SNAPSHOT,
    RULE_WINDOW,
    SLOT_BASE,
    SLOTS_PER_PAGE,
    SPINE,
)
from kvloom.core.handle import ANY, Handled, int32, int64
from kvloom.core.heat import pass_path
from kvloom.core.lifecycle import FREE, move
from kvloom.core.prefix_index import add_anchor, touch
from kvloom.core.reuse import count_request
from kvloom.core.rules import blocks_at, first_block_needed, next_rest
from kvloom.core.worth import value_resumed
from kvloom.plan import ArenaGeometry
from kvloom.spec.model_spec import ModelSpec
from kvloom.types import AnyArray

FAR = 1 << 40
# span: int32 [Q, G, 3]
FIRST, LAST, SHARED = range(3)
# shape: int32 [G, 2]
OFFSET, WIDTH = range(2)
# state: int64 [Q, 11]
(
    LENGTH,  # tokens computed
    PENDING,  # tokens appended, not computed yet
    PUBLISHED,  # segments published or reused
    NODE,  # deepest of them, anchored by the row
    STATE_GRADE,  # worst grade of the state
    EPOCH,  # clock when the row, or the one it was forked from, was opened
    DETACHED,  # 1 when the index was full and nothing more is published
    STEPPED,  # 1 when the pending token was reserved by a batch, which has put its id into the tail
    ROW_PRIORITY,  # of the request
    QUIET,  # decode steps up to fewer tokens than this change no block; 0 = not known
    PARTS,  # segments after which the prompt parts from what was known when it was opened; 0 = nowhere, or no matter
) = range(11)


class Rows(Handled):
    """Block tables of all running sequences; see the module docstring."""

    argument = "r"

    table: Annotated[AnyArray, int32(ANY, ANY)]  # [Q, sum of widths] local slots of blocks in [FIRST, LAST)
    generation: Annotated[AnyArray, int32(ANY, ANY)]  # like table: generation of the slot when the row took it
    span: Annotated[AnyArray, int32(ANY, ANY, 3)]  # [Q, G, 3]
    shape: Annotated[AnyArray, int32(ANY, 2)]  # [G, 2]
    state: Annotated[AnyArray, int64(ANY, 11)]  # [Q, 11]
    tail: Annotated[AnyArray, int32(ANY, ANY)]  # [Q, segment] tokens of the segment that is being filled


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
        state=np.zeros((max_sequences, 11), dtype=np.int64),
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
    r.generation[q, at] = a.generation[s]


@jit
def shrink(a: Arrays, r: Rows, q: int, g: int, first: int, last: int) -> None:
    """Give up every block outside [first, last), deepest first."""
    base, per_page = a.group[g, SLOT_BASE], a.group[g, SLOTS_PER_PAGE]
    begun, count, lowest = -1, 0, 0  # slots that nobody else knows, one below the other on one page, go at once
    for block in range(r.span[q, g, LAST] - 1, max(r.span[q, g, FIRST], r.span[q, g, SHARED]) - 1, -1):
        if first <= block < last:
            continue
        s = slot_at(a, r, q, g, block)
        private = a.slot[s, OWNER] < 0 and a.slot[s, PINS] == 1
        if count > 0 and not (private and s == begun - 1 and s >= lowest):
            give_run(a, g, begun, count)
            count = 0
        if private:
            if count == 0:
                lowest = base + (s - base) // per_page * per_page
            begun = s
            count += 1
            a.slot[s, PINS] = 0
            a.group[g, PINNED] -= 1
            move(a.slot, s, FREE)
            a.generation[s] += 1
        else:
            release(a, g, s)
    if count > 0:
        give_run(a, g, begun, count)
    r.span[q, g, FIRST] = max(r.span[q, g, FIRST], min(first, last))
    r.span[q, g, LAST] = max(r.span[q, g, FIRST], min(r.span[q, g, LAST], last))


@jit
def release_row(a: Arrays, r: Rows, q: int) -> None:
    """Release everything a row holds itself; the caller drops the anchor of its deepest node."""
    for g in range(a.group.shape[0]):
        shrink(a, r, q, g, 0, 0)
        a.group[g, LEASED] -= r.span[q, g, SHARED]
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


@inlined
def _until_rest(a: Arrays, g: int, block: int) -> int:
    """Blocks of group ``g`` from ``block`` on before one that a rest needs."""
    size = a.group[g, BLOCK_TOKENS]
    rest = next_rest(a, block * size + 1) if a.group[g, RULE] == RULE_WINDOW else 0
    return max(0, first_block_needed(a, g, rest) - block) if rest > 0 else FAR


@jit
def grow(a: Arrays, r: Rows, q: int, length: int, more: int) -> int:
    """Reserve the blocks that ``more`` tokens after ``length`` write; -1, or the group without room (nothing kept).

    The caller knows that there should be room.
    """
    for g in range(a.group.shape[0]):
        if a.group[g, RULE] == RULE_SNAPSHOT:
            continue
        want = blocks_at(a, g, length + more)
        if a.scalars[FRUGAL] == 0:
            make_room_for(a, g, want - r.span[q, g, LAST])
        while r.span[q, g, LAST] < want:
            at = place(r, g, r.span[q, g, LAST])
            most = min(want - r.span[q, g, LAST], r.shape[g, OFFSET] + r.shape[g, WIDTH] - at)
            before = _until_rest(a, g, r.span[q, g, LAST])
            if before == 0:
                taken = 0
                s = take_lasting(a, g)
                if s >= 0:
                    taken = 1
                    r.table[q, at] = s - a.group[g, SLOT_BASE]
                    r.generation[q, at] = a.generation[s]
            else:
                taken = take_many(a, g, min(most, before), r.table[q], r.generation[q], at)
            if taken == 0:  # pages that are only partly in use, scattered over the groups
                undo_growth(a, r, q, g, length)
                return g
            r.span[q, g, LAST] += taken
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
    count_request(a)
    pass_path(a, path, depth)
    value_resumed(a, end)
    worst = 2
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
        a.group[g, LEASED] += shared
        base = a.group[g, COL_BASE]
        for k in range(shared // per_segment):
            n = path[k + 1]
            worst = min(worst, a.trunk[n, SPINE])
            for i in range(per_segment):
                local = a.columns[n, base + i]
                at = r.shape[g, OFFSET] + k * per_segment + i
                r.table[q, at] = local
                r.generation[q, at] = a.generation[a.group[g, SLOT_BASE] + local]
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
def window_moved(a: Arrays, r: Rows, q: int, length: int) -> bool:
    """Whether ``shrink_windows`` has anything to give up."""
    for g in range(a.group.shape[0]):
        if a.group[g, RULE] == RULE_WINDOW and first_block_needed(a, g, length) > r.span[q, g, FIRST]:
            return True
    return False


@jit
def shrink_windows(a: Arrays, r: Rows, q: int, length: int) -> None:
    """Give up the window blocks that ``length`` no longer needs."""
    for g in range(a.group.shape[0]):
        if a.group[g, RULE] == RULE_WINDOW:
            first = first_block_needed(a, g, length)
            if first > r.span[q, g, FIRST]:
                shrink(a, r, q, g, first, r.span[q, g, LAST])


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
        a.group[g, LEASED] += r.span[q, g, SHARED]
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
            if a.generation[s] != r.generation[q, place(r, g, block)]:
                return g
    return -1
