"""Lanes that were waited for in vain: whoever comes next does not wait for them again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kvloom.transfer.jobs import Job
from kvloom.transfer.lanes import Lane

Moving = Sequence[tuple[Lane, Job[Any]]]
"""Jobs and their lanes; those of one lane in the order in which they were begun."""
_LOOK_S = 0.05
"""How often a request that waits looks whether it is to hurry."""


class Stuck:
    """Belongs to the manager's thread.

    Args:
        clock: monotonic seconds.
        hurried: once it says so nobody waits any longer.
    """

    def __init__(self, clock: Callable[[], float], hurried: Callable[[], bool]) -> None:
        self._clock, self._hurried = clock, hurried
        self._vain: dict[Lane, Job[Any]] = {}

    def wait(self, moving: Moving, wanted: Sequence[Job[Any]], seconds: float) -> bool:
        """Wait until the ``wanted`` ones of what is moving have ended, but no longer than ``seconds``.

        Nobody waits for a lane in which none ended when it was waited for last, until one does.  Returns whether any
        of the wanted ones has ended.
        """
        self._vain = {lane: job for lane, job in self._vain.items() if not job.done}
        lanes = {id(job): lane for lane, job in moving}
        awaited = [job for job in wanted if not job.done and lanes[id(job)] not in self._vain]
        first = {lane: job for lane, job in reversed(moving) if not job.done}
        ends_at = self._clock() + seconds
        for job in awaited:
            while not job.wait(min(_LOOK_S, max(0.0, ends_at - self._clock()))):
                if self._hurried():
                    return any(job.done for job in wanted)
                if self._clock() >= ends_at:
                    break
        for lane in {lanes[id(job)] for job in awaited}:
            if not first[lane].done:
                self._vain[lane] = first[lane]
        return any(job.done for job in wanted)
