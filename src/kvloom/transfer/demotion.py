"""From one cold tier to the next: what is coldest moves on before its room is needed."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Generator
from itertools import islice

import numpy as np

from kvloom.tiers.contract import HandsOn
from kvloom.tiers.values import Outcome
from kvloom.transfer.jobs import Job, Urgency, Work
from kvloom.transfer.link import Link
from kvloom.transfer.options import Admission, TransferOptions
from kvloom.transfer.pace import Rest, resting

_REMEMBERED = 1 << 14
_BATCH = 64


class Demotion:
    """Between two neighbours.  ``run`` belongs to the thread that stores in the nearer one.

    Args:
        tier: the nearer one.
        to: the farther one.
    """

    def __init__(self, tier: HandsOn, to: Link, options: TransferOptions) -> None:
        self._tier, self._to, self._options = tier, to, options
        self._asked: OrderedDict[tuple[bytes, bytes], None] = OrderedDict()

    def run(self) -> None:
        """Queue what is coldest, as far as the tier is fuller than it should be."""
        usage = self._tier.usage()
        excess = usage.bytes - int(self._options.host_mark * usage.capacity)
        if excess <= 0:
            return
        for layout, digest in islice(self._tier.coldest(excess), _BATCH):
            if (layout, digest) in self._asked or not self._admitted(layout, digest):
                continue
            if self._to.writing.submit(Urgency.DEMOTE, self._moving(layout, digest)) is None:
                return
            self._asked[layout, digest] = None
            if len(self._asked) > _REMEMBERED:
                self._asked.popitem(last=False)

    def run_all(self, patience_s: float) -> bool:
        """Move everything on that the next tier does not have; whether that ended in time."""

        def work(job: Job[None]) -> Generator[None, None, None]:
            for layout, digest in self._tier.coldest(self._tier.usage().capacity):
                if job.stopped():
                    return
                self._move(layout, digest, job.rest)
                yield

        job = self._to.writing.submit(Urgency.DEMOTE, work, patience_s)
        return job is not None and job.wait(patience_s)

    def _admitted(self, layout: bytes, digest: bytes) -> bool:
        return self._options.admission is Admission.ALWAYS or self._tier.hits(layout, digest) > 0

    def _moving(self, layout: bytes, digest: bytes) -> Work[None]:
        def work(job: Job[None]) -> Generator[None, None, None]:
            yield from ()  # a unit is one piece
            again = True
            try:
                again = self._move(layout, digest, job.rest)
            finally:
                if again:
                    self._asked.pop((layout, digest), None)

        return work

    def _move(self, layout: bytes, digest: bytes, rest: Rest) -> bool:
        """Move a unit on; whether it is to be tried again when it is among the coldest the next time."""
        if self._to.tier.lookup(layout, np.frombuffer(digest, np.uint8).reshape(1, -1)).boundary[0]:
            return False
        unit = self._tier.unit(layout, digest)
        if unit is None:
            return True
        done = self._to.tier.publish(resting(unit, rest))
        if done.stored:
            self._to.stats.demoted += 1
        else:
            self._to.stats.not_stored[done.outcome.value] += 1
        return done.outcome in {Outcome.UNAVAILABLE, Outcome.INCOMPLETE}
