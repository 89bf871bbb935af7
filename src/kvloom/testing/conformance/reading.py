"""Finding and reading."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kvloom.errors import InputError
from kvloom.testing.conformance.base import ROOT, WORLD, Base
from kvloom.testing.conformance.strict import Strict
from kvloom.testing.units import (
    FULL,
    LAYOUT,
    MIB,
    SEGMENT,
    World,
    fetch,
    hit,
    payload,
    tokens_of,
    wrong,
    wrong_bytes,
)
from kvloom.tiers.contract import Tier
from kvloom.tiers.values import Fill, Need, NewObject, Outcome, Result, Unit
from kvloom.types import Grade


class Reading(Base):
    """Finding and reading."""

    def test_nothing_is_found_at_first(self, tier: Tier) -> None:
        unit = WORLD.unit(tokens_of(1, 3))
        found = tier.lookup(LAYOUT, unit.digests, root=ROOT)
        assert not found.known.any()
        assert not found.boundary.any()
        assert len(found.places) == 0
        assert len(found.tails) == 0
        usage = tier.usage()
        assert (usage.objects, usage.units) == (0, 0)
        assert 0 <= usage.bytes <= usage.capacity

    @pytest.mark.parametrize("ragged", [0, 3])
    @pytest.mark.parametrize("segments", [1, 2, 7])
    def test_a_unit_of_all_kinds_comes_back_to_the_bit(self, tier: Tier, segments: int, ragged: int) -> None:
        unit = WORLD.unit(tokens_of(1, segments, ragged=ragged))
        done = tier.publish(unit)
        assert done.outcome is Outcome.PUBLISHED, f"publish: {done}"
        assert done.objects == len(unit.objects), "publish: says how many objects it wrote"
        found = tier.lookup(LAYOUT, unit.digests)
        n = len(unit.digests)
        assert found.known.tolist() == [True] * n, "lookup: all nodes of a unit are known"
        assert found.boundary.tolist() == [False] * (n - 1) + [True], "lookup: boundary is where units end"
        assert set(found.places.entries["grade"].tolist()) == {int(Grade.CANONICAL)}
        assert hit(tier, WORLD, unit), "publish: what is PUBLISHED is found and read, whole"
        assert (tier.usage().objects, tier.usage().units) == (len(unit.objects), 1), "usage: counts objects and units"

    @pytest.mark.parametrize("size", [1, 255, 4095, 4096, 4097, 65_536, 262_145, MIB + 1, 4 * MIB - 1, 5 * MIB])
    def test_objects_of_any_size(self, tier: Tier, size: int) -> None:
        world = World((size, 700, 1), columns=3)
        unit = world.unit(tokens_of(2, 1))
        assert tier.publish(unit).stored
        assert hit(tier, world, unit)

    def test_many_objects_in_one_read(self, tier: Tier) -> None:
        world = World((513, 70, 9), columns=40)
        unit = world.unit(tokens_of(2, 30))
        assert tier.publish(unit).stored
        assert hit(tier, world, unit)

    def test_payloads_may_be_any_bytes_or_write_themselves(self, tier: Tier) -> None:
        unit = WORLD.unit(tokens_of(1, 1))
        digest = unit.digests[0].tobytes()
        rights = [payload(digest, FULL, c, 3 * MIB // 2 + c) for c in range(4)]
        aligned = []

        def write(room: memoryview) -> None:
            aligned.append(np.frombuffer(room, np.uint8).ctypes.data % 256)
            room[:] = rights[3].data

        payloads: list[bytes | bytearray | memoryview | Fill] = [
            rights[0].tobytes(),
            bytearray(rights[1].tobytes()),
            rights[2].data,
            Fill(len(rights[3]), write),
        ]
        objects = [NewObject(0, FULL, c, Grade.CANONICAL, part) for c, part in enumerate(payloads)]
        one = Unit(LAYOUT, ROOT, unit.digests, unit.tokens, SEGMENT, objects, [Need(FULL, 0, 4)])
        assert tier.publish(one).stored
        assert aligned == [0], "publish: a Fill is called once, with memory that is 256-byte aligned"
        assert wrong_bytes(tier, tier.lookup(LAYOUT, unit.digests).places) == 0
        assert len(tier.lookup(LAYOUT, unit.digests).places) == 4

    def test_a_read_of_a_part_in_another_order(self, tier: Tier) -> None:
        unit = WORLD.unit(tokens_of(1, 6))
        tier.publish(unit)
        places = tier.lookup(LAYOUT, unit.digests).places
        some = places.take(np.arange(len(places))[::-2])
        got, done = fetch(tier, some)
        assert done.ok
        assert wrong(some, got, done.results) == 0

    def test_reads_beyond_the_buffer_are_refused(self, tier: Tier) -> None:
        unit = WORLD.unit(tokens_of(1, 1))
        tier.publish(unit)
        places = tier.lookup(LAYOUT, unit.digests).places
        into = np.zeros(int(places.nbytes), np.uint8)
        for offset in (-1, len(into)):
            try:
                tier.read(places, into, np.full(len(places), offset, np.int64))
            except InputError:
                continue
            pytest.fail("read: wrong arguments are InputError, such as an offset that is not in the buffer")

    def test_a_read_that_is_stopped_leaves_nothing_unverified(self, tier: Tier) -> None:
        world = World((MIB, 9000, 500), columns=6)
        unit = world.unit(tokens_of(1, 3))
        tier.publish(unit)
        places = tier.lookup(LAYOUT, unit.digests).places
        lengths = places.entries["length"].astype(np.int64)
        offsets = np.cumsum(lengths) - lengths
        for after in (0, 1, 3):
            asked: list[int] = []
            into = np.full(int(lengths.sum()), 0xA5, np.uint8)

            def stop() -> bool:
                asked.append(1)  # noqa: B023
                return len(asked) > after  # noqa: B023

            done = tier.read(places, into, offsets, stop)
            assert asked, "read: stop is asked now and then, and before the first object"
            assert set(done.results.tolist()) <= {Result.OK, Result.STOPPED}, "read: what was not read then is STOPPED"
            assert after or (done.results == Result.STOPPED).all(), "read: nothing more is read once stop says so"
            for i, result in enumerate(done.results.tolist()):
                part = into[offsets[i] : offsets[i] + lengths[i]]
                entry = places.entries[i]
                if result == Result.OK:
                    digest = places.digests[i].tobytes()
                    right = payload(digest, int(entry["group"]), int(entry["column"]), len(part))
                    assert (part == right).all(), "read: OK means that all of an object was read"
                else:
                    assert (part == 0xA5).all() or not part.any(), (
                        "read: the region of an object that is STOPPED is as it was, or zero"
                    )
        assert hit(tier, world, unit)

    def test_d5_damage_is_noticed_and_what_needs_it_is_not_found_again(self, tier: Strict, tmp_path: Path) -> None:
        units = [WORLD.unit(tokens_of(i, 3)) for i in range(2)]
        for unit in units:
            tier.publish(unit)
        places = tier.lookup(LAYOUT, units[0].digests).places
        if not self.damage(tier.inner, tmp_path):
            pytest.skip("this test has no damage()")
        got, done = fetch(tier, places)
        assert wrong(places, got, done.results) == 0, "read: a checksum covers every byte of every payload"
        assert Result.OK not in done.results.tolist(), "damage() left some payload as it was"
        assert Result.INTEGRITY in done.results.tolist(), "read: what is not what was stored is INTEGRITY"
        again = tier.lookup(LAYOUT, units[0].digests).places
        assert len(again) == 0, "read: what was INTEGRITY is not found again"
        assert tier.publish(units[0]).stored, "publish: what was damaged can be published again"
        assert hit(tier, WORLD, units[0]), "publish: what was damaged can be published again"
