"""A tier that fails as tiers do: slow, hung, forgetful, damaged.  Which calls fail is a plan or follows from a seed."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvloom.tiers.contract import Tier, Usage
from kvloom.tiers.values import Digests, Found, Outcome, Places, Published, ReadResult, Result, Unit
from kvloom.types import IntArray

STEP_S = 0.005
"""A read that waits asks this often whether to stop."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What goes wrong; everything counts from 0, over the life of the tier.

    Attributes:
        seconds_per_byte, seconds_per_read: what reads take longer.
        seconds_per_publish: what publications take longer.
        hang_reads, hang_publishes: these calls wait until ``FaultyTier.release``.
        objects: results that the nth object of all that is read has instead of being read.
        rates: the same by chance, one number of [0, 1] per result.
        lose: publications that say ``PUBLISHED`` and store nothing, as after a crash elsewhere.
        refuse: publications that end with an outcome that is not stored.
        hide: lookups that find nothing.
        seed: of all chances.
    """

    seconds_per_byte: float = 0.0
    seconds_per_read: float = 0.0
    seconds_per_publish: float = 0.0
    hang_reads: frozenset[int] = frozenset()
    hang_publishes: frozenset[int] = frozenset()
    objects: Mapping[int, Result] = field(default_factory=dict)
    rates: Mapping[Result, float] = field(default_factory=dict)
    lose: frozenset[int] = frozenset()
    refuse: Mapping[int, Outcome] = field(default_factory=dict)
    hide: frozenset[int] = frozenset()
    seed: int = 0


class FaultyTier:
    """Another tier, with faults.  Thread-safe if that one is.

    Attributes:
        done: how many faults of every sort there were.
        hanging: set while some call hangs.
    """

    def __init__(self, tier: Tier, plan: Plan | None = None) -> None:
        self._tier, self._plan = tier, plan or Plan()
        self._lock = threading.Lock()
        self._random = np.random.Generator(np.random.PCG64(self._plan.seed))
        self._calls: Counter[str] = Counter()
        self._released = threading.Event()
        self.hanging = threading.Event()
        self.done: Counter[str] = Counter()

    @property
    def name(self) -> str:
        """That of the tier behind."""
        return self._tier.name

    @property
    def durable(self) -> bool:
        """That of the tier behind."""
        return self._tier.durable

    def release(self) -> None:
        """Let go of everything that hangs, now and later."""
        self._released.set()

    def lookup(self, layout: bytes, digests: Digests, *, root: bytes | None = None) -> Found:
        """See ``Tier.lookup``."""
        found = self._tier.lookup(layout, digests, root=root)
        if self._number("lookup") in self._plan.hide:
            self._count("hidden")
            nothing = np.zeros(len(digests), np.bool_)
            return Found(nothing, nothing.copy(), found.places.take(np.zeros(len(found.places), np.bool_)))
        return found

    def read(
        self,
        places: Places,
        into: npt.NDArray[np.uint8],
        offsets: IntArray,
        stop: Callable[[], bool] = lambda: False,
    ) -> ReadResult:
        """See ``Tier.read``."""
        plan, number = self._plan, self._number("read")
        stopped = False
        if number in plan.hang_reads:
            stopped = self._hang(stop)
        stopped |= self._wait(plan.seconds_per_read + plan.seconds_per_byte * places.nbytes, stop)
        if stopped:
            return ReadResult(np.full(len(places), Result.STOPPED, np.uint8), 0, 0)
        codes = self._codes(len(places))
        if not codes.any():
            return self._tier.read(places, into, offsets, stop)
        good = codes == Result.OK
        part = self._tier.read(places.take(good), into, offsets[good], stop)
        codes[good] = part.results
        return ReadResult(codes, part.bytes_read, part.reads, part.reason or "as planned")

    def publish(self, unit: Unit) -> Published:
        """See ``Tier.publish``."""
        plan, number = self._plan, self._number("publish")
        if number in plan.hang_publishes:
            self._hang(lambda: False)
        self._wait(plan.seconds_per_publish, lambda: False)
        if number in plan.refuse:
            self._count("refused")
            return Published(plan.refuse[number], reason="as planned")
        if number in plan.lose:
            self._count("lost")
            return Published(Outcome.PUBLISHED, len(unit.objects), sum(item.size for item in unit.objects))
        return self._tier.publish(unit)

    def touch(self, layout: bytes, digest: bytes) -> None:
        """See ``Tier.touch``."""
        self._tier.touch(layout, digest)

    def clear(self, layout: bytes | None = None, root: bytes | None = None) -> int:
        """See ``Tier.clear``."""
        return self._tier.clear(layout, root)

    def usage(self) -> Usage:
        """See ``Tier.usage``."""
        return self._tier.usage()

    def close(self) -> None:
        """See ``Tier.close``; what hangs is let go of."""
        self.release()
        self._tier.close()

    def _number(self, what: str) -> int:
        with self._lock:
            self._calls[what] += 1
            return self._calls[what] - 1

    def _count(self, what: str, times: int = 1) -> None:
        with self._lock:
            self.done[what] += times

    def _codes(self, n: int) -> npt.NDArray[np.uint8]:
        """Results that were planned for the next ``n`` objects."""
        codes = np.zeros(n, np.uint8)
        with self._lock:
            begin = self._calls["object"]
            self._calls["object"] += n
            for result, rate in self._plan.rates.items():
                codes[self._random.random(n) < rate] = result
            for number, result in self._plan.objects.items():
                if begin <= number < begin + n:
                    codes[number - begin] = result
            for code in codes[codes != Result.OK].tolist():
                self.done[Result(code).name.lower()] += 1
        return codes

    def _hang(self, stop: Callable[[], bool]) -> bool:
        """Wait for ``release``; whether the caller asked to stop before."""
        self._count("hung")
        self.hanging.set()
        try:
            while not self._released.wait(STEP_S):
                if stop():
                    return True
        finally:
            self.hanging.clear()
        return False

    def _wait(self, seconds: float, stop: Callable[[], bool]) -> bool:
        ends = time.monotonic() + seconds
        while seconds > 0 and (left := ends - time.monotonic()) > 0:
            if stop():
                return True
            if self._released.wait(min(left, STEP_S)) and self._plan.hang_reads | self._plan.hang_publishes:
                time.sleep(min(left, STEP_S))
        return False
