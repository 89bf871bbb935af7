"""Time that goes on only when somebody says what took it."""

from __future__ import annotations


class VirtualClock:
    """Seconds since it was made; call it to read it."""

    def __init__(self) -> None:
        self._now = 0.0

    def __call__(self) -> float:
        """The present moment."""
        return self._now

    def advance(self, seconds: float) -> None:
        """So much has passed."""
        self._now += seconds
