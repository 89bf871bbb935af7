"""The core against the reference, operation by operation; the long run is ``python -m tests.core.long``."""

from __future__ import annotations

import pytest
from tests.core.differential import Life
from tests.core.worlds import WORLDS, World

from kvloom.eviction import POLICIES, EvictionPolicy

STEPS = 250
DEEPEST = EvictionPolicy("deepest", key=lambda uses, stamp, _priority, depth: stamp - depth * 1000 + uses)


@pytest.mark.parametrize("world", WORLDS, ids=lambda w: w.name)
def test_core_equals_reference(world: World) -> None:
    life = Life(world, seed=20)
    life.run(STEPS)
    assert len(life.log) >= STEPS


@pytest.mark.parametrize("policy", [*(p for p in POLICIES if p != "lru"), DEEPEST], ids=lambda p: getattr(p, "name", p))
@pytest.mark.parametrize("world", WORLDS, ids=lambda w: w.name)
def test_core_equals_reference_under_every_policy(world: World, policy: EvictionPolicy | str) -> None:
    life = Life(world, seed=21, policy=policy)
    life.run(STEPS // 2)
    assert len(life.log) >= STEPS // 2


def test_worlds_cover_both_ways_to_cut_an_arena() -> None:
    for name in {world.spec.name for world in WORLDS}:
        splits = {Life(w, 0).fast.geometry.static_split for w in WORLDS if w.spec.name == name}
        assert True in splits or name == "full", name


def test_lives_meet_hits_checkpoints_and_refusals() -> None:
    """A random walk that never hits would compare nothing of interest."""
    lives = [Life(world, seed=1) for world in WORLDS[:6]]
    for life in lives:
        life.run(STEPS)
    _, at_segments, at_checkpoints = (sum(values) for values in zip(*(life.hits for life in lives), strict=True))
    assert at_segments > 20
    assert at_checkpoints > 2
    assert sum(life.errors for life in lives) > 20
