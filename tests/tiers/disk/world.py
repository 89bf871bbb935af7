"""The units of ``kvloom.testing``, read piece by piece as only the disk store can."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvloom.testing.units import (
    FULL,
    LAYOUT,
    MIB,
    SEGMENT,
    SNAPSHOT,
    WINDOW,
    World,
    digest_chain,
    payload,
    tokens_of,
    wrong,
)
from kvloom.tiers.disk import DiskStore, Places, Result, Unit

__all__ = [
    "FULL",
    "LAYOUT",
    "MIB",
    "SEGMENT",
    "SNAPSHOT",
    "WINDOW",
    "World",
    "digest_chain",
    "hit",
    "payload",
    "read_all",
    "tokens_of",
    "wrong",
    "wrong_bytes",
]


def read_all(store: DiskStore, places: Places) -> tuple[list[bytes | None], npt.NDArray[np.uint8]]:
    """Payloads in order, None for what was not delivered."""
    got: list[bytes | None] = [None] * len(places)

    def deliver(i: int, data: npt.NDArray[np.uint8]) -> None:
        got[i] = data.tobytes()

    return got, store.read_each(places, deliver).results


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
