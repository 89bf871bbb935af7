"""How a load is made, and how far it has come: told by the thread that reads, asked by the one that computes."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from kvloom.transfer.jobs import Urgency
from kvloom.transfer.options import Restoring
from kvloom.transfer.pace import Pace


@dataclass(frozen=True, slots=True)
class Way:
    """How a load is made: in ``within`` seconds, or None for any time; in ``steps`` pieces at least, if it can be."""

    urgency: Urgency
    within: float | None = None
    restoring: Restoring = Restoring.WHOLE
    steps: int = 1


@dataclass(frozen=True, slots=True)
class Piece:
    """One piece of a job that was read: monotonic seconds, and bytes.

    ``rested``: the job rested meanwhile, so that the seconds say nothing of the tier.
    """

    begun: float
    ended: float
    n_bytes: int
    rested: bool = False


class Progress:
    """Of one job.  Thread-safe.

    Attributes:
        pieces: those that were read, in order.
        good: how many of the first ones arrived without a fault.
    """

    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        self.pieces: list[Piece] = []
        self.good = 0
        self._changed = threading.Condition()

    def passed_one(self, piece: Piece, whole: bool) -> None:
        """One more piece was read (told by the reading thread); ``whole``: all of it arrived."""
        with self._changed:
            if whole and self.good == len(self.pieces):
                self.good += 1
            self.pieces.append(piece)
            self._changed.notify_all()

    def wait(self, count: int, seconds: float) -> bool:
        """Wait until ``count`` pieces were read, well or not, but no longer than ``seconds``; whether they were."""
        if len(self.pieces) >= count or seconds <= 0:
            return len(self.pieces) >= count
        with self._pace.awaited(), self._changed:
            return self._changed.wait_for(lambda: len(self.pieces) >= count, seconds)
