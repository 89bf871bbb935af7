"""Compiled steps: taking and giving pages, and copies between memory and the runs that an object lies in.

Every function takes the arrays as ``a``; what they say of pages is checked before bytes are copied.
"""

from __future__ import annotations

from typing import Any

from kvloom.core._jit import jit_of
from kvloom.core.bitmap import lowest_bit, mark_range_free, next_free, take_range
from kvloom.tiers.hashing.streaming import LINE, copy_line, fence
from kvloom.tiers.host.arrays import FREE, MEMORY, PAGE, PAGES, RUN
from kvloom.tiers.rows import memcpy
from kvloom.types import AnyArray

jit = jit_of("kvloom.tiers.host", "kvloom.tiers.hashing")

OUTWARD, INWARD, PAST = 0, 1, 2
LARGE = 16 << 10
"""Bytes from which on it pays to go past the cache."""
TRIES = 32
"""Gaps that are looked at for one that takes everything."""


@jit
def _gap_end(a: Any, page: int, most: int) -> int:
    """The end of the free pages from ``page`` on, at most ``most`` of them."""
    limit = min(page + most, a.scalars[PAGES])
    at = page
    while at < limit:
        used = ~a.free_bits[at >> 6] & (-1 << (at & 63))
        if used != 0:
            return min(((at >> 6) << 6) + lowest_bit(used), limit)
        at = ((at >> 6) + 1) << 6
    return limit


@jit
def all_free(a: Any) -> None:
    """At the beginning."""
    mark_range_free(a, 0, a.scalars[PAGES])


@jit
def take_pages(a: Any, count: int) -> int:
    """Take ``count`` pages, which are free: in one run if a gap near the beginning has room, else the lowest ones."""
    a.scalars[FREE] -= count
    page = next_free(a, 0)
    for _ in range(TRIES):
        end = _gap_end(a, page, count)
        if end - page == count:
            take_range(a, page, end)
            a.run[page, 0], a.run[page, 1] = count, -1
            return page
        if end >= a.scalars[PAGES]:
            break
        page = next_free(a, end)
        if page < 0:
            break
    first, last = -1, -1
    page = next_free(a, 0)
    while count > 0 and page >= 0:
        end = _gap_end(a, page, count)
        take_range(a, page, end)
        a.run[page, 0], a.run[page, 1] = end - page, -1
        if last >= 0:
            a.run[last, 1] = page
        else:
            first = page
        last = page
        count -= end - page
        if count > 0:
            page = next_free(a, page)
    return first


@jit
def give_pages(a: Any, page: int) -> None:
    """Give all runs from ``page`` on back."""
    while 0 <= page < a.scalars[PAGES]:
        count, after = a.run[page, 0], a.run[page, 1]
        if count < 1 or page + count > a.scalars[PAGES]:
            return
        mark_range_free(a, page, page + count)
        a.scalars[FREE] += count
        a.run[page, 0], a.run[page, 1] = 0, -1
        page = after


@jit
def cut_pages(a: Any, page: int, keep: int) -> None:
    """Give back all but the first ``keep`` pages, at least one, of the runs from ``page`` on."""
    while page >= 0 and a.run[page, 0] < keep:
        keep -= a.run[page, 0]
        page = a.run[page, 1]
    if page < 0:
        return
    rest, after = a.run[page, 0] - keep, a.run[page, 1]
    a.run[page, 0], a.run[page, 1] = keep, -1
    if rest > 0:
        a.run[page + keep, 0], a.run[page + keep, 1] = rest, after
        after = page + keep
    give_pages(a, after)


@jit
def _stream(to: int, source: int, size: int) -> None:
    """Copy past the cache."""
    head = min(-to & (LINE - 1), size)
    memcpy(to, source, head)
    lines = (size - head) // LINE
    for i in range(lines):
        copy_line(to + head + i * LINE, source + head + i * LINE)
    done = head + lines * LINE
    memcpy(to + done, source + done, size - done)


@jit
def _move(a: Any, page: int, begin: int, size: int, other: int, way: int) -> int:
    """Copy bytes [begin, begin + size) of the runs from ``page`` on to the address ``other``, or from there to them.

    Returns 1, or 0 where the runs are not what they can be; then some bytes may have been copied.
    """
    while size > 0:
        if page < 0 or page >= a.scalars[PAGES]:
            return 0
        count = a.run[page, 0]
        if count < 1 or page + count > a.scalars[PAGES]:
            return 0
        here = count * PAGE
        if begin < here:
            part = min(here - begin, size)
            mine = a.scalars[MEMORY] + page * PAGE + begin
            if way == INWARD:
                memcpy(mine, other, part)
            elif way == PAST and part >= LARGE:
                _stream(other, mine, part)
            else:
                memcpy(other, mine, part)
            other += part
            size -= part
            begin = 0
        else:
            begin -= here
        page = a.run[page, 1]
    return 1


@jit
def gather(a: Any, page: int, begin: int, size: int, to: int) -> int:
    """Copy bytes of the runs from ``page`` on to an address; 0 where that is not possible."""
    return _move(a, page, begin, size, to, OUTWARD)


@jit
def scatter(a: Any, page: int, begin: int, size: int, source: int) -> int:
    """Copy bytes from an address to the runs from ``page`` on; 0 where that is not possible."""
    return _move(a, page, begin, size, source, INWARD)


@jit
def gather_many(
    a: Any, rows: AnyArray, lengths: AnyArray, to: AnyArray, begin: int, end: int, good: AnyArray, way: int
) -> None:
    """Copy the objects ``rows[begin:end]`` to addresses ``to``; ``good`` uint8 gets 1, or 0 where that failed.

    ``way``: ``OUTWARD``, or ``PAST`` the cache for bytes that are not looked at here.
    """
    for i in range(begin, end):
        good[i] = _move(a, a.obj[rows[i], RUN], 0, lengths[i], to[i], way)
    fence()
