"""Progress of a long show: what is being done, and how far the whole is."""

from __future__ import annotations

from collections.abc import Callable

Tell = Callable[[str, float], None]
"""Told (what is being done, share of the whole that is done, 0 to 1)."""


class Steps:
    """Turns weighted steps into one share of the whole.

    Args:
        tell: who is told.
        total: sum of the weights of all steps that will come (about seconds on two cores).
    """

    def __init__(self, tell: Tell, total: float) -> None:
        self._tell = tell
        self._total = total
        self._done = 0.0
        self._weight = 0.0
        self._what = ""

    def begin(self, what: str, weight: float) -> None:
        """The step before is done; ``what`` begins."""
        self._done += self._weight
        self._what, self._weight = what, weight
        self.within(0.0)

    def within(self, share: float) -> None:
        """How much of the present step is done, 0 to 1."""
        self._tell(self._what, min((self._done + share * self._weight) / self._total, 1.0))
