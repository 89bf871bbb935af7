"""The load that a request reads while it is still coming, and the loads that nobody waits for any more."""

from __future__ import annotations

from kvloom.errors import ArrivalError
from kvloom.plan import CopyPlan
from kvloom.transfer.arriving import Arrival, Ended, Timeline
from kvloom.transfer.ground import Ground
from kvloom.transfer.loading import Load
from kvloom.transfer.stuck import Moving

_LOOK_S = 0.05
"""How often a request that waits looks whether it is to hurry."""


class Late:
    """Loads that nobody waits for: they keep their slots until they have ended, and what arrives is published then."""

    def __init__(self, ground: Ground) -> None:
        self._ground = ground
        self.loads: list[Load] = []

    def leave(self, load: Load) -> None:
        """A request does not wait for a load any longer."""
        self.loads.append(load)
        self._ground.stats.late += 1

    @property
    def moving(self) -> Moving:
        """What brings them, with its lanes."""
        return [(each.link.reading, each.job) for load in self.loads for each in load.bringing if each.job is not None]

    def collect(self) -> None:
        """Publish what has ended."""
        loads, self.loads = self.loads, []
        for load in loads:
            if load.done:
                load.finish(self._ground.manager)
            else:
                self.loads.append(load)


class Landing:
    """Attributes:
    arriving: the load whose objects are published and not all there; all that may read them wait for it.
    timeline: of the last one.
    """

    def __init__(self, ground: Ground, late: Late) -> None:
        self._ground, self._late = ground, late
        self.arriving: Arrival | None = None
        self.timeline: Timeline | None = None

    def arrive(self, load: Load, ends_at: float, begun: float) -> bool:
        """Let the request go on once the first stage of a load is there; False when it is to wait for all of it."""
        ground = self._ground
        if load.stages.count == 1:
            return False
        arrival = Arrival(load, ends_at, begun, ground.clock, ground.hurried)
        try:
            arrival.wait_for(1)
        except ArrivalError:
            return False
        arrival.timeline.opened = ground.clock()
        self.arriving, self.timeline = arrival, arrival.timeline  # before anybody can see what is not there
        ground.manager.colder.begin_arriving(load.plan)
        ground.stats.layered += 1
        return True

    def fence(self, plan: CopyPlan) -> None:
        """Copies are about to run: wait if one of them may read what is not there yet; ArrivalError if it won't be."""
        arrival = self.arriving
        if arrival is not None and arrival.reads_of(plan):
            self.settle()
            arrival.wait_all()

    def await_arrival(self) -> None:
        """Wait until what is arriving is there, or will not be; then ``settle`` takes no time."""
        if self.arriving is not None:
            self.wait(self.arriving.load, self.arriving.ends_at)

    def settle(self) -> None:
        """Wait for what is arriving; what did not come is quarantined, and sequences that read it are broken."""
        if self.arriving is not None:
            self.await_arrival()
            self._conclude(self.arriving)

    def give_up(self, patience_s: float) -> None:
        """Nobody needs what is arriving any more: read nothing more of it."""
        if self.arriving is not None:
            now = self._ground.clock()
            self.arriving.load.cancel()
            self.arriving.load.wait(now + patience_s, now)
            self._conclude(self.arriving)

    def _conclude(self, arrival: Arrival) -> None:
        manager, load = self._ground.manager, arrival.load
        self.arriving = None
        arrival.end(Ended.BROKEN)
        if not load.done:
            # A late write may still land in its slots: they stay held, but nobody reads them.
            load.cancel(late=True)
            manager.colder.withdraw(load.plan, arrival.nothing)
            self._late.leave(load)
        elif not load.finish(manager).any():
            arrival.end(Ended.WHOLE)
            load.touch(manager.layout)

    def wait(self, load: Load, ends_at: float) -> bool:
        """Wait for a load, until the time is over or somebody is in a hurry; whether it is done."""
        clock = self._ground.clock
        while not load.wait(min(ends_at, clock() + _LOOK_S), clock()):
            if clock() >= ends_at or self._ground.hurried():
                return False
        return True
