"""A session: one token sequence, its lease on cached state, and the cache that a model continues it with."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any, NoReturn, Self

import torch
from transformers import PreTrainedModel

from kvloom.adapters.transformers.cache import PagedCache
from kvloom.adapters.transformers.forward import forward_chunk
from kvloom.adapters.transformers.layers import refuse
from kvloom.adapters.transformers.recovering import Passage
from kvloom.adapters.transformers.runner import Runner
from kvloom.errors import ArrivalError, InputError
from kvloom.manager.inputs import whole_number
from kvloom.manager.ranges import TokenRange
from kvloom.manager.sequence import CachedSequence
from kvloom.plan import Explanation, Limit
from kvloom.types import Grade, Int32Array


class Session:
    """Made by :meth:`Engine.open` and :meth:`fork`; belongs to the thread that made the engine.  A context manager.

    ``prefill`` computes what is missing of the prompt in canonical chunks, up to its last token, which is always
    its own forward.  Then ``model.generate(ids, past_key_values=session.cache)``, or any other calls of the
    attached model with this cache, go on.  ``close`` keeps the exact end resumable.

    A forward that brings another token than the prompt has at that position raises InputError and changes nothing.
    ``generate`` hands the model only the tokens whose state is missing (after ``prefill`` the last one), so a
    prompt of the same length that differs only before them is not noticed: pass the prompt that was opened.

    Attributes:
        cache: the transformers cache.
        tokens: the prompt, int32 ``[n]``.
    """

    def __init__(self, runner: Runner, tokens: Int32Array, limits: tuple[Limit, ...] = ()) -> None:
        self._runner = runner
        self._limits = limits
        self.tokens = tokens
        self.cache = PagedCache(runner)

    # ---------------------------------------------------------------- looking

    @property
    def model(self) -> PreTrainedModel:
        """The attached model."""
        return self._runner.engine.model

    @property
    def sequence(self) -> CachedSequence:
        """The manager's side of the session: block tables, live slots.

        This, and all that is told from it, is known once all of a restored prefix has arrived, so it waits for that.
        """
        self._runner.settle_outside()
        return self._runner.sequence

    @property
    def reused(self) -> int:
        """Leading tokens that needed no compute."""
        return self.sequence.reused

    @property
    def length(self) -> int:
        """Tokens whose state is there."""
        return self.sequence.length

    @property
    def grade(self) -> Grade:
        """Worst grade of the state so far."""
        return self.sequence.grade

    @property
    def explanation(self) -> Explanation:
        """What the lookup found, and what stopped it, in the device and in the tiers behind it."""
        found = self.sequence.explanation
        more = [limit for limit in self._limits if limit.position >= found.boundary]
        return found.with_limits(more) if more else found

    def ranges(self) -> tuple[TokenRange, ...]:
        """Form, grade and life-cycle state of the computed tokens, as ranges per group.

        Raises SequenceError once closed or broken.
        """
        return self.sequence.ranges()

    @property
    def closed(self) -> bool:
        """True once closed."""
        return self._runner.sequence.closed

    @property
    def broken(self) -> bool:
        """True after a forward failed half-way and left state torn that is updated in place: only ``close`` is left."""
        return self.sequence.broken

    # ---------------------------------------------------------------- working

    def prefill(self, told: Callable[[int], None] | None = None) -> PagedCache:
        """Compute the missing tokens of the prompt but the last, and keep the state there resumable.

        The calls are those of a cold run: from segment boundary to segment boundary, then the ragged rest.  The first
        one runs while the last layers of a restored prefix are still being read (``TransferOptions.restoring``); what
        does not arrive is computed, too.

        Args:
            told: called after each call with the number of prompt tokens whose state is there.

        Raises:
            CapacityError: no room; what was computed so far stays.
            SequenceError: the session or its engine is closed, or a forward failed half-way.
        """
        self._runner.engine.require_open()
        self.advance(len(self.tokens) - 1, told)
        self.checkpoint()
        return self.cache

    def advance(self, end: int, told: Callable[[int], None] | None = None) -> None:
        """``step`` until ``end`` tokens of the prompt are computed; nothing when they are already.

        Looks at nothing that waits for a restored prefix, so the first step runs while that is still being read.

        Args:
            end: how many tokens.
            told: called after each step with the number of tokens whose state is there.

        Raises InputError, CapacityError and SequenceError as ``step``.
        """
        while self._runner.length < end:
            self.step(end)
            if told is not None:
                told(self._runner.length)

    def step(self, end: int) -> torch.Tensor:
        """Run one canonical chunk of the prompt: to the next segment boundary, or to ``end`` if that is nearer.

        Returns the logits of its last token, ``[1, 1, vocab]``.

        Raises:
            InputError: ``end`` is not a whole number behind what is computed and within the prompt.
            CapacityError, SequenceError: as ``prefill``.
        """
        runner = self._runner
        runner.engine.require_open()
        runner.abort()
        runner.begin_step()
        start, segment = runner.length, runner.engine.spec.segment_tokens
        if not start < whole_number(end, "end") <= len(self.tokens):
            raise InputError(
                f"a step cannot end at {end}: {start} tokens are computed and the prompt has {len(self.tokens)}; "
                f"use {start + 1} to {len(self.tokens)}"
                if start < len(self.tokens)
                else f"a step cannot end at {end}: all {len(self.tokens)} tokens of the prompt are computed"
            )
        stop = min(int(end), (start // segment + 1) * segment)
        while True:
            try:
                logits = self._chunk(stop)
            except ArrivalError:
                if not runner.arriving:
                    raise
                runner.go_on()
            else:
                if runner.length == stop:
                    return logits

    def _chunk(self, end: int) -> torch.Tensor:
        """The next canonical chunk on the way to ``end``."""
        runner = self._runner
        start, segment = runner.length, runner.engine.spec.segment_tokens
        stop = min(end, (start // segment + 1) * segment)
        ids = torch.from_numpy(self.tokens[start:stop]).to(self.model.device, torch.int64).unsqueeze(0)
        runner.claim = Grade.CANONICAL
        try:
            if runner.passage is None:
                return forward_chunk(self.model, ids, self.cache, start)
            return self._timed(ids, start, runner.passage)
        except BaseException:
            runner.abort()
            raise
        finally:
            runner.claim = Grade.FAITHFUL

    def _timed(self, ids: torch.Tensor, start: int, passage: Passage) -> torch.Tensor:
        """A chunk whose time tells the planner how fast this model computes here, until the prompt is computed."""
        recoverer, settle = self._runner.engine.recoverer, self._runner.engine.arena.settle
        if recoverer is None:
            return forward_chunk(self.model, ids, self.cache, start)
        settle()
        began = recoverer.clock()
        logits = forward_chunk(self.model, ids, self.cache, start)
        settle()
        seconds = recoverer.clock() - began
        recoverer.recovery.prefilled(start, ids.shape[1], seconds)
        passage.seconds += seconds
        self._runner.arrive()
        return logits

    def checkpoint(self) -> None:
        """Keep the exact present end resumable, as far as there is room."""
        self._runner.checkpoint()

    def fork(self, token_ids: Any = None) -> Session:
        """A second session with the same past; from here both go on apart.

        Args:
            token_ids: the prompt of the fork, which must begin with the tokens computed so far (it can be
                prefilled then); by default the fork has no prompt beyond them.
        """
        self._runner.engine.require_open()
        self._runner.abort()
        past = self.sequence.tokens
        tokens = past.copy() if token_ids is None else self._runner.engine.checked(token_ids)
        if len(tokens) < len(past) or not (tokens[: len(past)] == past).all():
            raise InputError(
                f"the prompt of a fork must begin with the {len(past)} tokens computed so far; "
                "open a session for another one"
            )
        return Session(self._runner.fork(tokens), tokens)

    def close(self) -> None:
        """Keep the end resumable and give everything back.  Closing twice is harmless."""
        self._runner.close()

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        refuse("copying a session", "use Session.fork, or copy.deepcopy of its cache, which forks too")

    def __copy__(self) -> NoReturn:
        refuse("copying a session", "use Session.fork, or copy.deepcopy of its cache, which forks too")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
