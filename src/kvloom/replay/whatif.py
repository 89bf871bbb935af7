"""A recorded run under another policy or in another tier: what would have happened.

Lookups find other prefixes here.  So calls are made by position: tokens that are there already are not appended, and
those that the run found and that are missing here are computed from the prompt, in canonical chunks, as sessions do.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvloom.errors import CapacityError
from kvloom.manager import events
from kvloom.manager.manager import Manager
from kvloom.manager.sequence import CachedSequence
from kvloom.plan import CopyPlan
from kvloom.replay.player import Player
from kvloom.replay.recording import Recording
from kvloom.types import Grade, Int32Array


@dataclass(slots=True)
class _Live:
    """A sequence of the recording and the one that stands for it here.

    Attributes:
        sequence: None once it was refused.
        prompt: what it was opened with.
        at: tokens that are computed in the recording.
        pending: tokens that are appended there and not committed.
        stepped: whether a batch appended them.
        appended: whether something is appended and not committed here.
    """

    sequence: CachedSequence | None
    prompt: Int32Array
    at: int
    pending: int = 0
    stepped: bool = False
    appended: bool = False


class WhatIfPlayer(Player):
    """Never stops for what is not as recorded.  A request that does not fit is closed, its other calls left out."""

    def __init__(self, recording: Recording, manager: Manager) -> None:
        super().__init__(recording, manager)
        self._live: dict[int, _Live] = {}
        self._members: dict[int, tuple[int, ...]] = {}
        self._plans: dict[int, CopyPlan] = {}

    def compare(self, what: str, recorded: object, found: object) -> None:
        """See ``Player.compare``: everything may differ here."""

    def _open(self, event: events.Open) -> None:
        if event.refused:
            self.refused += 1
            return
        live = self._live[event.seq] = _Live(None, event.tokens, event.reused)
        try:
            live.sequence = self.look(event)
        except CapacityError:
            self.refused += 1
            return
        self._take(event.plan, live.sequence.restore)

    def _append(self, event: events.Append) -> None:
        live = self._find(event.seq)
        if event.refused:
            self.refused += 1
            return
        self._begin(live, event.tokens, event.plan)

    def _commit(self, event: events.Commit) -> None:
        live = self._find(event.seq)
        if not live.pending:
            self.fail(f"sequence {event.seq} has nothing to commit")
        self._end(live, event.grade, event.plan)

    def _rollback(self, event: events.Rollback) -> None:
        live = self._find(event.seq)
        live.pending, live.stepped = 0, False
        sequence = self._usable(live)
        if sequence is not None and live.appended:
            live.appended = False
            sequence.rollback()

    def _checkpoint(self, event: events.Checkpoint) -> None:
        live = self._find(event.seq)
        sequence = self._brought(live)
        if sequence is not None and sequence.length == live.at:  # else the hit went further, so more is kept
            self._take(event.plan, sequence.checkpoint())

    def _fork(self, event: events.Fork) -> None:
        live = self._find(event.seq)
        if event.refused:
            self.refused += 1
            return
        child = self._live[event.child] = _Live(None, live.prompt, live.at)
        sequence = self._brought(live)
        if sequence is None:
            return
        try:
            child.sequence, plan = sequence.fork()
        except CapacityError:
            self.refused += 1
            return
        self._take(event.plan, plan)

    def _close(self, event: events.Close) -> None:
        live = self._find(event.seq)
        del self._live[event.seq]
        if live.sequence is not None:
            live.sequence.close()

    def _batch(self, event: events.MakeBatch) -> None:
        for seq in event.seqs:
            self._find(seq)
        self._members[event.batch] = event.seqs

    def _step(self, event: events.Step) -> None:
        members = self._commit_members(event.batch)
        if len(event.tokens) != len(members):
            self.fail(f"{len(event.tokens)} tokens for a batch of {len(members)}")
        if event.refused:
            self.refused += 1
            return
        for i, live in enumerate(members):
            self._begin(live, event.tokens[i : i + 1], 0)
            live.stepped = True

    def _finish(self, event: events.Finish) -> None:
        self._commit_members(event.batch)

    def _complete(self, event: events.Complete) -> None:
        plan = self._plans.pop(event.plan, None) if event.plan else CopyPlan(0)
        if plan is not None:
            self.manager.complete(plan)

    def _abandon(self, event: events.Abandon) -> None:
        plan = self._plans.pop(event.plan, None) if event.plan else CopyPlan(0)
        if plan is not None:
            self.manager.abandon(plan)

    # ---------------------------------------------------------------- parts

    def _find(self, seq: int) -> _Live:
        live = self._live.get(seq)
        if live is None:
            self.fail(f"sequence {seq} is not open here")
        return live

    def _usable(self, live: _Live) -> CachedSequence | None:
        """Ours, if calls to it still have a meaning."""
        if live.sequence is None or live.sequence.broken:
            self.left_out += 1
            return None
        return live.sequence

    def _commit_members(self, batch: int) -> list[_Live]:
        """Commit what the last step of a batch appended; its sequences."""
        if batch not in self._members:
            self.fail(f"batch {batch} was not made before")
        members = [self._find(seq) for seq in self._members[batch]]
        for live in members:
            if live.stepped:
                self._end(live, Grade.FAITHFUL, 0)
        return members

    def _begin(self, live: _Live, tokens: Int32Array, ticket: int) -> None:
        """Append what is not there yet of ``tokens`` and of all before them."""
        if live.pending:
            self.fail("the last append was neither committed nor rolled back")
        if live.at == len(live.prompt) - 1 and live.sequence is not None and live.sequence.length < live.at:
            kept = self._brought(live)  # the run found the state there, which whoever computes it keeps
            if kept is not None and not kept.broken:
                self.manager.complete(kept.checkpoint())
        live.pending = len(tokens)
        sequence = self._usable(live)
        if sequence is None or sequence.length >= live.at + live.pending:
            return
        missing = live.prompt[sequence.length : live.at]
        ids = np.concatenate([missing, tokens]) if len(missing) else tokens[sequence.length - live.at :]
        try:
            rest = self._compute(sequence, ids) if len(missing) else ids
            if len(rest):
                self._take(ticket, sequence.append(rest))
                live.appended = True
        except CapacityError:
            self._refuse(live)

    def _end(self, live: _Live, grade: Grade, ticket: int) -> None:
        """Commit what ``_begin`` appended."""
        live.at += live.pending
        live.pending, live.stepped = 0, False
        sequence = self._usable(live)
        if sequence is not None and live.appended:
            live.appended = False
            self._take(ticket, sequence.commit(grade))

    def _brought(self, live: _Live) -> CachedSequence | None:
        """Ours, with everything computed that is computed in the recording."""
        if live.pending:
            self.fail("the last append was neither committed nor rolled back")
        sequence = self._usable(live)
        if sequence is not None and sequence.length < live.at:
            missing = live.prompt[sequence.length : live.at]
            try:
                rest = self._compute(sequence, missing)
                if len(rest):
                    self.manager.complete(sequence.append(rest))
                    self.manager.complete(sequence.commit())
            except CapacityError:
                self._refuse(live)
        return live.sequence

    def _compute(self, sequence: CachedSequence, ids: Int32Array) -> Int32Array:
        """Compute the leading ``ids`` in canonical chunks; returns those of the last, which may be a whole one."""
        segment = self.manager.spec.segment_tokens
        while len(ids) > (size := segment - sequence.length % segment):
            self.manager.complete(sequence.append(ids[:size]))
            self.manager.complete(sequence.commit())
            ids = ids[size:]
        return ids

    def _refuse(self, live: _Live) -> None:
        """What does not fit is over, as an engine would end it."""
        self.refused += 1
        assert live.sequence is not None
        live.sequence.close()
        live.sequence = None

    def _take(self, ticket: int, plan: CopyPlan) -> None:
        """Keep a plan until the recording completes it; complete it now if there was none in the recording."""
        if ticket:
            self._plans[ticket] = plan
        elif plan.ticket:
            self.manager.complete(plan)
