"""Threads that move bytes: one *lane* for every tier and direction, each with a bounded queue ordered by urgency.

A job is a generator: after every piece that it moves the lane looks for something more urgent.  So a prefetch gives
way to a load, a hung disk holds up nothing but its own lane, and a job that was cancelled or is late stops between
two pieces.  When a job is ``done`` it will never write again: that is the fence behind which its slots are free.
"""

from __future__ import annotations

import contextlib
import enum
import heapq
import logging
import math
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator
from typing import Generic, TypeVar

from kvloom.transfer.pace import Pace

T = TypeVar("T")
_LOG = logging.getLogger(__name__)
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


class Lane:
    """One thread and its queue.  Thread-safe.

    Args:
        name: of the thread.
        most: jobs of each urgency that may wait or run at a time; more are refused.
        clock: monotonic seconds.
        nice: how far the thread stands behind others that want the processor, 0 to 19.
        pace: of all lanes of an engine; its jobs rest before every piece.

    What a job raises ends that job alone.  It is logged, with its traceback the first time.

    Attributes:
        raised: how many jobs raised something, by its type.
    """

    def __init__(
        self,
        name: str,
        most: dict[Urgency, int],
        clock: Callable[[], float] = time.monotonic,
        nice: int = 0,
        pace: Pace | None = None,
    ) -> None:
        self._name, self._most, self._clock, self._nice = name, most, clock, nice
        self._pace = pace or Pace()
        self.raised: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._queue: list[tuple[int, int, Job[object]]] = []
        self._open = dict.fromkeys(Urgency, 0)
        self._number = 0
        self._running: Job[object] | None = None
        self._thread: threading.Thread | None = None
        self._closing = self._gave_up = False

    def submit(self, urgency: Urgency, work: Work[T], within: float | None = None) -> Job[T] | None:
        """Queue a job that is to be done ``within`` seconds; None when the lane is full or closing."""
        with self._lock:
            if self._closing or self._open[urgency] >= self._most.get(urgency, 0):
                return None
            job = Job(urgency, work, within, self._clock, self._tell, self._pace)
            self._open[urgency] += 1
            self._push(job)  # type: ignore[arg-type]
            if self._thread is None:  # a daemon: a disk that hangs must not keep the process
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            self._changed.notify_all()
        return job

    def hasten(self, job: Job[T], urgency: Urgency, within: float | None = None) -> None:
        """A job has become more urgent, and is to be done ``within`` seconds from now."""
        with self._lock:
            if job.done:
                return
            self._open[job.urgency] -= 1
            self._open[urgency] += 1
            job.urgency = urgency
            job.due(within)
            self._queue = [(int(each.urgency), number, each) for _, number, each in self._queue]
            heapq.heapify(self._queue)

    def busy(self, urgency: Urgency) -> bool:
        """Whether a job of this urgency waits or runs."""
        return self._open[urgency] > 0

    @property
    def hung(self) -> bool:
        """Whether the running job, or a load behind it, should have ended by now: nothing new comes soon."""
        now = self._clock()
        with self._lock:
            if self._running is None:
                return False
            waiting = (job for _, _, job in self._queue if job.urgency is Urgency.LOAD)
            return self._running.overdue(now) or any(job.overdue(now) for job in waiting)

    def close(self, patience_s: float) -> bool:
        """Take nothing more, end what waits after ``patience_s`` at most; whether the lane has ended."""
        with self._pace.awaited():
            return self._close(patience_s)

    def _close(self, patience_s: float) -> bool:
        ends = self._clock() + patience_s
        with self._lock:
            self._closing = True
            self._changed.notify_all()
            while self._thread is not None and (self._queue or self._running):
                left = ends - self._clock()
                if left <= 0 or not self._changed.wait(left):
                    break
            self._gave_up = True
            waiting, self._queue = self._queue, []
            for _, _, job in waiting:
                job.drop()
                self._open[job.urgency] -= 1
            thread = self._thread if self._running is None else None
            ended = self._running is None
        if thread is not None:
            thread.join()
        return ended

    def _push(self, job: Job[object]) -> None:
        self._number += 1
        heapq.heappush(self._queue, (int(job.urgency), self._number, job))

    def _run(self) -> None:
        if self._nice and sys.platform == "linux":
            with contextlib.suppress(OSError):  # of this thread, and of those that it starts
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), self._nice)
        while True:
            with self._lock:
                while not self._queue:
                    if self._closing:
                        return
                    self._changed.wait()
                first = self._queue[0][2]
            first.rest()
            with self._lock:
                if not self._queue:  # dropped meanwhile
                    continue
                _, number, job = heapq.heappop(self._queue)
                self._running = job
            ended = job.advance()
            with self._lock:
                self._running = None
                if not ended and self._gave_up:
                    job.drop()
                    ended = True
                if ended:
                    self._open[job.urgency] -= 1
                else:
                    heapq.heappush(self._queue, (int(job.urgency), number, job))
                self._changed.notify_all()

    def _tell(self, failure: BaseException) -> None:
        """Nobody may ever ask for the result of a job, so that it failed is told here."""
        name = type(failure).__name__
        self.raised[name] += 1
        trace = failure if self.raised[name] == 1 else None
        _LOG.error("%s: a job raised %s: %s", self._name, name, failure, exc_info=trace)
