"""The ways back, the options of a request, and the choice between them: frozen values."""

from __future__ import annotations

import enum
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from kvloom.manager.surveys import Reach
from kvloom.spec.replay import Span
from kvloom.types import Grade

PATIENCE = 0.1
"""Share of the time that computing would take after which a load must show that it is worth waiting for."""
LATE = 1.25
"""How much longer than expected a piece of a load may take, beside that."""


class Way(enum.StrEnum):
    """How a request gets from what the device has to its first token."""

    RECOMPUTE = "recompute"
    """From the device's own hit on, compute."""
    RESTORE = "restore"
    """Load a prefix unit from colder tiers, then compute the rest."""
    EXACT_REPLAY = "exact_replay"
    """Run again what all windows stacked have seen, over the kept prefix (loaded if need be)."""
    BOUNDED_REPLAY = "bounded_replay"
    """Run again one window only: approximate."""


class Why(enum.StrEnum):
    """Why a way was chosen."""

    ONLY = "only"
    """There was no other."""
    FASTEST = "fastest"
    """Its estimate is the lowest."""
    CLOSE = "close"
    """Nothing is clearly faster than computing."""
    UNKNOWN = "unknown"
    """Nothing was computed yet that could be measured: as few tokens as possible are."""
    ASKED = "asked"
    """The caller wanted this way."""
    RETRY = "retry"
    """A tier that looked too slow for long is measured again."""


@dataclass(frozen=True, slots=True)
class Option:
    """One way back and what it should take.

    Attributes:
        way: which.
        position: tokens that need no compute after it.
        reach: what it loads and makes; None for recompute.
        span: the tokens that it replays; None without a replay.
        grade: of what it makes by replay; CANONICAL when it makes nothing.
        load_s, replay_s, prefill_s: estimates; None while nothing was measured.
        latency_s: the part of ``load_s`` that passes before anything comes.
        expected_s: what their sum makes in all, by how this way's estimates turned out before.
    """

    way: Way
    position: int
    reach: Reach | None
    span: Span | None
    grade: Grade
    load_s: float | None
    replay_s: float | None
    prefill_s: float | None
    expected_s: float | None
    latency_s: float = 0.0

    @property
    def parts_s(self) -> float | None:
        """The sum of its parts; None while nothing was measured."""
        if self.replay_s is None or self.prefill_s is None:
            return None
        return (self.load_s or 0.0) + self.replay_s + self.prefill_s

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "way": self.way.value,
            "position": self.position,
            "tiers": 0 if self.reach is None else self.reach.tiers,
            "load_bytes": 0 if self.reach is None else sum(self.reach.tier_bytes),
            "replay_tokens": 0 if self.span is None else self.span.tokens,
            "load_s": self.load_s,
            "replay_s": self.replay_s,
            "prefill_s": self.prefill_s,
            "expected_s": self.expected_s,
        }


@dataclass(frozen=True, slots=True)
class Refused:
    """A way that was not offered, and why."""

    way: Way
    position: int
    reason: str


@dataclass(frozen=True, slots=True)
class Choice:
    """What was chosen, and what else there was.

    Attributes:
        number: 1, 2, ... in the order of the choices.
        chosen: the option that was taken.
        why: the reason.
        options: all of them, computing first.
        refused: ways that were not possible.
    """

    number: int
    chosen: Option
    why: Why
    options: tuple[Option, ...]
    refused: tuple[Refused, ...] = ()

    @property
    def way(self) -> Way:
        """How."""
        return self.chosen.way

    @property
    def position(self) -> int:
        """Tokens that need no compute after it."""
        return self.chosen.position

    @property
    def expected_s(self) -> float | None:
        """Seconds to the first token; None while nothing was measured."""
        return self.chosen.expected_s

    @property
    def recompute_s(self) -> float | None:
        """Seconds that computing would take."""
        return self.options[0].expected_s

    @property
    def deadline_s(self) -> float | None:
        """Seconds after which the load is of no use: it would end later than computing by a tenth; None: any time."""
        if self.recompute_s is None:
            return None
        rest = (self.chosen.replay_s or 0.0) + (self.chosen.prefill_s or 0.0)
        return max(PATIENCE * self.recompute_s, (1.0 + PATIENCE) * self.recompute_s - rest)

    def give_up(self, elapsed_s: float, standing: Standing) -> bool:
        """Whether a load that stands so ``elapsed_s`` after it began is worth no more waiting: computing ends earlier.

        To be asked again and again while it runs.  What is left is expected at the pace of what came, or at that of the
        next piece once it is late; one that does not come at all costs a tenth of the time that computing would take.
        """
        recompute, option = self.recompute_s, self.chosen
        if recompute is None or self.why is Why.ASKED or standing.share >= 1.0 or elapsed_s < PATIENCE * recompute:
            return False
        rest = (option.replay_s or 0.0) + (option.prefill_s or 0.0)
        load, hope = option.load_s or 0.0, 1.0
        if self.why is Why.RETRY:  # it was slow; now it is expected to be just fast enough to be of use
            hope = min(1.0, max(recompute - rest, PATIENCE * recompute) / max(load, 1e-9))
        latency, moving = hope * option.latency_s, hope * (load - option.latency_s)
        came = standing.arrived_s / max(latency + standing.share * moving, 1e-9)
        due = latency + standing.following * moving
        pace = max(came, elapsed_s / max(due, 1e-9))
        if elapsed_s > LATE * max(came, 1.0) * due + PATIENCE * recompute:
            return True
        return pace * (latency + moving) - elapsed_s + rest > recompute


@dataclass(frozen=True, slots=True)
class Standing:
    """How far a load has come.

    Attributes:
        share: of its bytes (0 to 1) that are there; the last of them came ``arrived_s`` seconds after it began.
        following: the share that will be there with the pieces that come next.
    """

    share: float
    arrived_s: float
    following: float


@dataclass(frozen=True, slots=True)
class Arrived:
    """What a load brought.

    Attributes:
        good: bool ``[len(plan)]``, the objects that arrived verified.
        tiers: (tier, bytes, seconds) of what was read, for the estimates.
    """

    good: npt.NDArray[np.bool_]
    tiers: tuple[tuple[int, int, float], ...] = ()


@dataclass(slots=True)
class RecoveryStats:
    """How requests got to their first token.

    Attributes:
        chosen: choices by way, and by reason.
        given_up: loads that were given up.
        replays, replayed_tokens, replayed_forwards: what replays ran.
    """

    chosen: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    given_up: int = 0
    replays: int = 0
    replayed_tokens: int = 0
    replayed_forwards: int = 0
