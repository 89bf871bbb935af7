"""Prefix units whose bytes follow from what they are, so that whoever reads one can say what it must hold.

Three groups as a hybrid model has: 0 needs every node of the chain, 1 the last two (a window), 2 the end (a snapshot).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvloom.tiers.disk import DiskStore, Need, NewObject, Places, Result, Unit
from kvloom.types import Grade

LAYOUT = hashlib.sha256(b"layout").digest()
SEGMENT = 8
FULL, WINDOW, SNAPSHOT = 0, 1, 2
WINDOW_NODES = 2
MIB = 1 << 20


def digest_chain(root: bytes, tokens: npt.NDArray[np.int32], segment: int = SEGMENT) -> npt.NDArray[np.uint8]:
    """Digests that depend on all that went before, as real ones do."""
    at, rows = root, []
    for i in range(0, len(tokens), segment):
        at = hashlib.sha256(at + tokens[i : i + segment].astype("<i4").tobytes()).digest()
        rows.append(np.frombuffer(at, np.uint8))
    return np.stack(rows)


def payload(digest: bytes, group: int, column: int, size: int) -> npt.NDArray[np.uint8]:
    """The only right bytes of an object."""
    seed = int.from_bytes(hashlib.sha256(digest + bytes([group, column])).digest()[:8], "little")
    return np.random.Generator(np.random.PCG64(seed)).integers(0, 256, size, np.uint8)


@dataclass(frozen=True)
class World:
    """Sizes of the objects of every group."""

    sizes: tuple[int, int, int] = (3000, 9000, 500)
    columns: int = 2
    layout: bytes = LAYOUT

    def columns_of(self, group: int) -> int:
        return self.columns if group == FULL else 1

    def unit(self, tokens, *, root: bytes = b"r" * 32, have: int = 0, grade: Grade = Grade.CANONICAL) -> Unit:
        """The unit at the end of ``tokens``; its first ``have`` nodes bring no objects of group FULL along."""
        tokens = np.asarray(tokens, np.int32)
        digests = digest_chain(root, tokens)
        n = len(digests)
        objects = [
            self.object(digests, i, FULL, c, grade) for i in range(have, n) for c in range(self.columns_of(FULL))
        ]
        first = max(0, n - WINDOW_NODES)
        objects += [self.object(digests, i, WINDOW, 0, grade) for i in range(first, n)]
        objects.append(self.object(digests, n - 1, SNAPSHOT, 0, grade))
        needs = [Need(FULL, 0, n * self.columns), Need(WINDOW, first, n - first), Need(SNAPSHOT, n - 1, 1)]
        return Unit(self.layout, root, digests, tokens, SEGMENT, objects, needs)

    def object(self, digests, node: int, group: int, column: int, grade: Grade) -> NewObject:
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


def tokens_of(seed: int, segments: int, *, ragged: int = 0) -> npt.NDArray[np.int32]:
    """A prompt of whole segments and a rest."""
    drawn = np.random.Generator(np.random.PCG64(seed)).integers(0, 50_000, segments * SEGMENT + ragged)
    return drawn.astype(np.int32)


def read_all(store: DiskStore, places: Places) -> tuple[list[bytes | None], npt.NDArray[np.uint8]]:
    """Payloads in order, None for what was not delivered."""
    got: list[bytes | None] = [None] * len(places)

    def deliver(i: int, data: npt.NDArray[np.uint8]) -> None:
        got[i] = data.tobytes()

    return got, store.read_each(places, deliver).results


def wrong(places: Places, got: list[bytes | None], results: npt.NDArray[np.uint8]) -> int:
    """Objects that were delivered and are not what they must be: never more than 0."""
    count = 0
    for i, data in enumerate(got):
        entry = places.entries[i]
        assert (data is not None) == (results[i] == Result.OK)
        if data is not None:
            right = payload(places.digests[i].tobytes(), int(entry["group"]), int(entry["column"]), len(data))
            count += data != right.tobytes()
    return count


def wrong_bytes(store: DiskStore, places: Places) -> int:
    """The same of a read."""
    return wrong(places, *read_all(store, places))


def hit(store: DiskStore, world: World, unit: Unit) -> bool:
    """Whether the whole unit is found and read; asserts that nothing wrong was delivered."""
    found = store.lookup(unit.layout, unit.digests)
    got, results = read_all(store, found.places)
    assert wrong(found.places, got, results) == 0
    if not found.boundary[-1] or not found.known.all():
        return False
    entries = found.places.entries
    there = {
        (int(row), int(entry["group"]), int(entry["column"]))
        for row, entry, result in zip(found.places.rows, entries, results, strict=True)
        if result == Result.OK
    }
    return world.needed(len(unit.digests)) <= there
