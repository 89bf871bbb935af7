"""``Hierarchy``: one manager's device arena and the cold tiers behind it, nearest first.

The manager decides what moves; this joins its plans with the bytes.  A load comes before the request that waits for
it (``fetching.py``), a prefetch before the request itself (``ahead.py``); a large prefix is read while it is still
coming (``landing.py``); stores go on behind requests while their slots are held (``keeping.py``), and what is cold in
one tier moves on to the next (``moving.py``).  Nothing that a tier does stops a request: what cannot be found, read or
stored is counted and computed again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from kvloom.core.namespace import ExtraKey
from kvloom.manager import Manager
from kvloom.manager.sequence import CachedSequence
from kvloom.plan import Chain, CopyPlan, Limit
from kvloom.tiers.contract import Tier
from kvloom.transfer.ahead import Ahead
from kvloom.transfer.arriving import Arrival, Timeline
from kvloom.transfer.cooling import Cooling
from kvloom.transfer.fetching import Fetching
from kvloom.transfer.ground import Ground, Names
from kvloom.transfer.keeping import END_PATIENCE_S, Keeping
from kvloom.transfer.landing import Landing, Late
from kvloom.transfer.lanes import Lane
from kvloom.transfer.link import Link
from kvloom.transfer.loading import Load
from kvloom.transfer.memory import SlotMemory
from kvloom.transfer.moving import Moving
from kvloom.transfer.options import Restoring, TransferOptions
from kvloom.transfer.pace import Pace
from kvloom.transfer.ready import make_ready
from kvloom.transfer.stats import TransferStats
from kvloom.transfer.stuck import Stuck
from kvloom.types import Grade, Int32Array

CLOSE_PATIENCE, ROOM_PATIENCE, GIVE_UP_PATIENCE = 60.0, 2.0, 1.0
"""Seconds that closing, a request without room, and one that gives its prefix up, wait at most for what moves."""
LOAD_ROOM_PATIENCE = 0.5
"""The same for a request whose prefix may find no room."""


class Hierarchy:
    """Belongs to the manager's thread.

    Args:
        memory: of the device arena.
        tiers: cold tiers, nearest first; ``close`` closes them.
        clock: monotonic seconds.
        lane: what moves bytes: threads, or ``Inline``, which does everything at once.
        hurried: asked while a request waits for a tier: once it says so, as after Ctrl-C, nobody waits any longer.

    Attributes:
        pace: is told when a forward begins and ends.
        ground, fetching, landing, late, ahead, keeping: its rooms.
    """

    def __init__(
        self,
        manager: Manager,
        memory: SlotMemory,
        tiers: Sequence[Tier],
        options: TransferOptions | None = None,
        clock: Callable[[], float] = time.monotonic,
        lane: type[Lane] = Lane,
        hurried: Callable[[], bool] = lambda: False,
    ) -> None:
        options = options or TransferOptions()
        make_ready(tiers, options.cold_form)
        # Copies to an accelerator take no processor away from what it computes.
        self.pace = Pace(options.pace if memory.host_memory() is not None else 1.0)
        shared = (memory, manager.spec, manager.geometry, options, clock, lane, self.pace)
        self.links = [Link(tier, *shared) for tier in tiers]
        for link in self.links:
            link.hurried = hurried
        self.stats = TransferStats({link.tier.name: link.stats for link in self.links})
        self.ground = Ground(manager, memory, self.links, options, self.stats, clock, hurried)
        self.late = Late(self.ground)
        self.landing = Landing(self.ground, self.late)
        self.fetching = Fetching(self.ground, self.landing, self.late)
        self.fetching.make_room = self._let_go
        self.ahead = Ahead(self.ground, self.fetching, self.landing, self.late)
        self._moving = Moving(self.ground)
        self._stuck = Stuck(clock, hurried)
        self.keeping = Keeping(self.ground, self.landing, self._moving, self._stuck)

    @property
    def tiers(self) -> list[Tier]:
        """Nearest first."""
        return [link.tier for link in self.links]

    @property
    def outlives(self) -> bool:
        """Whether a tier outlives the process."""
        return any(link.tier.durable for link in self.links)

    @property
    def cooling(self) -> list[Cooling]:
        """Of the tiers whose objects may take another form."""
        return self._moving.cooling

    # ---------------------------------------------------------------- to the device

    def restore(
        self,
        tokens: Int32Array,
        salt: bytes,
        extra_keys: Sequence[ExtraKey],
        floor: Grade,
        restoring: Restoring | None = None,
    ) -> None:
        """Bring to the device what lets a prompt resume further on.

        ``tokens``: the whole prompt.  Call it right before ``Manager.open``.  ``restoring``: instead of that of the
        options.  When it returns with an ``arriving`` one, what the first copies read is there, and the rest is coming.
        """
        self.begin_request()
        if len(tokens) < 2:
            return
        options, names = self.ground.options, (salt, extra_keys)
        chain = self.ground.chain(tokens[:-1], names)
        ends_at = self.ground.clock() + options.load_deadline_s
        self.await_ends(chain, names, floor)
        if self.ahead.take(chain, floor):
            self.fetching.restore(chain, names, floor, restoring or options.restoring, ends_at)

    def begin_request(self) -> None:
        """What moved before is settled as far as it can be, and nothing is known yet that limits the next prompt."""
        self.settle()
        self.collect()
        self.fetching.limits = []

    def await_ends(self, chain: Chain, names: Names, floor: Grade, patience_s: float = END_PATIENCE_S) -> None:
        """Let ends of a prompt get to a tier that the device has dropped while they were on their way."""
        (salt, keys), survey = names, self.ground.manager.colder.survey

        def here() -> int:
            return survey(chain.tokens, salt=salt, extra_keys=keys, floor=floor).reused

        self.keeping.await_ends(chain, here, patience_s)

    def prefetch(self, tokens: Int32Array, salt: bytes, extra_keys: Sequence[ExtraKey], floor: Grade) -> bool:
        """Begin to bring what ``restore`` will want for a prompt that waits; whether something is under way.

        What arrives holds its room until the prompt is opened, ``forget_ahead`` is called, or somebody needs the room.
        """
        self.collect()
        if len(tokens) < 2:
            return False
        names = salt, extra_keys
        return self.ahead.begin(self.ground.chain(tokens[:-1], names), names, floor)

    def ahead_of(self, tokens: Int32Array, salt: bytes, extra_keys: Sequence[ExtraKey]) -> dict[str, tuple[int, int]]:
        """What a prefetch for a prompt brings, and how much of that is there: ``Load.objects``; empty without one."""
        if len(tokens) < 2:
            return {}
        return self.ahead.objects(self.ground.chain(tokens[:-1], (salt, extra_keys)))

    def forget_ahead(self, tokens: Int32Array, salt: bytes, extra_keys: Sequence[ExtraKey]) -> None:
        """The prompt of a prefetch is not going to be opened."""
        if len(tokens) >= 2:
            self.ahead.forget(self.ground.chain(tokens[:-1], (salt, extra_keys)))
            self.collect()

    def forget_all_ahead(self) -> None:
        """No prompt of a prefetch is going to be opened."""
        self.ahead.forget_all()
        self.collect()

    @property
    def limits(self) -> list[Limit]:
        """Of the last request: what a tier has, but not good enough."""
        return self.fetching.limits

    # ---------------------------------------------------------------- while it arrives

    @property
    def arriving(self) -> Arrival | None:
        """The load whose objects are published and not all there; all that may read them wait for it."""
        return self.landing.arriving

    @property
    def timeline(self) -> Timeline | None:
        """Of the last one."""
        return self.landing.timeline

    def fence(self, plan: CopyPlan) -> None:
        """Copies are about to run: wait if one of them may read what is not there yet; ArrivalError if it won't be."""
        self.landing.fence(plan)

    def await_arrival(self) -> None:
        """Wait until what is arriving is there, or will not be; then ``settle`` takes no time."""
        self.landing.await_arrival()

    def settle(self) -> None:
        """Wait for what is arriving; what did not come is quarantined, and sequences that read it are broken."""
        self.landing.settle()

    def give_up(self, patience_s: float = GIVE_UP_PATIENCE) -> None:
        """Nobody needs what is arriving any more: read nothing more of it."""
        self.landing.give_up(patience_s)

    # ---------------------------------------------------------------- from the device

    def keep(self, sequence: CachedSequence, salt: bytes, extra_keys: Sequence[ExtraKey]) -> None:
        """The present end of a sequence has just been kept resumable: store it where it is to be, now or later.

        Returns at once; the bytes are read from the slots later, in another thread.
        """
        if len(sequence.tokens):
            self.collect()
            self.keeping.keep(sequence, (salt, extra_keys))

    # ---------------------------------------------------------------- all that moves

    def collect(self) -> None:
        """Let go of the slots of what has ended, and begin what waits."""
        self.keeping.collect()
        self.late.collect()
        self.keeping.offload()

    @property
    def waiting(self) -> bool:
        """Whether transfers hold slots that they will let go of."""
        return bool(self.keeping.jobs or self.late.loads or len(self.ahead))

    @property
    def moving(self) -> bool:
        """Whether bytes are on their way now."""
        loads: list[Load] = [*self.late.loads, *self.ahead.loads]
        if self.arriving is not None:
            loads.append(self.arriving.load)
        return any(not load.done for load in loads) or any(not job.done for job in self.keeping.jobs)

    def make_room(self) -> None:
        """Somebody needs room: give up what was fetched ahead, and wait a little for what is being stored."""
        self.forget_all_ahead()
        self.flush(ROOM_PATIENCE)

    def _let_go(self) -> bool:
        """Wait for what holds slots of ends and of loads that were given up; whether any has let go of some."""
        moving = [*self.keeping.moving, *self.late.moving]
        ended = self._stuck.wait(moving, [job for _, job in moving], LOAD_ROOM_PATIENCE)
        self.collect()
        return ended

    def flush(self, patience_s: float = CLOSE_PATIENCE) -> bool:
        """Wait until everything that is being moved is, but not longer; whether nothing holds slots any more."""
        clock = self.ground.clock
        ends_at = clock() + patience_s
        while self.keeping.jobs or self.late.loads:
            for job in self.keeping.jobs:
                job.wait(max(0.0, ends_at - clock()))
            for load in self.late.loads:
                load.wait(ends_at, clock())
            self.collect()
            if clock() >= ends_at:
                break
        return not (self.keeping.jobs or self.late.loads)

    def close(self, patience_s: float = CLOSE_PATIENCE) -> None:
        """Store what is to outlive the process, then close the tiers.

        A tier that hangs is left to itself after a while, and what waits for it is lost.
        """
        clock = self.ground.clock
        ends_at = clock() + patience_s
        self.give_up()
        self.forget_all_ahead()
        self.flush(patience_s)
        for number, link in enumerate(self.links):
            if link.tier.durable:
                self.keeping.keep_for_good(number, lambda: self.flush(ends_at - clock()))
                self.flush(ends_at - clock())
                self._moving.all_to(number, max(0.0, ends_at - clock()))
                break
        for link in self.links:
            link.close(max(0.0, ends_at - clock()))
        self.keeping.count_left()
