"""Tiers that raise, hang or lie although their contract forbids it: requests go on, and what happened is told."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.core.specs import FULL_WINDOW
from tests.transfer.rude import Rude, held_back
from tests.transfer.world import Tokens, World, draw

from kvloom.testing.faults import FaultyTier, Plan
from kvloom.tiers.contract import Tier
from kvloom.tiers.disk import DiskStore
from kvloom.tiers.host import HostStore
from kvloom.transfer.hierarchy import LOAD_ROOM_PATIENCE
from kvloom.transfer.keeping import END_PATIENCE_S
from kvloom.transfer.options import ColdForm, TransferOptions
from kvloom.types import Grade, Int32Array

MIB = 1 << 20


def fails(_inner: Tier, *_: Any, **__: Any) -> Any:
    raise RuntimeError("planted")


def array(prompt: Tokens) -> Int32Array:
    return np.array(prompt, dtype=np.int32)


def filled(tier: Tier, arena: int = MIB, **options: Any) -> tuple[World, list[Tokens]]:
    """A world whose ``tier`` has some prompts that its device lost."""
    world = World(FULL_WINDOW, arena, [tier], TransferOptions(gpu_watermark=0.01, **options))
    rng = random.Random(1)
    prompts = [draw(rng, 43) for _ in range(6)]
    for prompt in prompts:
        world.serve(prompt)
        world.settled()
    world.manager.evict(1 << 30)
    return world, prompts


@contextmanager
def takes_less_than(seconds: float) -> Iterator[None]:
    begun = time.monotonic()
    yield
    assert time.monotonic() - begun < seconds


OPERATIONS = (
    "lookup",
    "read",
    "publish",
    "touch",
    "usage",
    "close",
    "coldest",
    "unit",
    "hits",
    "cold_objects",
    "rewrite",
)


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("what", OPERATIONS)
def test_what_a_tier_raises_is_nobodys_error(
    tmp_path: Path, what: str, number: int, caplog: pytest.LogCaptureFixture
) -> None:
    tiers = [Rude(HostStore(512 << 10)), Rude(DiskStore.open(tmp_path, 64 * MIB))]
    options = TransferOptions(gpu_watermark=0.01, host_mark=0.2, cold_form=ColdForm.LOSSLESS)
    world = World(FULL_WINDOW, 64 << 10, tiers, options)
    rng = random.Random(1)
    prompts = [draw(rng, 43) for _ in range(4)]
    for prompt in prompts:
        world.serve(prompt)
    world.settled()
    tiers[number].faults = {what: fails}
    with caplog.at_level(logging.ERROR):
        for prompt in (*prompts, *prompts):
            world.manager.evict(1 << 30)
            world.cold.prefetch(array(prompt), b"", (), Grade.FAITHFUL)
            world.serve(prompt)
            world.serve(draw(rng, 43))
        world.settled()
        world.cold.forget_all_ahead()
        world.settled()
        assert world.manager.in_use() == 0
        assert len(world.manager.transfers) == 0
        world.cold.close(10)
    raised = [names for stats in world.cold.stats.tiers.values() for names in stats.to_json()["raised"].values()]
    told = [record for record in caplog.records if "planted" in record.getMessage()]
    assert len(told) == sum(sum(names.values()) for names in raised)
    if what not in {"hits", "unit"} if number == 0 else what in {"lookup", "publish", "close"}:
        assert told, "it was never asked"
    assert all(set(names) == {"RuntimeError"} for names in raised)


def nonsense(inner: Tier, *_: Any, **__: Any) -> Any:
    return 7


def too_short(inner: Tier, *args: Any, **options: Any) -> Any:
    found = inner.read(*args, **options)
    return replace(found, results=found.results[:1])


def unknown_codes(inner: Tier, *args: Any, **options: Any) -> Any:
    found = inner.read(*args, **options)
    return replace(found, results=np.full_like(found.results, 200))


def odd_rows(inner: Tier, *args: Any, **options: Any) -> Any:
    found = inner.lookup(*args, **options)
    return replace(found, places=replace(found.places, rows=found.places.rows + 1000))


def odd_tails(inner: Tier, *args: Any, **options: Any) -> Any:
    found = inner.lookup(*args, **options)
    return replace(found, tails=np.array([[-9, 3], [-1, 0], [90, 1], [0, -8]], np.int32))


@pytest.mark.parametrize(
    ("what", "lie"),
    [
        ("lookup", nonsense),
        ("lookup", odd_rows),
        ("lookup", odd_tails),
        ("read", nonsense),
        ("read", too_short),
        ("read", unknown_codes),
        ("publish", nonsense),
        ("usage", nonsense),
    ],
)
def test_what_a_tier_makes_up_is_nobodys_error(what: str, lie: Any) -> None:
    tier = Rude(HostStore(8 * MIB))
    world, prompts = filled(tier)
    tier.faults = {what: lie}
    for prompt in prompts[:3]:
        world.serve(prompt)
        world.serve(draw(random.Random(len(prompt)), 40))
    world.settled()
    assert world.manager.in_use() == 0
    world.cold.close(10)


@pytest.mark.parametrize("what", ["lookup", "touch"])
def test_d10_a_tier_that_does_not_answer_costs_one_patience(what: str) -> None:
    """Who asks again while it owes an answer does not wait; then it is asked again."""
    tier, door = Rude(HostStore(8 * MIB)), threading.Event()
    world, prompts = filled(tier, load_deadline_s=0.3)

    def hangs(inner: Tier, *args: Any, **options: Any) -> Any:
        assert door.wait(30)
        return getattr(inner, what)(*args, **options)

    tier.faults = {what: hangs}
    with takes_less_than(10):
        reused = [world.serve(prompt) for prompt in prompts]
    assert world.cold.stats.tiers["host"].unanswered >= 1
    if what == "lookup":
        assert reused == [0] * len(prompts)
    door.set()
    tier.faults = {}
    world.settled()
    world.manager.evict(1 << 30)
    time.sleep(0.1)
    assert world.serve(prompts[0]) == len(prompts[0]) - 1
    world.cold.close(10)


def test_d10_ends_that_a_tier_does_not_take_are_waited_for_once() -> None:
    """The device has dropped them; who asks again while the same store hangs computes at once."""
    tier, door = Rude(HostStore(8 * MIB)), threading.Event()
    tier.faults = {"publish": held_back(door)}
    world = World(FULL_WINDOW, MIB, [tier], TransferOptions(gpu_watermark=0.001))
    prompt = draw(random.Random(12), 43)
    world.serve(prompt)
    with takes_less_than(2.5 * END_PATIENCE_S):
        for _ in range(6):
            world.manager.evict(1 << 30)
            assert world.serve(prompt) == 0
    door.set()
    world.settled()
    world.manager.evict(1 << 30)
    assert world.serve(prompt) == len(prompt) - 1
    world.cold.close(10)


def test_d10_slots_that_a_tier_does_not_let_go_of_are_waited_for_once() -> None:
    """A prefix finds no room while a store hangs: who asks again computes at once."""
    tier, door = Rude(HostStore(8 * MIB)), threading.Event()
    world = World(FULL_WINDOW, 48 << 10, [tier], TransferOptions(gpu_watermark=0.001))
    rng = random.Random(13)
    stored, running = draw(rng, 43), draw(rng, 60)
    world.serve(stored)
    world.settled()
    world.manager.evict(1 << 30)
    tier.faults = {"publish": held_back(door)}
    world.serve(running)
    with takes_less_than(2.5 * LOAD_ROOM_PATIENCE):
        for _ in range(6):
            world.cold.restore(array(stored), b"", (), Grade.FAITHFUL)
    assert world.manager.colder.survey(array(stored)).reused == 0
    door.set()
    world.settled()
    assert world.serve(stored) == len(stored) - 1
    world.settled()
    world.cold.close(10)


def test_closing_does_not_wait_for_a_tier_that_does_not_close(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvloom.transfer.link.TIER_PATIENCE", 0.2)
    tier, door = Rude(HostStore(8 * MIB)), threading.Event()
    world, _ = filled(tier)
    tier.faults = {"close": lambda _inner: door.wait(30)}
    with takes_less_than(10):
        world.cold.close(0.2)
    door.set()


def test_a_reader_that_hangs_does_not_keep_the_writer(monkeypatch: pytest.MonkeyPatch) -> None:
    tier = FaultyTier(HostStore(8 * MIB), Plan(hang_reads=frozenset([0])))
    world, prompts = filled(tier)
    lanes = world.cold.links[0].lanes
    tier_read, door = tier.read, threading.Event()

    def deaf(*args: Any) -> Any:
        assert door.wait(30)
        return tier_read(*args)

    monkeypatch.setattr(tier, "read", deaf)
    assert world.cold.prefetch(array(prompts[0]), b"", (), Grade.FAITHFUL)
    world.cold.close(0.3)
    assert [lane.submit(urgency, lambda _job: iter(())) for lane in lanes for urgency in lane._most] == [None] * 5
    assert not any("kvloom-store-host" in thread.name for thread in threading.enumerate() if thread in _of(lanes[1]))
    door.set()
    tier.close()


def _of(lane: Any) -> list[threading.Thread]:
    return [] if lane._thread is None else [lane._thread]


# -------------------------------------------------------------------- prefetches


def test_d10_a_prefetch_that_hangs_costs_one_deadline() -> None:
    """Loads behind it are late once; then the tier is not asked until it answers."""
    tier = FaultyTier(HostStore(8 * MIB), Plan(hang_reads=frozenset([0])))
    world, prompts = filled(tier, load_deadline_s=0.5)
    assert world.cold.prefetch(array(prompts[0]), b"", (), Grade.FAITHFUL)
    assert tier.hanging.wait(10)
    assert [world.serve(prompt) for prompt in prompts[1:6]] == [0] * 5
    assert world.cold.stats.late == 1
    tier.release()
    world.settled()
    world.manager.evict(1 << 30)
    assert world.serve(prompts[1]) == len(prompts[1]) - 1
    world.cold.close(10)


def test_a_prefetch_for_a_lower_floor_does_not_stand_in_the_way() -> None:
    """What it brought may be of no use, so what is good enough is loaded; one for a higher floor serves."""
    world, prompts = filled(HostStore(8 * MIB))
    expected = world.serve(prompts[0], floor=Grade.CANONICAL)
    for ahead, floor, used in ((0, 2, False), (2, 1, True), (1, 2, False)):
        world.settled()
        world.manager.evict(1 << 30)
        before = world.cold.stats.prefetch_used
        assert world.cold.prefetch(array(prompts[0]), b"", (), Grade(ahead))
        assert world.serve(prompts[0], floor=Grade(floor)) >= expected
        assert (world.cold.stats.prefetch_used > before) is used
    assert expected > 0
    world.cold.close(10)


def test_a_prefetch_that_no_lane_takes_is_none() -> None:
    """It says so, and holds nothing: the request loads once its turn comes."""
    tier = FaultyTier(HostStore(8 * MIB), Plan(hang_reads=frozenset([0])))
    world, prompts = filled(tier, most_prefetches=1)
    assert world.cold.prefetch(array(prompts[0]), b"", (), Grade.FAITHFUL)
    assert tier.hanging.wait(10)
    lane = world.cold.links[0].reading
    job = lane._running
    assert job is not None
    job.stopped = lambda: False  # type: ignore[method-assign]  # a tier that does not ask
    world.cold.forget_ahead(array(prompts[0]), b"", ())
    assert not world.cold.prefetch(array(prompts[1]), b"", (), Grade.FAITHFUL)
    assert not len(world.cold.ahead)
    tier.release()
    world.settled()
    world.manager.evict(1 << 30)
    assert world.serve(prompts[1]) == len(prompts[1]) - 1
    world.cold.close(10)


def test_a_prefetch_that_was_cancelled_is_waited_for_a_moment() -> None:
    """The piece that it is in ends soon: that is no hang."""
    tier = FaultyTier(HostStore(8 * MIB), Plan(seconds_per_read=0.2))
    world, prompts = filled(tier)
    assert world.cold.prefetch(array(prompts[0]), b"", (), Grade.FAITHFUL)
    time.sleep(0.05)
    world.cold.forget_ahead(array(prompts[0]), b"", ())
    assert world.serve(prompts[1]) == len(prompts[1]) - 1
    world.cold.close(10)
