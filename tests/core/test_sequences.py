"""Grades, checkpoints, forks, and plans that are reported late, twice or never."""

from __future__ import annotations

import itertools

import pytest
from tests.core import specs
from tests.core.workshop import engine, ids, prompt_of, reason_list

from kvloom.spec.model_spec import ModelSpec
from kvloom.types import Grade, Kind, Reason

ALL = pytest.mark.parametrize("spec", specs.ALL, ids=lambda s: s.name)


# ---------------------------------------------------------------- the edges of prompts


@ALL
@pytest.mark.parametrize("length", [1, 2])
def test_the_shortest_prompts(spec: ModelSpec, length: int) -> None:
    e = engine(spec, 200)
    for turn in range(3):
        s = e.open(prompt_of(length))
        assert s.reused == (0 if turn == 0 else length - 1)
        for end in (length - 1, length):
            e.prefill(s, prompt_of(end))
            e.finish(s.checkpoint())
        s.close()
        e.manager.check_integrity()


@ALL
def test_a_prompt_that_ends_with_a_segment(spec: ModelSpec) -> None:
    """The last token is computed again, so the hit is one segment less, or the checkpoint before the last token."""
    segment = spec.segment_tokens
    prompt = prompt_of(4 * segment)
    e = engine(spec, 300)
    s = e.open(prompt)
    e.prefill(s, prompt)
    e.finish(s.checkpoint())
    s.close()
    s = e.open(prompt)
    assert s.reused == 3 * segment - (3 * segment % (spec.snapshot_interval or segment))
    e.prefill(s, prompt[:-1])
    e.finish(s.checkpoint())
    s.close()
    s = e.open(prompt)
    assert s.reused == 4 * segment - 1
    assert s.grade is (Grade.CANONICAL if segment == 1 else Grade.FAITHFUL)
    s.close()
    assert e.open([*prompt, 1]).reused == 4 * segment


@ALL
def test_a_checkpoint_of_nothing_or_of_what_is_there_already(spec: ModelSpec) -> None:
    e = engine(spec, 300)
    s = e.open(prompt_of(9))
    assert len(s.checkpoint()) == 0
    e.prefill(s, prompt_of(7))
    e.finish(s.checkpoint())
    used = e.manager.stats().used
    assert len(s.checkpoint()) == 0
    s.close()
    again = e.open(prompt_of(9))
    assert again.reused == 7
    assert len(again.checkpoint()) == 0
    again.close()
    assert e.manager.stats().used <= used
    e.manager.check_integrity()


# ---------------------------------------------------------------- grades


def test_what_makes_state_canonical() -> None:
    e = engine(specs.FULL, 200)
    cases: list[tuple[list[int], Grade, Grade]] = [
        ([8], Grade.CANONICAL, Grade.CANONICAL),
        ([8, 8], Grade.CANONICAL, Grade.CANONICAL),
        ([16], Grade.CANONICAL, Grade.FAITHFUL),
        ([4, 4], Grade.CANONICAL, Grade.FAITHFUL),
        ([8, 1], Grade.CANONICAL, Grade.FAITHFUL),
        ([8, 4, 4, 8], Grade.CANONICAL, Grade.FAITHFUL),
        ([8], Grade.FAITHFUL, Grade.FAITHFUL),
        ([8], Grade.APPROXIMATE, Grade.APPROXIMATE),
    ]
    for number, (counts, claimed, grade) in enumerate(cases):
        s = e.open(prompt_of(40, number))
        assert s.grade is Grade.CANONICAL
        for count in counts:
            e.step(s, prompt_of(40, number)[s.length : s.length + count], claimed)
        assert s.grade is grade, counts
        s.close()


def test_a_worse_grade_never_replaces_a_better_one() -> None:
    e = engine(specs.V4, 200)
    prompt = prompt_of(40)
    e.request(prompt, keep=False)
    commits = {k: v.commits for k, v in e.manager.stats().kinds.items()}
    s = e.open(prompt, floor=Grade.CANONICAL)
    s.close()
    e.manager.drop(Kind.TAIL)
    s = e.open(prompt)
    assert s.reused == 0
    for count in (3, 13, 16):
        e.step(s, prompt[s.length : s.length + count])
    s.close()
    after = {k: v.commits for k, v in e.manager.stats().kinds.items()}
    assert {k for k in after if after[k] != commits[k]} == {Kind.TAIL}
    hit = e.open(prompt[:33])
    assert (hit.reused, hit.grade) == (32, Grade.FAITHFUL)
    assert e.open(prompt[:33], floor=Grade.CANONICAL).reused == 0


def test_canonical_replaces_faithful_even_while_others_read_it() -> None:
    for spec in (specs.FULL_WINDOW, specs.V4, specs.RECURRENT):
        segment = spec.segment_tokens
        prompt = prompt_of(3 * segment + 1)
        e = engine(spec, 300)
        first = e.open(prompt)
        e.step(first, prompt[:1])
        e.prefill(first, prompt)
        first.close()
        reader = e.open(prompt)
        assert reader.reused > 0
        assert reader.grade is Grade.FAITHFUL
        better = e.open(prompt, floor=Grade.CANONICAL)
        assert better.reused == 0
        assert {x.reason for x in better.explanation.limits} == {Reason.GRADE}
        e.prefill(better, prompt[: 3 * segment])
        assert better.grade is Grade.CANONICAL
        e.check(reader)
        e.manager.check_integrity()
        late = e.open(prompt, floor=Grade.CANONICAL)
        assert late.reused == 3 * segment
        e.step(reader, prompt[reader.length :])
        for s in (reader, better, late):
            e.check(s)
            s.close()
        e.manager.check_integrity()
        assert e.manager.in_use() == 0


def test_a_faithful_checkpoint_keeps_the_grades_of_its_parts() -> None:
    """The prefix stays canonical; only the sealed part and the state at the end are faithful."""
    e = engine(specs.V4, 200)
    prompt = prompt_of(40)
    e.request(prompt)
    hit = e.open(prompt)
    assert (hit.reused, hit.grade) == (39, Grade.FAITHFUL)
    assert e.open(prompt, floor=Grade.CANONICAL).reused == 32


def test_a_segment_end_gets_its_snapshot_when_a_checkpoint_asks() -> None:
    """At 8 no recurrent state is kept; asked for, it is, first faithful, then canonical."""
    e = engine(specs.RECURRENT, 96)
    for ragged, grade in ((True, Grade.FAITHFUL), (False, Grade.CANONICAL)):
        s = e.open(prompt_of(9), floor=grade)
        if ragged:
            e.step(s, prompt_of(1))
        e.prefill(s, prompt_of(8))
        assert s.grade is grade
        plan = s.checkpoint()
        assert len(plan) == 1
        e.finish(plan)
        s.close()
        assert e.open(prompt_of(9), floor=grade).reused == 8
        e.manager.check_integrity()


def test_a_checkpoint_that_is_hit_outlives_one_that_is_not() -> None:
    e = engine(specs.FULL, 200)
    for variant in range(3):
        e.request(prompt_of(6, variant))
    e.open(prompt_of(6)).close()
    e.open(prompt_of(6)).close()
    e.manager.evict(1)
    e.manager.evict(1)
    assert [e.open(prompt_of(6, variant)).reused for variant in range(3)] == [5, 0, 0]


def test_the_caller_may_reuse_its_buffer_before_the_commit() -> None:
    e = engine(specs.FULL, 64)
    s = e.open(prompt_of(9))
    buffer = ids(prompt_of(8))
    s.append(buffer)
    e.compute(s, prompt_of(8))
    buffer[:] = 7
    s.commit()
    assert s.tokens.tolist() == prompt_of(8)
    assert e.open(prompt_of(9)).reused == 8


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
