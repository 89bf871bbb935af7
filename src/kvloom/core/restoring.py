"""What a request could resume from with the help of colder tiers: which objects to bring, and bringing them in.

A chain of *rows* stands for the prompt: row ``k`` is its segment ``k``, and one more row, when ``tail`` is not 0, the
checkpoint of ``tail`` tokens behind the last segment.  ``cold`` int8 [rows, columns] says with which grade a colder
tier has each object, -1 for not at all.  On the device segment ``k`` is node ``path[k + 1]``, -1 when it is not known
there, and the last row ``checkpoint``.
"""

from __future__ import annotations

from kvloom.core._jit import inlined, jit
from kvloom.core.arrays import Arrays
from kvloom.core.block_pool import hold, release
from kvloom.core.child_table import find_checkpoint
from kvloom.core.eviction import make_node_room, take_or_evict
from kvloom.core.fields import (
    BROKEN,
    CARRIED,
    COL_BASE,
    COLUMNS,
    GRADE,
    NEED,
    OWNER,
    RULE,
    RULE_PREFIX,
    RULE_SNAPSHOT,
    SLOT_BASE,
    STATE,
)
from kvloom.core.heat import use_checkpoint
from kvloom.core.hybrid_match import fault
from kvloom.core.lifecycle import LOADING, QUARANTINED, READY, move
from kvloom.core.objects import adopt, forget_object, refresh_spine
from kvloom.core.prefix_index import add_anchor, drop_anchor, new_node, touch
from kvloom.core.room import lacks_room
from kvloom.core.rules import block_of, blocks_at, first_block_needed, snapshot_needed
from kvloom.types import AnyArray

ROW, GROUP, COLUMN, SLOT, ITEM_GRADE = range(5)
"""Columns of ``items``, int32: the row, the group, the column within the group, the global slot, the grade."""
ITEM_COLUMNS = 5


@inlined
def node_of(path: AnyArray, checkpoint: int, segments: int, row: int) -> int:
    """The node of a row, for a boundary behind ``segments`` segments; -1 when the device does not know it."""
    return path[row + 1] if row < segments else checkpoint


@inlined
def there(a: Arrays, n: int, c: int, g: int, floor: int) -> bool:
    """Whether node ``n`` (-1: none) has an object in column ``c`` that is good enough."""
    return n >= 0 and fault(a, n, c, g, floor) == 0


@inlined
def needed_blocks(a: Arrays, g: int, position: int) -> tuple[int, int]:
    """The blocks [first, last) that group ``g`` needs at ``position``; a snapshot counts as that of its row."""
    if a.group[g, RULE] != RULE_SNAPSHOT:
        return first_block_needed(a, g, position), blocks_at(a, g, position)
    row = (position - 1) // a.tokens.shape[1]
    return (row, row + 1) if snapshot_needed(a, g, position) else (row, row)


@jit
def _resumable(a: Arrays, path: AnyArray, checkpoint: int, cold: AnyArray, position: int, floor: int) -> bool:
    """Whether everything that ``position`` needs is on the device or cold, prefix blocks of whole segments aside."""
    segments = position // a.tokens.shape[1]
    for g in range(a.group.shape[0]):
        base, per_segment = a.group[g, COL_BASE], a.group[g, COLUMNS]
        first, last = needed_blocks(a, g, position)
        if a.group[g, RULE] == RULE_PREFIX:
            first = max(first, segments * per_segment)
        for block in range(last - 1, first - 1, -1):
            row = block // per_segment
            c = base + block - row * per_segment
            if cold[row, c] < floor and not there(a, node_of(path, checkpoint, segments, row), c, g, floor):
                return False
    return True


@jit
def reachable(a: Arrays, path: AnyArray, checkpoint: int, cold: AnyArray, tail: int, floor: int) -> int:
    """The deepest position of the chain at which every group could resume once what is cold was brought."""
    segment, segments = a.tokens.shape[1], cold.shape[0] - (1 if tail > 0 else 0)
    whole = 0
    while whole < segments:
        complete = True
        for g in range(a.group.shape[0]):
            if a.group[g, RULE] == RULE_PREFIX:
                for c in range(a.group[g, COL_BASE], a.group[g, COL_BASE] + a.group[g, COLUMNS]):
                    n = path[whole + 1]
                    if cold[whole, c] < floor and not there(a, n, c, g, floor):
                        complete = False
        if not complete:
            break
        whole += 1
    if tail > 0 and whole == segments:
        position = segments * segment + tail
        if _resumable(a, path, checkpoint, cold, position, floor):
            return position
    while whole > 0 and not _resumable(a, path, checkpoint, cold, whole * segment, floor):
        whole -= 1
    return whole * segment


@jit
def list_needed(
    a: Arrays,
    path: AnyArray,
    checkpoint: int,
    cold: AnyArray,
    position: int,
    floor: int,
    present: bool,
    items: AnyArray,
) -> int:
    """Write what ``position`` needs into ``items`` and return how many.

    ``present``: what is on the device and not as good in the colder tier, with its slot (to be stored); else what is
    not on the device at ``floor`` or better (to be loaded).
    """
    segments = position // a.tokens.shape[1]
    count = 0
    for g in range(a.group.shape[0]):
        base, per_segment = a.group[g, COL_BASE], a.group[g, COLUMNS]
        first, last = needed_blocks(a, g, position)
        for block in range(first, last):
            row = block // per_segment
            c = base + block - row * per_segment
            n = node_of(path, checkpoint, segments, row)
            here = there(a, n, c, g, floor)
            s = a.group[g, SLOT_BASE] + a.columns[n, c] if here else -1
            if present:
                if not here or a.slot[s, GRADE] <= cold[row, c]:
                    continue
            elif here:
                continue
            items[count, ROW] = row
            items[count, GROUP] = g
            items[count, COLUMN] = c - base
            items[count, SLOT] = s
            items[count, ITEM_GRADE] = a.slot[s, GRADE] if here else cold[row, c]
            count += 1
    return count


@jit
def hold_needed(a: Arrays, path: AnyArray, checkpoint: int, position: int, floor: int, held: AnyArray) -> int:
    """Hold the windows and snapshots on the device that ``position`` needs, so that making room leaves them.

    ``held`` int32 [n, 2]: group and global slot; returns how many.
    """
    segments, count = position // a.tokens.shape[1], 0
    for g in range(a.group.shape[0]):
        base, per_segment = a.group[g, COL_BASE], a.group[g, COLUMNS]
        first, last = needed_blocks(a, g, position)
        if a.group[g, RULE] == RULE_PREFIX:
            first = max(first, segments * per_segment)  # those of the checkpoint; the path protects the others
        for block in range(first, last):
            row = block // per_segment
            c = base + block - row * per_segment
            n = node_of(path, checkpoint, segments, row)
            if there(a, n, c, g, floor):
                s = a.group[g, SLOT_BASE] + a.columns[n, c]
                hold(a, g, s)
                held[count, 0] = g
                held[count, 1] = s
                count += 1
    return count


@jit
def _new(a: Arrays, parent: int, tokens: AnyArray, start: int, count: int) -> int:
    n = new_node(a, parent, tokens, start, count)
    while n < 0 and make_node_room(a):
        n = new_node(a, parent, tokens, start, count)
    if n >= 0:
        refresh_spine(a, n)  # a model without prefix groups has nothing to wait for
    return n


@jit
def make_path(a: Arrays, path: AnyArray, known: int, tokens: AnyArray, position: int) -> int:
    """Make the nodes that the device lacks up to ``position``; returns the last one, anchored, or -1: no room.

    ``path`` gets those of whole segments.
    """
    segment = a.tokens.shape[1]
    segments = position // segment
    n = path[min(known, segments)]
    add_anchor(a, n)
    for row in range(known, segments):
        child = _new(a, n, tokens, row * segment, segment)
        drop_anchor(a, n)  # its child keeps it; without one it may go
        if child < 0:
            return -1
        n = child
        path[row + 1] = n
    if position > segments * segment:
        child = find_checkpoint(a, n, tokens, segments * segment, position - segments * segment)
        if child >= 0:
            add_anchor(a, child)
        else:
            child = _new(a, n, tokens, segments * segment, position - segments * segment)
        drop_anchor(a, n)
        n = child
    if n >= 0:
        a.scalars[CARRIED] += 1
    return n


@jit
def reserve_items(a: Arrays, items: AnyArray, count: int, position: int) -> int:
    """Take a slot for every item; -1, or the group without room (then none is taken).

    There must also be room for what a request that resumes at ``position`` takes beside them, live slots and its own
    copies of a checkpoint's blocks: else it would be refused where it would have fitted without the load.
    """
    start = position // a.tokens.shape[1] * a.tokens.shape[1]
    for g in range(a.group.shape[0]):
        a.group[g, NEED] = 0
        if a.group[g, RULE] == RULE_SNAPSHOT:
            a.group[g, NEED] = 1
        elif position > start:
            first = max(block_of(a, g, start), first_block_needed(a, g, position))
            a.group[g, NEED] = max(0, blocks_at(a, g, position) - first)
    for i in range(count):
        a.group[items[i, GROUP], NEED] += 1
    short = lacks_room(a)
    if short >= 0:
        return short
    for i in range(count):
        g = items[i, GROUP]
        s = take_or_evict(a, g)
        if s < 0:
            for j in range(i):
                release(a, items[j, GROUP], items[j, SLOT])
            return g
        move(a.slot, s, LOADING)
        a.slot[s, GRADE] = items[i, ITEM_GRADE]
        items[i, SLOT] = s
    return -1


@jit
def finish_load(a: Arrays, path: AnyArray, end: int, segments: int, items: AnyArray, good: AnyArray) -> None:
    """Publish the items that arrived (``good``: bool) and give back the slots of the others."""
    for i in range(len(items)):
        g, s = items[i, GROUP], items[i, SLOT]
        n = path[items[i, ROW] + 1] if items[i, ROW] < segments else end
        if not good[i] and a.group[g, RULE] == RULE_PREFIX and good.any():
            a.scalars[BROKEN] = 1  # what is below it may be there nevertheless
        if good[i]:
            move(a.slot, s, READY)
            adopt(a, n, a.group[g, COL_BASE] + items[i, COLUMN], g, s)
            touch(a, n)
        release(a, g, s)
    for i in range(len(items)):
        refresh_spine(a, path[items[i, ROW] + 1] if items[i, ROW] < segments else end)
    use_checkpoint(a, end)


@jit
def publish_arriving(a: Arrays, path: AnyArray, end: int, segments: int, items: AnyArray) -> None:
    """Publish all items before their bytes are there.  The load goes on holding them, so none of them is evicted."""
    for i in range(len(items)):
        g, s = items[i, GROUP], items[i, SLOT]
        n = path[items[i, ROW] + 1] if items[i, ROW] < segments else end
        move(a.slot, s, READY)
        adopt(a, n, a.group[g, COL_BASE] + items[i, COLUMN], g, s)
        touch(a, n)
    for i in range(len(items)):
        refresh_spine(a, path[items[i, ROW] + 1] if items[i, ROW] < segments else end)
    use_checkpoint(a, end)


@jit
def withdraw_items(a: Arrays, items: AnyArray, good: AnyArray) -> int:
    """Quarantine published items that did not arrive (``good``: bool), which the load still holds; returns how many.

    Whatever became of one since, a slot that nobody filled is never read again.
    """
    count = 0
    for i in range(len(items)):
        g, s = items[i, GROUP], items[i, SLOT]
        if good[i] or a.slot[s, STATE] == QUARANTINED:
            continue
        if a.slot[s, OWNER] >= 0:
            forget_object(a, g, s, -1)
            if a.group[g, RULE] == RULE_PREFIX:
                a.scalars[BROKEN] = 1  # what is below it may be there nevertheless
        move(a.slot, s, QUARANTINED)
        count += 1
    return count


@jit
def let_go(a: Arrays, end: int) -> None:
    """Drop the anchor that ``make_path`` left on its last node."""
    touch(a, end)
    a.scalars[CARRIED] -= 1
    drop_anchor(a, end)


@jit
def release_all(a: Arrays, held: AnyArray) -> None:
    """Release ``held``: int32 [n, 2], group and global slot."""
    for i in range(len(held)):
        release(a, held[i, 0], held[i, 1])


@jit
def hold_all(a: Arrays, held: AnyArray) -> None:
    """Hold ``held``: int32 [n, 2], group and global slot."""
    for i in range(len(held)):
        hold(a, held[i, 0], held[i, 1])
