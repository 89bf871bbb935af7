"""Whether it is worth asking the disk: after a failure not for a bounded time, then again, by itself."""

from __future__ import annotations

import threading
from collections.abc import Callable

FIRST_PAUSE = 0.5
LONGEST_PAUSE = 15.0


class Health:
    """Pauses after failures, twice as long each time, up to ``LONGEST_PAUSE`` seconds.  Thread-safe.

    Args:
        clock: seconds, never going back (``time.monotonic``).
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._pause = 0.0
        self._until = 0.0
        self.reason = ""
        self.failures = 0

    def ready(self) -> bool:
        """Whether to try; after a failure only when its pause is over."""
        with self._lock:
            return not self._pause or self._clock() >= self._until

    def failed(self, reason: str) -> None:
        """It did not work."""
        with self._lock:
            self._pause = min(2 * self._pause or FIRST_PAUSE, LONGEST_PAUSE)
            self._until = self._clock() + self._pause
            self.reason = reason
            self.failures += 1

    def worked(self) -> None:
        """It worked."""
        with self._lock:
            self._pause, self.reason = 0.0, ""
