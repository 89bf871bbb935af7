"""A virtual tier does what a real one does, but for the bytes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from kvloom.replay.virtual import DISK, HOST, Medium, VirtualClock, VirtualTier
from kvloom.testing.conformance import TierConformance
from kvloom.testing.units import LAYOUT, World, tokens_of
from kvloom.tiers.contract import Tier, Usage
from kvloom.tiers.host import HostStore
from kvloom.tiers.host.arrays import PAGE, pages_within
from kvloom.tiers.values import Digests, Fill, Found, Outcome, Places, Published, ReadResult, Result, Unit
from kvloom.types import IntArray


class WithBytes:
    """A virtual tier beside a dictionary with the payloads, so that the tests of real tiers say what they say of it."""

    def __init__(self, medium: Medium, capacity: int) -> None:
        self.inner = VirtualTier(medium, capacity, VirtualClock())
        self.bytes: dict[tuple[bytes, bytes, int, int, int], bytes] = {}
        self.lock = threading.RLock()

    name, durable = "virtual", False

    @property
    def capacity(self) -> int:
        return self.inner.capacity

    def lookup(self, layout: bytes, digests: Digests, *, root: bytes | None = None) -> Found:
        with self.lock:
            return self.inner.lookup(layout, digests, root=root)

    def publish(self, unit: Unit) -> Published:
        made = {}
        for item in unit.objects:
            data = item.payload
            if isinstance(data, Fill):
                room = np.empty(data.size + 256, np.uint8)
                begin = -room.ctypes.data % 256
                data.write(room[begin : begin + data.size].data)
                data = room[begin : begin + data.size]
            name = unit.digests[item.node].tobytes()
            made[unit.layout, name, item.group, item.column, int(item.grade)] = np.asarray(data).tobytes()
        with self.lock:
            done = self.inner.publish(unit)
            self.inner.check_integrity()
            if done.outcome is Outcome.PUBLISHED:
                self.bytes |= made
            return done

    def read(
        self,
        places: Places,
        into: npt.NDArray[np.uint8],
        offsets: IntArray,
        stop: Callable[[], bool] = lambda: False,
    ) -> ReadResult:
        with self.lock:
            done = self.inner.read(places, into, offsets, stop)
            for i in np.flatnonzero(done.results == Result.OK).tolist():
                e = places.entries[i]
                where = (places.layout, places.digests[i].tobytes())
                data = self.bytes[(*where, int(e["group"]), int(e["column"]), int(e["grade"]))]
                into[offsets[i] : offsets[i] + len(data)] = np.frombuffer(data, np.uint8)
            return done

    def touch(self, layout: bytes, digest: bytes) -> None:
        with self.lock:
            self.inner.touch(layout, digest)

    def clear(self, layout: bytes | None = None, root: bytes | None = None) -> int:
        with self.lock:
            return self.inner.clear(layout, root)

    def usage(self) -> Usage:
        with self.lock:
            return self.inner.usage()

    def close(self) -> None:
        self.inner.close()


class TestHost(TierConformance):
    def make(self, tmp_path: Path, capacity: int) -> Tier:
        return WithBytes(HOST, capacity)


class TestDisk(TierConformance):
    def make(self, tmp_path: Path, capacity: int) -> Tier:
        return WithBytes(DISK, capacity)


SIZES = ((9000, 3000, 500), (70_000, 300, 20_000))


@pytest.mark.parametrize("seed", range(6))
def test_the_host_tier_on_paper_is_the_real_one(seed: int) -> None:
    """The same calls, one by one: outcomes, what is found, what goes, what is coldest, bytes."""
    rng = np.random.Generator(np.random.PCG64(seed))
    capacity = 3 << 20
    pages = pages_within(capacity, PAGE)
    real = HostStore(capacity)
    paper = VirtualTier(HOST, pages * PAGE, VirtualClock())
    empty = real.usage().bytes
    world = World(SIZES[seed % 2])
    gone = 0
    for _ in range(300):
        tokens = tokens_of(int(rng.integers(8)), 6)
        segments, ragged = int(rng.integers(1, 7)), int(rng.integers(3))
        tokens = tokens[: 8 * segments - ragged]
        unit = world.unit(tokens, have=int(rng.integers(segments)) if rng.random() < 0.3 else 0)
        draw = rng.random()
        if draw < 0.6:
            done, also = real.publish(unit), paper.publish(unit)
            assert (done.outcome, done.objects) == (also.outcome, also.objects)
        elif draw < 0.8:
            for tier in (real, paper):
                tier.touch(LAYOUT, unit.digests[-1].tobytes())
        else:
            assert real.coldest(400_000) == list(paper.coldest(400_000))
        found, other = (tier.lookup(LAYOUT, unit.digests, root=b"r" * 32) for tier in (real, paper))
        assert found.known.tolist() == other.known.tolist()
        assert found.boundary.tolist() == other.boundary.tolist()
        assert sorted(map(tuple, found.tails.tolist())) == sorted(map(tuple, other.tails.tolist()))
        assert _objects(found) == _objects(other)
        usage, same = real.usage(), paper.usage()
        assert (usage.bytes - empty, usage.objects, usage.units) == (same.bytes, same.objects, same.units)
        assert real.counts().evicted == paper.units_evicted
        gone = paper.units_evicted
        paper.check_integrity()
    assert gone > 20
    real.close()


def _objects(found: Found) -> list[tuple[int, ...]]:
    entries, rows = found.places.entries, found.places.rows.tolist()
    fields = ("group", "column", "form", "grade", "length")
    return sorted((row, *(int(entry[name]) for name in fields)) for row, entry in zip(rows, entries, strict=True))


def test_a_unit_moves_on_with_all_that_it_needs() -> None:
    host, disk = (VirtualTier(medium, 1 << 30, VirtualClock()) for medium in (HOST, DISK))
    world = World()
    for seed in range(4):
        host.publish(world.unit(np.concatenate([tokens_of(9, 3), tokens_of(seed, 2, ragged=seed)])))
    names = list(host.coldest(1 << 30))
    assert len(names) == 4
    for name in names:
        unit = host.unit(*name)
        assert unit is not None
        assert disk.publish(unit).outcome is Outcome.PUBLISHED
    before = host.usage()
    host.clear()
    assert (host.usage().bytes, host.usage().objects) == (0, 0)
    assert (disk.usage().units, disk.usage().objects) == (before.units, before.objects) == (4, 40)
    assert host.unit(*names[0]) is None
    disk.check_integrity()


def test_reads_take_their_time_and_nothing_else() -> None:
    clock = VirtualClock()
    tier = VirtualTier(DISK, 1 << 50, clock, speed=1e6)
    unit = World().unit(tokens_of(1, 3))
    tier.publish(unit)
    assert clock() == 0
    places = tier.lookup(LAYOUT, unit.digests).places
    into = np.full(places.nbytes, 7, np.uint8)
    lengths = places.entries["length"].astype(np.int64)
    done = tier.read(places, into, np.cumsum(lengths) - lengths)
    assert done.ok
    assert done.bytes_read == tier.read_bytes == places.nbytes
    assert clock() == pytest.approx(DISK.latency_s + places.nbytes / 1e6)
    assert (into == 7).all()
    assert tier.payload == {0: 6 * 3000, 1: 2 * 9000, 2: 500}
    assert tier.written % 4096 == 0
    assert sum(tier.payload.values()) < tier.written < sum(tier.payload.values()) + 9 * 512 + 4096


def test_uses_are_counted_from_the_first_one_on() -> None:
    tier = VirtualTier(HOST, 1 << 30, VirtualClock())
    unit = World().unit(tokens_of(1, 2))
    name = (LAYOUT, unit.digests[-1].tobytes())
    assert tier.hits(*name) == 0
    tier.publish(unit)
    assert tier.hits(*name) == 0
    tier.touch(*name)
    assert tier.hits(*name) == 1


def test_a_unit_that_takes_the_room_of_all_others_of_its_namespace_keeps_its_root() -> None:
    world = World()
    first, second, third = (world.unit(tokens_of(seed, 3)) for seed in range(3))
    roomy = VirtualTier(HOST, 1 << 30, VirtualClock())
    roomy.publish(first)
    tier = VirtualTier(HOST, int(1.5 * roomy.usage().bytes), VirtualClock())
    for unit in (first, second, third):
        assert tier.publish(unit).outcome is Outcome.PUBLISHED
        tier.check_integrity()
        assert tier.usage().units == 1
    assert tier.clear(LAYOUT, third.root) == 1
    assert tier.usage().bytes == 0
