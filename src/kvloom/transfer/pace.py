"""While a forward computes on the processors that transfers use, transfers take a share of one core and no more.

A lane asks before every piece, and a tier asks through the ``stop`` that it is given, in whatever thread does the work:
``rest`` looks at the CPU time that this thread has used since it asked last, and lets it sleep until that is no more
than the share.  Waiting for a disk costs nothing of it.  What was not used is not saved up: pieces do not come in
bursts.

Nothing rests while no forward runs, while anybody waits for any transfer (then nothing computes, and what is waited for
may need what others hold), when it brings what the forward itself reads, once it was cancelled, and once half of its
time is gone.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Protocol

import numpy as np

from kvloom.tiers.values import Fill, NewObject, Unit

Rest = Callable[[], None]
"""``Pace.rest`` of one transfer."""
LINGER_S = 0.01
"""Seconds after a forward that count as its own: what a decode does between two steps is no time for a burst.  Also
how long it takes at most until a rest ends after that."""
FORGOTTEN_S = 5.0
"""Seconds after which a forward whose end was not told is over: one that Ctrl-C took out of a direct call."""
FIRST_COST_S = 0.001
_SMOOTH = 0.3


class Resting(Protocol):
    """What a transfer says of itself.

    Attributes:
        rests: how often it rested.
    """

    rests: int

    def in_haste(self) -> bool:
        """Whether it is to end now, or soon: it does not rest."""


class _OfThread(threading.local):
    """Attributes:
    cpu: of this thread when it asked last, None before that.
    charged: seconds that were charged for what it does now, None when it goes at its own speed.
    """

    cpu: float | None = None
    charged: float | None = None


class Pace:
    """Of all transfers of one engine.  Thread-safe; ``begin`` and ``end`` belong to the thread that computes.

    Args:
        share: of one core, above 0; 1 or more: nothing ever rests.
        clock: monotonic seconds; ``cpu``: seconds that the calling thread computed.
    """

    def __init__(
        self,
        share: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
        cpu: Callable[[], float] = time.thread_time,
    ) -> None:
        self.share, self._clock, self._cpu = share, clock, cpu
        self._changed = threading.Condition()
        self._turn = threading.Lock()
        self._mine = _OfThread()
        self._since: float | None = None
        self._ended = float("-inf")
        self._own: Collection[object] = ()
        self._waiting = 0
        self._free_at = 0.0
        self._cost = FIRST_COST_S

    # ---------------------------------------------------------------- the one who computes

    def begin(self, own: Collection[object] = ()) -> None:
        """A forward begins; ``own``: the transfers that bring what it reads."""
        self._own = own
        self._since = self._clock()

    def end(self) -> None:
        """It is over, or never was."""
        if self._since is not None:
            self._ended = self._clock()
            self._since = None

    @contextmanager
    def forward(self) -> Iterator[None]:
        """A forward that nothing is brought for."""
        self.begin()
        try:
            yield
        finally:
            self.end()

    @property
    def computing(self) -> bool:
        """Whether a forward is under way."""
        since = self._since
        return since is not None and self._clock() - since < FORGOTTEN_S

    # ---------------------------------------------------------------- those who wait

    @contextmanager
    def awaited(self) -> Iterator[None]:
        """Somebody waits for a transfer: meanwhile none rests."""
        with self._changed:
            self._waiting += 1
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._waiting -= 1

    def wake(self) -> None:
        """Something has changed for a transfer that may be resting."""
        with self._changed:
            self._changed.notify_all()

    # ---------------------------------------------------------------- those who move bytes

    def rest(self, job: Resting) -> None:
        """Called before a piece of ``job`` by the thread that moves it: sleep as long as the share asks for."""
        if self.share >= 1:
            return
        mine, cpu = self._mine, self._cpu()
        used = 0.0 if mine.cpu is None else cpu - mine.cpu
        mine.cpu, charged, mine.charged = cpu, mine.charged, None
        if charged is not None:
            with self._changed:
                self._free_at += (used - charged) / self.share
                self._cost += _SMOOTH * (used - self._cost)
        if not self.slows(job):
            return
        with self._turn, self._changed:  # one after the other, so that those behind the first need not look at the time
            mine.charged = self._sleep(job)

    def _sleep(self, job: Resting) -> float | None:
        """Sleep until a piece may begin, and charge what it will cost; None when it need not rest any more."""
        slept = False
        while self.slows(job):
            now = self._clock()
            if now >= self._free_at:
                self._free_at = now + self._cost / self.share
                return self._cost
            if not slept:
                slept, job.rests = True, job.rests + 1
            self._changed.wait(min(self._free_at - now, LINGER_S))
        self._free_at = min(self._free_at, self._clock())
        return None

    def slows(self, job: Resting) -> bool:
        """Whether ``job`` is to keep to the share now."""
        if self.share >= 1 or self._waiting:
            return False
        if not self.computing and self._clock() - self._ended >= LINGER_S:
            return False
        return job not in self._own and not job.in_haste()


def resting(unit: Unit, rest: Rest) -> Unit:
    """The same unit, which rests before each of its payloads is written."""
    return replace(unit, objects=tuple(_resting(item, rest) for item in unit.objects))


def _resting(item: NewObject, rest: Rest) -> NewObject:
    payload = item.payload

    def write(into: memoryview) -> None:
        rest()
        if isinstance(payload, Fill):
            payload.write(into)
        elif isinstance(payload, np.ndarray):
            np.frombuffer(into, np.uint8)[:] = np.ascontiguousarray(payload).reshape(-1).view(np.uint8)
        else:
            into[:] = payload

    return replace(item, payload=Fill(item.size, write))
