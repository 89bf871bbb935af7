"""Prefix units whose bytes follow from what they are, so that whoever reads one can say what it must hold.

Three groups as a hybrid model has: 0 needs every node of the chain, 1 the last two (a window), 2 the end (a snapshot).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvloom.tiers.contract import Tier
from kvloom.tiers.values import Digests, Need, NewObject, Places, ReadResult, Result, Unit
from kvloom.types import Grade

LAYOUT = hashlib.sha256(b"layout").digest()
SEGMENT = 8
FULL, WINDOW, SNAPSHOT = 0, 1, 2
WINDOW_NODES = 2
MIB = 1 << 20

Bytes = npt.NDArray[np.uint8]
Tokens = npt.NDArray[np.int32]


def digest_chain(root: bytes, tokens: Tokens, segment: int = SEGMENT) -> Digests:
    """Digests that depend on all that went before, as real ones do."""
    at, rows = root, []
    for i in range(0, len(tokens), segment):
        at = hashlib.sha256(at + tokens[i : i + segment].astype("<i4").tobytes()).digest()
        rows.append(np.frombuffer(at, np.uint8))
    return np.stack(rows)


def payload(digest: bytes, group: int, column: int, size: int) -> Bytes:
    """The only right bytes of an object."""
    seed = int.from_bytes(hashlib.sha256(digest + bytes([group, column])).digest()[:8], "little")
    return np.random.Generator(np.random.PCG64(seed)).integers(0, 256, size, np.uint8)


@dataclass(frozen=True)
class World:
    """Makes units; ``sizes``: bytes of the objects of every group, ``columns``: of group ``FULL`` in a node."""

    sizes: tuple[int, int, int] = (3000, 9000, 500)
    columns: int = 2
    layout: bytes = LAYOUT

    def columns_of(self, group: int) -> int:
        """Columns of a group in one node."""
        return self.columns if group == FULL else 1

    def unit(
        self, tokens: npt.ArrayLike, *, root: bytes = b"r" * 32, have: int = 0, grade: Grade = Grade.CANONICAL
    ) -> Unit:
        """The unit at the end of ``tokens``; its first ``have`` nodes bring no objects of group FULL along."""
        made = np.asarray(tokens, np.int32)
        digests = digest_chain(root, made)
        n = len(digests)
        objects = [
            self.object(digests, i, FULL, c, grade) for i in range(have, n) for c in range(self.columns_of(FULL))
        ]
        first = max(0, n - WINDOW_NODES)
        objects += [self.object(digests, i, WINDOW, 0, grade) for i in range(first, n)]
        objects.append(self.object(digests, n - 1, SNAPSHOT, 0, grade))
        needs = [Need(FULL, 0, n * self.columns), Need(WINDOW, first, n - first), Need(SNAPSHOT, n - 1, 1)]
        return Unit(self.layout, root, digests, made, SEGMENT, objects, needs)

    def object(self, digests: Digests, node: int, group: int, column: int, grade: Grade) -> NewObject:
        """One object of a chain."""
        size = self.sizes[group]
        return NewObject(node, group, column, grade, payload(digests[node].tobytes(), group, column, size))

    def needed(self, n: int) -> set[tuple[int, int, int]]:
        """(node, group, column) of everything that a chain of n nodes needs."""
        first = max(0, n - WINDOW_NODES)
        return (
            {(i, FULL, c) for i in range(n) for c in range(self.columns)}
            | {(i, WINDOW, 0) for i in range(first, n)}
            | {(n - 1, SNAPSHOT, 0)}
        )


def tokens_of(seed: int, segments: int, *, ragged: int = 0) -> Tokens:
    """A prompt of whole segments and a rest."""
    drawn = np.random.Generator(np.random.PCG64(seed)).integers(0, 50_000, segments * SEGMENT + ragged)
    return drawn.astype(np.int32)


def wrong(places: Places, got: list[bytes | None], results: Bytes) -> int:
    """Objects that were delivered and are not what they must be: never more than 0."""
    count = 0
    for i, data in enumerate(got):
        entry = places.entries[i]
        assert (data is not None) == (results[i] == Result.OK)
        if data is not None:
            right = payload(places.digests[i].tobytes(), int(entry["group"]), int(entry["column"]), len(data))
            count += data != right.tobytes()
    return count


BEFORE = 0xA5
"""What memory holds before a read."""


def fetch(tier: Tier, places: Places) -> tuple[list[bytes | None], ReadResult]:
    """Read objects into memory with gaps; payloads in order, None for what did not arrive.

    Asserts that nothing else was touched, and that what did not arrive left nothing behind.
    """
    lengths = places.entries["length"].astype(np.int64)
    offsets = np.cumsum(lengths + 3) - lengths
    into = np.full(int((lengths + 3).sum()) + 3, BEFORE, np.uint8)
    done = tier.read(places, into, offsets)
    assert done.results.shape == (len(places),)
    got: list[bytes | None] = []
    gap = np.ones(len(into), np.bool_)
    for begin, length, result in zip(offsets.tolist(), lengths.tolist(), done.results.tolist(), strict=True):
        part = into[begin : begin + length]
        gap[begin : begin + length] = False
        if result == Result.OK:
            got.append(part.tobytes())
        else:
            assert (part == BEFORE).all() or not part.any(), (
                f"read: the region of an object that is {Result(result).name} is as it was, or zero"
            )
            got.append(None)
    assert (into[gap] == BEFORE).all(), "read: nothing but the regions of the objects is written"
    return got, done


def wrong_bytes(tier: Tier, places: Places) -> int:
    """Objects that a read delivered and that are not what they must be."""
    got, done = fetch(tier, places)
    return wrong(places, got, done.results)


def hit(tier: Tier, world: World, unit: Unit) -> bool:
    """Whether the whole unit is found and read; asserts that nothing wrong was delivered."""
    found = tier.lookup(unit.layout, unit.digests)
    got, done = fetch(tier, found.places)
    assert wrong(found.places, got, done.results) == 0, "read: OK means that these are the bytes that were published"
    if not found.boundary[-1] or not found.known.all():
        return False
    there = {
        (int(row), int(entry["group"]), int(entry["column"]))
        for row, entry, result in zip(found.places.rows, found.places.entries, done.results, strict=True)
        if result == Result.OK
    }
    return world.needed(len(unit.digests)) <= there
