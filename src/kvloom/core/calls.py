"""The compiled calls of the hot path.  They take an array of two addresses; see ``kvloom.core.handle``."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from kvloom.core._jit import jit
from kvloom.core.arrays import Arrays
from kvloom.core.fields import CLOCK
from kvloom.core.handle import at_address
from kvloom.core.heat import end_at
from kvloom.core.hybrid_match import best_boundary, first_bad_group, known_prefix, walk
from kvloom.core.page_table import EPOCH, LENGTH, NODE, PUBLISHED, ROW_PRIORITY, STATE_GRADE, Rows, lease, release_row
from kvloom.core.prefix_index import drop_anchor, touch
from kvloom.core.progress import begin_step, commit, finish_step, reserve
from kvloom.core.publishing import republish
from kvloom.core.sweep import count_misses
from kvloom.core.worth import value_end
from kvloom.types import AnyArray

NOT_BEGUN = -2

arrays_of = cast("Callable[[AnyArray], Arrays]", at_address(Arrays, 0))
rows_of = cast("Callable[[AnyArray], Rows]", at_address(Rows, 1))


@jit
def first_outside(tokens: AnyArray, begin: int, top: int) -> int:
    """Place of the first of ``tokens[begin:]`` (int32) that is negative or not below ``top``, or -1."""
    rest = tokens[begin:]  # a plain loop from 0 is what gets vectorised
    signs = 0
    for i in range(len(rest)):
        signs |= rest[i] | (top - 1 - rest[i])
    if signs < 0:
        for i in range(len(rest)):
            if rest[i] < 0 or rest[i] >= top:
                return begin + i
    return -1


@jit
def match_prompt(
    h: AnyArray, root: int, prompt: AnyArray, top: int, floor: int, path: AnyArray
) -> tuple[int, int, int, int, int]:
    """The one-pass match: (-1, segments known, best position, segments before it, checkpoint node or -1).

    ``path`` int32 gets the nodes; see ``kvloom.core.hybrid_match``.  The first number is the place of a token that is
    not in ``[0, top)`` if there is one; those that the index knows need no check.
    """
    a = arrays_of(h)
    limit = len(prompt) - 1
    depth, complete = walk(a, root, prompt, limit, floor, path)
    wrong = first_outside(prompt, depth * a.tokens.shape[1], top)
    position, at, checkpoint = best_boundary(a, path, complete, prompt, limit, floor)
    return wrong, depth, position, at, checkpoint


@jit
def verify_groups(h: AnyArray, path: AnyArray, depth: int, checkpoint: int, position: int, floor: int) -> int:
    """``first_bad_group``."""
    return first_bad_group(arrays_of(h), path, depth, checkpoint, position, floor)


@jit
def known_tokens(h: AnyArray, path: AnyArray, depth: int, prompt: AnyArray) -> tuple[int, int]:
    """``known_prefix``."""
    return known_prefix(arrays_of(h), path, depth, prompt, len(prompt) - 1)


@jit
def lease_row(h: AnyArray, q: int, path: AnyArray, depth: int, checkpoint: int, position: int, priority: int) -> int:
    """``lease``: enter and hold the blocks of a hit; returns their worst grade and starts the row's state."""
    a, r = arrays_of(h), rows_of(h)
    worst = lease(a, r, q, path, depth, checkpoint, position)
    for i in range(r.state.shape[1]):
        r.state[q, i] = 0
    r.state[q, LENGTH] = position
    r.state[q, PUBLISHED] = depth
    r.state[q, NODE] = path[depth]
    r.state[q, STATE_GRADE] = worst
    r.state[q, ROW_PRIORITY] = priority
    r.state[q, EPOCH] = a.scalars[CLOCK]
    return worst


@jit
def note_misses(h: AnyArray, limit: int, reused: int) -> None:
    """``count_misses``."""
    count_misses(arrays_of(h), limit, reused)


@jit
def reserve_tokens(h: AnyArray, q: int, count: int) -> int:
    """``reserve``, one tick of the clock later."""
    a = arrays_of(h)
    a.scalars[CLOCK] += 1
    return reserve(a, rows_of(h), q, count)


@jit
def reserve_again(h: AnyArray, q: int, count: int) -> int:
    """``reserve``."""
    return reserve(arrays_of(h), rows_of(h), q, count)


@jit
def commit_tokens(h: AnyArray, q: int, ids: AnyArray, claim: int) -> int:
    """``commit``, one tick of the clock later."""
    a = arrays_of(h)
    a.scalars[CLOCK] += 1
    return commit(a, rows_of(h), q, ids, claim)


@jit
def finish_rows(h: AnyArray, rows: AnyArray, begin: int, claim: int, ended: AnyArray, count: int) -> tuple[int, int]:
    """``finish_step``."""
    return finish_step(arrays_of(h), rows_of(h), rows, begin, claim, ended, count)


@jit
def begin_rows(h: AnyArray, rows: AnyArray, tokens: AnyArray, vocabulary: int, longest: int) -> tuple[int, int]:
    """``begin_step``."""
    return begin_step(arrays_of(h), rows_of(h), rows, tokens, vocabulary, longest)


@jit
def step_rows(
    h: AnyArray,
    rows: AnyArray,
    tokens: AnyArray,
    claim: int,
    ended: AnyArray,
    vocabulary: int,
    longest: int,
    at_once: bool,
) -> tuple[int, int, int, int]:
    """``finish_step`` and ``begin_step``: (place, rows that ended a segment, place, why).

    A tick of the clock comes first.  The second place is ``NOT_BEGUN`` when the first step did not come to its end, or
    when rows ended a segment and not ``at_once``: the caller takes their snapshots before it begins the next step.
    """
    a, r = arrays_of(h), rows_of(h)
    a.scalars[CLOCK] += 1
    done, count = finish_step(a, r, rows, 0, claim, ended, 0)
    if done < len(rows) or (count > 0 and not at_once):
        return done, count, NOT_BEGUN, 0
    place, why = begin_step(a, r, rows, tokens, vocabulary, longest)
    return done, count, place, why


@jit
def close_row(h: AnyArray, q: int, whole: bool) -> None:
    """Release everything that row ``q`` holds; ``whole``: its state can be trusted.  The clock ticks first.

    A row that was closed already is left alone.
    """
    a, r = arrays_of(h), rows_of(h)
    a.scalars[CLOCK] += 1
    node = r.state[q, NODE]
    if node < 0:
        return
    if whole:
        republish(a, r, q)
    value_end(a, node)
    release_row(a, r, q)
    touch(a, node)
    end_at(a, node, r.state[q, ROW_PRIORITY])
    drop_anchor(a, node)
    r.state[q, NODE] = -1
