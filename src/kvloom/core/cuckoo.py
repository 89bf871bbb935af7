"""Compiled steps of the cuckoo table.

A bucket is one row of ``keys`` and one of ``places``: four entries, their keys in one cache line of 64 bytes.  A key
may be in either of two buckets and nowhere else, so a lookup reads one or two, whatever the table has been through.
An insertion that finds both full looks for the shortest row of moves that frees an entry (breadth first, bounded) and
only then moves anything: one that fails has changed nothing.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from kvloom.core._jit import inlined, jit
from kvloom.types import AnyArray

SLOTS = 4
SEARCHED = 512
"""Buckets that an insertion looks at before it gives up.  Near 98 % load the tail of the search needs most of them."""

# scratch of a search, int64 [SEARCHED, 3]
BUCKET, CAME_FROM, BY_SLOT = range(3)

# tally: int64 [6]
(
    ENTRIES,
    READ_ONE,  # lookups that read one bucket
    READ_TWO,
    MOVES,  # entries that insertions moved
    LONGEST,  # most moves of one insertion
    WIDEST,  # most buckets that one insertion looked at
) = range(6)

_U: Any = np.uint64


class Table(NamedTuple):
    """All arrays of a table."""

    keys: AnyArray  # uint64 [buckets, 8]: the first halves of four keys, then the second halves
    places: AnyArray  # int64 [buckets, 4], -1 = free
    seed: AnyArray  # uint64 [1]
    search: AnyArray  # int64 [SEARCHED, 3] scratch
    tally: AnyArray  # int64 [6]


@inlined
def _homes(high: Any, low: Any, seed: Any, buckets: int) -> tuple[Any, Any]:
    """The two buckets of a key, never the same one.  Both depend on all 128 bits and on the seed."""
    h = _U((high ^ seed) * _U(0x9E3779B97F4A7C15))
    h = _U((h ^ (h >> _U(32))) ^ low)
    h = _U((h ^ (h >> _U(29))) * _U(0xBF58476D1CE4E5B9))
    h = _U((h ^ (h >> _U(32))) * _U(0x94D049BB133111EB))
    h = _U(h ^ (h >> _U(29)))
    first = np.int64(((h & _U(0xFFFFFFFF)) * _U(buckets)) >> _U(32))
    second = np.int64(((h >> _U(32)) * _U(buckets)) >> _U(32))
    if second == first:
        second = np.int64(first + 1 if first + 1 < buckets else 0)
    return first, second


@inlined
def _slot_of(t: Table, bucket: int, high: Any, low: Any) -> int:
    """The entry of a bucket that holds the key, or -1."""
    for i in range(SLOTS):
        if t.keys[bucket, i] == high and t.keys[bucket, SLOTS + i] == low and t.places[bucket, i] >= 0:
            return i
    return -1


@jit
def find(t: Table, wanted: AnyArray, out: AnyArray) -> None:
    """Places of the keys ``wanted`` uint64 [n, 2 or more], -1 for those that are not here."""
    one = two = 0
    for n in range(wanted.shape[0]):
        high, low = wanted[n, 0], wanted[n, 1]
        first, second = _homes(high, low, t.seed[0], t.keys.shape[0])
        i = _slot_of(t, first, high, low)
        if i >= 0:
            out[n] = t.places[first, i]
            one += 1
            continue
        two += 1
        i = _slot_of(t, second, high, low)
        out[n] = t.places[second, i] if i >= 0 else -1
    t.tally[READ_ONE] += one
    t.tally[READ_TWO] += two


@jit
def _free_slot(t: Table, first: int, second: int) -> int:
    """Search for the bucket nearest to ``first`` and ``second`` with a free entry: its row in ``search``, or -1.

    The row's chain of ``CAME_FROM`` is the path of moves; no bucket is on it twice.
    """
    t.search[0, BUCKET], t.search[0, CAME_FROM] = first, -1
    t.search[1, BUCKET], t.search[1, CAME_FROM] = second, -1
    end = 2
    at = 0
    while at < end:
        bucket = t.search[at, BUCKET]
        for i in range(SLOTS):
            if t.places[bucket, i] < 0:
                return at
        for i in range(SLOTS):
            if end == t.search.shape[0]:
                break
            a, b = _homes(t.keys[bucket, i], t.keys[bucket, SLOTS + i], t.seed[0], t.keys.shape[0])
            other = b if a == bucket else a
            up = at
            while up >= 0 and t.search[up, BUCKET] != other:
                up = t.search[up, CAME_FROM]
            if up < 0:
                t.search[end, BUCKET], t.search[end, CAME_FROM], t.search[end, BY_SLOT] = other, at, i
                end += 1
        at += 1
    return -1


@inlined
def _write(t: Table, bucket: int, i: int, high: Any, low: Any, place: int) -> None:
    t.keys[bucket, i] = high
    t.keys[bucket, SLOTS + i] = low
    t.places[bucket, i] = place


@jit
def _insert(t: Table, high: Any, low: Any, place: int) -> bool:
    """Enter a key that is not in the table; False, and nothing changed, when no room was found for it."""
    first, second = _homes(high, low, t.seed[0], t.keys.shape[0])
    at = _free_slot(t, first, second)
    if at < 0:
        return False
    t.tally[WIDEST] = max(t.tally[WIDEST], at + 1)
    bucket = t.search[at, BUCKET]
    free = 0
    while t.places[bucket, free] >= 0:
        free += 1
    moves = 0
    while t.search[at, CAME_FROM] >= 0:
        i = t.search[at, BY_SLOT]
        at = t.search[at, CAME_FROM]
        source = t.search[at, BUCKET]
        _write(t, bucket, free, t.keys[source, i], t.keys[source, SLOTS + i], t.places[source, i])
        bucket, free = source, i
        moves += 1
    _write(t, bucket, free, high, low, place)
    t.tally[ENTRIES] += 1
    t.tally[MOVES] += moves
    t.tally[LONGEST] = max(t.tally[LONGEST], moves)
    return True


@jit
def put(t: Table, new: AnyArray, new_places: AnyArray, begin: int, most: int, old: AnyArray) -> int:
    """Enter keys from index ``begin`` on, or replace their places; ``old`` gets what was there, or -1.

    Returns the number of keys, or the index of the first one for which there was no room (``most`` entries, or none
    found): it and those after it are untouched.
    """
    for n in range(begin, new.shape[0]):
        high, low = new[n, 0], new[n, 1]
        first, second = _homes(high, low, t.seed[0], t.keys.shape[0])
        bucket = first
        i = _slot_of(t, first, high, low)
        if i < 0:
            bucket = second
            i = _slot_of(t, second, high, low)
        if i >= 0:
            old[n] = t.places[bucket, i]
            t.places[bucket, i] = new_places[n]
            continue
        if t.tally[ENTRIES] >= most or not _insert(t, high, low, new_places[n]):
            return n
        old[n] = -1
    return new.shape[0]


@jit
def remove(t: Table, gone: AnyArray, old: AnyArray) -> None:
    """Take keys out; ``old`` gets their places, -1 for those that are not here.  An entry is free again at once."""
    for n in range(gone.shape[0]):
        high, low = gone[n, 0], gone[n, 1]
        first, second = _homes(high, low, t.seed[0], t.keys.shape[0])
        bucket = first
        i = _slot_of(t, first, high, low)
        if i < 0:
            bucket = second
            i = _slot_of(t, second, high, low)
        old[n] = -1
        if i >= 0:
            old[n] = t.places[bucket, i]
            t.places[bucket, i] = -1
            t.tally[ENTRIES] -= 1


@jit
def undo(t: Table, new: AnyArray, old: AnyArray) -> None:
    """Take back what ``put`` did with the keys ``new``, the last one first."""
    for n in range(new.shape[0] - 1, -1, -1):
        high, low = new[n, 0], new[n, 1]
        first, second = _homes(high, low, t.seed[0], t.keys.shape[0])
        bucket = first
        i = _slot_of(t, first, high, low)
        if i < 0:
            bucket = second
            i = _slot_of(t, second, high, low)
        t.places[bucket, i] = old[n]
        if old[n] < 0:
            t.tally[ENTRIES] -= 1


@jit
def refill(t: Table, source: Table) -> bool:
    """Enter everything of another table into this empty one; False when some entry found no room."""
    for bucket in range(source.keys.shape[0]):
        for i in range(SLOTS):
            place = source.places[bucket, i]
            if place >= 0 and not _insert(t, source.keys[bucket, i], source.keys[bucket, SLOTS + i], place):
                return False
    return True


@jit
def misplaced(t: Table) -> int:
    """Entries that are in neither of their two buckets, or in the table twice."""
    wrong = 0
    for bucket in range(t.keys.shape[0]):
        for i in range(SLOTS):
            if t.places[bucket, i] < 0:
                continue
            high, low = t.keys[bucket, i], t.keys[bucket, SLOTS + i]
            first, second = _homes(high, low, t.seed[0], t.keys.shape[0])
            other = second if bucket == first else first
            mine = bucket in (first, second) and _slot_of(t, bucket, high, low) == i
            if not mine or _slot_of(t, other, high, low) >= 0:
                wrong += 1
    return wrong
