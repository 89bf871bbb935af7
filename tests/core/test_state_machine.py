"""A hypothesis state machine over the public API, with an engine that really computes.

After every step the books are recomputed; whenever a sequence reads its state, every row must be what a cold run of
the same tokens would have computed.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from tests.core import specs
from tests.core.toy_engine import ToyEngine

from kvloom.config import Device
from kvloom.errors import CapacityError, SequenceError
from kvloom.manager import CachedSequence, Manager
from kvloom.plan import CopyPlan
from kvloom.types import Grade

KIB = 1024
ARENAS = [
    (specs.FULL_WINDOW, 46 * KIB),
    (specs.FULL_WINDOW, 80 * KIB),
    (specs.THREE_SEGMENTS, 90 * KIB),
    (specs.V4, 150 * KIB),
    (specs.V4, 200 * KIB),
    (specs.RECURRENT, 60 * KIB),
    (specs.STATE_ONLY, 80 * KIB),
    (specs.LARGE_LCM, 112 * KIB),
]
COUNTS = st.integers(1, 20)


def _stream(leave_at: int, variant: int) -> list[int]:
    """Tokens that agree with the common stream up to ``leave_at``."""
    return [i % 7 if i < leave_at else (i * (variant + 3) + variant) % 11 for i in range(96)]


STREAMS = [_stream(96, 0), _stream(40, 1), _stream(16, 2), _stream(17, 3), _stream(1, 4)]
"""What sequences say; they share prefixes of 96, 40, 16, 17 and 1 tokens."""


class Caching(RuleBasedStateMachine):
    """Requests come and go; forwards fail; plans are reported late; memory is short."""

    arenas = ARENAS

    def __init__(self) -> None:
        super().__init__()
        self.running: list[CachedSequence] = []
        self.late: list[CopyPlan] = []
        self.hits = 0

    @initialize(arena=st.sampled_from(ARENAS), nodes=st.sampled_from([12, 40, 200]))
    def make(self, arena: tuple[Any, int], nodes: int) -> None:
        spec, size = arena
        self.manager = Manager(spec, [Device(size)], max_sequences=4, max_nodes=nodes)
        self.engine = ToyEngine(self.manager)

    def _pick(self, data: st.DataObject) -> CachedSequence:
        return data.draw(st.sampled_from(self.running), label="sequence")

    def _report(self, plan: CopyPlan, *, now: bool) -> None:
        if plan.ticket and now:
            self.manager.complete(plan)
        elif plan.ticket:
            self.late.append(plan)

    @rule(
        stream=st.sampled_from(STREAMS),
        count=st.integers(1, 90),
        floor=st.sampled_from([Grade.FAITHFUL, Grade.APPROXIMATE, Grade.CANONICAL]),
        salt=st.sampled_from([b"", b"", b"", b"other"]),
    )
    def open(self, stream: list[int], count: int, floor: Grade, salt: bytes) -> None:
        prompt = stream[:count]
        crowded = bool(self.running or self.late)
        try:
            sequence = self.engine.open(prompt, floor=floor, salt=salt)
        except CapacityError as refused:
            if not refused.never_fits and not crowded:
                raise  # alone, whatever can ever fit fits now
            return
        assert sequence.reused < len(prompt)
        assert sequence.explanation.boundary == sequence.reused
        assert sequence.grade >= floor
        self.hits += sequence.reused > 0
        self.running.append(sequence)

    @rule(stream=st.sampled_from(STREAMS), count=st.integers(2, 90), answer=st.integers(0, 3))
    def whole_request(self, stream: list[int], count: int, answer: int) -> None:
        try:
            self.hits += self.engine.request(stream[:count], stream[count : count + answer]).reused > 0
        except CapacityError:
            for sequence in set(self.manager.running()) - set(self.running):
                sequence.close()

    @precondition(lambda self: self.running)
    @rule(
        data=st.data(),
        stream=st.sampled_from(STREAMS),
        count=COUNTS,
        to_segment_end=st.booleans(),
        grade=st.sampled_from([Grade.CANONICAL, Grade.CANONICAL, Grade.FAITHFUL]),
    )
    def step(self, data: st.DataObject, stream: list[int], count: int, to_segment_end: bool, grade: Grade) -> None:
        sequence = self._pick(data)
        segment = self.manager.spec.segment_tokens
        if to_segment_end:
            count = segment - sequence.length % segment
        tokens = stream[sequence.length :][:count] or [1]
        if self.manager.spec.max_positions and sequence.length + len(tokens) > self.manager.spec.max_positions:
            return
        before = sequence.length
        try:
            plan = self.engine.forward(sequence, tokens, grade)
        except CapacityError:
            assert sequence.length == before
            return
        self._report(plan, now=data.draw(st.booleans(), label="reported"))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), count=COUNTS)
    def forward_that_fails(self, data: st.DataObject, count: int) -> None:
        sequence = self._pick(data)
        tokens = [1] * count
        if self.manager.spec.max_positions and sequence.length + len(tokens) > self.manager.spec.max_positions:
            return
        try:
            sequence.append(tokens)
        except CapacityError:
            return
        sequence.rollback()
        if sequence.broken:
            with pytest.raises(SequenceError):
                sequence.append(tokens)
            sequence.close()
            self.running.remove(sequence)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), now=st.booleans())
    def checkpoint(self, data: st.DataObject, now: bool) -> None:
        plan = self._pick(data).checkpoint()
        self.engine.arena.run(plan)
        self._report(plan, now=now)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        try:
            child, plan = self._pick(data).fork()
        except CapacityError:
            return
        self.engine.finish(plan)
        self.engine.check(child)
        self.running.append(child)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        sequence = self._pick(data)
        sequence.close()
        self.running.remove(sequence)

    @precondition(lambda self: self.late)
    @rule(data=st.data(), executed=st.booleans())
    def report(self, data: st.DataObject, executed: bool) -> None:
        plan = data.draw(st.sampled_from(self.late), label="plan")
        self.late.remove(plan)
        (self.manager.complete if executed else self.manager.abandon)(plan)

    @rule(n_bytes=st.integers(0, 20 * KIB))
    def evict(self, n_bytes: int) -> None:
        freed = self.manager.evict(n_bytes)
        assert freed >= n_bytes or self.manager.evict(1) == 0

    @rule(salt=st.sampled_from([None, b"other"]))
    def clear(self, salt: bytes | None) -> None:
        self.manager.clear(salt)
        if salt is None:
            assert all(kind.objects == 0 for kind in self.manager.stats().kinds.values())

    @rule(data=st.data(), quarantine=st.booleans())
    def drop(self, data: st.DataObject, quarantine: bool) -> None:
        group = data.draw(st.sampled_from(self.manager.spec.groups), label="group")
        self.manager.drop(group.name, quarantine=quarantine)
        for sequence in [s for s in self.running if s.broken]:
            assert quarantine
            sequence.close()
            self.running.remove(sequence)

    @invariant()
    def books_agree(self) -> None:
        if hasattr(self, "manager"):
            self.manager.check_integrity()
            stats = self.manager.stats()
            assert stats.used <= stats.arena <= stats.cap

    @invariant()
    def every_running_state_is_right(self) -> None:
        for sequence in self.running:
            self.engine.check(sequence)

    def teardown(self) -> None:
        """Nothing is left behind once everybody is gone."""
        if not hasattr(self, "manager"):
            return
        for sequence in self.running:
            sequence.close()
        for plan in self.late:
            self.manager.complete(plan)
        self.manager.check_integrity()
        assert self.manager.in_use() == 0
        self.manager.clear()
        assert self.manager.stats().used == 0


def test_state_machine() -> None:
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        Caching,
        settings=settings(
            max_examples=60,
            stateful_step_count=40,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
