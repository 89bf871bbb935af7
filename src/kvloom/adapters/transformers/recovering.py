"""What happens before a prompt is opened: find out from where it can go on, choose a way, and go it."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvloom.adapters.transformers.interrupts import whole
from kvloom.adapters.transformers.replay import Replayer
from kvloom.core.namespace import ExtraKey
from kvloom.errors import ConfigError
from kvloom.manager.recovery import Recovery
from kvloom.manager.ways import Arrived, Choice, Option, Way
from kvloom.plan import Chain, StoredObjects, TransferPlan
from kvloom.transfer.source import TierSource
from kvloom.types import Grade, Int32Array

if TYPE_CHECKING:
    from kvloom.adapters.transformers.engine import Engine

_TRIES = 4
"""Choices for one request: after one that did not come whole, what is left is tried."""
_EMPTY = np.empty(0, dtype=np.int32)
_NOBODY: npt.NDArray[np.bool_] = np.zeros(0, dtype=np.bool_)
Names = tuple[bytes, tuple[ExtraKey, ...]]
NOTHING = StoredObjects(_EMPTY, _EMPTY, _EMPTY, _EMPTY)
"""What a tier has of a chain that it does not know."""


class Replay(enum.StrEnum):
    """Whether an engine makes lost state again by replay."""

    OFF = "off"
    AUTO = "auto"


def replay_of(value: Replay | str) -> Replay:
    """The ``Replay`` called ``value``; ConfigError for anything else."""
    try:
        return Replay(value)
    except ValueError:
        raise ConfigError(f"replay is {value!r}; use {' or '.join(Replay)}") from None


class _Source(TierSource):
    """The tiers of an engine: an interrupt that arrives while they are asked is delivered once the books are whole."""

    begin = whole(TierSource.begin)
    find = whole(TierSource.find)
    load = whole(TierSource.load)
    fetch = whole(TierSource.fetch)
    make_room = whole(TierSource.make_room)


@dataclass(slots=True)
class Passage:
    """A request on its way to its first token.

    Attributes:
        choice: the way that was chosen first.
        seconds: what it took so far: the way back, and the forwards since.
        given_up: whether that way did not lead where it should.
    """

    choice: Choice
    seconds: float
    given_up: bool = False


class Recoverer:
    """Chooses and goes the way back for the prompts of one engine.  Belongs to the engine's thread.

    Args:
        engine: whose arena it fills.
        clock: seconds.

    Attributes:
        recovery: the planner: estimates, counters.
        replayer: runs replays.
        clock: seconds.
        forced: a way that is gone whatever the planner says, where it is possible, else tokens are computed; for
            measurements.
    """

    def __init__(self, engine: Engine, clock: Callable[[], float]) -> None:
        self._engine, self.clock = engine, clock
        self._source = None if engine.cold is None else _Source(engine.cold)
        self.recovery = Recovery(engine.spec, () if self._source is None else self._source.names)
        self.replayer = Replayer(engine, clock)
        self.forced: Way | None = None
        self._open: tuple[TransferPlan, npt.NDArray[np.bool_]] | None = None

    def recover(self, tokens: Int32Array, salt: bytes, extra_keys: Sequence[ExtraKey], floor: Grade) -> Passage | None:
        """Let a prompt resume as far on as is worth it; call it right before ``Manager.open``.

        ``tokens``: the whole prompt.  Returns what there is to measure of its way, None for a prompt of one token.
        What cannot be read or does not fit is left out, and computed.
        """
        if len(tokens) < 2:
            return None
        self._finish(_NOBODY)  # an interrupt may have come before the end of the one before
        began = self.clock()
        names, ids = (salt, tuple(extra_keys)), np.ascontiguousarray(tokens[:-1])
        chains: Sequence[Chain | None] = [None]
        if self._source is not None:
            chains = self._source.begin(ids, *names, floor, self.recovery.patience_s(len(ids)))
        passage: Passage | None = None
        here = 0
        for chain in chains:  # ends of earlier turns within the prompt first; the last one is all of it
            if chain is not None and len(chain.tokens) <= here:
                continue  # the device goes beyond it
            passage = self._along(chain, ids if chain is None else chain.tokens, names, floor)
            if passage.choice.way is not Way.RECOMPUTE and not passage.given_up:
                break
            here = max(here, passage.choice.options[0].position)
        assert passage is not None
        passage.seconds = self.clock() - began
        return passage

    def _along(self, chain: Chain | None, ids: Int32Array, names: Names, floor: Grade) -> Passage:
        """Go the best ways towards the end of ``ids`` until one leads there, or none is left."""
        salt, keys = names
        passage: Passage | None = None
        for _ in range(_TRIES):
            tiers = () if self._source is None or chain is None else self._source.find(chain)
            survey = self._engine.manager.colder.survey(ids, tiers, salt=salt, extra_keys=keys, floor=floor)
            choice = self.recovery.choose(survey, self.forced)
            if passage is None and self._source is not None:
                self._source.note_limits(*names, floor)
            passage = passage or Passage(choice, 0.0)
            if choice.way is Way.RECOMPUTE:
                break
            whole = self._go(choice, ids, tiers, names, floor)
            passage.given_up = not whole
            if whole or whole is None:
                break
        assert passage is not None
        return passage

    def _go(
        self,
        choice: Choice,
        ids: Int32Array,
        tiers: Sequence[StoredObjects],
        names: Names,
        floor: Grade,
    ) -> bool | None:
        """Whether all arrived; None when asking again would be of no use: no room, or no more patience."""
        good = _NOBODY
        try:  # what takes long can be interrupted, and whatever happens the load ends
            self._plan(choice.chosen, ids, tiers, names, floor)
            if self._open is None and self._source is not None and self._source.make_room():
                self._plan(choice.chosen, ids, tiers, names, floor)
            if self._open is None:
                return None
            plan, made = self._open
            if not made.any():
                return self._load(plan, choice, floor)
            good = np.zeros(len(plan), dtype=np.bool_)
            if not made.all():
                assert self._source is not None
                arrived = self._source.fetch(plan, ~made, floor, choice.give_up)
                self._measure(arrived)
                if arrived is None:
                    return None
                good = arrived.good & ~made
            if (good | made).all():
                good = good | self._replay(choice.chosen, ids, plan, made)
        finally:
            self._finish(good)
        return bool(good.all())

    def _load(self, plan: TransferPlan, choice: Choice, floor: Grade) -> bool | None:
        """Bring a plan that nothing is to be replayed for; the tiers publish it, perhaps while it is still coming."""
        assert self._source is not None
        arrived = self._source.load(plan, floor, choice.give_up, choice.deadline_s)
        self._measure(arrived)
        if arrived is None:
            return None
        return bool(arrived.good.all())

    def _measure(self, arrived: Arrived | None) -> None:
        if arrived is None:
            assert self._source is not None
            for tier, n_bytes, seconds in self._source.slow:
                self.recovery.late(tier, n_bytes, seconds)
            return
        for tier, n_bytes, seconds in arrived.tiers:
            self.recovery.loaded(tier, n_bytes, seconds)

    @whole
    def _plan(
        self, option: Option, ids: Int32Array, tiers: Sequence[StoredObjects], names: Names, floor: Grade
    ) -> None:
        """Reserve what ``option`` brings and makes, as far as there is room."""
        manager, (salt, keys) = self._engine.manager, names
        assert option.reach is not None
        stored = joined(tiers[: option.reach.tiers], -(-option.position // manager.spec.segment_tokens))
        tokens = ids[: option.position]
        if option.span is None:
            plan = manager.colder.plan_load(tokens, stored, salt=salt, extra_keys=keys, floor=floor)
            self._open = None if plan is None else (plan, np.zeros(len(plan), dtype=np.bool_))
        else:
            self._open = manager.colder.plan_replay(
                tokens, stored, option.grade, salt=salt, extra_keys=keys, floor=floor
            )

    @whole
    def _finish(self, good: npt.NDArray[np.bool_]) -> None:
        """Publish what is good of the load in progress, unless its tiers see to that once nothing of it moves."""
        if self._open is not None:
            (plan, _), self._open = self._open, None
            if self._source is not None and self._source.taken is plan:
                return
            self._engine.manager.colder.finish_load(plan, good if len(good) else np.zeros(len(plan), dtype=np.bool_))

    def _replay(
        self, option: Option, tokens: Int32Array, plan: TransferPlan, made: npt.NDArray[np.bool_]
    ) -> npt.NDArray[np.bool_]:
        assert option.span is not None
        done = self.replayer.run(tokens, plan, made, option.span)
        self.recovery.replayed(option.span, done.forwards, done.seconds)
        return done.good


def joined(parts: Sequence[StoredObjects], rows: int) -> StoredObjects:
    """What several tiers have together of the first ``rows`` rows: of an object that more than one has, the best."""
    if not parts:
        return NOTHING
    names = ("row", "group", "column", "grade")
    row, group, column, grade = (np.concatenate([getattr(part, name) for part in parts]) for name in names)
    order = np.argsort(grade, kind="stable")  # of several the last one counts
    order = order[row[order] < rows]
    return StoredObjects(row[order], group[order], column[order], grade[order])
