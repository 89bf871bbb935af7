"""One transition table, as data, checked on every change."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from tests.core import specs
from tests.core.differential import Life
from tests.core.workshop import engine, ids, prompt_of, view
from tests.core.worlds import WORLDS

from kvloom.core.fields import STATE
from kvloom.core.lifecycle import ALLOWED, TRANSITIONS, move
from kvloom.errors import LifecycleError, SequenceError
from kvloom.types import Kind, ObjectState

PAIRS = list(itertools.product(ObjectState, ObjectState))


@pytest.mark.parametrize(("current", "target"), PAIRS, ids=lambda s: s.name)
def test_a_transition_is_legal_or_changes_nothing(current: ObjectState, target: ObjectState) -> None:
    legal = target in TRANSITIONS[current] or (target is ObjectState.QUARANTINED and current is not ObjectState.FREE)
    slots = np.full((3, 8), 7, dtype=np.int32)
    slots[1, STATE] = int(current)
    wanted = slots.copy()
    if legal:
        wanted[1, STATE] = int(target)
        move(slots, 1, int(target))
        assert (slots == wanted).all()
        return
    with pytest.raises(LifecycleError):
        move(slots, 1, int(target))
    assert (slots == wanted).all()


def test_the_spine_is_in_the_table() -> None:
    spine = ["FREE", "ALLOCATED", "READY", "COMMITTED", "COLD", "EVICTED", "FREE"]
    for current, target in itertools.pairwise(spine):
        assert ALLOWED[ObjectState[current], ObjectState[target]]


def test_every_state_leads_back_to_free_and_nothing_leaves_quarantine_but_to_free() -> None:
    for start in ObjectState:
        reached, frontier = set(), {start}
        while frontier:
            reached |= frontier
            frontier = {s for f in frontier for s in ObjectState if ALLOWED[f, s]} - reached
        assert ObjectState.FREE in reached, start
        assert ObjectState.COMMITTED in reached, start
    left = {s for s in ObjectState if ALLOWED[ObjectState.QUARANTINED, s]}
    assert left == {ObjectState.FREE, ObjectState.QUARANTINED}


def test_what_happens_in_a_random_life_follows_the_table() -> None:
    """Between two looks a slot may pass several states; each look must be reachable from the one before."""
    reachable = np.linalg.matrix_power(ALLOWED.astype(np.int64) + np.eye(len(ObjectState), dtype=np.int64), 8) > 0
    seen: set[int] = set()
    for world in WORLDS[2:8]:
        life = Life(world, seed=3)
        before = life.fast.arrays.slot[:, STATE].copy()
        for _ in range(80):
            life.step()
            after = life.fast.arrays.slot[:, STATE]
            assert reachable[before, after].all()
            seen |= set(after.tolist())
            before = after.copy()
    here = {ObjectState.FREE, ObjectState.ALLOCATED, ObjectState.READY, ObjectState.COMMITTED}
    assert here <= {ObjectState(s) for s in seen} <= here | {ObjectState.QUARANTINED}


# ---------------------------------------------------------------- the life of a sequence


def test_a_sequence_out_of_order_raises_and_changes_nothing() -> None:
    e = engine(specs.V4, 200)
    s = e.manager.open(ids(prompt_of(20)))
    for act in (
        lambda: s.append(ids([1])),
        s.commit,
        s.rollback,
        s.checkpoint,
        s.fork,
        s.check,
        lambda: s.live_slot(4),
    ):
        with pytest.raises(SequenceError, match="restore plan was not completed"):
            act()
    e.finish(s.restore)
    for act in (s.commit, s.rollback):
        with pytest.raises(SequenceError, match="nothing was appended"):
            act()
    s.append(ids([1]))
    seen = view(e.manager, s)
    for act in (lambda: s.append(ids([1])), s.checkpoint, s.fork):
        with pytest.raises(SequenceError, match="append"):
            act()
    assert view(e.manager, s) == seen
    e.manager.check_integrity()
    s.close()
    for act in (lambda: s.append(ids([1])), s.commit, s.rollback, s.checkpoint, s.fork, s.check):
        with pytest.raises(SequenceError, match="closed"):
            act()
    s.close()
    e.manager.check_integrity()


def test_after_a_failed_forward_in_place_state_is_not_trusted() -> None:
    """Blocks can be given back; a tail or a recurrent state may be half written, so the sequence is broken."""
    for spec, broken in ((specs.FULL_WINDOW, False), (specs.V4, True), (specs.RECURRENT, True)):
        e = engine(spec, 200)
        s = e.open(prompt_of(20))
        e.prefill(s, prompt_of(6))
        s.append(ids(prompt_of(9)))
        s.rollback()
        assert s.broken is broken
        assert s.length == 6
        e.manager.check_integrity()
        if broken:
            with pytest.raises(SequenceError, match="half-way"):
                s.append(ids([1]))
        else:
            e.prefill(s, prompt_of(20))
        s.close()
        assert e.manager.in_use() == 0


def test_an_abandoned_restore_breaks_the_sequence() -> None:
    """Its slots were never filled: a forward must not read them."""
    e = engine(specs.V4, 200)
    e.request(prompt_of(20))
    s = e.manager.open(ids(prompt_of(20)))
    other = e.manager.open(ids(prompt_of(20)))
    assert s.reused == 19
    e.manager.abandon(s.restore)
    assert s.broken
    assert not other.broken
    with pytest.raises(SequenceError, match="abandoned"):
        s.append(ids([1]))
    s.close()
    e.finish(other.restore)
    e.manager.abandon(other.restore)
    assert not other.broken, "it was completed before"
    e.step(other, prompt_of(20)[-1:])
    other.close()
    assert e.manager.in_use() == 0
    e.manager.check_integrity()


def test_an_abandoned_fork_breaks_only_the_child() -> None:
    e = engine(specs.RECURRENT, 96)
    parent = e.open(prompt_of(20))
    e.prefill(parent, prompt_of(6))
    child, plan = parent.fork()
    e.manager.abandon(plan)
    assert child.broken
    assert not parent.broken
    child.close()
    e.step(parent, [1])
    e.manager.check_integrity()


@pytest.mark.parametrize("kind", [Kind.COMPRESSED, Kind.WINDOW, Kind.TAIL])
def test_who_reads_a_quarantined_object_is_broken(kind: Kind) -> None:
    """Whether it was leased already, or its restore has still to read it; others go on."""
    e = engine(specs.V4, 200)
    e.request(prompt_of(20))
    e.request(prompt_of(20, 3), salt=b"other")
    leased, stranger = e.open(prompt_of(20)), e.open(prompt_of(4, 5))
    loading = e.manager.open(ids(prompt_of(20)))
    e.manager.drop(kind, quarantine=True)
    assert loading.broken
    assert leased.broken is (kind is not Kind.TAIL), "a tail was copied: nothing of it is shared"
    assert not stranger.broken
    e.manager.check_integrity()
    for s in (leased, loading):
        s.close()
    e.finish(loading.restore)
    stranger.close()
    assert e.manager.in_use() == 0
    e.manager.check_integrity()
