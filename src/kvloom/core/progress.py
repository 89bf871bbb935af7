"""What append and commit do to one row, and to many rows at once."""

from __future__ import annotations

from kvloom.core._jit import jit
from kvloom.core.arrays import Arrays
from kvloom.core.eviction import make_node_room
from kvloom.core.page_table import (
    DETACHED,
    LENGTH,
    NODE,
    PENDING,
    PUBLISHED,
    STATE_GRADE,
    STEPPED,
    Rows,
    commit_segment,
    grow,
    mark_computed,
    need_growth,
    shrink_windows,
    undo_growth,
)
from kvloom.core.prefix_index import drop_anchor
from kvloom.core.room import lacks_room, need_nothing
from kvloom.types import AnyArray

BAD_TOKEN, TOO_LONG, BUSY = -1, -2, -3


@jit
def reserve(a: Arrays, r: Rows, q: int, count: int) -> int:
    """Reserve slots for ``count`` more tokens; -1, or the group without room (nothing changed)."""
    need_nothing(a)
    full = need_growth(a, r, q, r.state[q, LENGTH] + count)
    if full < 0:
        full = lacks_room(a)
    if full < 0:
        full = grow(a, r, q, r.state[q, LENGTH], count)
    if full < 0:
        r.state[q, PENDING] = count
    return full


@jit
def compute(a: Arrays, r: Rows, q: int, claim: int) -> None:
    """The pending tokens were computed, at best at grade ``claim``.

    CANONICAL only if they are exactly one segment from a segment boundary on canonical state, else at most FAITHFUL.
    """
    segment = a.tokens.shape[1]
    length, count = r.state[q, LENGTH], r.state[q, PENDING]
    whole = length % segment == 0 and count == segment
    grade = min(claim, r.state[q, STATE_GRADE], 2 if whole else 1)
    mark_computed(a, r, q, length, count, grade)
    r.state[q, LENGTH] = length + count
    r.state[q, STATE_GRADE] = grade
    r.state[q, PENDING] = 0


@jit
def publish(a: Arrays, r: Rows, q: int, ids: AnyArray, used: int) -> int:
    """Publish the segments that the tokens ``ids[used:]``, the last ones computed, complete; keep the rest in the tail.

    Returns how many ids are done with; fewer than ``len(ids)`` when the index is full.
    """
    segment = a.tokens.shape[1]
    while True:
        start = r.state[q, PUBLISHED] * segment
        filled = r.state[q, LENGTH] - (len(ids) - used) - start
        if filled + len(ids) - used < segment:
            break
        parent = r.state[q, NODE]
        if filled == 0:
            n = commit_segment(a, r, q, parent, ids, used, start)
        else:
            for i in range(segment - filled):
                r.tail[q, filled + i] = ids[used + i]
            n = commit_segment(a, r, q, parent, r.tail[q], 0, start)
        if n < 0 and not make_node_room(a):
            return used
        if n >= 0:
            drop_anchor(a, parent)
            r.state[q, NODE] = n
            r.state[q, PUBLISHED] += 1
            used += segment - filled
    for i in range(used, len(ids)):
        r.tail[q, filled + i - used] = ids[i]
    return len(ids)


@jit
def commit(a: Arrays, r: Rows, q: int, ids: AnyArray, claim: int) -> int:
    """Compute, publish, and give up what windows no longer need; returns like ``publish``.

    When the index is full the windows stay, since the caller may find room and go on publishing.
    """
    compute(a, r, q, claim)
    used = len(ids) if r.state[q, DETACHED] else publish(a, r, q, ids, 0)
    if used == len(ids):
        shrink_windows(a, r, q, r.state[q, LENGTH])
    return used


@jit
def finish_step(
    a: Arrays, r: Rows, rows: AnyArray, begin: int, claim: int, ended: AnyArray, count: int
) -> tuple[int, int]:
    """Commit the token that a step reserved in every row of ``rows[begin:]``.

    ``ended[count:]`` gets the rows that end a segment.  Returns (place, rows in ``ended``): ``len(rows)`` when done,
    else the place of a row that is computed but for which the index has no room; the caller publishes it, or does not,
    and goes on behind it.
    """
    segment = a.tokens.shape[1]
    for i in range(begin, len(rows)):
        q = rows[i]
        if r.state[q, STEPPED] == 0:
            continue
        r.state[q, STEPPED] = 0
        compute(a, r, q, claim)
        length = r.state[q, LENGTH]
        if length == (r.state[q, PUBLISHED] + 1) * segment and r.state[q, DETACHED] == 0:
            parent = r.state[q, NODE]
            n = commit_segment(a, r, q, parent, r.tail[q], 0, length - segment)
            while n < 0 and make_node_room(a):
                n = commit_segment(a, r, q, parent, r.tail[q], 0, length - segment)
            if n < 0:
                return i, count
            drop_anchor(a, parent)
            r.state[q, NODE] = n
            r.state[q, PUBLISHED] += 1
            ended[count] = q
            count += 1
        shrink_windows(a, r, q, length)
    return len(rows), count


@jit
def _first_without_room(a: Arrays, r: Rows, rows: AnyArray) -> tuple[int, int]:
    """The place of the first row that cannot get one more token beside those before it, and the group."""
    need_nothing(a)
    for i in range(len(rows) - 1):
        need_growth(a, r, rows[i], r.state[rows[i], LENGTH] + 1)
        full = lacks_room(a)
        if full >= 0:
            return i, full
    need_growth(a, r, rows[-1], r.state[rows[-1], LENGTH] + 1)
    return len(rows) - 1, lacks_room(a)


@jit
def begin_step(a: Arrays, r: Rows, rows: AnyArray, tokens: AnyArray, vocabulary: int, longest: int) -> tuple[int, int]:
    """Reserve one more token for every row: (-1, 0), or nothing changed and (place in ``rows``, why).

    Why: the group without room, ``BAD_TOKEN`` (not in ``[0, vocabulary)``), ``TOO_LONG`` (``longest`` tokens, 0 = no
    limit), or ``BUSY`` (an append is pending).
    """
    segment = a.tokens.shape[1]
    for i in range(len(rows)):
        if tokens[i] < 0 or tokens[i] >= vocabulary:
            return i, BAD_TOKEN
        if longest > 0 and r.state[rows[i], LENGTH] >= longest:
            return i, TOO_LONG
        if r.state[rows[i], PENDING] != 0:
            return i, BUSY
    need_nothing(a)
    for i in range(len(rows)):
        full = need_growth(a, r, rows[i], r.state[rows[i], LENGTH] + 1)
        if full >= 0:
            return i, full
    if lacks_room(a) >= 0:
        return _first_without_room(a, r, rows)
    for i in range(len(rows)):
        q = rows[i]
        length = r.state[q, LENGTH]
        full = grow(a, r, q, length, 1)
        if full >= 0:
            for j in range(i):
                undo_growth(a, r, rows[j], a.group.shape[0] - 1, r.state[rows[j], LENGTH])
                r.state[rows[j], PENDING] = 0
                r.state[rows[j], STEPPED] = 0
            return i, full
        r.state[q, PENDING] = 1
        r.state[q, STEPPED] = 1
        if r.state[q, DETACHED] == 0:
            r.tail[q, length - r.state[q, PUBLISHED] * segment] = tokens[i]
    return -1, 0
