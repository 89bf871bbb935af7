"""A manager whose calls are told to somebody, for instance to be written down and replayed.

It is another class, so that the ordinary one pays nothing for it.  Calls that only look are not told, nor are
calls that were refused for their arguments: they change nothing but the logical clock, which ``Tick`` tells.
What goes to and comes from colder tiers is refused: what they held cannot be told, so it could not be replayed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np

from kvloom.config import Device
from kvloom.core.namespace import ExtraKey
from kvloom.errors import CapacityError, InputError, KVLoomError, UnsupportedError
from kvloom.manager import events
from kvloom.manager.colder import ColderTiers
from kvloom.manager.decoding import Batch, rows_of
from kvloom.manager.events import Event, Watch
from kvloom.manager.inputs import checked_keys, grade_of
from kvloom.manager.manager import Manager
from kvloom.manager.sequence import CachedSequence
from kvloom.plan import CopyPlan, TransferPlan
from kvloom.spec.model_spec import ModelSpec
from kvloom.types import AnyArray, Grade, Int32Array, Kind


class WatchedSequence(CachedSequence):
    """A sequence of a ``WatchedManager``.

    Attributes:
        number: 1, 2, … in the order in which sequences were made.
    """

    number = 0

    def append(self, token_ids: AnyArray) -> CopyPlan:
        """See ``CachedSequence.append``."""
        door = self._door()
        try:
            plan = super().append(token_ids)
        except CapacityError as error:
            ids = door.ids.checked(token_ids, self.length)
            door.tell(events.Append(self.number, ids.copy(), refused=type(error).__name__))
            raise
        door.tell(events.Append(self.number, self._ids.copy(), plan.ticket))
        return plan

    def commit(self, grade: Grade = Grade.CANONICAL) -> CopyPlan:
        """See ``CachedSequence.commit``."""
        door = self._door()
        plan = super().commit(grade)
        door.tell(events.Commit(self.number, grade_of(grade, "grade"), plan.ticket))
        return plan

    def rollback(self) -> None:
        """See ``CachedSequence.rollback``."""
        door = self._door()
        super().rollback()
        door.tell(events.Rollback(self.number))

    def checkpoint(self) -> CopyPlan:
        """See ``CachedSequence.checkpoint``."""
        door = self._door()
        plan = super().checkpoint()
        door.tell(events.Checkpoint(self.number, plan.ticket))
        return plan

    def fork(self) -> tuple[CachedSequence, CopyPlan]:
        """See ``CachedSequence.fork``."""
        door = self._door()
        try:
            child, plan = super().fork()
        except CapacityError as error:
            door.tell(events.Fork(self.number, 0, refused=type(error).__name__))
            raise
        door.tell(events.Fork(self.number, door.numbered(child), plan.ticket))
        return child, plan

    def close(self) -> None:
        """See ``CachedSequence.close``."""
        if not self.closed:
            door = self._door()
            super().close()
            door.tell(events.Close(self.number))

    def _door(self) -> WatchedManager:
        assert isinstance(self._books, WatchedManager)
        self._books.listen()
        return self._books


class WatchedBatch(Batch):
    """A batch of a ``WatchedManager``.

    Attributes:
        number: 1, 2, … in the order in which batches were made.
    """

    __slots__ = ("number",)
    number: int


class UntoldTiers(ColderTiers):
    """The calls of a ``WatchedManager`` about colder tiers: looking is free, all else raises UnsupportedError."""

    def plan_load(self, *_given: object, **_names: object) -> NoReturn:
        """Raises UnsupportedError."""
        _refuse()

    def plan_replay(self, *_given: object, **_names: object) -> NoReturn:
        """Raises UnsupportedError."""
        _refuse()

    def begin_arriving(self, plan: TransferPlan) -> NoReturn:
        """Raises UnsupportedError."""
        _refuse()

    def withdraw(self, plan: TransferPlan, good: AnyArray) -> NoReturn:
        """Raises UnsupportedError."""
        _refuse()

    def finish_load(self, plan: TransferPlan, good: AnyArray) -> NoReturn:
        """Raises UnsupportedError."""
        _refuse()

    def plan_offload(self, *_given: object, **_names: object) -> NoReturn:
        """Raises UnsupportedError."""
        _refuse()

    def plan_units(self, *_given: object, **_names: object) -> NoReturn:
        """Raises UnsupportedError."""
        _refuse()

    def finish_store(self, plan: TransferPlan) -> NoReturn:
        """Raises UnsupportedError."""
        _refuse()


class WatchedManager(Manager):
    """A ``Manager`` that tells ``watch`` what is done to it; see there for the other arguments.

    ``watch`` is called in the manager's thread, after each call, and must not raise.
    """

    sequence_type = WatchedSequence
    batch_type = WatchedBatch
    colder_type = UntoldTiers

    def __init__(self, spec: ModelSpec, tiers: Sequence[Device], *, watch: Watch, **options: Any) -> None:
        super().__init__(spec, tiers, **options)
        self._watch = watch
        self._clock = self.now()
        self._sequences = self._batches = 0
        self.tell(events.Made(spec, self.policy.name, self.cap, len(self.rows.state), len(self.arrays.node)))

    def listen(self) -> None:
        """A call begins: tell what was done to the clock since the one before.  Raises WrongThreadError."""
        self.enter()
        if self.now() != self._clock:
            self.tell(events.Tick(self.now() - self._clock))

    def tell(self, event: Event) -> None:
        """A call is over."""
        self._clock = self.now()
        self._watch(event)

    def numbered(self, sequence: CachedSequence) -> int:
        """Give a new sequence its number."""
        assert isinstance(sequence, WatchedSequence)
        self._sequences += 1
        sequence.number = self._sequences
        return sequence.number

    def open(
        self,
        tokens: AnyArray,
        *,
        salt: bytes = b"",
        extra_keys: Sequence[ExtraKey] = (),
        floor: Grade = Grade.FAITHFUL,
        priority: int = 0,
    ) -> CachedSequence:
        """See ``Manager.open``."""
        self.listen()
        try:
            sequence = super().open(tokens, salt=salt, extra_keys=extra_keys, floor=floor, priority=priority)
        except CapacityError as error:
            with contextlib.suppress(InputError):  # ids that were not looked at before it was too late
                ids, keys = self.ids.checked(tokens).copy(), checked_keys(extra_keys)
                refused = type(error).__name__
                self.tell(events.Open(0, ids, salt, keys, grade_of(floor), int(priority), refused=refused))
            raise
        found = sequence.explanation
        self.tell(
            events.Open(
                self.numbered(sequence),
                self.ids.checked(tokens).copy(),
                salt,
                checked_keys(extra_keys),
                grade_of(floor),
                int(priority),
                sequence.reused,
                found.grade,
                found.limits[0].reason,
                found.limits[0].kind,
                sequence.restore.ticket,
            )
        )
        return sequence

    def complete(self, plan: CopyPlan) -> None:
        """See ``Manager.complete``."""
        self.listen()
        super().complete(plan)
        self.tell(events.Complete(plan.ticket))

    def abandon(self, plan: CopyPlan) -> None:
        """See ``Manager.abandon``."""
        self.listen()
        super().abandon(plan)
        self.tell(events.Abandon(plan.ticket))

    def batch(self, sequences: Sequence[CachedSequence]) -> Batch:
        """See ``Manager.batch``."""
        self.listen()
        made = super().batch(sequences)
        assert isinstance(made, WatchedBatch)
        self._batches += 1
        made.number = self._batches
        self.tell(events.MakeBatch(made.number, tuple(_number(sequence) for sequence in made.sequences)))
        return made

    def step(self, batch: Batch, tokens: Int32Array) -> tuple[CopyPlan, ...]:
        """See ``Manager.step``."""
        self.listen()
        rows_of(self, batch)  # a batch that cannot go on changes nothing; every other refusal is told
        assert isinstance(batch, WatchedBatch)
        try:
            plans = super().step(batch, tokens)
        except KVLoomError as error:
            if getattr(tokens, "dtype", None) == np.int32 and tokens.shape == (len(batch),):
                self.tell(events.Step(batch.number, tokens.copy(), refused=type(error).__name__))
            raise
        self.tell(events.Step(batch.number, tokens.copy(), tuple(plan.ticket for plan in plans)))
        return plans

    def finish(self, batch: Batch) -> tuple[CopyPlan, ...]:
        """See ``Manager.finish``."""
        self.listen()
        plans = super().finish(batch)
        assert isinstance(batch, WatchedBatch)
        self.tell(events.Finish(batch.number, tuple(plan.ticket for plan in plans)))
        return plans

    def evict(self, n_bytes: int) -> int:
        """See ``Manager.evict``."""
        self.listen()
        freed = super().evict(n_bytes)
        self.tell(events.Evict(min(int(n_bytes), self.geometry.arena_bytes), freed))
        return freed

    def clear(self, salt: bytes | None = None) -> int:
        """See ``Manager.clear``."""
        self.listen()
        dropped = super().clear(salt)
        self.tell(events.Clear(salt, dropped))
        return dropped

    def drop(self, what: Kind | str, position: int | None = None, *, quarantine: bool = False) -> int:
        """See ``Manager.drop``."""
        self.listen()
        dropped = super().drop(what, position, quarantine=quarantine)
        kind, group = (what, "") if isinstance(what, Kind) else (None, what)
        at = None if position is None else min(int(position), np.iinfo(np.int64).max)
        self.tell(events.Drop(kind, group, at, bool(quarantine), dropped))
        return dropped


def _refuse() -> NoReturn:
    raise UnsupportedError(
        "what goes to and comes from a store cannot be recorded; use a manager without a watch, or no store"
    )


def _number(sequence: CachedSequence) -> int:
    assert isinstance(sequence, WatchedSequence)
    return sequence.number
