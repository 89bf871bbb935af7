"""Forks, chains of checkpoints, and plans that are reported late, twice or never."""

from __future__ import annotations

import itertools

import pytest
from tests.core import specs
from tests.core.workshop import engine, ids, prompt_of, reason_list

from kvloom.errors import InputError, SequenceError
from kvloom.spec.model_spec import ModelSpec
from kvloom.types import Kind, Reason

ALL = pytest.mark.parametrize("spec", specs.ALL, ids=lambda s: s.name)


# ---------------------------------------------------------------- forks


@ALL
@pytest.mark.parametrize("at", [1, 2, 3, 5, 6, 7, 9, 14, 20])
def test_after_a_fork_both_publish_their_own_ending(spec: ModelSpec, at: int) -> None:
    """Also the blocks before the fork that neither had published: each prompt hits as if it had been alone."""
    segment = spec.segment_tokens
    start = prompt_of(at)
    e = engine(spec, 700, max_nodes=100)
    parent = e.open(start)
    e.prefill(parent, start)
    child, plan = parent.fork()
    e.finish(plan)
    ends = []
    for number, s in enumerate((parent, child)):
        talk = [*start, *([40 + number] * (2 * segment + 2))]
        e.prefill(s, talk)
        e.finish(s.checkpoint())
        s.close()
        ends.append(talk)
    e.manager.check_integrity()
    for talk in ends:
        s = e.open([*talk, 1])
        assert s.reused == len(talk)
        s.close()


@ALL
def test_forks_of_forks_read_what_they_should(spec: ModelSpec) -> None:
    e = engine(spec, 700, max_nodes=200, max_sequences=20)
    family = [e.open([1, 2, 3])]
    e.prefill(family[0], [1, 2, 3])
    for generation in range(9):
        child, plan = family[generation % len(family)].fork()
        e.finish(plan)
        family.append(child)
        for number, s in enumerate(family):
            e.step(s, [number + 1] * (1 + (generation + number) % 3))
        e.manager.check_integrity()
    for s in family[::2]:
        s.close()
    for s in family[1::2]:
        e.step(s, [7, 7])
        s.close()
    assert e.manager.in_use() == 0
    e.manager.check_integrity()


def test_a_fork_shares_what_is_published_and_costs_only_the_rest() -> None:
    e = engine(specs.FULL, 200)
    parent = e.open(prompt_of(40))
    e.prefill(parent, prompt_of(35))
    before = e.manager.in_use()
    child, plan = parent.fork()
    assert len(plan) == 1
    assert e.manager.in_use() - before == 2048
    e.finish(plan)
    assert child.block_table(0)[:8].tolist() == parent.block_table(0)[:8].tolist()
    assert (child.length, child.reused, child.grade) == (35, 35, parent.grade)


# ---------------------------------------------------------------- chains and plans


@ALL
def test_a_long_chain_of_checkpoints(spec: ModelSpec) -> None:
    """One at every token: each of them is a boundary, whatever the order in which they are asked for."""
    e = engine(spec, 900, max_nodes=120)
    talk = prompt_of(2 * min(spec.segment_tokens, 16) + 5)
    s = e.open(talk)
    for at in range(len(talk) - 1):
        e.step(s, [talk[at]])
        e.finish(s.checkpoint())
    s.close()
    for length in (*range(2, len(talk)), *range(len(talk), 1, -1)):
        hit = e.open(talk[:length])
        assert hit.reused == length - 1
        hit.close()
    e.manager.check_integrity()


@ALL
def test_plans_reported_in_any_order_after_everything_is_closed(spec: ModelSpec) -> None:
    prompt = prompt_of(2 * spec.segment_tokens + 2)
    for order in itertools.islice(itertools.permutations(range(4)), 0, 24, 5):
        e = engine(spec, 500, max_nodes=60)
        s = e.open(prompt)
        plans = []
        while s.length < len(prompt) - 1:
            count = min(spec.segment_tokens - s.length % spec.segment_tokens, len(prompt) - 1 - s.length)
            plans.append(e.forward(s, prompt[s.length : s.length + count]))
        plans.append(s.checkpoint())
        e.arena.run(plans[-1])
        s.close()
        e.manager.check_integrity()
        for at in [o for o in order if o < len(plans)] + list(range(4, len(plans))):
            e.manager.complete(plans[at])
            e.manager.complete(plans[at])
            e.manager.abandon(plans[at])
            e.manager.check_integrity()
        issued = sum(len(plan) > 0 for plan in plans)
        assert e.manager.stats().completions_ignored == 2 * issued
        hit = e.open(prompt)
        assert hit.reused == len(prompt) - 1
        hit.close()
        assert e.manager.in_use() == 0


@ALL
def test_an_abandoned_plan_publishes_nothing_and_frees_its_slots(spec: ModelSpec) -> None:
    prompt = prompt_of(spec.segment_tokens + 2 if spec.segment_tokens > 1 else 3)
    e = engine(spec, 500, max_nodes=60)
    s = e.open(prompt)
    e.prefill(s, prompt[:-1])
    before = e.manager.in_use()
    plan = s.checkpoint()
    assert e.manager.in_use() > before or len(plan) == 0
    e.manager.abandon(plan)
    assert e.manager.in_use() == before
    s.close()
    hit = e.open(prompt)
    assert hit.reused < len(prompt) - 1 or len(plan) == 0
    e.manager.check_integrity()


def test_nothing_is_visible_before_its_copy_is_made() -> None:
    e = engine(specs.V4, 200)
    prompt = prompt_of(20)
    s = e.open(prompt)
    commit = e.forward(s, prompt[:16])
    assert e.open(prompt).reused == 0
    assert e.manager.stats().plans_open == 1
    e.manager.complete(commit)
    assert e.open(prompt).reused == 16
    e.step(s, prompt[16:19])
    kept = s.checkpoint()
    assert e.open(prompt).reused == 16
    e.finish(kept)
    assert e.open(prompt).reused == 19


def test_two_that_compute_the_same_at_once_share_what_the_first_published() -> None:
    e = engine(specs.V4, 300)
    prompt = prompt_of(40)
    pair = [e.open(prompt), e.open(prompt)]
    for end in (16, 32, 39):
        for s in pair:
            e.prefill(s, prompt[:end])
            e.finish(s.checkpoint())
    objects = e.manager.stats().kinds[Kind.INDEXER].objects
    assert objects == 4 + 1, "published once"
    for s in pair:
        e.check(s)
        s.close()
    assert e.manager.stats().kinds[Kind.INDEXER].objects == objects
    assert e.manager.in_use() == 0
    assert e.open(prompt).reused == 39


def test_what_one_of_two_published_is_evicted_while_the_other_goes_on() -> None:
    """The other one's own copy takes its place, so that what follows can be reached."""
    for spec in (specs.V4, specs.FULL_WINDOW, specs.LARGE_LCM):
        e = engine(spec, 300, max_nodes=60)
        prompt = prompt_of(3 * spec.segment_tokens + 2)
        first, second = e.open(prompt), e.open(prompt)
        for s in (first, second):
            e.prefill(s, prompt[: 2 * spec.segment_tokens])
        first.close()
        e.manager.evict(10**9)
        e.prefill(second, prompt[:-1])
        e.finish(second.checkpoint())
        third = e.open(prompt)
        assert third.reused == len(prompt) - 1
        second.close()
        third.close()
        e.manager.check_integrity()


def test_clearing_while_sequences_run() -> None:
    """They keep what they hold, and go on; what they publish later is found again once the prefix is back."""
    e = engine(specs.FULL_WINDOW, 96)
    prompt = prompt_of(33)
    s = e.open(prompt)
    e.prefill(s, prompt[:16])
    assert e.manager.clear() > 0
    e.prefill(s, prompt[:32])
    e.check(s)
    miss = e.open(prompt)
    assert miss.reused == 0
    assert (Reason.CLEARED, 0, "device", Kind.COMPRESSED, "full") in reason_list(miss)
    e.prefill(miss, prompt[:16])
    assert e.open(prompt).reused == 32
    e.manager.check_integrity()
    assert e.open(ids(prompt).tolist()).reused == 32


def test_the_plan_of_another_manager_is_refused() -> None:
    mine, other = engine(specs.RECURRENT, 300), engine(specs.RECURRENT, 300)
    restore = mine.manager.open(ids(prompt_of(9))).restore
    waiting = other.manager.open(ids(prompt_of(9)))
    assert restore.ticket == waiting.restore.ticket
    for call in (other.manager.complete, other.manager.abandon):
        with pytest.raises(InputError, match="another manager's"):
            call(restore)
    with pytest.raises(SequenceError, match="restore plan was not completed"):
        waiting.append(ids([1]))
