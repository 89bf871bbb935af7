"""The tests that every cold tier passes.  Needs pytest and hypothesis.

Make a class in a test file of one's own, and run it with pytest::

    class TestMine(TierConformance):
        def make(self, tmp_path, capacity):
            return MyTier(capacity)

``docs/tiers.md`` says what the methods promise.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from kvloom.errors import InputError
from kvloom.testing.model import machine
from kvloom.testing.units import (
    FULL,
    LAYOUT,
    MIB,
    SEGMENT,
    SNAPSHOT,
    World,
    digest_chain,
    fetch,
    hit,
    payload,
    tokens_of,
    wrong,
    wrong_bytes,
)
from kvloom.tiers.contract import Tier
from kvloom.tiers.values import Fill, Need, NewObject, Outcome, Published, Result, Unit
from kvloom.types import Grade

ROOT, OTHER = b"r" * 32, b"o" * 32
WORLD = World()


class FillError(Exception):
    """Raised by payloads that fail."""


class TierConformance(ABC):
    """Override ``make``, and what is not so of a tier."""

    survives_restart: ClassVar[bool] = False
    """Whether a tier that is closed and made again at the same path holds what it held."""
    tells_tails: ClassVar[bool] = True
    """Whether ``Found.tails`` is filled in."""
    capacity: ClassVar[int] = 64 * MIB
    """Where nothing has to go; at least this much is needed."""
    small: ClassVar[int] = 16 * MIB
    """Where a few of the units below fit, and dozens do not."""
    examples: ClassVar[int] = 15
    """Runs of the state machine."""

    @abstractmethod
    def make(self, tmp_path: Path, capacity: int) -> Tier:
        """A tier of ``capacity`` bytes; at the same path again after ``close`` for one that survives restarts."""

    @pytest.fixture
    def tier(self, tmp_path: Path) -> Iterator[Tier]:
        """An empty tier."""
        made = self.make(tmp_path, self.capacity)
        yield made
        made.close()

    # ------------------------------------------------------------ found and read

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
        assert done.outcome is Outcome.PUBLISHED
        assert done.objects == len(unit.objects)
        found = tier.lookup(LAYOUT, unit.digests)
        n = len(unit.digests)
        assert found.known.tolist() == [True] * n
        assert found.boundary.tolist() == [False] * (n - 1) + [True]
        assert set(found.places.entries["grade"].tolist()) == {int(Grade.CANONICAL)}
        assert hit(tier, WORLD, unit)
        assert (tier.usage().objects, tier.usage().units) == (len(unit.objects), 1)

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
        assert aligned == [0]
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
            with pytest.raises(InputError):
                tier.read(places, into, np.full(len(places), offset, np.int64))

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
            assert asked
            assert set(done.results.tolist()) <= {Result.OK, Result.STOPPED}
            assert after or (done.results == Result.STOPPED).all()
            for i, result in enumerate(done.results.tolist()):
                part = into[offsets[i] : offsets[i] + lengths[i]]
                entry = places.entries[i]
                if result == Result.OK:
                    digest = places.digests[i].tobytes()
                    right = payload(digest, int(entry["group"]), int(entry["column"]), len(part))
                    assert (part == right).all()
                else:
                    assert (part == 0xA5).all() or not part.any()
        assert hit(tier, world, unit)

    # ------------------------------------------------------------ whole or absent

    def test_a_unit_that_lacks_objects_is_refused(self, tier: Tier) -> None:
        tokens = tokens_of(1, 8)
        assert tier.publish(WORLD.unit(tokens, have=4)).outcome is Outcome.INCOMPLETE
        assert not tier.lookup(LAYOUT, WORLD.unit(tokens).digests).known.any()
        assert tier.usage().objects == 0

    def test_d1_a_payload_that_fails_leaves_nothing(self, tier: Tier) -> None:
        before = WORLD.unit(tokens_of(1, 2))
        tier.publish(before)
        unit = WORLD.unit(tokens_of(1, 4), have=2)
        usage = tier.usage()
        for nth in range(len(unit.objects)):

            def fail(room: memoryview) -> None:
                room[: len(room) // 2] = b"x" * (len(room) // 2)
                raise FillError

            objects = list(unit.objects)
            bad = objects[nth]
            objects[nth] = NewObject(bad.node, bad.group, bad.column, bad.grade, Fill(bad.size, fail))
            with pytest.raises(FillError):
                tier.publish(Unit(LAYOUT, ROOT, unit.digests, unit.tokens, SEGMENT, objects, unit.needs))
            assert tier.lookup(LAYOUT, unit.digests).known.tolist() == [True, True, False, False]
            assert tier.usage().objects == usage.objects
        assert hit(tier, WORLD, before)
        assert tier.publish(unit).stored
        assert hit(tier, WORLD, unit)

    def test_a_unit_that_can_never_fit_is_refused_and_nothing_goes(self, tmp_path: Path) -> None:
        tier = self.make(tmp_path, self.small)
        try:
            world = World((2 * MIB, 100, 100))
            unit = WORLD.unit(tokens_of(1, 2))
            tier.publish(unit)
            assert tier.publish(world.unit(tokens_of(2, 12))).outcome is Outcome.NO_ROOM
            assert hit(tier, WORLD, unit)
        finally:
            tier.close()

    # ------------------------------------------------------------ chains

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
        assert tier.usage().objects == sum(len(unit.objects) for unit in units) - 3 * shared

    def test_what_is_there_already_is_kept(self, tier: Tier) -> None:
        unit = WORLD.unit(tokens_of(1, 3))
        tier.publish(unit)
        before = tier.usage()
        again = tier.publish(unit)
        assert (again.outcome, again.objects) == (Outcome.KNOWN, 0)
        assert tier.usage().objects == before.objects

    def test_a_better_grade_replaces_and_a_worse_one_does_not(self, tier: Tier) -> None:
        tokens = tokens_of(1, 2)
        for grade in (Grade.APPROXIMATE, Grade.FAITHFUL, Grade.CANONICAL, Grade.FAITHFUL, Grade.APPROXIMATE):
            unit = WORLD.unit(tokens, grade=grade)
            done = tier.publish(unit)
            assert done.stored
            grades = tier.lookup(LAYOUT, unit.digests).places.entries["grade"]
            best = max(grade, Grade.CANONICAL) if done.outcome is Outcome.KNOWN else grade
            assert set(grades.tolist()) == {int(best)}
            assert hit(tier, WORLD, unit)
        assert tier.publish(WORLD.unit(tokens, grade=Grade.FAITHFUL)).outcome is Outcome.KNOWN

    def test_d9_another_layout_finds_nothing(self, tier: Tier) -> None:
        unit = WORLD.unit(tokens_of(1, 3))
        tier.publish(unit)
        assert not tier.lookup(b"x" * 32, unit.digests, root=ROOT).known.any()
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
        assert not found.known.any()
        assert len(found.tails) == 0
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
        assert sorted(found.tails.tolist()) == [[1, 3], [1, 5]]
        assert len(tier.lookup(LAYOUT, digest_chain(ROOT, tokens_of(5, 2)), root=ROOT).tails) == 0
        tier.publish(WORLD.unit(tokens_of(7, 0, ragged=6)))
        for digests in (digest_chain(ROOT, tokens_of(5, 2)), np.empty((0, 32), np.uint8)):
            short = [row for row in tier.lookup(LAYOUT, digests, root=ROOT).tails.tolist() if row[1] < SEGMENT]
            assert short == [[-1, 6]]
        assert len(tier.lookup(LAYOUT, digests, root=OTHER).tails) == 0

    # ------------------------------------------------------------ the cap

    def test_d8_never_above_the_cap_and_only_what_can_hit(self, tmp_path: Path) -> None:
        tier = self.make(tmp_path, self.small)
        try:
            world = World((200_000, 90_000, 50_000))
            units = []
            for i in range(30):
                head = tokens_of(i // 3, 2)
                units.append(world.unit(np.concatenate([head, tokens_of(100 + i, 1, ragged=i % 3)])))
                assert tier.publish(units[-1]).stored
                usage = tier.usage()
                assert usage.bytes <= usage.capacity <= self.small
            hits = [hit(tier, world, unit) for unit in units]
            assert hits[-1]
            assert 2 <= sum(hits) < 30
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
            assert needed <= there
        finally:
            tier.close()

    def test_what_is_used_stays(self, tmp_path: Path) -> None:
        tier = self.make(tmp_path, self.small)
        try:
            world = World((200_000, 90_000, 50_000))
            mine = world.unit(tokens_of(1000, 2))
            tier.publish(mine)
            for i in range(30):
                tier.publish(world.unit(tokens_of(i, 2)))
                for _ in range(4):
                    tier.touch(LAYOUT, mine.digests[-1].tobytes())
                tier.touch(LAYOUT, b"?" * 32)
            assert hit(tier, world, mine)
            assert not hit(tier, world, world.unit(tokens_of(0, 2)))
        finally:
            tier.close()

    # ------------------------------------------------------------ removing

    def test_clear_of_one_namespace(self, tier: Tier) -> None:
        mine = [WORLD.unit(tokens_of(i, 2), root=ROOT) for i in range(3)]
        others = [WORLD.unit(tokens_of(i, 2), root=OTHER) for i in range(2)]
        for unit in (*mine, *others):
            tier.publish(unit)
        assert tier.clear(LAYOUT, ROOT) == 3
        assert not any(tier.lookup(LAYOUT, unit.digests).known.any() for unit in mine)
        assert all(hit(tier, WORLD, unit) for unit in others)
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
        assert wrong(places, got, done.results) == 0
        assert set(done.results.tolist()) <= {Result.OK, Result.MISSING}

    def test_nothing_after_close(self, tmp_path: Path) -> None:
        tier = self.make(tmp_path, self.capacity)
        unit = WORLD.unit(tokens_of(1, 2))
        tier.publish(unit)
        places = tier.lookup(LAYOUT, unit.digests).places
        tier.close()
        assert not tier.lookup(LAYOUT, unit.digests).known.any()
        assert tier.publish(WORLD.unit(tokens_of(2, 2))).outcome is Outcome.UNAVAILABLE
        got, done = fetch(tier, places)
        assert wrong(places, got, done.results) == 0
        tier.touch(LAYOUT, unit.digests[-1].tobytes())
        tier.close()

    def test_d11_restart(self, tmp_path: Path) -> None:
        if not self.survives_restart:
            pytest.skip("this tier begins empty")
        units = [WORLD.unit(tokens_of(i, 3, ragged=2)) for i in range(4)]
        tier = self.make(tmp_path, self.capacity)
        for unit in units:
            tier.publish(unit)
        tier.close()
        tier = self.make(tmp_path, self.capacity)
        try:
            assert all(hit(tier, WORLD, unit) for unit in units)
            assert all(tier.publish(unit).outcome is Outcome.KNOWN for unit in units)
        finally:
            tier.close()

    # ------------------------------------------------------------ all at once

    def test_threads_publish_read_and_evict_and_no_byte_is_wrong(self, tmp_path: Path) -> None:
        tier = self.make(tmp_path, self.small)
        world = World((120_000, 300_000, 5000))
        units = [world.unit(tokens_of(i, 3)) for i in range(16)]
        done: list[Published] = []
        errors: list[BaseException] = []
        hits: list[bool] = []
        most: list[int] = []

        def work(seed: int) -> None:
            random = np.random.Generator(np.random.PCG64(seed))
            try:
                for _ in range(25):
                    unit = units[int(random.integers(len(units)))]
                    if random.random() < 0.4:
                        done.append(tier.publish(unit))
                    else:
                        hits.append(hit(tier, world, unit))
                    if random.random() < 0.05:
                        tier.clear(LAYOUT, ROOT)
                    most.append(tier.usage().bytes)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        try:
            assert not errors, errors
            assert any(item.stored for item in done)
            assert max(most) <= self.small
            assert tier.publish(units[0]).stored
            assert hit(tier, world, units[0])
        finally:
            tier.close()

    def test_everything_at_random_against_a_plain_model(self, tmp_path: Path) -> None:
        numbers = iter(range(10**6))

        def make() -> Tier:
            folder = tmp_path / str(next(numbers))
            folder.mkdir()
            return self.make(folder, self.capacity)

        run_state_machine_as_test(
            machine(make),
            settings=settings(
                max_examples=self.examples,
                stateful_step_count=20,
                deadline=None,
                database=None,
                suppress_health_check=list(HealthCheck),
            ),
        )


__all__ = ["SNAPSHOT", "TierConformance"]
