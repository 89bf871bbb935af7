"""Loads that are watched: how long one is waited for that does not come."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from tests.core.specs import V4
from tests.transfer.rude import Rude
from tests.transfer.world import World, draw

from kvloom.adapters.transformers.recovering import joined
from kvloom.manager.ways import Arrived, Choice, Option, Way, Why
from kvloom.tiers.contract import HandsOn, Tier
from kvloom.tiers.host import HostStore
from kvloom.transfer.options import Restoring, TransferOptions
from kvloom.transfer.source import TierSource
from kvloom.types import Grade

MIB = 1 << 20


def chosen(compute_s: float, load_s: float) -> Choice:
    """A load that is expected to take ``load_s``, in place of computing for ``compute_s``."""
    compute = Option(Way.RECOMPUTE, 0, None, None, Grade.CANONICAL, 0.0, 0.0, compute_s, compute_s)
    load = Option(Way.RESTORE, 1, None, None, Grade.CANONICAL, load_s, 0.0, 0.0, load_s)
    return Choice(1, load, Why.FASTEST, (compute, load))


def halves(restoring: Restoring) -> tuple[World, list[Rude], np.ndarray[Any, np.dtype[np.int32]]]:
    """Two tiers that have a prompt together: the first its group 0, the second the rest; the device has nothing."""
    tiers = [Rude(HostStore(64 * MIB)) for _ in range(2)]
    world = World(V4, 4 * MIB, tiers, TransferOptions(gpu_watermark=0.001, restoring=restoring))
    prompt = draw(random.Random(1), 300)
    world.serve(prompt)
    world.settled()
    first, second = (tier._inner for tier in tiers)
    assert isinstance(first, HandsOn)
    for layout, digest in list(first.coldest(1 << 40)):
        unit = first.unit(layout, digest)
        assert unit is not None
        second.publish(unit)
    world.manager.evict(1 << 40)
    for number, tier in enumerate(tiers):

        def lookup(inner: Tier, *args: Any, number: int = number, **options: Any) -> Any:
            found = inner.lookup(*args, **options)
            return replace(found, places=found.places.take((found.places.entries["group"] != 0) == bool(number)))

        tier.faults["lookup"] = lookup
    return world, tiers, np.array(prompt[:-1], dtype=np.int32)


def load(world: World, ids: np.ndarray[Any, np.dtype[np.int32]], choice: Choice) -> Arrived | None:
    """What a planner does that chose to load all."""
    source = TierSource(world.cold)
    chain = source.begin(ids, b"", ())[-1]
    stored = joined(source.find(chain), len(chain.digests))
    plan = world.manager.colder.plan_load(ids, stored, salt=b"", extra_keys=(), floor=Grade.FAITHFUL)
    assert plan is not None
    return source.load(plan, Grade.FAITHFUL, choice.give_up, choice.deadline_s)


def after(seconds: float, door: threading.Event | None = None) -> Callable[..., Any]:
    """A ``read`` that takes long, and waits for a door."""

    def read(inner: Tier, *args: Any, **options: Any) -> Any:
        time.sleep(seconds)
        assert door is None or door.wait(60)
        return inner.read(*args, **options)

    return read


def test_a_tier_that_hangs_behind_one_that_does_not_is_given_up() -> None:
    """Layer by layer, too: that the first stage of one tier is there says nothing of the other."""
    for restoring in (Restoring.WHOLE, Restoring.LAYERS):
        world, tiers, ids = halves(restoring)
        assert load(world, ids, chosen(60.0, 1.0)) is not None, "compiled, and both tiers are needed"
        world.cold.settle()
        world.manager.evict(1 << 40)
        door = threading.Event()
        tiers[0].faults["read"], tiers[1].faults["read"] = after(0.001), after(0.0, door)
        begun = time.monotonic()
        assert load(world, ids, chosen(4.0, 0.1)) is None
        assert time.monotonic() - begun < 2.0
        door.set()
        world.settled()
        assert world.manager.in_use() == 0
        world.cold.close(10)
