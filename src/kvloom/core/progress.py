"""What append and commit do to one row, and to many rows at once."""

from __future__ import annotations

from kvloom.core._jit import inlined, jit
from kvloom.core.arrays import Arrays
from kvloom.core.eviction import make_node_room
from kvloom.core.fields import (
    BLOCK_TOKENS,
    CHUNKED,
    FIRST_CHILD,
    FREE_NODES,
    RATIO,
    RULE,
    RULE_SNAPSHOT,
    RULE_WINDOW,
    WINDOW,
)
from kvloom.core.page_table import (
    DETACHED,
    LENGTH,
    NODE,
    PENDING,
    PUBLISHED,
    QUIET,
    STATE_GRADE,
    STEPPED,
    Rows,
    grow,
    need_growth,
    shrink_windows,
    undo_growth,
    window_moved,
)
from kvloom.core.prefix_index import drop_anchor, recycle
from kvloom.core.publishing import commit_segment, mark_computed, publish_fresh
from kvloom.core.room import lacks_room, need_nothing
from kvloom.core.rules import block_of, blocks_at, first_block_needed
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
        r.state[q, QUIET] = 0
    return full


@inlined
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
        if filled >= segment:  # ids were lost to an interrupt: nothing after them can be named
            r.state[q, DETACHED] = 1
            return len(ids)
        if filled + len(ids) - used < segment:
            break
        parent = r.state[q, NODE]
        if filled == 0 and a.trunk[parent, FIRST_CHILD] < 0 and recycle(a):
            count = min((len(ids) - used) // segment, a.scalars[FREE_NODES])
            publish_fresh(a, r, q, ids, used, count)
            used += count * segment
            continue
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


@inlined
def opens_block(a: Arrays, length: int) -> bool:
    """Whether the token after ``length`` needs a block that those before it did not."""
    for g in range(a.group.shape[0]):
        if a.group[g, RULE] != RULE_SNAPSHOT and blocks_at(a, g, length + 1) > blocks_at(a, g, length):
            return True
    return False


@inlined
def quiet_until(a: Arrays, length: int) -> int:
    """The next length at which a block of some group is complete, no longer needed, or lacking for one token more."""
    first = length + a.tokens.shape[1] - length % a.tokens.shape[1]
    for g in range(a.group.shape[0]):
        if a.group[g, RULE] == RULE_SNAPSHOT:
            continue
        size = a.group[g, BLOCK_TOKENS]
        first = min(first, (block_of(a, g, length) + 1) * size)
        opening = blocks_at(a, g, length) * size + a.group[g, RATIO] - 1
        first = min(first, opening if opening > length else first)
        if a.group[g, RULE] == RULE_WINDOW:
            window = a.group[g, WINDOW]
            if a.group[g, CHUNKED]:
                first = min(first, length - length % window + window)
            else:  # the block of the first token needed changes
                first = min(first, (first_block_needed(a, g, length) + 1) * size + window - 1)
    return first


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
        length = r.state[q, LENGTH] + 1
        if length < r.state[q, QUIET]:
            r.state[q, LENGTH] = length
            r.state[q, PENDING] = 0
            continue
        compute(a, r, q, claim)
        r.state[q, QUIET] = -quiet_until(a, length)  # the next reservation is not quiet yet
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
        if window_moved(a, r, q, length):
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


@inlined
def _first_unfit(
    a: Arrays, r: Rows, rows: AnyArray, tokens: AnyArray, vocabulary: int, longest: int
) -> tuple[int, int]:
    """The first row that cannot have its token, and why; else -1, and ``NEED`` is what all rows lack together."""
    for i in range(len(rows)):
        if tokens[i] < 0 or tokens[i] >= vocabulary:
            return i, BAD_TOKEN
        if longest > 0 and r.state[rows[i], LENGTH] >= longest:
            return i, TOO_LONG
        if r.state[rows[i], PENDING] != 0:
            return i, BUSY
    for i in range(len(rows)):
        length = r.state[rows[i], LENGTH]
        if length >= r.state[rows[i], QUIET] and opens_block(a, length):
            full = need_growth(a, r, rows[i], length + 1)
            if full >= 0:
                return i, full
    return -1, 0


@jit
def begin_step(a: Arrays, r: Rows, rows: AnyArray, tokens: AnyArray, vocabulary: int, longest: int) -> tuple[int, int]:
    """Reserve one more token for every row: (-1, 0), or nothing changed and (place in ``rows``, why).

    Why: the group without room, ``BAD_TOKEN`` (not in ``[0, vocabulary)``), ``TOO_LONG`` (``longest`` tokens, 0 = no
    limit), or ``BUSY`` (an append is pending).
    """
    segment = a.tokens.shape[1]
    need_nothing(a)
    place, why = _first_unfit(a, r, rows, tokens, vocabulary, longest)
    if place >= 0:
        return place, why
    if lacks_room(a) >= 0:
        return _first_without_room(a, r, rows)
    for i in range(len(rows)):
        q = rows[i]
        length = r.state[q, LENGTH]
        full = -1
        if length >= r.state[q, QUIET]:
            opens = opens_block(a, length)
            if opens:
                full = grow(a, r, q, length, 1)
            # a new block takes its grade with its first token
            r.state[q, QUIET] = 0 if opens else -r.state[q, QUIET]
        if full >= 0:
            for j in range(i):
                undo_growth(a, r, rows[j], a.group.shape[0] - 1, r.state[rows[j], LENGTH])
                r.state[rows[j], PENDING] = 0
                r.state[rows[j], STEPPED] = 0
                r.state[rows[j], QUIET] = 0
            return i, full
        r.state[q, PENDING] = 1
        r.state[q, STEPPED] = 1
        if length - r.state[q, PUBLISHED] * segment >= segment:  # a step that was interrupted, see ``publish``
            r.state[q, DETACHED] = 1
        if r.state[q, DETACHED] == 0:
            r.tail[q, length - r.state[q, PUBLISHED] * segment] = tokens[i]
    return -1, 0
