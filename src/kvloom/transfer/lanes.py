"""Threads that move bytes: one *lane* for every tier and direction, each with a bounded queue ordered by urgency.

A job is a generator: after every piece that it moves the lane looks for something more urgent.  So a prefetch gives
way to a load, a hung disk holds up nothing but its own lane, and a job that was cancelled or is late stops between
two pieces.  When a job is ``done`` it will never write again: that is the fence behind which its slots are free.
"""

from __future__ import annotations

import contextlib
import heapq
import logging
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import TypeVar

from kvloom.transfer.jobs import Job, Urgency, Work
from kvloom.transfer.pace import Pace

T = TypeVar("T")
_LOG = logging.getLogger(__name__)


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
