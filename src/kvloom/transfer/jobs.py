"""One transfer: a generator that gives way after every piece, and what others may ask of it meanwhile."""

from __future__ import annotations

import enum
import math
import threading
from collections.abc import Callable, Generator
from typing import Generic, TypeVar

from kvloom.transfer.pace import Pace

T = TypeVar("T")
GRACE_S = 0.5
"""Seconds that the piece which a job is cancelled in may take before its lane is said to hang."""


class Urgency(enum.IntEnum):
    """What goes first in a lane."""

    LOAD = 0
    """A request waits for it."""
    PREFETCH = 1
    """A request that has not begun will want it."""
    STORE = 2
    """The device may need the room."""
    DEMOTE = 3
    """From one cold tier to the next."""


class State(enum.Enum):
    """Of a job."""

    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    """Its work raised; ``Job.result`` raises the same."""
    DROPPED = "dropped"
    """It was cancelled, or its lane closed, before it began: it has done nothing."""


Work = Callable[["Job[T]"], Generator[None, None, T]]


class Job(Generic[T]):
    """One transfer, to be done ``within`` seconds, None for any time.  Thread-safe.

    Attributes:
        rests: how often it rested (``Pace.rest``).
    """

    def __init__(
        self,
        urgency: Urgency,
        work: Work[T],
        within: float | None,
        clock: Callable[[], float],
        tell: Callable[[BaseException], None],
        pace: Pace,
    ) -> None:
        self.urgency, self.rests = urgency, 0
        self._tell, self._pace = tell, pace
        self._work, self._clock = work, clock
        self.due(within)
        self._steps: Generator[None, None, T] | None = None
        self._ended = threading.Event()
        self._cancelled: float | None = None
        self._state = State.WAITING
        self._result: T | None = None
        self._failure: BaseException | None = None

    def due(self, within: float | None) -> None:
        """It is to be done ``within`` seconds from now."""
        now = self._clock()
        self.ends_at = None if within is None else now + within
        self._hastes_at = math.inf if within is None else now + within / 2

    @property
    def state(self) -> State:
        """Where it stands."""
        return self._state

    @property
    def failure(self) -> BaseException | None:
        """What its work raised."""
        return self._failure

    @property
    def done(self) -> bool:
        """Whether it has ended, in whatever way: nothing of it moves any more."""
        return self._ended.is_set()

    def cancel(self, *, late: bool = False) -> None:
        """Stop it at the next piece; one that has not begun ends when its lane comes to it.

        ``late``: it should have ended by now, so what waits behind it need not be waited for.
        """
        if late:
            self._cancelled = -math.inf
        elif self._cancelled is None:
            self._cancelled = self._clock()
        self._pace.wake()

    def stopped(self) -> bool:
        """Whether its work is to stop now: it was cancelled, or its deadline has passed."""
        return self._cancelled is not None or (self.ends_at is not None and self._clock() > self.ends_at)

    def rest(self) -> None:
        """Called now and then by whoever moves its bytes: see ``Pace.rest``."""
        self._pace.rest(self)

    def in_haste(self) -> bool:
        """Whether it is to stop, or half of its time is gone."""
        return self._cancelled is not None or self._clock() > self._hastes_at

    def overdue(self, now: float) -> bool:
        """Whether it should have ended by now: its deadline has passed, or it was cancelled a while ago."""
        late = self.ends_at is not None and now > self.ends_at
        return late or (self._cancelled is not None and now > self._cancelled + GRACE_S)

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until it is done; whether it is.  Meanwhile no transfer rests."""
        if self.done or (seconds is not None and seconds <= 0):
            return self.done
        with self._pace.awaited():
            return self._ended.wait(seconds)

    def result(self) -> T | None:
        """What its work returned; None when it was dropped.  Raises what the work raised.  Only when it is done."""
        if self._failure is not None:
            raise self._failure
        return self._result

    def advance(self) -> bool:
        """Do one piece (called by its lane); whether it has ended."""
        if self._steps is None:
            if self.stopped():
                self._end(State.DROPPED)
                return True
            self._state = State.RUNNING
            self._steps = self._work(self)
        try:
            next(self._steps)
        except StopIteration as stop:
            self._result = stop.value
            self._end(State.DONE)
            return True
        except BaseException as failure:
            self._failure = failure
            self._tell(failure)
            self._end(State.FAILED)
            return True
        return False

    def drop(self) -> None:
        """End it without its work (called by its lane, which closes)."""
        if self._steps is not None:
            self._steps.close()
        self._end(State.DROPPED)

    def _end(self, state: State) -> None:
        self._state = state
        self._ended.set()
