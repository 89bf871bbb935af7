"""From where a prompt could go on, in random lives and by hand: every number compared with plain enumeration."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.core import specs
from tests.core.cold_rules import NOTHING, all_of, stored_objects
from tests.core.survey_world import surveyed
from tests.core.workshop import engine, ids, prompt_of
from tests.core.worlds import WORLDS, World

from kvloom.config import Device
from kvloom.errors import InputError, UnsupportedError
from kvloom.manager.watched import WatchedManager
from kvloom.types import Grade, Kind

POLICIES = ("cost", "lru", "lfu", "s3-fifo", "priority")


@pytest.mark.parametrize("number", range(0, len(WORLDS), 2), ids=lambda n: WORLDS[n].name)
def test_random_lives(number: int) -> None:
    surveyed(WORLDS[number], number, POLICIES[number % 5], 80)


@settings(max_examples=15, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(world=st.sampled_from(WORLDS), seed=st.integers(0, 2**20), policy=st.sampled_from(POLICIES))
def test_any_life(world: World, seed: int, policy: str) -> None:
    surveyed(world, seed, policy, 40)


def test_the_lives_see_everything_that_may_happen() -> None:
    seen = [surveyed(world, 5, "cost", 80).surveyed for world in WORLDS[::3]]
    for what in ("restored", "replayed", "mixed", "computed"):
        assert sum(getattr(one, what) for one in seen) > 0, what


def test_lost_windows_leave_a_boundary_for_replay() -> None:
    e = engine(specs.FULL_WINDOW, 200)
    prompt = prompt_of(29)
    e.request(prompt)
    assert e.manager.colder.survey(ids(prompt[:-1])).replayed == ()
    e.manager.drop(Kind.WINDOW)
    found = e.manager.colder.survey(ids(prompt[:-1]))
    assert found.reused == 0
    assert [(r.position, r.tiers, r.missing) for r in found.replayed] == [(28, 0, (1,))]
    both = e.manager.colder.plan_replay(ids(prompt[:-1]), NOTHING, Grade.CANONICAL)
    assert both is not None
    plan, made = both
    assert made.all()
    assert set(plan.group.tolist()) == {1}
    assert set(plan.grade.tolist()) == {int(Grade.FAITHFUL)}, "computed state is never called canonical"
    e.manager.check_integrity()
    e.manager.evict(10**9)
    slots = e.manager.colder.prefix_slots(plan)
    assert (len(slots[0]), len(slots[1])) == (7, 0), "what the replay reads stays while everything else goes"
    e.manager.colder.finish_load(plan, np.zeros(len(plan), dtype=np.bool_))
    e.manager.check_integrity()
    with pytest.raises(InputError, match="the load has ended"):
        e.manager.colder.prefix_slots(plan)


def test_lost_prefix_objects_are_no_replay() -> None:
    e = engine(specs.FULL_WINDOW, 200)
    prompt = prompt_of(29)
    e.request(prompt)
    e.manager.drop(Kind.WINDOW)
    e.manager.drop("full", 8)
    assert [r.position for r in e.manager.colder.survey(ids(prompt[:-1])).replayed] == [8]
    assert e.manager.colder.plan_replay(ids(prompt[:-1]), NOTHING, Grade.FAITHFUL) is None
    e.manager.check_integrity()
    assert len(e.manager.transfers) == 0
    near = all_of(e.manager, 28)
    prefix = np.flatnonzero(near.group == 0)
    tier = stored_objects(
        zip(*(getattr(near, name)[prefix].tolist() for name in ("row", "group", "column", "grade")), strict=True)
    )
    found = e.manager.colder.survey(ids(prompt[:-1]), [NOTHING, tier])
    assert [(r.position, r.tiers, r.tier_objects) for r in found.replayed] == [(8, 0, (0, 0)), (28, 2, (0, 1))]


def test_a_canonical_request_gets_no_replay() -> None:
    e = engine(specs.FULL_WINDOW, 200)
    prompt = prompt_of(25)
    e.request(prompt)
    e.manager.drop(Kind.WINDOW)
    assert e.manager.colder.survey(ids(prompt[:-1]), floor=Grade.CANONICAL).replayed != ()
    plan = e.manager.colder.plan_replay(ids(prompt[:-1]), NOTHING, Grade.CANONICAL, floor=Grade.CANONICAL)
    assert plan is None


def test_an_approximate_replay_is_no_hit_for_others() -> None:
    e = engine(specs.FULL_WINDOW, 200)
    prompt = prompt_of(25)
    e.request(prompt)
    e.manager.drop(Kind.WINDOW)
    floor = Grade.APPROXIMATE
    both = e.manager.colder.plan_replay(ids(prompt[:-1]), NOTHING, Grade.APPROXIMATE, floor=floor)
    assert both is not None
    e.manager.colder.finish_load(both[0], np.ones(len(both[0]), dtype=np.bool_))
    low = e.manager.open(ids(prompt), floor=floor)
    assert (low.reused, low.grade) == (24, Grade.APPROXIMATE)
    low.close()
    high = e.manager.open(ids(prompt))
    assert high.reused == 0
    assert next(limit.reason.value for limit in high.explanation.limits) == "grade"
    high.close()
    assert [r.position for r in e.manager.colder.survey(ids(prompt[:-1])).replayed] == [24], "an exact one replaces it"
    both = e.manager.colder.plan_replay(ids(prompt[:-1]), NOTHING, Grade.FAITHFUL)
    assert both is not None
    e.manager.colder.finish_load(both[0], np.ones(len(both[0]), dtype=np.bool_))
    high = e.manager.open(ids(prompt))
    assert (high.reused, high.grade) == (24, Grade.FAITHFUL)
    high.close()
    e.manager.check_integrity()


def test_watched_managers_refuse() -> None:
    manager = WatchedManager(specs.FULL_WINDOW, [Device(200 * 1024)], watch=lambda event: None)
    with pytest.raises(UnsupportedError, match="cannot be recorded"):
        manager.colder.plan_replay(ids(prompt_of(8)), NOTHING, Grade.FAITHFUL)
