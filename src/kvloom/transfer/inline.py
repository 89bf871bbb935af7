"""A lane without a thread: a job is done before ``submit`` returns, so the same calls always do the same."""

from __future__ import annotations

from kvloom.transfer.jobs import Job, Urgency, Work
from kvloom.transfer.lanes import Lane, T


class Inline(Lane):
    """Runs jobs in the caller's thread.  One job may submit another one, to this lane or to others."""

    def submit(self, urgency: Urgency, work: Work[T], within: float | None = None) -> Job[T] | None:
        """Do a job; None when the lane is closed, or takes none of this urgency."""
        if self._closing or not self._most.get(urgency, 0):
            return None
        job = Job(urgency, work, within, self._clock, self._tell, self._pace)
        while not job.advance():
            pass
        return job
