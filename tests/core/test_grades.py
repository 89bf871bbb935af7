"""The edges of prompts, and what grades mean."""

from __future__ import annotations

import pytest
from tests.core import specs
from tests.core.workshop import engine, prompt_of

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


def test_a_checkpoint_gets_better_when_it_is_made_again() -> None:
    """Approximate, then faithful; the third, approximate again, changes nothing."""
    e = engine(specs.V4, 200)
    prompt = prompt_of(22)
    for claimed, best in (
        (Grade.APPROXIMATE, Grade.APPROXIMATE),
        (Grade.FAITHFUL, Grade.FAITHFUL),
        (Grade.APPROXIMATE, Grade.FAITHFUL),
    ):
        s = e.open(prompt, floor=Grade.CANONICAL)
        for end in (16, 21):
            e.step(s, prompt[s.length : end], claimed)
        e.finish(s.checkpoint())
        s.close()
        hit = e.open(prompt, floor=Grade.APPROXIMATE)
        assert (hit.reused, hit.grade) == (21, best)
        hit.close()
        assert e.open(prompt).reused == (21 if best is Grade.FAITHFUL else 0)
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
