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
from kvloom.errors import InputError, SequenceError
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
    ) -> None:
        self.engine = engine
        self.passage = passage
        self.names = names
        self.made_by = made_by
        self.sequence = sequence
        self.prompt = _NOTHING if prompt is None else prompt
        self.flight = Flight(engine.hooks)
        self.claim = Grade.FAITHFUL
        self._state = SequenceState(engine.spec, engine.manager.geometry, engine.arena, sequence)
        self.layers: list[Any] = engine.layers.make(self._state, self.flight)
        self._paged = [layer for layer in self.layers if isinstance(layer, PagedLayerMixin)]
        # A linear layer is not told about every token (the fused decode kernel updates in place), so it cannot count.
        self.counting = [layer for layer in self._paged if not isinstance(layer, PagedLinearLayer)]
        self._kept_at = sequence.length if sequence.length == sequence.reused else -1
        self._sync()

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

    @whole
    def land(self) -> None:
        """The forward is over: publish the segments that it completed."""
        end = self.flight.end
        behind = sum([layer.cumulative_length != end for layer in self.counting])
        if behind:
            self._roll_back()
            raise SequenceError(
                f"the forward left {behind} layers without the new tokens, so nothing of it was kept; run all layers "
                "of the model (no early exit, no skipped layers) with this cache"
            )
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

    @whole
    def checkpoint(self) -> None:
        """Keep the exact present end resumable, as far as there is room."""
        self.abort()
        self.sequence.check()
        if self.length and self.length != self._kept_at:
            self.engine.run(self.sequence.checkpoint())
            self._kept_at = self.length
            self.engine.keep_cold(self.sequence, self.names, self.made_by)

    @whole
    def fork(self, prompt: Int32Array | None = None) -> Runner:
        """A second sequence with the same past, and a ``prompt`` of its own."""
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
        try:
            self.abort()
            if not self.sequence.broken:
                self.checkpoint()
        finally:
            self.sequence.close()

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
        self.flight.start = self.flight.end = -1
        self.sequence.rollback()
        if not self.sequence.broken:
            self._sync()

    def _sync(self) -> None:
        self._state.refresh()
        for layer in self._paged:
            layer.sync(self.length)
