"""What is kept of the present end of a row, so that others can resume there: snapshots, and sealed part-filled blocks.

Best effort: where there is no room the plan is empty, and the pool's ``unkept`` counter grows.
"""

from __future__ import annotations

import numpy as np

from kvloom.core.child_table import find_checkpoint
from kvloom.core.fields import BLOCK_TOKENS, COL_BASE, RATIO
from kvloom.core.heat import note_priority
from kvloom.core.keeping import checkpoint_complete, checkpoint_lacks_room, reserve_sealed, reserve_snapshots
from kvloom.core.page_table import LENGTH, NODE, PUBLISHED, ROW_PRIORITY, STATE_GRADE, slot_at
from kvloom.core.prefix_index import add_anchor, drop_anchor, new_node
from kvloom.core.publishing import republish
from kvloom.core.worth import value_end
from kvloom.manager.books import Books
from kvloom.manager.tickets import NOTHING, Copy, Publication
from kvloom.plan import CopyPlan


def keep_end(books: Books, row: int) -> CopyPlan:
    """Keep the exact end of ``row`` resumable, wherever it lies."""
    republish(books.arrays, books.rows, row)
    state = books.rows.state[row]
    value_end(books.arrays, int(state[NODE]))
    start = int(state[PUBLISHED]) * books.spec.segment_tokens
    if state[LENGTH] == start:
        return keep_snapshots(books, row, asked=True)
    return _seal(books, row, start)


def keep_snapshots(books: Books, row: int, *, asked: bool) -> CopyPlan:
    """Keep the snapshots of ``row`` at the segment end that it has reached.

    ``asked``: all that resuming there needs, else those that are due at this place.
    """
    node = int(books.rows.state[row, NODE])
    found = _reserved_snapshots(books, row, node, asked=asked)
    if found is None or not found[0]:
        return NOTHING
    add_anchor(books.arrays, node)
    return books.tickets.issue(found[0], publish=found[1], node=node)


def _reserved_snapshots(
    books: Books, row: int, node: int, *, asked: bool
) -> tuple[list[Copy], list[Publication]] | None:
    """Copies of the live slots into slots for ``node``; None when there is no room."""
    a, state = books.arrays, books.rows.state[row]
    out = np.empty(len(a.group), dtype=np.int64)
    arguments = (a, books.rows, row, node, int(state[LENGTH]), asked, int(state[STATE_GRADE]), out)
    if int(reserve_snapshots(*arguments)) >= 0:
        return None
    copies, publish = [], []
    for g in np.flatnonzero(out >= 0).tolist():
        live = int(slot_at(a, books.rows, row, g, 0))
        copies.append(Copy(g, live, int(out[g])))
        publish.append(Publication(node, int(a.group[g, COL_BASE]), g, int(out[g])))
    return copies, publish


def _seal(books: Books, row: int, start: int) -> CopyPlan:
    """Copies of the blocks of ``row`` from token ``start`` on, and its snapshots, below a node of their own."""
    a, r = books.arrays, books.rows
    length, grade = int(r.state[row, LENGTH]), int(r.state[row, STATE_GRADE])
    above, tail, count = int(r.state[row, NODE]), r.tail[row], length - start
    node = int(find_checkpoint(a, above, tail, 0, count))
    if node >= 0:
        if checkpoint_complete(a, node, start, length, grade):
            return NOTHING
        add_anchor(a, node)
    else:
        node = int(new_node(a, above, tail, 0, count))
        if node < 0 and books.namespaces.make_node_room():
            node = int(new_node(a, above, tail, 0, count))
        if node < 0:
            return NOTHING
    note_priority(a, node, int(r.state[row, ROW_PRIORITY]))
    if int(checkpoint_lacks_room(a, node, start, length, grade)) >= 0:
        drop_anchor(a, node)
        return NOTHING
    sealed = np.empty((a.columns.shape[1], 4), dtype=np.int64)
    blocks = int(reserve_sealed(a, r, row, start, length, sealed))
    snapshots = _reserved_snapshots(books, row, node, asked=True) if blocks >= 0 else None
    if snapshots is None:
        books.release_slots([(g, s) for g, _, _, s in sealed[: max(blocks, 0)].tolist()])
        drop_anchor(a, node)
        return NOTHING
    copies, publish = snapshots
    for g, block, source, target in sealed[:blocks].tolist():
        per_block = books.spec.groups[g].block_entries
        left = length // int(a.group[g, RATIO]) - block * per_block
        copies.append(Copy(g, source, target, left if left < per_block else -1))
        column = int(a.group[g, COL_BASE]) + block - start // int(a.group[g, BLOCK_TOKENS])
        publish.append(Publication(node, column, g, target))
    return books.tickets.issue(copies, publish=publish, node=node)
