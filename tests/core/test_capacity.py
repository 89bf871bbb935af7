"""FAILURES B3: an allocation fails at every point of every operation; nothing is leased, nothing leaks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tests.core import specs
from tests.core.toy_engine import ToyEngine
from tests.core.workshop import KIB, allocations, engine, holdings, ids, prompt_of, split_engine, squeezed, view

from kvloom.config import Device
from kvloom.errors import CapacityError
from kvloom.manager import CachedSequence, Manager
from kvloom.plan import CopyPlan
from kvloom.spec.model_spec import ModelSpec
from kvloom.types import Grade

Operation = Callable[[ToyEngine, CachedSequence], Any]


def hit_a_checkpoint(e: ToyEngine, _: CachedSequence) -> CachedSequence:
    return e.open(prompt_of(19, 5))


def hit_a_segment(e: ToyEngine, _: CachedSequence) -> CachedSequence:
    return e.open([*prompt_of(e.spec.snapshot_interval or 16, 5), 49, 49])


def miss(e: ToyEngine, _: CachedSequence) -> CachedSequence:
    return e.open(prompt_of(8, 9))


def append(e: ToyEngine, s: CachedSequence) -> None:
    s.append(prompt_of(19))


def fork(e: ToyEngine, s: CachedSequence) -> CachedSequence:
    return s.fork()[0]


def checkpoint(e: ToyEngine, s: CachedSequence) -> CopyPlan:
    return s.checkpoint()


SPECS = (specs.V4, specs.FULL_WINDOW, specs.RECURRENT, specs.THREE_SEGMENTS)
SPLIT = {specs.V4.name: 190, specs.FULL_WINDOW.name: 63, specs.RECURRENT.name: 63, specs.THREE_SEGMENTS.name: 94}
"""KiB of arenas that are split statically here, so that one group can be short while the others are not."""


def prepared(spec: ModelSpec) -> tuple[ToyEngine, CachedSequence]:
    """A cache with a checkpoint at 18 tokens, and a running sequence of 15 tokens."""
    e = split_engine(spec, SPLIT[spec.name], max_nodes=60)
    e.request(prompt_of(19, 5))
    running = e.open(prompt_of(40, 3))
    e.prefill(running, prompt_of(15, 3))
    return e, running


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.name)
@pytest.mark.parametrize("operation", [hit_a_checkpoint, hit_a_segment, miss, append, fork, checkpoint])
def test_b3_every_allocation_fails_once(spec: ModelSpec, operation: Operation) -> None:
    e, running = prepared(spec)
    before = allocations(e.manager)
    operation(e, running)
    wanted = [after - b for after, b in zip(allocations(e.manager), before, strict=True)]
    points = [(g, k) for g, count in enumerate(wanted) for k in range(count)]
    assert points or operation is not append
    for group, leave in points:
        e, running = prepared(spec)
        with squeezed(e.manager, group, leave):
            held, seen = holdings(e.manager), view(e.manager, running)
            evicted = {k: v.evictions for k, v in e.manager.stats().kinds.items()}
            if operation is checkpoint:
                assert len(operation(e, running)) == 0  # best effort: nothing is kept, and that is counted
                assert sum(k.unkept for k in e.manager.stats().kinds.values()) == 1
            else:
                with pytest.raises(CapacityError, match="no room to") as refused:
                    operation(e, running)
                assert refused.value.in_use == e.manager.in_use() <= refused.value.cap
                assert refused.value.needed > 0
            assert holdings(e.manager) == held
            assert {k: v.evictions for k, v in e.manager.stats().kinds.items()} == evicted
            assert view(e.manager, running) == seen
            e.manager.check_integrity()
        operation(e, running)
        e.manager.check_integrity()
        e.check(running) if operation is not append else running.rollback()


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.name)
@pytest.mark.parametrize("kib", [None, 400])
def test_a_refusal_costs_nobody_anything(spec: ModelSpec, kib: int | None) -> None:
    """What a request can never get beside the others is refused before anything is evicted for it."""
    e = engine(spec, kib, max_nodes=200) if kib else split_engine(spec, SPLIT[spec.name], max_nodes=200)
    for variant in range(3):
        e.request(prompt_of(19, variant))
    hog = e.open(prompt_of(2, 7))
    hog.append(ids(prompt_of(24)))
    refusals = 0
    for count in range(8, spec.max_positions or 900, 8):
        asking = e.open(prompt_of(2, 8))
        objects = {k: v.objects for k, v in e.manager.stats().kinds.items()}
        try:
            asking.append(ids(prompt_of(count)))
        except CapacityError:
            refusals += 1
            assert {k: v.objects for k, v in e.manager.stats().kinds.items()} == objects
        asking.close()
    assert refusals > 3 or spec.max_positions
    e.manager.check_integrity()


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.name)
def test_b3_a_commit_without_room_for_snapshots_still_publishes_its_blocks(spec: ModelSpec) -> None:
    groups = [g for g, group in enumerate(spec.groups) if group.is_snapshot]
    for group in groups:
        e = split_engine(spec, SPLIT[spec.name], max_nodes=60)
        s = e.open(prompt_of(40))
        e.prefill(s, prompt_of(spec.snapshot_interval - spec.segment_tokens if spec.snapshot_interval else 0))
        with squeezed(e.manager, group, 0):
            start = s.length
            plan = e.forward(s, prompt_of(40)[start : start + spec.segment_tokens])
            kept = e.groups[group].snapshot_kept(s.length)
            assert len(plan) == 0 or not kept
            assert e.manager.stats().kinds[spec.groups[group].kind].unkept == int(kept)
            e.manager.check_integrity()
        e.finish(plan)
        e.check(s)
        s.close()
        assert e.manager.in_use() == 0


@pytest.mark.parametrize("spec", specs.ALL, ids=lambda s: s.name)
def test_b3_whatever_size_the_arena_has_nothing_leaks(spec: ModelSpec) -> None:
    """The same script on arenas of many sizes: some step fails in most of them, each time at another point."""
    refusals = 0
    for kib in [*range(6, 40), *range(40, 240, 9)]:
        try:
            e = engine(spec, kib, max_nodes=30, max_sequences=3)
        except CapacityError:
            continue
        refusals += _script(e, spec.segment_tokens)
        e.manager.check_integrity()
        assert e.manager.in_use() == 0, f"{kib} KiB"
        e.manager.clear()
        assert e.manager.stats().used == 0, f"{kib} KiB"
    assert refusals > 5


def _script(e: ToyEngine, segment: int) -> int:
    refusals = 0
    long, running = prompt_of(5 * segment + 2), []
    for length in (2 * segment + 1, 5 * segment + 2, segment // 2 + 2, 3 * segment + segment // 2 + 1):
        try:
            s = e.open(long[:length])
            running.append(s)
            e.prefill(s, long[: length - 1])
            e.finish(s.checkpoint())
            child, plan = s.fork()
            running.append(child)
            e.finish(plan)
            e.step(child, [7])
        except CapacityError:
            refusals += 1
        e.manager.check_integrity()
        while len(running) > 1:
            running.pop(0).close()
    for s in running:
        s.close()
    return refusals


@pytest.mark.parametrize("spec", [s for s in specs.ALL if s is not specs.STATE_ONLY], ids=lambda s: s.name)
def test_a_refusal_names_bytes_that_would_do(spec: ModelSpec) -> None:
    tokens = min(9 * spec.segment_tokens + 1, spec.max_positions or 10**6)
    with pytest.raises(CapacityError) as refused:
        Manager(spec, [Device(7 * KIB if spec is not specs.V4 else 9 * KIB)], max_nodes=9).open(prompt_of(tokens))
    error = refused.value
    assert error.never_fits
    assert error.needed > error.cap
    assert str(error.needed) in str(error)
    assert str(error.cap) in str(error)
    e = ToyEngine(Manager(spec, [Device(error.needed)], max_nodes=9))
    e.prefill(e.open(prompt_of(tokens)), prompt_of(tokens))


@pytest.mark.parametrize("spec", specs.ALL, ids=lambda s: s.name)
def test_b1_a_prompt_that_fits_runs_when_nothing_else_does(spec: ModelSpec) -> None:
    """Even in a full cache, and to the last slot: nothing is kept back for anybody."""
    for kib in (24, 40, 61, 96):
        e = engine(spec, max(kib, 12), max_nodes=40)
        longest = max(n for n in range(1, spec.max_positions or 40 * spec.segment_tokens) if _fits(e.manager, n))
        for variant in range(6):
            e.request(prompt_of(longest if variant % 2 else max(2, longest // 2), variant))
        assert e.manager.in_use() == 0
        s = e.open(prompt_of(longest, 77))
        e.prefill(s, prompt_of(longest, 77))
        e.check(s)
        s.close()


def _fits(manager: Manager, tokens: int) -> bool:
    from kvloom.core.geometry import fits

    return fits(manager.spec, manager.geometry, tokens)


def test_what_a_better_grade_replaced_makes_room_when_nobody_reads_it() -> None:
    """Alone on an arena of just its size, a request replaces a faithful version of itself."""
    e = engine(specs.FULL, 40, max_nodes=40)
    prompt = prompt_of(79)
    s = e.open(prompt)
    e.step(s, prompt[:1])
    e.prefill(s, prompt[:72])
    s.close()
    better = e.open(prompt, floor=Grade.CANONICAL)
    e.prefill(better, prompt)
    e.check(better)
    e.manager.check_integrity()
    better.close()
    assert e.open(prompt, floor=Grade.CANONICAL).reused == 72


def test_what_a_reader_still_reads_is_not_given_away_when_there_is_no_room() -> None:
    e = engine(specs.FULL, 64, max_nodes=60)
    prompt = prompt_of(40)
    s = e.open(prompt)
    e.step(s, prompt[:1])
    e.prefill(s, prompt[:39])
    s.close()
    reader = e.open(prompt)
    assert (reader.reused, reader.grade) == (32, Grade.FAITHFUL)
    better = e.open(prompt, floor=Grade.CANONICAL)
    e.prefill(better, prompt[:32])
    hungry = e.open(prompt_of(72, 3))
    with pytest.raises(CapacityError):
        e.prefill(hungry, prompt_of(72, 3))
    e.check(reader)
    e.manager.check_integrity()
    reader.close()
    hungry.close()
    again = e.open(prompt_of(72, 3))
    e.prefill(again, prompt_of(72, 3))
    e.check(better)


def test_what_is_cleared_is_free_at_once_unless_somebody_reads_it() -> None:
    e = engine(specs.FULL, 200, max_nodes=60)
    stranger = e.open([9, 9])
    e.request(prompt_of(40))
    reader = e.open(prompt_of(17))
    used = e.manager.stats().used
    assert e.manager.clear() > 0
    assert e.manager.stats().used == 4 * 2048 < used
    e.check(reader)
    reader.close()
    assert e.manager.stats().used == 4 * 2048, "the stranger began before it was given up"
    stranger.close()
    assert e.manager.stats().used == 0


def test_an_append_that_can_never_fit_says_so() -> None:
    e = engine(specs.FULL, 12, max_nodes=20)
    s = e.open([1, 2])
    with pytest.raises(CapacityError) as refused:
        s.append(prompt_of(80))
    assert refused.value.never_fits
    assert refused.value.needed > refused.value.cap


def test_when_others_hold_the_memory_the_error_says_how_much() -> None:
    e = engine(specs.FULL, 40, max_nodes=20)
    first, second = e.open([1, 2]), e.open([3, 4])
    first.append(prompt_of(60))
    with pytest.raises(CapacityError, match="2 running sequences") as refused:
        second.append(prompt_of(40, 2))
    assert not refused.value.never_fits
    assert refused.value.in_use == 15 * 2048
    first.rollback()
    second.append(prompt_of(40, 2))


def test_rows_run_out_before_memory() -> None:
    e = engine(specs.FULL, 40, max_sequences=2)
    held = [e.open([1, 2]), e.open([1, 2])]
    with pytest.raises(CapacityError, match="2 sequences are running"):
        e.open([1, 2])
    with pytest.raises(CapacityError, match="2 sequences are running"):
        held[0].fork()
    held.pop().close()
    held[0].fork()
    e.manager.check_integrity()
