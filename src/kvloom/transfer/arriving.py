"""A load whose objects a request reads already while the last of them are still coming."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from kvloom.errors import ArrivalError
from kvloom.plan import CopyPlan
from kvloom.transfer.loading import Bringing, Load

_LOOK_S = 0.05
"""Seconds after which a waiting forward looks whether its job ended early."""


class Ended(enum.Enum):
    """How an arrival stands."""

    OPEN = "open"
    WHOLE = "whole"
    """Everything is there and verified."""
    BROKEN = "broken"
    """Something did not come: who began to read it has to begin again."""


@dataclass(slots=True)
class Timeline:
    """Monotonic seconds, for reports.

    Attributes:
        begun: the load was handed out.
        opened: the prompt could be opened.
        needed: (group, layer of the group, asked, there): when a forward first needed the state of a layer.
        reads: (begun, ended, bytes) of every stage of every tier.
    """

    begun: float
    opened: float
    needed: list[tuple[int, int, float, float]] = field(default_factory=list)
    reads: list[tuple[float, float, int]] = field(default_factory=list)


class Arrival:
    """Belongs to the manager's thread.

    Args:
        load: in stages; ``ColderTiers.begin_arriving`` is for the caller.
        ends_at: monotonic second after which nobody waits for it any more.
        clock: monotonic seconds.
        hurried: once it says so nobody waits any longer.
    """

    def __init__(
        self,
        load: Load,
        ends_at: float,
        begun: float,
        clock: Callable[[], float],
        hurried: Callable[[], bool] = lambda: False,
    ) -> None:
        self._hurried = hurried
        self.load, self.ends_at, self.ended = load, ends_at, Ended.OPEN
        self.timeline = Timeline(begun, begun)
        self._clock = clock
        self._reached = 0
        self._seen: set[tuple[int, int]] = set()
        plan = load.plan
        self._stage_of = dict(
            zip(zip(plan.group.tolist(), plan.slot.tolist(), strict=True), load.stages.of_object.tolist(), strict=True)
        )

    def wait(self, group: int, layer: int) -> None:
        """Return once all state of a layer (by its place in its group) is there and verified.

        Raises ArrivalError when it does not come, or the load has ended without it.
        """
        if self.ended is Ended.WHOLE:
            return
        asked = self._clock()
        self.wait_for(self.load.stages.of_layer[group][layer] + 1)
        if (group, layer) not in self._seen:
            self._seen.add((group, layer))
            self.timeline.needed.append((group, layer, asked, self._clock()))

    def wait_for(self, stages: int) -> None:
        """Like ``wait``, for the first ``stages`` stages."""
        if self.ended is Ended.BROKEN:
            raise ArrivalError("a cached prefix did not arrive whole")
        if stages <= self._reached or self.ended is Ended.WHOLE:
            return
        for each in self.load.bringing:
            self._wait_one(each, stages)
        self._reached = stages

    def wait_all(self) -> None:
        """Like ``wait``, for everything."""
        self.wait_for(self.load.stages.count)

    def _wait_one(self, each: Bringing, stages: int) -> None:
        while True:
            ended = each.job is None or each.job.done  # asked first: what it brought before it ended counts
            if len(each.progress.pieces) >= stages:
                break
            left = self.ends_at - self._clock()
            if ended or left <= 0 or self._hurried():
                break
            each.progress.wait(stages, min(left, _LOOK_S))
        if each.progress.good < stages:
            raise ArrivalError("a cached prefix did not arrive whole")

    def reads_of(self, plan: CopyPlan) -> bool:
        """Whether a plan copies from a slot whose bytes may not be there yet."""
        sources = zip(plan.group.tolist(), plan.src.tolist(), strict=True)
        return any(self._stage_of.get(source, -1) >= self._reached for source in sources)

    def end(self, how: Ended) -> None:
        """Say how it ended."""
        self.ended = how
        self.timeline.reads = [
            (piece.begun, piece.ended, piece.n_bytes) for each in self.load.bringing for piece in each.progress.pieces
        ]

    @property
    def nothing(self) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """That no object came, as the manager takes it."""
        return np.zeros(len(self.load.plan), dtype=np.bool_)
