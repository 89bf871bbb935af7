"""Decoding a whole batch per call: the same as token by token, all or nothing, and guarded against misuse."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Sequence

import numpy as np
import pytest
from tests.core import specs
from tests.core.toy_engine import ToyEngine
from tests.core.workshop import engine, ids, prompt_of, squeezed, view

from kvloom.errors import CapacityError, InputError, SequenceError, UnsupportedError
from kvloom.manager import CachedSequence
from kvloom.manager.decoding import Batch
from kvloom.spec.model_spec import ModelSpec
from kvloom.types import Grade

ALL = pytest.mark.parametrize("spec", specs.ALL, ids=lambda s: s.name)


def step(e: ToyEngine, batch: Batch, tokens: Sequence[int]) -> None:
    """One decode step: copies, then the forward of every sequence."""
    for plan in e.manager.step(batch, ids(list(tokens))):
        e.finish(plan)
    for sequence, token in zip(batch.sequences, tokens, strict=True):
        e.compute(sequence, [token])


def finish(e: ToyEngine, batch: Batch) -> None:
    """Commit the last step."""
    for plan in e.manager.finish(batch):
        e.finish(plan)


def started(e: ToyEngine, count: int, length: int = 5) -> list[CachedSequence]:
    """Sequences that have computed different prompts."""
    running = [e.open(prompt_of(length, v)) for v in range(count)]
    for v, s in enumerate(running):
        e.prefill(s, prompt_of(length, v))
    return running


@ALL
def test_a_batch_computes_and_publishes_what_single_steps_would(spec: ModelSpec) -> None:
    e, single = engine(spec, 900, max_nodes=300), engine(spec, 900, max_nodes=300)
    count = 2 * spec.segment_tokens + 3
    running, alone = started(e, 4), started(single, 4)
    batch = e.manager.batch(running)
    for at in range(count):
        step(e, batch, [(at * 3 + v) % 7 for v in range(4)])
        for v, s in enumerate(alone):
            single.step(s, [(at * 3 + v) % 7], Grade.FAITHFUL)
        e.manager.check_integrity()
    finish(e, batch)
    for one, other in zip(running, alone, strict=True):
        e.check(one)
        assert (one.length, one.grade) == (other.length, other.grade)
        assert one.tokens.tolist() == other.tokens.tolist()
        talk = [*one.tokens.tolist(), 1]
        assert [x.open(talk).reused for x in (e, single)].count(e.open(talk).reused) == 2
    kinds, wanted = e.manager.stats().kinds, single.manager.stats().kinds
    assert {k: (v.objects, v.commits) for k, v in kinds.items()} == {
        k: (v.objects, v.commits) for k, v in wanted.items()
    }


@ALL
def test_a_step_without_room_reserves_nothing_and_keeps_what_was_committed(spec: ModelSpec) -> None:
    groups = [g for g, group in enumerate(spec.groups) if not group.is_snapshot]
    for group in groups:
        e = engine(spec, 600, max_nodes=300)
        running = started(e, 3, 1)
        batch = e.manager.batch(running)
        while running[0].length % spec.groups[group].block_tokens or running[0].length == 0:
            step(e, batch, [1, 2, 3])
            if (running[0].length + 1) % spec.groups[group].block_tokens == 0:
                break
        lengths = [s.length for s in running]
        pending = bool(e.manager.rows.state[running[0].row, 1])
        with squeezed(e.manager, group, 1), pytest.raises(CapacityError, match="decode one token after"):
            e.manager.step(batch, ids([1, 2, 3]))
        assert [s.length for s in running] == [n + pending for n in lengths]
        e.manager.check_integrity()
        assert e.manager.stats().plans_open == 0, "nobody could copy the snapshots of the refused step"
        for s in running:
            e.check(s)
        e.step(running[0], [1], Grade.FAITHFUL)  # nothing of the refused step is left: single steps work too
        step(e, batch, [1, 2, 3])
        finish(e, batch)
        for s in running:
            e.check(s)
            s.close()
        assert e.manager.in_use() == 0


def test_a_batch_in_a_full_index_goes_on_unpublished() -> None:
    e = engine(specs.FULL, 300, max_nodes=4)
    running = started(e, 3, 3)
    batch = e.manager.batch(running)
    for at in range(13):
        step(e, batch, [at % 7, (at + 1) % 7, (at + 2) % 7])
    finish(e, batch)
    assert [s.length for s in running] == [16, 16, 16]
    assert [s.published_blocks(0) for s in running] == [2, 2, 2], "one segment each, then the index was full"
    assert running[1].tokens.tolist() == prompt_of(3, 1) + [(at + 1) % 7 for at in range(13)]
    for _ in range(20):
        e.manager.step(batch, ids([1, 2, 3]))
        e.manager.check_integrity()
    e.manager.finish(batch)
    assert [s.length for s in running] == [36, 36, 36]
    with pytest.raises(SequenceError, match="were not kept"):
        _ = running[0].tokens
    for s in running:
        s.close()
    assert e.manager.in_use() == 0
    e.request(prompt_of(20, 9))
    assert e.open(prompt_of(20, 9)).reused == 19


def test_an_empty_namespace_makes_room_for_a_batch() -> None:
    e = engine(specs.FULL, 300, max_nodes=3)
    e.open([1, 2], salt=b"gone").close()
    s = started(e, 1, 7)[0]
    batch = e.manager.batch([s])
    for token in range(12):
        step(e, batch, [token])
    finish(e, batch)
    assert e.open([*s.tokens.tolist(), 1]).reused == 16
    e.manager.check_integrity()


def test_misuse_is_refused_and_changes_nothing() -> None:
    e = engine(specs.THREE_SEGMENTS, 200)
    running = started(e, 2)
    with pytest.raises(SequenceError, match="twice"):
        e.manager.batch([running[0], running[0]])
    batch = e.manager.batch(running)
    for wrong in (np.zeros(2, dtype=np.int64), ids([1]), np.zeros((2, 1), dtype=np.int32)):
        with pytest.raises(InputError, match="int32 tokens of shape"):
            e.manager.step(batch, wrong)
    seen = [view(e.manager, s) for s in running]
    for tokens in ([1, -1], [-5, 1]):
        with pytest.raises(InputError, match="outside the vocabulary"):
            e.manager.step(batch, ids(tokens))
    assert [view(e.manager, s) for s in running] == seen
    running[1].append(ids([1]))
    with pytest.raises(SequenceError, match="last append"):
        e.manager.step(batch, ids([1, 1]))
    running[1].rollback()
    assert [view(e.manager, s) for s in running] == seen
    step(e, batch, [1, 1])
    with pytest.raises(SequenceError, match="finish the batch"):
        running[0].commit()
    with pytest.raises(SequenceError, match="neither committed nor rolled back"):
        running[0].append(ids([1]))
    running[0].rollback()
    finish(e, batch)
    assert [s.length for s in running] == [5, 6]
    for s in running:
        e.check(s)
    e.manager.check_integrity()


def test_positions_end() -> None:
    e = engine(specs.THREE_SEGMENTS, 400)
    running = started(e, 1, 95)
    batch = e.manager.batch(running)
    step(e, batch, [1])
    with pytest.raises(InputError, match="96 positions"):
        e.manager.step(batch, ids([1]))
    assert running[0].length == 96
    e.check(running[0])


def test_a_batch_notices_who_closed_or_broke() -> None:
    e = engine(specs.V4, 400)
    for end in ("close", "quarantine", "rollback"):
        running = started(e, 3, 20)
        batch = e.manager.batch(running)
        step(e, batch, [1, 2, 3])
        if end == "close":
            running[1].close()
        elif end == "quarantine":
            e.manager.drop("csa", quarantine=True)
        else:
            running[1].rollback()
        lengths = [s.length for s in running]
        for act in (lambda b=batch: e.manager.step(b, ids([1, 2, 3])), lambda b=batch: e.manager.finish(b)):
            with pytest.raises(SequenceError):
                act()
        assert [s.length for s in running] == lengths
        going = [s for s in running if not s.closed and not s.broken]
        rest = e.manager.batch(going)
        finish(e, rest)
        assert [s.length for s in going] == [21] * len(going)
        for s in running:
            s.close()
        e.manager.check_integrity()
        e.manager.clear()


def test_a_batch_serves_the_manager_that_made_it_and_no_other() -> None:
    target, draft = engine(specs.FULL, 300), engine(specs.FULL, 300)
    one, other = started(target, 1)[0], started(draft, 1)[0]
    foreign = draft.manager.batch([other])
    for call in (lambda: target.manager.step(foreign, ids([7])), lambda: target.manager.finish(foreign)):
        with pytest.raises(InputError, match="belongs to another manager"):
            call()
    with pytest.raises(InputError, match="a Batch is expected"):
        target.manager.finish(None)  # type: ignore[arg-type]
    assert (one.length, other.length) == (5, 5)
    target.manager.check_integrity()
    draft.manager.check_integrity()


def test_nothing_of_a_manager_is_copied_or_pickled() -> None:
    e = engine(specs.FULL, 300)
    running = started(e, 1)
    for thing in (e.manager, running[0], e.manager.batch(running)):
        for way in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(UnsupportedError, match="cannot be copied or pickled"):
                way(thing)


def test_tokens_of_a_step_may_be_strided_or_read_only() -> None:
    e = engine(specs.FULL, 300)
    batch = e.manager.batch(started(e, 2))
    strided = np.arange(8, dtype=np.int32).reshape(2, 4)[:, 1]
    fixed = ids([3, 4])
    fixed.flags.writeable = False
    for tokens in (strided, fixed):
        assert e.manager.step(batch, tokens) == ()
        for sequence, token in zip(batch.sequences, tokens.tolist(), strict=True):
            e.compute(sequence, [token])
    finish(e, batch)
    assert [s.tokens[-2:].tolist() for s in batch.sequences] == [[1, 3], [5, 4]]
