"""What is moved: random bytes, cut into objects of one size, in prefix units of 128 MiB with half a MiB to a node."""

from __future__ import annotations

import time

import numpy as np
import numpy.typing as npt

from kvloom.errors import KVLoomError
from kvloom.tiers.contract import Tier
from kvloom.tiers.disk.files import aligned
from kvloom.tiers.values import Need, NewObject, Places, Unit
from kvloom.types import Grade, IntArray

UNIT_BYTES = 128 << 20
WARM_BYTES = 32 << 20
NODE_BYTES = 512 << 10
SEGMENT = 128
LAYOUT, WARM_LAYOUT, ROOT = b"L" * 32, b"W" * 32, b"R" * 32
Bytes = npt.NDArray[np.uint8]


class DataError(KVLoomError):
    """What was stored did not come back, or was not taken: the figures would mean nothing."""


def payload_of(total: int) -> Bytes:
    """Incompressible bytes, page-aligned, and in huge pages where there are any: what direct I/O is fastest from."""
    made = aligned(total)
    made[:] = np.random.Generator(np.random.PCG64(0)).integers(0, 256, total, np.uint8)
    return made


class World:
    """Units of one size of objects over ``payload``, whose length is a multiple of ``UNIT_BYTES``."""

    def __init__(self, payload: Bytes, size: int) -> None:
        self.payload, self.size = payload, size
        self._per_node = max(1, NODE_BYTES // size)
        numbers = range(len(payload) // UNIT_BYTES)
        self.units = [self._unit(i, payload[i * UNIT_BYTES : (i + 1) * UNIT_BYTES], LAYOUT) for i in numbers]
        self._warm = self._unit(len(numbers), payload[:WARM_BYTES], WARM_LAYOUT)

    def _unit(self, number: int, part: Bytes, layout: bytes) -> Unit:
        rng, per = np.random.Generator(np.random.PCG64(number + 1)), self._per_node
        parts = part.reshape(-1, self.size)
        objects = [NewObject(i // per, 0, i % per, Grade.CANONICAL, one) for i, one in enumerate(parts)]
        nodes = len(parts) // per
        digests = rng.integers(0, 256, (nodes, 32), np.uint8)
        tokens = rng.integers(0, 50_000, nodes * SEGMENT).astype(np.int32)
        return Unit(layout, ROOT, digests, tokens, SEGMENT, objects, [Need(0, 0, len(parts))])

    def store(self, tier: Tier) -> float:
        """Publish every unit; seconds.  One of another layout goes before them, so that buffers and threads are there.

        Raises DataError.
        """
        self._publish(tier, self._warm)
        begun = time.perf_counter()
        for unit in self.units:
            self._publish(tier, unit)
        return time.perf_counter() - begun

    @staticmethod
    def _publish(tier: Tier, unit: Unit) -> None:
        done = tier.publish(unit)
        if not done.stored:
            raise DataError(f"the {tier.name} tier does not take the data: {done.outcome.value} {done.reason}".rstrip())

    def find(self, tier: Tier) -> tuple[Places, IntArray, float]:
        """Places of all objects, where each belongs in memory that is like ``payload``, and the seconds it took."""
        begun = time.perf_counter()
        found = [tier.lookup(LAYOUT, unit.digests).places for unit in self.units]
        seconds = time.perf_counter() - begun
        places = Places.join(found)
        unit_of = np.repeat(np.arange(len(found)), [len(part) for part in found])
        within = places.rows * self._per_node + places.entries["column"].astype(np.int64)
        return places, unit_of * UNIT_BYTES + within * self.size, seconds

    def restore(self, tier: Tier, places: Places, into: Bytes, offsets: IntArray) -> float:
        """Read everything; seconds.  Raises DataError when anything does not arrive."""
        begun = time.perf_counter()
        done = tier.read(places, into, offsets)
        seconds = time.perf_counter() - begun
        if not done.ok:
            raise DataError(f"the {tier.name} tier does not return what was stored {done.reason}".rstrip())
        return seconds

    def check(self, what: str, into: Bytes) -> None:
        """Raise DataError unless ``into`` is what was stored."""
        if not np.array_equal(into, self.payload):
            raise DataError(f"{what} returned other bytes than were stored")
