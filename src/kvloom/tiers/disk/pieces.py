"""Which bytes are read together: neighbours in one piece, and an object that is too large for that in several."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvloom.tiers.disk.format import ALIGN, HEADER, PAGE, padded
from kvloom.types import AnyArray, IntArray

CHUNK = 2 << 20
"""Bytes of one read at most, unless a single object that has to be whole is larger.

More was measured to gain nothing, and the buffers of all threads together stay in a processor's cache.
"""
BUFFER = CHUNK + (64 << 10)
"""So that an object of ``CHUNK`` bytes with its header fits without another buffer."""
GAP = 128 << 10
"""Unwanted bytes that are read along rather than making two reads."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes [``begin``, ``end``) of an extent, whole pages, and the objects in them, by where they lie.

    ``first`` and ``size``: which bytes of its payload, where it is a part of one object.
    """

    extent: int
    begin: int
    end: int
    which: IntArray
    first: int = 0
    size: int | None = None


def pieces(places: AnyArray, cut: npt.NDArray[np.bool_]) -> Iterator[Piece]:
    """Reads that cover all of ``PLACE[m]``; those of objects that ``cut`` names come in parts, in their order."""
    begin = places["offset"].astype(np.int64)
    end = begin + HEADER + padded_lengths(places)
    order = np.lexsort((begin, places["extent"]))
    extents, begins, ends = places["extent"][order], begin[order] // PAGE * PAGE, -(-end[order] // PAGE) * PAGE
    for one in _parts(extents[1:] != extents[:-1], len(order)):
        which, starts, reach = order[one], begins[one], np.maximum.accumulate(ends[one])
        alone = cut[which]
        apart = (starts[1:] - reach[:-1] > GAP) | alone[1:] | alone[:-1]
        for near in _parts(apart, len(which)):
            if alone[near.start]:
                yield from _cut(places[which[near.start]], which[near])
                continue
            first = near.start
            while first < near.stop:
                start = int(starts[first])
                fit = first + int(np.searchsorted(reach[first : near.stop], start + CHUNK, "right"))
                last = max(fit, first + 1)
                yield Piece(int(extents[one.start]), start, int(reach[last - 1]), which[first:last])
                first = last


def _parts(ends: AnyArray, count: int) -> list[slice]:
    """Slices of ``count`` items: one ends after each item for which ``ends`` is true."""
    bounds = [0, *(np.flatnonzero(ends) + 1).tolist(), count]
    return [slice(a, b) for a, b in itertools.pairwise(bounds) if a < b]


def _cut(entry: AnyArray, which: IntArray) -> Iterator[Piece]:
    """Even parts of whole pages of the payload; what would be less than a page at the end goes with the one before."""
    length, payload = int(entry["length"]), int(entry["offset"]) + HEADER
    step = padded(-(-length // -(-length // CHUNK)), PAGE)
    firsts = [*range(0, length - PAGE, step)]
    for first, after in itertools.pairwise([*firsts, length]):
        begin = payload + first if first else payload - HEADER
        yield Piece(
            int(entry["extent"]),
            begin // PAGE * PAGE,
            padded(payload + after, PAGE),
            which,
            first,
            after - first,
        )


def padded_lengths(places: AnyArray) -> IntArray:
    """Bytes that the payloads take with their padding."""
    lengths: IntArray = (places["length"].astype(np.int64) + ALIGN - 1) // ALIGN * ALIGN
    return lengths
