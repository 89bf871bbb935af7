"""Whole or absent; what units share and what keeps them apart."""

from __future__ import annotations

import numpy as np
import pytest

from kvloom.testing.conformance.base import OTHER, ROOT, WORLD, Base
from kvloom.testing.conformance.strict import FillError, failing
from kvloom.testing.units import (
    LAYOUT,
    SEGMENT,
    World,
    digest_chain,
    hit,
    tokens_of,
)
from kvloom.tiers.contract import Tier
from kvloom.tiers.values import Outcome, Unit
from kvloom.types import Grade


class Chains(Base):
    """Whole or absent; what units share and what keeps them apart."""

    def test_a_unit_that_lacks_objects_is_refused(self, tier: Tier) -> None:
        tokens = tokens_of(1, 8)
        assert tier.publish(WORLD.unit(tokens, have=4)).outcome is Outcome.INCOMPLETE, (
            "publish: INCOMPLETE when something that needs asks for was neither brought nor is there"
        )
        assert not tier.lookup(LAYOUT, WORLD.unit(tokens).digests).known.any(), "publish: whole, or nothing has changed"
        assert tier.usage().objects == 0, "publish: whole, or nothing has changed"

    def test_d1_a_payload_that_fails_leaves_nothing(self, tier: Tier) -> None:
        before = WORLD.unit(tokens_of(1, 2))
        tier.publish(before)
        unit = WORLD.unit(tokens_of(1, 4), have=2)
        usage = tier.usage()
        for nth in range(len(unit.objects)):
            objects = list(unit.objects)
            objects[nth] = failing(objects[nth])
            with pytest.raises(FillError):
                tier.publish(Unit(LAYOUT, ROOT, unit.digests, unit.tokens, SEGMENT, objects, unit.needs))
            assert tier.lookup(LAYOUT, unit.digests).known.tolist() == [True, True, False, False], (
                "publish: a payload that raises leaves nothing of its unit"
            )
            assert tier.usage().objects == usage.objects, "publish: a payload that raises leaves nothing of its unit"
        assert hit(tier, WORLD, before)
        assert tier.publish(unit).stored
        assert hit(tier, WORLD, unit)

    def test_a_longer_unit_brings_only_what_is_new(self, tier: Tier) -> None:
        tokens = tokens_of(1, 8)
        assert tier.publish(WORLD.unit(tokens[: 4 * SEGMENT])).stored
        longer = WORLD.unit(tokens, have=4)
        assert tier.publish(longer).outcome is Outcome.PUBLISHED
        assert hit(tier, WORLD, longer)
        assert hit(tier, WORLD, WORLD.unit(tokens[: 4 * SEGMENT]))

    def test_units_share_a_prefix(self, tier: Tier) -> None:
        head = tokens_of(1, 5)
        units = [WORLD.unit(np.concatenate([head, tokens_of(10 + i, 2, ragged=i)])) for i in range(4)]
        for unit in units:
            assert tier.publish(unit).stored
        assert all(hit(tier, WORLD, unit) for unit in units)
        shared = 5 * WORLD.columns
        assert tier.usage().objects == sum(len(unit.objects) for unit in units) - 3 * shared, (
            "publish: an object that is there already is not stored again"
        )

    def test_what_is_there_already_is_kept(self, tier: Tier) -> None:
        unit = WORLD.unit(tokens_of(1, 3))
        tier.publish(unit)
        before = tier.usage()
        again = tier.publish(unit)
        assert (again.outcome, again.objects) == (Outcome.KNOWN, 0), "publish: KNOWN when everything was there already"
        assert tier.usage().objects == before.objects

    def test_a_better_grade_replaces_and_a_worse_one_does_not(self, tier: Tier) -> None:
        tokens = tokens_of(1, 2)
        for grade in (Grade.APPROXIMATE, Grade.FAITHFUL, Grade.CANONICAL, Grade.FAITHFUL, Grade.APPROXIMATE):
            unit = WORLD.unit(tokens, grade=grade)
            done = tier.publish(unit)
            assert done.stored
            grades = tier.lookup(LAYOUT, unit.digests).places.entries["grade"]
            best = max(grade, Grade.CANONICAL) if done.outcome is Outcome.KNOWN else grade
            assert set(grades.tolist()) == {int(best)}, "publish: an object stays unless the new one is better"
            assert hit(tier, WORLD, unit)
        assert tier.publish(WORLD.unit(tokens, grade=Grade.FAITHFUL)).outcome is Outcome.KNOWN

    def test_d9_another_layout_finds_nothing(self, tier: Tier) -> None:
        unit = WORLD.unit(tokens_of(1, 3))
        tier.publish(unit)
        assert not tier.lookup(b"x" * 32, unit.digests, root=ROOT).known.any(), (
            "lookup: what was published under another layout is never found"
        )
        other = World((100, 200, 300), layout=b"x" * 32)
        assert tier.publish(other.unit(tokens_of(1, 3))).stored
        assert hit(tier, other, other.unit(tokens_of(1, 3)))
        assert hit(tier, WORLD, unit)

    def test_d13_another_salt_finds_nothing(self, tier: Tier) -> None:
        tokens = tokens_of(1, 3)
        unit = WORLD.unit(tokens, root=ROOT)
        tier.publish(unit)
        other = WORLD.unit(tokens, root=OTHER)
        found = tier.lookup(LAYOUT, other.digests, root=OTHER)
        assert not found.known.any(), "lookup: what was published under another root is never found"
        assert len(found.tails) == 0, "lookup: tails are those of the root that was asked for"
        assert tier.publish(WORLD.unit(tokens, root=OTHER, have=1)).outcome is Outcome.INCOMPLETE
        assert hit(tier, WORLD, unit)

    def test_tails_say_where_units_end_within_the_next_segment(self, tier: Tier) -> None:
        if not self.tells_tails:
            pytest.skip("this tier does not tell")
        tokens = tokens_of(1, 3, ragged=7)
        tier.publish(WORLD.unit(tokens[: 2 * SEGMENT]))
        for extra in (3, 5, 3):
            tier.publish(WORLD.unit(tokens[: 2 * SEGMENT + extra], have=2))
        tier.publish(WORLD.unit(tokens[: 3 * SEGMENT], have=2))
        other = np.concatenate([tokens[: 2 * SEGMENT], tokens_of(9, 2)])
        found = tier.lookup(LAYOUT, digest_chain(ROOT, other), root=ROOT)
        assert sorted(found.tails.tolist()) == [[1, 3], [1, 5]], (
            "lookup: tails are (row, tokens) of units that end less than a segment behind the deepest known node"
        )
        assert len(tier.lookup(LAYOUT, digest_chain(ROOT, tokens_of(5, 2)), root=ROOT).tails) == 0
        tier.publish(WORLD.unit(tokens_of(7, 0, ragged=6)))
        for digests in (digest_chain(ROOT, tokens_of(5, 2)), np.empty((0, 32), np.uint8)):
            short = [row for row in tier.lookup(LAYOUT, digests, root=ROOT).tails.tolist() if row[1] < SEGMENT]
            assert short == [[-1, 6]]
        assert len(tier.lookup(LAYOUT, digests, root=OTHER).tails) == 0
