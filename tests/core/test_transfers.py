"""Loads from and stores to a colder tier, as the manager plans them: random lives, and the rows C1, C2, C3, C5, C6."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.core import specs
from tests.core.cold_rules import NOTHING, Rules, all_good, all_of, fill, held, planned, stored_objects
from tests.core.cold_world import ColdLife
from tests.core.workshop import engine, ids, prompt_of
from tests.core.worlds import WORLDS, World

from kvloom.core.fields import STATE
from kvloom.core.lifecycle import LOADING
from kvloom.errors import CapacityError
from kvloom.plan import StoredObjects
from kvloom.spec.model_spec import ModelSpec
from kvloom.types import Grade

POLICIES = ("cost", "lru", "lfu", "s3-fifo", "priority")
HYBRIDS = (specs.FULL_WINDOW, specs.THREE_SEGMENTS, specs.V4, specs.RECURRENT, specs.LARGE_LCM)


def lived(world: World, seed: int, policy: str, steps: int) -> ColdLife:
    life = ColdLife(world, seed, policy)
    life.run(steps)
    life.end()
    return life


@pytest.mark.parametrize("number", range(len(WORLDS)), ids=lambda n: WORLDS[n].name)
def test_random_lives(number: int) -> None:
    lives = [lived(WORLDS[number], seed, POLICIES[(seed + number) % 5], 80) for seed in (1, 2)]
    assert sum(life.seen.loads + life.seen.refused for life in lives) > 0


@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(world=st.sampled_from(WORLDS), seed=st.integers(0, 2**20), policy=st.sampled_from(POLICIES))
def test_any_life(world: World, seed: int, policy: str) -> None:
    lived(world, seed, policy, 50)


def test_the_lives_see_everything_that_may_happen() -> None:
    seen = [lived(world, seed, "cost", 120).seen for world in WORLDS[::3] for seed in (3, 4)]
    for what in ("loads", "full", "partial", "nothing", "stores", "refused", "arriving", "broken"):
        assert sum(getattr(one, what) for one in seen) > 0, what


# ---------------------------------------------------------------- by hand


@pytest.mark.parametrize("spec", HYBRIDS, ids=lambda s: s.name)
@pytest.mark.parametrize("tail", [0, 3])
@pytest.mark.parametrize("grade", [Grade.CANONICAL, Grade.FAITHFUL])
def test_a_prompt_resumes_where_a_full_load_says(spec: ModelSpec, tail: int, grade: Grade) -> None:
    e = engine(spec, 400)
    position = 3 * spec.segment_tokens + tail
    prompt = prompt_of(position + 1)
    plan = e.manager.colder.plan_load(ids(prompt[:-1]), all_of(e.manager, position, grade), floor=grade)
    assert plan is not None
    fill(e, plan, prompt[:-1])
    e.manager.colder.finish_load(plan, all_good(plan))
    sequence = e.open(prompt, floor=grade)
    assert (sequence.reused, sequence.grade) == (position, grade)
    sequence.close()
    assert e.manager.colder.plan_load(ids(prompt[:-1]), all_of(e.manager, position, grade), floor=grade) is None
    e.manager.check_integrity()


@pytest.mark.parametrize("spec", HYBRIDS, ids=lambda s: s.name)
def test_below_the_floor_is_not_loaded(spec: ModelSpec) -> None:
    e = engine(spec, 400)
    tokens = prompt_of(2 * spec.segment_tokens)
    stored = all_of(e.manager, len(tokens), Grade.FAITHFUL)
    assert e.manager.colder.plan_load(ids(tokens), stored, floor=Grade.CANONICAL) is None
    assert e.manager.colder.plan_load(ids(tokens), stored, floor=Grade.FAITHFUL) is not None


@pytest.mark.parametrize("spec", HYBRIDS, ids=lambda s: s.name)
def test_c1_c2_nothing_takes_the_slots_of_a_load_in_flight(spec: ModelSpec) -> None:
    """Requests come and end, everything is evicted, cleared and dropped between the plan and its end."""
    e = engine(spec, 150)
    prompt = prompt_of(2 * spec.segment_tokens + 4)
    plan = planned(e, prompt[:-1], len(prompt) - 1)
    slots = set(zip(plan.group.tolist(), plan.slot.tolist(), strict=True))
    for variant in range(1, 4):
        e.request(prompt_of(2 * spec.segment_tokens + 2, variant))
        e.manager.evict(10**9)
        e.manager.clear()
        for group in spec.groups:
            e.manager.drop(group.name, quarantine=True)
        e.manager.check_integrity()
        assert int((e.manager.arrays.slot[:, STATE] == LOADING).sum()) == len(plan)
    with_same_tokens = e.open(prompt)
    assert with_same_tokens.reused == 0, "what a load brings stays invisible until it ends"
    e.prefill(with_same_tokens, prompt[:-1])
    for g in range(len(spec.groups)):
        taken = e.manager.rows.table[with_same_tokens.row]
        if not e.groups[g].snapshot:
            mine = {(g, s) for s in with_same_tokens.block_table(g)[: with_same_tokens.num_blocks(g)].tolist()}
            assert not mine & slots, taken
    with_same_tokens.close()
    fill(e, plan, prompt[:-1])
    e.manager.colder.finish_load(plan, all_good(plan))
    sequence = e.open(prompt)
    assert sequence.reused == len(prompt) - 1
    sequence.close()


@pytest.mark.parametrize("spec", HYBRIDS, ids=lambda s: s.name)
def test_c2_the_slots_of_an_abandoned_load_are_free(spec: ModelSpec) -> None:
    e = engine(spec, 150)
    tokens = prompt_of(2 * spec.segment_tokens + 3)
    plan = planned(e, tokens, len(tokens))
    e.manager.colder.finish_load(plan, np.zeros(len(plan), dtype=np.bool_))
    assert (held(e.manager), e.manager.stats().used, len(e.manager.transfers)) == (0, 0, 0)
    generations = e.manager.arrays.generation.copy()
    again = planned(e, tokens, len(tokens))
    a = e.manager.arrays
    taken = np.flatnonzero(a.slot[:, STATE] == LOADING)
    assert len(taken) == len(again)
    assert (a.generation[taken] != generations[taken]).all(), "a late write for the old plan can be told apart"


@pytest.mark.parametrize("spec", HYBRIDS, ids=lambda s: s.name)
@pytest.mark.parametrize("forget", ["evict", "clear", "drop", "close"])
def test_c3_a_slot_that_is_being_stored_is_not_given_away(spec: ModelSpec, forget: str) -> None:
    e = engine(spec, 200)
    prompt = prompt_of(2 * spec.segment_tokens + 4)
    sequence = e.open(prompt)
    e.prefill(sequence, prompt[:-1])
    e.finish(sequence.checkpoint())
    plan = e.manager.colder.plan_offload(sequence.tokens, NOTHING)
    assert plan is not None
    assert plan.position == len(prompt) - 1
    contents = [list(e.arena.read(g, s)) for g, s in zip(plan.group.tolist(), plan.slot.tolist(), strict=True)]
    sequence.close()
    if forget == "evict":
        e.manager.evict(10**9)
    elif forget == "clear":
        e.manager.clear()
    elif forget == "drop":
        for group in spec.groups:
            e.manager.drop(group.name)
    for variant in (1, 2):
        e.request(prompt_of(2 * spec.segment_tokens + 3, variant))
        e.manager.check_integrity()
    now = [list(e.arena.read(g, s)) for g, s in zip(plan.group.tolist(), plan.slot.tolist(), strict=True)]
    assert now == contents
    e.manager.colder.finish_store(plan)
    assert held(e.manager) == 0
    e.manager.check_integrity()


def test_c5_an_end_that_nobody_waits_for_is_counted() -> None:
    e = engine(specs.FULL_WINDOW, 80)
    tokens = prompt_of(20)
    plan = planned(e, tokens, 20)
    fill(e, plan, tokens)
    e.manager.colder.finish_load(plan, all_good(plan))
    before = e.manager.stats()
    for _ in range(3):
        e.manager.colder.finish_load(plan, all_good(plan))
        e.manager.colder.finish_store(plan)
    assert e.manager.transfers.ignored == 6
    assert e.manager.stats() == before
    e.manager.check_integrity()


@pytest.mark.parametrize("spec", HYBRIDS, ids=lambda s: s.name)
def test_c6_a_load_that_fails_for_one_group_is_a_shorter_hit(spec: ModelSpec) -> None:
    """Group by group: what arrived stays, and nothing resumes on what did not."""
    segment = spec.segment_tokens
    prompt = prompt_of(3 * segment + 1)
    for g in range(len(spec.groups)):
        e = engine(spec, 400)
        plan = planned(e, prompt[:-1], 3 * segment)
        if g not in plan.group:
            continue
        fill(e, plan, prompt[:-1])
        e.manager.colder.finish_load(plan, plan.group != g)
        e.manager.check_integrity()
        other = e.request(prompt_of(2 * segment, 5))
        assert other.reused == 0, "other requests go on"
        sequence = e.open(prompt)
        assert sequence.reused < 3 * segment
        e.prefill(sequence, prompt[:-1])
        sequence.close()
        again = e.manager.colder.plan_load(ids(prompt[:-1]), all_of(e.manager, 3 * segment))
        assert again is None or set(again.group.tolist()) <= set(plan.group.tolist())


def test_a_load_brings_only_what_the_device_lacks() -> None:
    e = engine(specs.V4, 400)
    prompt = prompt_of(4 * 16 + 1)
    e.request(prompt[: 2 * 16 + 1])
    plan = planned(e, prompt[:-1], 64)
    rules = Rules(e.manager)
    prefix = {g.index for g in rules.groups if not g.snapshot and not specs.V4.groups[g.index].window}
    assert {row for row, group in zip(plan.row.tolist(), plan.group.tolist(), strict=True) if group in prefix} == {2, 3}


def test_objects_of_other_boundaries_do_not_help() -> None:
    """A window or a snapshot alone is no hit, nor is a prefix without them."""
    e = engine(specs.V4, 400)
    for leave_out in range(len(specs.V4.groups)):
        items = [(*place, 2) for place in Rules(e.manager).needed(3 * 16 + 3) if place[1] != leave_out]
        assert e.manager.colder.plan_load(ids(prompt_of(3 * 16 + 3)), stored_objects(items)) is None
    assert held(e.manager) == 0


def test_more_segments_than_the_index_has_places() -> None:
    e = engine(specs.FULL, 400, max_nodes=5)
    tokens = prompt_of(8 * 20)
    for known in (3, 10, 20):
        stored = all_of(e.manager, 8 * known)
        plan = e.manager.colder.plan_load(ids(tokens), stored)
        assert (plan is not None) == (known == 3)
        if plan is not None:
            assert plan.position == 24
            e.manager.colder.finish_load(plan, np.zeros(len(plan), dtype=np.bool_))
        e.manager.check_integrity()
    assert e.manager.transfers.unkept == 2
    sequence = e.open(prompt_of(8 * 20))
    e.prefill(sequence, prompt_of(8 * 20))
    store = e.manager.colder.plan_offload(sequence.tokens, all_of(e.manager, 8 * 20, Grade.APPROXIMATE))
    assert store is not None
    e.manager.colder.finish_store(store)
    sequence.close()
    e.manager.check_integrity()


@pytest.mark.parametrize("spec", HYBRIDS, ids=lambda s: s.name)
@pytest.mark.parametrize("answer", [0, 1, 5])
def test_one_question_plans_what_a_question_for_every_grade_does(spec: ModelSpec, answer: int) -> None:
    e = engine(spec, 400)
    prompt = prompt_of(3 * spec.segment_tokens + 6)  # snapshots are kept every three segments
    sequence = e.open(prompt)
    e.prefill(sequence, prompt[: 3 * spec.segment_tokens])
    for token in prompt[3 * spec.segment_tokens : 3 * spec.segment_tokens + answer]:
        e.step(sequence, [token])
    e.finish(sequence.checkpoint())
    colder, tokens = e.manager.colder, sequence.tokens
    expected, have = [], NOTHING
    for floor in (Grade.CANONICAL, Grade.FAITHFUL, Grade.APPROXIMATE):
        plan = colder.plan_offload(tokens, have, floor=floor)
        if plan is not None:
            expected.append(plan)
            names = ("row", "group", "column", "grade")
            have = StoredObjects(*(np.concatenate([getattr(have, n), getattr(plan, n)]) for n in names))
    plans = colder.plan_units(tokens, NOTHING)
    assert [plan.position for plan in plans] == [plan.position for plan in expected]
    assert len(plans) == (1 if answer == 0 else 2)
    for plan, other in zip(plans, expected, strict=True):
        for name in ("row", "group", "column", "slot", "grade", "needs"):
            assert np.array_equal(getattr(plan, name), getattr(other, name)), name
    assert colder.plan_units(tokens, have) == (), "the tier has all of it"
    assert colder.plan_units(tokens, NOTHING, salt=b"nobody") == ()
    for plan in (*plans, *expected):
        colder.finish_store(plan)
    sequence.close()
    assert held(e.manager) == 0
    e.manager.check_integrity()


@pytest.mark.parametrize("spec", HYBRIDS, ids=lambda s: s.name)
@pytest.mark.parametrize("tail", [0, 2, 3])
def test_a_load_never_refuses_a_request_that_fits_without_it(spec: ModelSpec, tail: int) -> None:
    """Whatever the arena: after a load, or none for lack of room, the request opens and computes its prompt."""
    position = 3 * spec.segment_tokens + tail
    prompt = prompt_of(position + 1)
    whole = None
    for kib in range(8, 260, 2):
        try:
            e = engine(spec, kib)
            e.open(prompt).close()
        except CapacityError:
            continue
        plan = e.manager.colder.plan_load(ids(prompt[:-1]), all_of(e.manager, position))
        if plan is None:
            assert e.manager.transfers.unkept == 1
        else:
            fill(e, plan, prompt[:-1])
            e.manager.colder.finish_load(plan, all_good(plan))
            whole = whole or kib
        sequence = e.open(prompt)
        assert sequence.reused == (position if plan is not None else 0)
        e.prefill(sequence, prompt)
        sequence.close()
        e.manager.check_integrity()
    assert whole is not None


def test_a_full_arena_of_running_requests_is_no_room() -> None:
    e = engine(specs.FULL_WINDOW, 46)
    running = []
    for variant in range(1, 20):
        try:
            running.append(e.open(prompt_of(17, variant)))
            e.prefill(running[-1], prompt_of(16, variant))
        except CapacityError:
            break
    used = e.manager.stats().used
    assert e.manager.colder.plan_load(ids(prompt_of(40)), all_of(e.manager, 40)) is None
    assert e.manager.transfers.unkept == 1
    assert e.manager.stats().used == used
    for sequence in running:
        sequence.close()
    e.manager.check_integrity()
    assert e.manager.colder.plan_load(ids(prompt_of(40)), all_of(e.manager, 40)) is not None


def test_salts_and_keys_load_apart() -> None:
    e = engine(specs.FULL_WINDOW, 200)
    prompt = prompt_of(25)
    plan = planned(e, prompt[:-1], 24, salt=b"tenant", extra_keys=(("lora", "a"),))
    fill(e, plan, prompt[:-1])
    e.manager.colder.finish_load(plan, all_good(plan))
    for options, reused in (
        ({}, 0),
        ({"salt": b"tenant"}, 0),
        ({"extra_keys": (("lora", "a"),)}, 0),
        ({"salt": b"tenant", "extra_keys": (("lora", "a"),)}, 24),
    ):
        sequence = e.open(prompt, **options)
        assert sequence.reused == reused
        sequence.close()


def test_chains_name_what_opens_find() -> None:
    manager = engine(specs.FULL_WINDOW, 80).manager
    chain = manager.colder.chain(ids(prompt_of(21)), salt=b"x")
    assert chain.digests.shape == (3, 32)
    assert chain.segment == 8
    shorter, other = (
        manager.colder.chain(ids(prompt_of(16)), salt=b"x"),
        manager.colder.chain(ids(prompt_of(21)), salt=b"y"),
    )
    assert (chain.digests[:2] == shorter.digests).all()
    assert chain.root == shorter.root != other.root
    assert not (chain.digests == other.digests).all(axis=1).any()
