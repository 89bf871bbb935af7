"""The cap, what goes first, removing, restarts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kvloom.testing.conformance.base import OTHER, ROOT, WORLD, Base
from kvloom.testing.units import (
    LAYOUT,
    MIB,
    World,
    fetch,
    hit,
    tokens_of,
    wrong,
)
from kvloom.tiers.contract import Tier
from kvloom.tiers.values import Outcome, Result


class Keeping(Base):
    """The cap, what goes first, removing, restarts."""

    def test_a_unit_that_can_never_fit_is_refused_and_nothing_goes(self, tmp_path: Path) -> None:
        tier = self.open(tmp_path, self.small)
        try:
            world = World((2 * MIB, 100, 100))
            unit = WORLD.unit(tokens_of(1, 2))
            tier.publish(unit)
            assert tier.publish(world.unit(tokens_of(2, 12))).outcome is Outcome.NO_ROOM, (
                "publish: NO_ROOM when a unit cannot fit, whatever is evicted"
            )
            assert hit(tier, WORLD, unit), "publish: nothing is evicted in vain"
        finally:
            tier.close()

    def test_d8_never_above_the_cap_and_only_what_can_hit(self, tmp_path: Path) -> None:
        tier = self.open(tmp_path, self.small)
        try:
            world = World((200_000, 90_000, 50_000))
            units = []
            for i in range(30):
                head = tokens_of(i // 3, 2)
                units.append(world.unit(np.concatenate([head, tokens_of(100 + i, 1, ragged=i % 3)])))
                done = tier.publish(units[-1])
                assert done.stored, f"publish: a full tier evicts units to make room; {done}"
            hits = [hit(tier, world, unit) for unit in units]
            assert hits[-1], "publish: the last unit is there, whole"
            assert 2 <= sum(hits) < 30, f"a few of these units fit at a time, not {sum(hits)} of 30"
            needed = set()
            for unit in units:
                found = tier.lookup(LAYOUT, unit.digests)
                if found.boundary[-1]:
                    needed |= {(unit.digests[n].tobytes(), g, c) for n, g, c in world.needed(len(unit.digests))}
            there = set()
            for unit in units:
                places = tier.lookup(LAYOUT, unit.digests).places
                there |= {
                    (digest.tobytes(), int(entry["group"]), int(entry["column"]))
                    for digest, entry in zip(places.digests, places.entries, strict=True)
                }
            assert needed <= there, (
                f"what goes goes by units: {len(needed - there)} objects are gone that units need which are still found"
            )
            assert there <= needed, f"what goes goes by units: {len(there - needed)} objects stayed that no unit needs"
        finally:
            tier.close()

    def test_what_is_used_stays(self, tmp_path: Path) -> None:
        tier = self.open(tmp_path, self.small)
        try:
            world = World((200_000, 90_000, 50_000))
            mine = world.unit(tokens_of(1000, 2))
            tier.publish(mine)
            for i in range(30):
                tier.publish(world.unit(tokens_of(i, 2)))
                for _ in range(4):
                    tier.touch(LAYOUT, mine.digests[-1].tobytes())
                tier.touch(LAYOUT, b"?" * 32)
            assert hit(tier, world, mine), "touch: a unit that is used counts for more than one that is not"
            assert not hit(tier, world, world.unit(tokens_of(0, 2))), "what was not used for longest goes"
        finally:
            tier.close()

    def test_clear_of_one_namespace(self, tier: Tier) -> None:
        mine = [WORLD.unit(tokens_of(i, 2), root=ROOT) for i in range(3)]
        others = [WORLD.unit(tokens_of(i, 2), root=OTHER) for i in range(2)]
        for unit in (*mine, *others):
            tier.publish(unit)
        assert tier.clear(LAYOUT, ROOT) == 3, "clear: says how many units went"
        assert not any(tier.lookup(LAYOUT, unit.digests).known.any() for unit in mine), "clear: all of a namespace goes"
        assert all(hit(tier, WORLD, unit) for unit in others), "clear: other namespaces stay"
        assert tier.clear(LAYOUT, ROOT) == 0
        assert tier.usage().units == 2

    def test_clear_of_everything(self, tier: Tier) -> None:
        units = [WORLD.unit(tokens_of(i, 2), root=root) for i in range(3) for root in (ROOT, OTHER)]
        for unit in units:
            tier.publish(unit)
        assert tier.clear() == 6
        assert not any(tier.lookup(LAYOUT, unit.digests).known.any() for unit in units)
        assert (tier.usage().objects, tier.usage().units) == (0, 0)
        assert tier.publish(units[0]).stored
        assert hit(tier, WORLD, units[0])

    def test_c1_objects_that_went_since_they_were_looked_up_are_missing(self, tier: Tier) -> None:
        unit = WORLD.unit(tokens_of(1, 3))
        tier.publish(unit)
        places = tier.lookup(LAYOUT, unit.digests).places
        tier.clear(LAYOUT, ROOT)
        for i in range(4):
            tier.publish(WORLD.unit(tokens_of(10 + i, 3)))
        got, done = fetch(tier, places)
        assert wrong(places, got, done.results) == 0, "read: OK means that these are the bytes that were published"
        assert set(done.results.tolist()) <= {Result.OK, Result.MISSING}, "read: what went since the lookup is MISSING"

    def test_nothing_after_close(self, tmp_path: Path) -> None:
        tier = self.open(tmp_path, self.capacity)
        unit = WORLD.unit(tokens_of(1, 2))
        tier.publish(unit)
        places = tier.lookup(LAYOUT, unit.digests).places
        tier.close()
        assert not tier.lookup(LAYOUT, unit.digests).known.any(), "close: from then on nothing is found"
        assert tier.publish(WORLD.unit(tokens_of(2, 2))).outcome is Outcome.UNAVAILABLE, "close: and nothing is taken"
        got, done = fetch(tier, places)
        assert wrong(places, got, done.results) == 0
        tier.touch(LAYOUT, unit.digests[-1].tobytes())
        tier.close()

    def test_d11_restart(self, tmp_path: Path) -> None:
        if not self.survives_restart:
            pytest.skip("this tier begins empty")
        units = [WORLD.unit(tokens_of(i, 3, ragged=2)) for i in range(4)]
        tier = self.open(tmp_path, self.capacity)
        for unit in units:
            tier.publish(unit)
        tier.close()
        tier = self.open(tmp_path, self.capacity)
        try:
            assert all(hit(tier, WORLD, unit) for unit in units), "survives_restart: what was published is found again"
            assert all(tier.publish(unit).outcome is Outcome.KNOWN for unit in units), "survives_restart: and is KNOWN"
        finally:
            tier.close()
