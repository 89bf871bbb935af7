"""What drives one sequence through forwards: reserve before, publish after, roll back when a forward fails."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from kvloom.adapters.transformers.block_table import Flight
from kvloom.adapters.transformers.interrupts import whole
from kvloom.adapters.transformers.layers import PagedLayerMixin
from kvloom.adapters.transformers.recurrent import PagedLinearLayer
from kvloom.adapters.transformers.state import SequenceState
from kvloom.errors import ArrivalError, InputError, SequenceError
from kvloom.transfer.arriving import Arrival, Ended
from kvloom.transfer.options import Restoring
from kvloom.types import AnyArray, Grade, Int32Array

if TYPE_CHECKING:
    from kvloom.adapters.transformers.engine import Engine, Names
    from kvloom.adapters.transformers.recovering import Passage
    from kvloom.manager.sequence import CachedSequence


_NOTHING: Int32Array = np.empty(0, dtype=np.int32)


class Runner:
    """One sequence on one engine.  Shared by a session and its cache; lives as long as either of them.

    Attributes:
        engine: the engine.
        sequence: the manager's side.
        flight: the forward in progress.
        layers: the layers of the cache.
        claim: the grade that forwards in progress may claim: CANONICAL only for the adapter's own chunks.
        prompt: the tokens that forwards must bring as far as they go, int32; beyond them anything goes.
        names: salt and extra keys of the namespace.
        made_by: what ``Engine.seen`` said when the sequence was opened.
        passage: how the prompt came to the state that it began with, until its first token is due.
    """

    def __init__(
        self,
        engine: Engine,
        sequence: CachedSequence,
        names: Names,
        made_by: str,
        prompt: Int32Array | None = None,
        passage: Passage | None = None,
        arrival: Arrival | None = None,
    ) -> None:
        self.engine = engine
        self.passage = passage
        self.names = names
        self.made_by = made_by
        self.prompt = _NOTHING if prompt is None else prompt
        self.flight = Flight(engine.hooks)
        self.claim = Grade.FAITHFUL
        self.layers: list[Any] = []
        self._arrival = arrival
        self._bind(sequence)

    def _bind(self, sequence: CachedSequence) -> None:
        """Make layers over the state of ``sequence``, in the list that the cache has."""
        engine = self.engine
        self.sequence = sequence
        self._state = SequenceState(engine.spec, engine.manager.geometry, engine.arena, sequence)
        self._state.set_gate(self._arrival)
        self.layers[:] = engine.layers.make(self._state, self.flight)
        self._paged = [layer for layer in self.layers if isinstance(layer, PagedLayerMixin)]
        # A linear layer is not told about every token (the fused decode kernel updates in place), so it cannot count.
        self.counting = [layer for layer in self._paged if not isinstance(layer, PagedLinearLayer)]
        self._kept_at = sequence.length if sequence.length == sequence.reused else -1
        self._sync()

    # ---------------------------------------------------------------- what is still arriving

    @property
    def arriving(self) -> bool:
        """Whether a part of the restored prefix may still be on its way."""
        return self._arrival is not None

    def settle(self) -> None:
        """Wait until all of the restored prefix is there.  If it did not come, begin again from what is left."""
        cold = self.engine.cold
        if self._arrival is not None:
            if cold is not None and cold.arriving is self._arrival:
                cold.await_arrival()
            self._settle()

    def settle_outside(self) -> None:
        """``settle``, unless a forward is in progress, whose layers wait each for itself."""
        if self._arrival is not None and self.flight.end < 0:
            self.settle()

    def begin_forward(self) -> None:
        """The model is called with this cache: only the session's own chunks begin before everything is there."""
        if self._arrival is not None and (self.claim is not Grade.CANONICAL or self._arrival.ended is not Ended.OPEN):
            self.settle()

    def begin_step(self) -> None:
        """A canonical chunk is about to be computed: SequenceError when the sequence cannot go on."""
        if self._arrival is not None and self._arrival.ended is not Ended.OPEN:
            self.settle()
        self.sequence.require_usable()

    def go_on(self) -> None:
        """A forward ended with an ArrivalError: begin again from what is left."""
        self.settle()
        if self.sequence.broken:  # everything came after all, but too late for state that is updated in place
            self.begin_again()

    @whole
    def _settle(self) -> None:
        arrival, cold = self._arrival, self.engine.cold
        if arrival is None:
            return
        if cold is not None and cold.arriving is arrival:
            cold.settle()
        self._arrival = None
        if arrival.ended is Ended.WHOLE:
            self._state.set_gate(None)
        elif not self.engine.hooks.removed:
            self.begin_again()

    @whole
    def begin_again(self) -> None:
        """Give up the sequence, whose state cannot be trusted, for one with what there is of its tokens now."""
        old = self.sequence
        self.flight.start = self.flight.end = -1
        old.close()
        # No more than before: who asked for the length then was told the truth, or less than it.
        tokens = self.prompt[: old.length + 1]
        sequence, _, _ = self.engine.lease(tokens, self.names, old.floor, Restoring.WHOLE)
        self._bind(sequence)
        self.engine.track(self)

    def _await_rest(self, arrival: Arrival) -> None:
        """The forward is over: nothing of it is published before all that it read is verified."""
        try:
            arrival.wait_all()
        except ArrivalError:
            self._roll_back()
            raise
        self.settle()

    # ---------------------------------------------------------------- forwards

    @property
    def length(self) -> int:
        """Tokens whose state is there."""
        return self.sequence.length

    @whole
    def take_off(self, ids: torch.Tensor) -> None:
        """A forward over ``ids`` (int64, ``[q]``) is about to run: reserve its slots."""
        self.abort()
        self.engine.close_dropped()
        sequence, start = self.sequence, self.sequence.length
        sequence.check()
        tokens = ids.numpy(force=True)
        if start < len(self.prompt):
            self._check_prompt(start, tokens)
        self.engine.run(self.engine.with_room(lambda: sequence.append(tokens)))
        self._state.refresh()
        self.flight.start, self.flight.end = start, start + ids.shape[0]
        self.engine.begin_forward(self._arrival)

    def land(self) -> None:
        """The forward is over: publish the segments that it completed.

        Raises ArrivalError when a part of the restored prefix did not arrive; then nothing of it was kept.
        """
        self.engine.end_forward()
        if self._arrival is not None:
            self._await_rest(self._arrival)
        self._land()

    @whole
    def _land(self) -> None:
        end = self.flight.end
        behind = sum([layer.cumulative_length != end for layer in self.counting])
        if behind:
            self._roll_back()
            raise SequenceError(
                f"the forward left {behind} layers without the new tokens, so nothing of it was kept; run all layers "
                "of the model (no early exit, no skipped layers) with this cache"
            )
        cold, segment = self.engine.cold, self.engine.spec.segment_tokens
        ends = end // segment > self.flight.start // segment
        arriving = ends and cold is not None and cold.arriving is not None
        if cold is not None and arriving and self.engine.manager.colder.may_take_over(self.sequence):
            cold.settle()  # the commit may take what another session waits for in place of an equal block of its own
        self.flight.start = self.flight.end = -1
        self.engine.run(self.sequence.commit(self.claim))

    def arrive(self) -> None:
        """Tell the planner how long the way took, once only the last token of the prompt is left to compute."""
        passage, recoverer = self.passage, self.engine.recoverer
        if passage is not None and self.length >= len(self.prompt) - 1:
            self.passage = None
            if recoverer is not None:
                recoverer.recovery.observed(passage.choice, passage.seconds, given_up=passage.given_up)

    @whole
    def abort(self) -> None:
        """If a forward is in progress it will not finish (it raised, or Ctrl-C): give its slots back."""
        if self.flight.end >= 0:
            self._roll_back()

    def checkpoint(self) -> None:
        """Keep the exact present end resumable, as far as there is room."""
        self.settle()
        self._checkpoint()

    @whole
    def _checkpoint(self) -> None:
        self.abort()
        self.sequence.check()
        if self.length and self.length != self._kept_at:
            self._keep_end()
            self._kept_at = self.length
            self.engine.keep_cold(self.sequence, self.names, self.made_by)

    def _keep_end(self) -> None:
        """Keep the end on the device; where transfers hold the room for it, once more when they have let go."""
        manager, cold = self.engine.manager, self.engine.cold
        unkept = manager.unkept()
        self.engine.run(self.sequence.checkpoint())
        if manager.unkept() > unkept and cold is not None:
            if cold.waiting:
                cold.make_room()
                unkept = manager.unkept()
                self.engine.run(self.sequence.checkpoint())
            if manager.unkept() > unkept:
                cold.stats.not_kept["no room on the device"] += 1

    def fork(self, prompt: Int32Array | None = None) -> Runner:
        """A second sequence with the same past, and a ``prompt`` of its own."""
        self.settle()
        return self._fork(prompt)

    @whole
    def _fork(self, prompt: Int32Array | None) -> Runner:
        self.abort()
        self.engine.close_dropped()
        self.sequence.check()
        child, plan = self.engine.with_room(self.sequence.fork)
        try:
            self.engine.run(plan)
            return self.engine.track(Runner(self.engine, child, self.names, self.made_by, prompt))
        except BaseException:
            child.close()
            raise

    @whole
    def close(self) -> None:
        """Keep the end resumable unless it is torn, and give everything back."""
        if self.sequence.closed:
            return
        arrival, cold, self._arrival = self._arrival, self.engine.cold, None
        try:
            self.abort()
            # What is still arriving was never gone on from, so there is no end to keep.
            if arrival is None and not self.sequence.broken:
                self._checkpoint()
        finally:
            self.sequence.close()
            if cold is not None and arrival is not None and cold.arriving is arrival:
                cold.give_up()

    def _check_prompt(self, start: int, tokens: AnyArray) -> None:
        """InputError when ``tokens`` at position ``start`` are not those that the session was opened with."""
        expected = self.prompt[start : start + len(tokens)]
        differs = expected != tokens[: len(expected)]
        if differs.any():
            self.engine.checked(tokens)  # an id outside the vocabulary is the better reason
            at = int(differs.argmax())
            raise InputError(
                f"token {tokens[at]} at position {start + at} is not that of the session's prompt, {expected[at]}; "
                "open another session, or a fork, for another prompt"
            )

    def _roll_back(self) -> None:
        self.engine.end_forward()
        self.flight.start = self.flight.end = -1
        self.sequence.rollback()
        if not self.sequence.broken:
            self._sync()

    def _sync(self) -> None:
        self._state.refresh()
        for layer in self._paged:
            layer.sync(self.length)
