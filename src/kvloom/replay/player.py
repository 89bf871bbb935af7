"""Making the calls of a recording on another manager: what both ways of it share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping
from typing import NoReturn

from kvloom.errors import CapacityError, InputError, KVLoomError
from kvloom.manager import events
from kvloom.manager.events import Event
from kvloom.manager.manager import Manager
from kvloom.manager.sequence import CachedSequence
from kvloom.replay.recording import Recording
from kvloom.replay.simulate import Ended, Sample, note, sample

SAMPLES = 200
"""How often the fill of the tier is looked at during a run."""

Progress = Callable[[int], None]
"""Told how many calls are done."""


class BadCallError(InputError):
    """A call that the manager does not allow, or that names what is not there."""


class Player(ABC):
    """Plays a recording on ``manager``, once.

    Attributes:
        line: of the recording, of the call that is made.
        requests, prompt_tokens, reused: lookups, tokens of their prompts, and of these such as needed no compute.
        refused: requests, appends and forks that did not fit.
        left_out: calls that were not made because their sequence had been refused.
        ended, faults: what ended the lookups.
        samples: the tier at regular times.
    """

    def __init__(self, recording: Recording, manager: Manager) -> None:
        self.recording = recording
        self.manager = manager
        self.line = 1
        self.requests = self.prompt_tokens = self.reused = self.refused = self.left_out = 0
        self.ended: Ended = Counter()
        self.faults: Ended = Counter()
        self.samples: list[Sample] = []
        self._calls: Mapping[type[Event], Callable[..., None]] = {
            events.Open: self._open,
            events.Append: self._append,
            events.Commit: self._commit,
            events.Rollback: self._rollback,
            events.Checkpoint: self._checkpoint,
            events.Fork: self._fork,
            events.Close: self._close,
            events.MakeBatch: self._batch,
            events.Step: self._step,
            events.Finish: self._finish,
            events.Complete: self._complete,
            events.Abandon: self._abandon,
            events.Evict: self._evict,
            events.Clear: self._clear,
            events.Drop: self._drop,
            events.Tick: self._tick,
        }

    def play(self, progress: Progress = lambda _: None) -> None:
        """Make every call.

        Raises InputError, with the line, for calls that the manager does not allow: the recording was changed.
        """
        count = len(self.recording)
        every = max(1, count // SAMPLES)
        for i, (line, event) in enumerate(zip(self.recording.lines, self.recording.events, strict=True), 1):
            self.line = line
            if isinstance(event, events.Open):
                self.requests += 1
                self.prompt_tokens += len(event.tokens)
                if event.reused >= len(event.tokens):
                    self.fail(f"{event.reused} of {len(event.tokens)} tokens reused")
            try:
                self._calls[type(event)](event)
            except BadCallError:
                raise
            except CapacityError as error:
                self.compare("it was refused", "no error", str(error))
                raise
            except KVLoomError as error:
                self.fail(str(error))
            if i % every == 0 or i == count:
                self.samples.append(sample(self.manager.stats(), self.requests))
                progress(i)

    def fail(self, what: str) -> NoReturn:
        """BadCallError that names the line."""
        raise BadCallError(
            f"{self.recording.path}, line {self.line}: {what}; no run makes such a call: the line was changed, or "
            "another kvloom wrote it, so record the run again"
        )

    @abstractmethod
    def compare(self, what: str, recorded: object, found: object) -> None:
        """Something came of a call, in the run and here."""

    def look(self, event: events.Open) -> CachedSequence:
        """Open a request and count what it found."""
        sequence = self.manager.open(
            event.tokens, salt=event.salt, extra_keys=event.keys, floor=event.floor, priority=event.priority
        )
        self.reused += sequence.reused
        note(sequence.explanation, self.ended, self.faults)
        return sequence

    # ---------------------------------------------------------------- calls that are made as they are

    def _evict(self, event: events.Evict) -> None:
        self.compare("bytes freed", event.freed, self.manager.evict(event.bytes))

    def _clear(self, event: events.Clear) -> None:
        self.compare("objects cleared", event.dropped, self.manager.clear(event.salt))

    def _drop(self, event: events.Drop) -> None:
        what = event.group if event.kind is None else event.kind
        dropped = self.manager.drop(what, event.position, quarantine=event.quarantine)
        self.compare("objects dropped", event.dropped, dropped)

    def _tick(self, event: events.Tick) -> None:
        for _ in range(event.by):
            self.manager.tick()

    # ---------------------------------------------------------------- and the others

    @abstractmethod
    def _open(self, event: events.Open) -> None: ...

    @abstractmethod
    def _append(self, event: events.Append) -> None: ...

    @abstractmethod
    def _commit(self, event: events.Commit) -> None: ...

    @abstractmethod
    def _rollback(self, event: events.Rollback) -> None: ...

    @abstractmethod
    def _checkpoint(self, event: events.Checkpoint) -> None: ...

    @abstractmethod
    def _fork(self, event: events.Fork) -> None: ...

    @abstractmethod
    def _close(self, event: events.Close) -> None: ...

    @abstractmethod
    def _batch(self, event: events.MakeBatch) -> None: ...

    @abstractmethod
    def _step(self, event: events.Step) -> None: ...

    @abstractmethod
    def _finish(self, event: events.Finish) -> None: ...

    @abstractmethod
    def _complete(self, event: events.Complete) -> None: ...

    @abstractmethod
    def _abandon(self, event: events.Abandon) -> None: ...
