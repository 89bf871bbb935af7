"""Approximate state: it is hit only by who accepts it, says so, and whatever is computed from it is approximate too."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest
from tests.core import specs
from tests.core.cold_rules import NOTHING, Rules, all_good, all_of, array, fill, stored_objects
from tests.core.toy_engine import ToyEngine
from tests.core.workshop import engine, ids, prompt_of, reason_list

from kvloom.core.fields import GRADE, STATE
from kvloom.core.lifecycle import COMMITTED
from kvloom.manager import CachedSequence
from kvloom.plan import StoredObjects
from kvloom.spec.model_spec import ModelSpec
from kvloom.types import Grade, Kind, Reason

ALL = pytest.mark.parametrize("spec", specs.ALL, ids=lambda s: s.name)
LOW, FAITHFUL, CANONICAL = Grade.APPROXIMATE, Grade.FAITHFUL, Grade.CANONICAL
ROOM = 500


def load(e: ToyEngine, tokens: list[int], stored: StoredObjects, floor: Grade = LOW) -> int:
    """Bring what ``stored`` has of ``tokens`` to the device; returns the position that it allows."""
    plan = e.manager.colder.plan_load(ids(tokens), stored, floor=floor)
    assert plan is not None
    fill(e, plan, tokens)
    e.manager.colder.finish_load(plan, all_good(plan))
    return plan.position


def mixed(e: ToyEngine, position: int, low: Iterable[int], others: Grade = CANONICAL) -> StoredObjects:
    """A tier that has all that a boundary needs, the groups ``low`` approximately."""
    low = set(low)
    needed = Rules(e.manager).needed(position)
    return stored_objects((r, g, c, int(LOW if g in low else others)) for r, g, c in needed)


def grades(e: ToyEngine) -> set[Grade]:
    """Of everything that can be hit."""
    slots = e.manager.arrays.slot
    return {Grade(g) for g in slots[slots[:, STATE] == COMMITTED, GRADE].tolist()}


def end(e: ToyEngine, sequence: CachedSequence) -> None:
    e.check(sequence)
    e.finish(sequence.checkpoint())
    sequence.close()
    e.manager.check_integrity()
    e.check_grades()


# ---------------------------------------------------------------- who may use it


@ALL
@pytest.mark.parametrize("tail", [0, 3])
def test_only_who_accepts_it_hits(spec: ModelSpec, tail: int) -> None:
    e = engine(spec, ROOM)
    position = 3 * spec.segment_tokens + tail
    prompt = prompt_of(position + 1)
    stored = all_of(e.manager, position, LOW)
    for floor in (FAITHFUL, CANONICAL):
        assert e.manager.colder.plan_load(ids(prompt[:-1]), stored, floor=floor) is None
    assert load(e, prompt[:-1], stored) == position
    for floor in (FAITHFUL, CANONICAL):
        miss = e.open(prompt, floor=floor)
        assert (miss.reused, miss.grade) == (0, CANONICAL), "nothing is reused, so nothing is approximate"
        assert miss.explanation.grade is None
        faults = [x for x in miss.explanation.limits if x.kind is not None]
        assert {x.reason for x in faults} == {Reason.GRADE}
        assert {x.group for x in faults} == {spec.groups[g].name for _, g, _ in Rules(e.manager).needed(position)}
        assert "its grade is below the floor" in str(miss.explanation)
        miss.close()
    hit = e.open(prompt, floor=LOW)
    assert (hit.reused, hit.grade, hit.explanation.grade) == (position, LOW, LOW)
    assert str(hit.explanation).startswith("approximate hit: ")
    assert {x.grade for x in hit.ranges() if x.grade is not None and x.stop <= position} <= {LOW}
    end(e, hit)


@ALL
def test_one_approximate_group_is_enough(spec: ModelSpec) -> None:
    """Of every group in turn: a faithful request misses because of it alone, and the hit is approximate."""
    for group, one in enumerate(spec.groups):
        e = engine(spec, ROOM)
        position = 3 * spec.segment_tokens
        prompt = prompt_of(position + 1)
        stored = mixed(e, position, [group])
        if LOW not in {Grade(g) for g in stored.grade.tolist()}:
            continue  # not needed there
        load(e, prompt[:-1], stored)
        miss = e.open(prompt)
        assert miss.reused < position
        kind_and_group = {(x.reason, x.kind, x.group) for x in miss.explanation.limits if x.kind is not None}
        assert kind_and_group == {(Reason.GRADE, one.kind, one.name)}
        miss.close()
        hit = e.open(prompt, floor=LOW)
        assert (hit.reused, hit.grade) == (position, LOW)
        e.step(hit, prompt[position:])
        assert hit.grade is LOW
        end(e, hit)


def test_the_explanation_says_where() -> None:
    """Only the second segment's last block of one group is approximate."""
    e = engine(specs.V4, ROOM)
    prompt = prompt_of(49)
    items = [(r, g, c, int(LOW if (r, g, c) == (1, 1, 1) else CANONICAL)) for r, g, c in Rules(e.manager).needed(48)]
    load(e, prompt[:-1], stored_objects(items))
    miss = e.open(prompt)
    assert reason_list(miss) == [(Reason.GRADE, 24, "device", Kind.INDEXER, "indexer")]
    assert (miss.reused, miss.explanation.known_tokens) == (0, 48), "window and tail were only brought for 48"
    miss.close()
    assert e.manager.check_integrity() is None


def test_the_faithful_part_is_hit_by_who_asks_for_more() -> None:
    """Two segments are canonical on the device, the third came back approximately."""
    for spec in (specs.FULL, specs.FULL_WINDOW, specs.V4):
        e = engine(spec, ROOM)
        segment = spec.segment_tokens
        prompt = prompt_of(3 * segment + 1)
        e.request(prompt[: 2 * segment + 1], keep=False)
        assert load(e, prompt[:-1], all_of(e.manager, 3 * segment, LOW)) == 3 * segment
        for floor, reused, grade in ((CANONICAL, 2, CANONICAL), (FAITHFUL, 2, CANONICAL), (LOW, 3, LOW)):
            s = e.open(prompt, floor=floor)
            assert (s.reused, s.grade) == (reused * segment, grade)
            s.close()


# ---------------------------------------------------------------- what comes of it


@ALL
def test_what_is_computed_from_it_is_approximate(spec: ModelSpec) -> None:
    """Whole segments claimed canonical, ragged pieces, decode steps, checkpoints, forks: all of it."""
    e = engine(spec, ROOM)
    segment = spec.segment_tokens
    prompt = prompt_of(6 * segment + 3)
    load(e, prompt[: 2 * segment], all_of(e.manager, 2 * segment, LOW))
    s = e.open(prompt, floor=LOW)
    assert s.reused == 2 * segment
    e.step(s, prompt[2 * segment : 3 * segment], CANONICAL)
    e.finish(s.checkpoint())
    child, plan = s.fork()
    e.finish(plan)
    assert (child.grade, child.explanation.grade) == (LOW, LOW)
    e.step(child, [7] * segment, CANONICAL)
    e.step(child, [9], FAITHFUL)
    grandchild, plan = child.fork()
    e.finish(plan)
    e.step(grandchild, [3] * segment, CANONICAL)
    e.step(s, prompt[3 * segment : 3 * segment + 2])
    e.prefill(s, prompt[: 5 * segment + 1])
    for x in (s, child, grandchild):
        assert x.grade is LOW
        assert {r.grade for r in x.ranges() if r.grade is not None} == {LOW}
        end(e, x)
    assert grades(e) == {LOW}
    assert e.open(prompt).reused == 0
    assert e.open(prompt, floor=LOW).reused == 5 * segment + 1


@ALL
def test_forks_of_an_unfinished_segment_are_approximate(spec: ModelSpec) -> None:
    """The child's own copies of blocks that nobody has published yet: kept at once, and published later."""
    for count in sorted({1, spec.segment_tokens // 2, spec.segment_tokens - 1} - {0}):
        e = engine(spec, ROOM)
        segment = spec.segment_tokens
        prompt = prompt_of(2 * segment + count + 1)
        load(e, prompt[:segment], all_of(e.manager, segment, LOW))
        s = e.open(prompt, floor=LOW)
        assert s.reused == segment
        e.prefill(s, prompt[: segment + count])
        child, plan = s.fork()
        e.finish(plan)
        s.close()
        assert {r.grade for r in child.ranges() if r.grade is not None} == {LOW}
        e.finish(child.checkpoint())
        e.check_grades()
        e.prefill(child, prompt[: 2 * segment])
        end(e, child)
        assert grades(e) == {LOW}
        assert e.open(prompt).reused == 0


@ALL
def test_decode_steps_are_approximate(spec: ModelSpec) -> None:
    """A batch of one that goes on from approximate state and one that does not: each keeps its own grade."""
    e = engine(spec, ROOM)
    segment = spec.segment_tokens
    low, good = prompt_of(2 * segment + 1), prompt_of(2 * segment + 1, 1)
    load(e, low[:-1], all_of(e.manager, 2 * segment, LOW))
    first = e.open(low, floor=LOW)
    second = e.open(good, floor=LOW)
    e.prefill(second, good[:-1])
    assert (first.length, first.grade, second.length, second.grade) == (2 * segment, LOW, 2 * segment, CANONICAL)
    batch = e.manager.batch([first, second])
    for step in range(2 * segment + 1):
        plans = e.manager.step(batch, array([step % 50, step % 49]))
        for plan in plans:
            e.finish(plan)
    for plan in e.manager.finish(batch):
        e.finish(plan)
    assert (first.grade, second.grade) == (LOW, FAITHFUL)
    for s, expected in ((first, {LOW}), (second, {CANONICAL, FAITHFUL})):
        assert s.length == 4 * segment + 1
        found = {r.grade for r in s.ranges() if r.grade is not None}
        assert found <= expected
        assert min(found) is min(expected)
        s.close()
    e.manager.check_integrity()
    again = [*low[:-1], *(step % 50 for step in range(2 * segment + 1)), 0]
    assert e.open(again).reused == 0
    assert e.open([*again[: 2 * segment + 1]], floor=LOW).reused == 2 * segment


@ALL
def test_what_is_stored_of_it_is_approximate(spec: ModelSpec) -> None:
    """A store that asks for better gets nothing; another device that loads what was stored has it approximate too."""
    e = engine(spec, ROOM)
    segment = spec.segment_tokens
    prompt = prompt_of(4 * segment + 2)
    load(e, prompt[: 2 * segment], all_of(e.manager, 2 * segment, LOW))
    s = e.open(prompt, floor=LOW)
    e.prefill(s, prompt[:-1])
    e.finish(s.checkpoint())
    for floor in (FAITHFUL, CANONICAL):
        assert e.manager.colder.plan_offload(s.tokens, NOTHING, floor=floor) is None
    plan = e.manager.colder.plan_offload(s.tokens, NOTHING, floor=LOW)
    assert plan is not None
    assert plan.position == len(prompt) - 1
    assert set(plan.grade.tolist()) == {int(LOW)}
    stored = StoredObjects(plan.row, plan.group, plan.column, plan.grade)
    e.manager.colder.finish_store(plan)
    assert e.manager.colder.plan_offload(s.tokens, stored, floor=LOW) is None, "the tier has it as good"
    end(e, s)
    other = engine(spec, ROOM)
    assert other.manager.colder.plan_load(ids(prompt[:-1]), stored) is None
    assert load(other, prompt[:-1], stored) == len(prompt) - 1
    assert grades(other) == {LOW}
    assert other.open(prompt).reused == 0
    hit = other.open(prompt, floor=LOW)
    assert (hit.reused, hit.grade) == (len(prompt) - 1, LOW)


# ---------------------------------------------------------------- and what replaces it


@ALL
def test_better_state_takes_its_place_while_it_is_read(spec: ModelSpec) -> None:
    e = engine(spec, ROOM)
    segment = spec.segment_tokens
    prompt = prompt_of(3 * segment + 1)
    load(e, prompt[:-1], all_of(e.manager, 3 * segment, LOW))
    reader = e.open(prompt, floor=LOW)
    better = e.open(prompt, floor=CANONICAL)
    assert (reader.reused, better.reused) == (3 * segment, 0)
    e.prefill(better, prompt[:-1])
    e.finish(better.checkpoint())
    assert better.grade is CANONICAL
    late = e.open(prompt, floor=CANONICAL)
    assert (late.reused, late.grade) == (3 * segment, CANONICAL)
    e.check(reader)
    e.step(reader, prompt[reader.length :])
    assert reader.grade is LOW, "it read approximate state, whatever the index has by now"
    end(e, reader)
    hit = e.open([*prompt, 1])
    assert (hit.reused, hit.grade) == (3 * segment, CANONICAL)
    for s in (better, late, hit):
        s.close()
    e.check_grades()
    e.manager.check_integrity()


@pytest.mark.parametrize(
    "spec", [specs.FULL_WINDOW, specs.THREE_SEGMENTS, specs.V4, specs.RECURRENT], ids=lambda s: s.name
)
def test_it_never_takes_the_place_of_better_state(spec: ModelSpec) -> None:
    """Everything is there canonically but one group; who computes it again approximately changes that group only."""
    e = engine(spec, ROOM)
    segment = spec.segment_tokens
    prompt = prompt_of(3 * segment + 1)
    e.request(prompt, keep=False)
    assert e.manager.colder.plan_load(ids(prompt[:-1]), all_of(e.manager, 3 * segment, LOW), floor=LOW) is None
    e.manager.drop(spec.groups[0].name)
    a = e.manager.arrays
    before = (a.slot[:, STATE] == COMMITTED) & (a.slot[:, GRADE] == int(CANONICAL))
    s = e.open(prompt, floor=LOW)
    assert s.reused == 0
    while s.length < 3 * segment:
        e.step(s, prompt[s.length : s.length + segment], LOW)
    end(e, s)
    assert before.any()
    assert (a.slot[before, STATE] == COMMITTED).all()
    assert (a.slot[before, GRADE] == int(CANONICAL)).all()
    again = e.open(prompt, floor=LOW)
    assert (again.reused, again.grade) == (3 * segment, LOW)
    assert {x.group for x in e.open(prompt).explanation.limits if x.reason is Reason.GRADE} == {spec.groups[0].name}


# ---------------------------------------------------------------- what a colder tier has below the floor


def limits(e: ToyEngine, tokens: list[int], stored: StoredObjects, floor: Grade = FAITHFUL) -> list[tuple[object, ...]]:
    found = e.manager.colder.explain_load(ids(tokens), stored, tier="disk", floor=floor)
    return [(x.reason, x.position, x.tier, x.kind, x.group) for x in found]


@ALL
@pytest.mark.parametrize("tail", [0, 3])
def test_a_load_that_only_its_grade_forbids_is_explained(spec: ModelSpec, tail: int) -> None:
    e = engine(spec, ROOM)
    position = 2 * spec.segment_tokens + tail
    tokens = prompt_of(position)
    stored = all_of(e.manager, position, LOW)
    found = limits(e, tokens, stored)
    assert [x[4] for x in found] == [
        group.name for g, group in enumerate(spec.groups) if g in {g for _, g, _ in Rules(e.manager).needed(position)}
    ]
    assert {(x[0], x[2]) for x in found} == {(Reason.GRADE, "disk")}
    for _, begins, _, kind, name in found:
        group = spec.groups[spec.group_index(str(name))]
        first = min(
            r * spec.segment_tokens + c * group.block_tokens
            for r, g, c in Rules(e.manager).needed(position)
            if spec.groups[g] is group
        )
        assert begins == (position if group.is_snapshot else first)
        assert kind is group.kind
    assert limits(e, tokens, stored, LOW) == []
    assert limits(e, tokens, all_of(e.manager, position, FAITHFUL)) == []
    assert limits(e, tokens, all_of(e.manager, position, FAITHFUL), CANONICAL) == [
        (*x[:2], "disk", *x[3:]) for x in found
    ]
    assert limits(e, tokens, NOTHING) == []
    assert e.manager.stats().nodes == 0, "asking changes nothing"
    miss = e.open([*tokens, 1])
    both = miss.explanation.with_limits(e.manager.colder.explain_load(ids(tokens), stored, tier="disk"))
    assert [x.reason for x in both.limits] == [Reason.EMPTY, *(x[0] for x in found)]
    assert "in tier disk" in str(both)


def test_what_both_tiers_have_below_the_floor() -> None:
    """The device has the first segment approximately, the disk the second; the third is nowhere."""
    e = engine(specs.FULL, ROOM)
    tokens = prompt_of(24)
    load(e, tokens[:8], all_of(e.manager, 8, LOW))
    rest = stored_objects([(1, 0, 0, 0), (1, 0, 1, 0)])
    assert limits(e, tokens, rest) == [(Reason.GRADE, 0, "device", Kind.COMPRESSED, "full")]
    assert limits(e, tokens, NOTHING) == [(Reason.GRADE, 0, "device", Kind.COMPRESSED, "full")]
    good = stored_objects([(0, 0, 0, 2), (0, 0, 1, 2), (1, 0, 0, 2), (1, 0, 1, 0)])
    assert limits(e, tokens, good) == [(Reason.GRADE, 12, "disk", Kind.COMPRESSED, "full")]


def test_another_namespace_has_its_own() -> None:
    e = engine(specs.FULL, ROOM)
    tokens = prompt_of(11)
    stored = all_of(e.manager, 11, LOW)
    found = e.manager.colder.explain_load(ids(tokens), stored, tier="disk", salt=b"tenant")
    assert [x.position for x in found] == [0]
    assert e.manager.colder.explain_load(ids(tokens[:3]), NOTHING, tier="disk", salt=b"tenant") == ()
    before = e.manager.arrays.node.copy()
    e.manager.colder.explain_load(ids(tokens), stored, tier="disk", salt=b"other")
    np.testing.assert_array_equal(e.manager.arrays.node, before)
