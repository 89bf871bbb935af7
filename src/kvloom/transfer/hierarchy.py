"""``Hierarchy``: one manager's device arena and the cold tiers behind it, nearest first.

The manager decides what moves; this joins its plans with the bytes.  A load comes before the request that waits for
it, a prefetch before the request itself; stores go on behind requests while their slots are held.  Nothing that a tier
does stops a request: what cannot be found, read or stored is counted and computed again.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from kvloom.core.namespace import ExtraKey
from kvloom.errors import ArrivalError
from kvloom.manager import Manager
from kvloom.manager.sequence import CachedSequence
from kvloom.plan import Chain, CopyPlan, Limit, TransferPlan
from kvloom.tiers.contract import HandsOn, Tier
from kvloom.tiers.values import Places, Result
from kvloom.transfer.arriving import Arrival, Ended, Timeline
from kvloom.transfer.cooling import Cooling, Rewrites
from kvloom.transfer.demotion import Demotion
from kvloom.transfer.forms import Forms
from kvloom.transfer.lanes import Job, Lane, Urgency
from kvloom.transfer.link import ASK_PATIENCE, Link, Stored
from kvloom.transfer.loading import Load
from kvloom.transfer.memory import SlotMemory
from kvloom.transfer.offers import Offer, joined, kept_of, make_offer, objects_of
from kvloom.transfer.options import Admission, ColdForm, Restoring, TransferOptions
from kvloom.transfer.parts import Parts
from kvloom.transfer.progress import Way
from kvloom.transfer.stats import TransferStats
from kvloom.types import Grade, Int32Array

_TRIES = 4
"""Loads for one request: after one that did not arrive whole, what is left is tried."""
MOST_PENDING = 4096
"""Ends of sequences that are remembered to be copied once the device fills."""
CLOSE_PATIENCE, ROOM_PATIENCE, GIVE_UP_PATIENCE = 60.0, 2.0, 1.0
"""Seconds that closing, a request without room, and one that gives its prefix up, wait at most for what moves."""
_LOOK_S = 0.05
"""How often a request that waits looks whether it is to hurry."""


@dataclass(frozen=True, slots=True)
class _End:
    """An end of a sequence that was kept resumable; ``exact``: for one that does not accept approximate state."""

    tokens: Int32Array
    salt: bytes
    extra_keys: tuple[ExtraKey, ...]
    exact: bool


class Hierarchy:
    """Belongs to the manager's thread.

    Args:
        memory: of the device arena.
        tiers: cold tiers, nearest first; ``close`` closes them.
        clock: monotonic seconds.
        lane: what moves bytes: threads, or ``Inline``, which does everything at once.
        hurried: asked while a request waits for a tier: once it says so, as after Ctrl-C, nobody waits any longer.
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
        self.hurried = hurried
        self.manager = manager
        self._memory, self._clock = memory, clock
        self.options = options or TransferOptions()
        self.links = [Link(tier, memory, manager.spec, manager.geometry, self.options, clock, lane) for tier in tiers]
        for link in self.links:
            link.hurried = hurried
        self.stats = TransferStats({link.tier.name: link.stats for link in self.links})
        self.cooling: list[Cooling] = []
        self._after = [self._housekeeping(number) for number in range(len(self.links))]
        self._pending: OrderedDict[bytes, _End] = OrderedDict()
        self._stores: deque[tuple[Link, TransferPlan, Job[Stored]]] = deque()
        self._ahead: OrderedDict[bytes, tuple[Load, Grade]] = OrderedDict()
        self._late: list[Load] = []
        self._tails: set[tuple[int, int]] = set()
        self.arriving: Arrival | None = None
        """The load whose objects are published and not all there; all that may read them wait for it."""
        self.timeline: Timeline | None = None
        """Of the last one."""
        self.limits: list[Limit] = []
        """Of the last ``restore``: what a tier has, but not good enough."""

    @property
    def parts(self) -> Parts:
        """How slots are cut into records."""
        return self.links[0].parts

    @property
    def tiers(self) -> list[Tier]:
        """Nearest first."""
        return [link.tier for link in self.links]

    @property
    def outlives(self) -> bool:
        """Whether a tier outlives the process."""
        return any(link.tier.durable for link in self.links)

    # ---------------------------------------------------------------- loading

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
        self.settle()
        self.collect()
        self.limits = []
        if len(tokens) < 2:
            return
        chain = self.manager.colder.chain(tokens[:-1], salt=salt, extra_keys=extra_keys)
        ends = self._clock() + self.options.load_deadline_s
        if not self.take_ahead(chain, floor):
            return
        for _ in range(_TRIES):  # damaged objects are not found again, but something shorter may be
            begun = self._clock()
            way = Way(Urgency.LOAD, ends - begun, restoring or self.options.restoring)
            load = self._begin(chain, salt, extra_keys, floor, way)
            if load is None or self.arrive(load, ends, begun) or not self._end(load, ends):
                break

    def take_ahead(self, chain: Chain, floor: Grade) -> bool:
        """Let what was fetched ahead for a chain arrive; whether to look for something better now."""
        load, best = self._ahead.get(_name(chain), (None, floor))
        if load is None:
            return True
        if best < floor:  # it may be of no use, and something better may be there
            self._give_up_ahead(_name(chain))
            return True
        load.hasten(self.options.load_deadline_s)
        arrived = self._wait(load, self._clock() + self.options.load_deadline_s)  # an interrupt leaves it ahead
        del self._ahead[_name(chain)]
        self.stats.prefetch_used += 1
        if not arrived:
            load.cancel(late=True)
            self.leave(load)
            return False
        results = load.finish(self.manager)
        if not results.any():
            load.touch(self.manager.layout)
        # More may have come to the tiers since; what a device cannot read now it is not asked for again at once.
        return not (results == Result.IO_ERROR).any()

    def prefetch(self, tokens: Int32Array, salt: bytes, extra_keys: Sequence[ExtraKey], floor: Grade) -> bool:
        """Begin to bring what ``restore`` will want for a prompt that waits; whether something is under way.

        What arrives holds its room until the prompt is opened, ``forget_ahead`` is called, or somebody needs the room.
        """
        self.collect()
        if len(tokens) < 2:
            return False
        chain = self.manager.colder.chain(tokens[:-1], salt=salt, extra_keys=extra_keys)
        name = _name(chain)
        if name in self._ahead:
            if self._ahead[name][1] >= floor:
                return True
            self._give_up_ahead(name)
        if len(self._ahead) >= self.options.most_prefetches:
            return False
        load = self._begin(chain, salt, extra_keys, floor, Way(Urgency.PREFETCH))
        if load is None:
            return False
        if any(each.job is None for each in load.bringing):  # a lane is full, or hangs
            load.cancel()
            self._late.append(load)
            self.collect()
            return False
        self._ahead[name] = load, floor
        self.stats.prefetched += 1
        return True

    def ahead_of(self, tokens: Int32Array, salt: bytes, extra_keys: Sequence[ExtraKey]) -> dict[str, tuple[int, int]]:
        """What a prefetch for a prompt brings, and how much of that is there: ``Load.objects``; empty without one."""
        if len(tokens) < 2:
            return {}
        ahead = self._ahead.get(_name(self.manager.colder.chain(tokens[:-1], salt=salt, extra_keys=extra_keys)))
        return {} if ahead is None else ahead[0].objects()

    def forget_ahead(self, tokens: Int32Array, salt: bytes, extra_keys: Sequence[ExtraKey]) -> None:
        """The prompt of a prefetch is not going to be opened."""
        if len(tokens) < 2:
            return
        self._give_up_ahead(_name(self.manager.colder.chain(tokens[:-1], salt=salt, extra_keys=extra_keys)))

    def forget_all_ahead(self) -> None:
        """No prompt of a prefetch is going to be opened."""
        for name in list(self._ahead):
            self._give_up_ahead(name)

    def _give_up_ahead(self, name: bytes) -> None:
        ahead = self._ahead.pop(name, None)
        if ahead is not None:
            ahead[0].cancel()
            self._late.append(ahead[0])
            self.collect()

    def _begin(
        self,
        chain: Chain,
        salt: bytes,
        extra_keys: Sequence[ExtraKey],
        floor: Grade,
        way: Way,
    ) -> Load | None:
        """Plan and begin the best load for a chain, or for an earlier end within it; None when nothing helps."""
        waits = way.urgency is Urgency.LOAD
        patience = self.options.load_deadline_s if waits and way.within is None else way.within or ASK_PATIENCE
        found = self.find(chain, patience)
        ends = self.ends_within(chain, salt, extra_keys)
        here = 0
        if ends:  # one that the device goes beyond is of no use
            here = self.manager.colder.survey(chain.tokens, salt=salt, extra_keys=extra_keys, floor=floor).reused
        for end in ends:
            if len(end.tokens) <= here:
                break
            shorter = self.find(end, patience)
            load = self._plan(end, make_offer(shorter, floor, self.parts), salt, extra_keys, floor, way)
            if load is not None:
                return load
        return self._plan(chain, make_offer(found, floor, self.parts), salt, extra_keys, floor, way)

    def _plan(
        self,
        chain: Chain,
        offer: Offer,
        salt: bytes,
        extra_keys: Sequence[ExtraKey],
        floor: Grade,
        way: Way,
    ) -> Load | None:
        self.note_limits(chain, offer.places, salt, extra_keys, floor)
        if not len(offer):
            return None
        manager = self.manager
        plan = manager.colder.plan_load(chain.tokens, offer.stored, salt=salt, extra_keys=extra_keys, floor=floor)
        if plan is None:
            return None
        return Load.begin(manager, self.links, chain, plan, offer, way, self.options.prefetch_window)

    def find(self, chain: Chain, patience_s: float = ASK_PATIENCE) -> list[Places | None]:
        """The places of a chain in every tier; None where a tier has nothing of it, or does not say so in time."""
        places: list[Places | None] = []
        self._tails = set()
        for link in self.links:
            found = link.find(self.manager.layout, chain, patience_s)
            places.append(found.places if len(found.places) else None)
            self._tails.update((row, tokens) for row, tokens in found.tails.tolist())
        return places

    def chain(self, tokens: Int32Array, salt: bytes, extra_keys: Sequence[ExtraKey]) -> Chain:
        """The names of tokens."""
        return self.manager.colder.chain(tokens, salt=salt, extra_keys=extra_keys)

    def ends_within(self, chain: Chain, salt: bytes, extra_keys: Sequence[ExtraKey]) -> list[Chain]:
        """Chains that stop at ends within the one that was just found, which a tier may know; the longest first."""
        lengths = {(row + 1) * chain.segment + tokens for row, tokens in self._tails}
        reached = len(chain.tokens)
        wanted = sorted((length for length in lengths if 0 < length < reached), reverse=True)
        return [self.chain(chain.tokens[:length], salt, extra_keys) for length in wanted[:_TRIES]]

    def now(self) -> float:
        """Monotonic seconds."""
        return self._clock()

    def leave(self, load: Load) -> None:
        """Nobody waits for a load any more: what arrives is published at a later call."""
        self._late.append(load)
        self.stats.late += 1

    def _end(self, load: Load, ends_at: float) -> bool:
        """Wait for a load and publish it; whether another one may do better (False: it was late, or all arrived)."""
        try:
            arrived = self._wait(load, ends_at)
        except BaseException:  # an interrupt: what still moves keeps its slots until it has ended
            load.cancel()
            self.leave(load)
            raise
        if not arrived:
            load.cancel(late=True)
            self.leave(load)
            return False
        results = load.finish(self.manager)
        if not results.any():
            load.touch(self.manager.layout)
            return False
        # What a device cannot read now it may read later; it is not asked again at once.
        return not np.isin(results, (Result.IO_ERROR, Result.STOPPED)).any()

    def _wait(self, load: Load, ends_at: float) -> bool:
        """Wait for a load, until the time is over or somebody is in a hurry; whether it is done."""
        while not load.wait(min(ends_at, self._clock() + _LOOK_S), self._clock()):
            if self._clock() >= ends_at or self.hurried():
                return False
        return True

    # ---------------------------------------------------------------- arriving

    def arrive(self, load: Load, ends_at: float, begun: float) -> bool:
        """Let the request go on once the first stage of a load is there; False when it is to wait for all of it."""
        if load.stages.count == 1:
            return False
        arrival = Arrival(load, ends_at, begun, self._clock, self.hurried)
        try:
            arrival.wait_for(1)
        except ArrivalError:
            return False
        arrival.timeline.opened = self._clock()
        self.arriving, self.timeline = arrival, arrival.timeline  # before anybody can see what is not there
        self.manager.colder.begin_arriving(load.plan)
        self.stats.layered += 1
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
            self._wait(self.arriving.load, self.arriving.ends_at)

    def settle(self) -> None:
        """Wait for what is arriving; what did not come is quarantined, and sequences that read it are broken."""
        if self.arriving is not None:
            self.await_arrival()
            self._conclude(self.arriving)

    def give_up(self, patience_s: float = GIVE_UP_PATIENCE) -> None:
        """Nobody needs what is arriving any more: read nothing more of it."""
        if self.arriving is not None:
            self.arriving.load.cancel()
            self.arriving.load.wait(self._clock() + patience_s, self._clock())
            self._conclude(self.arriving)

    def _conclude(self, arrival: Arrival) -> None:
        self.arriving = None
        arrival.end(Ended.BROKEN)
        load = arrival.load
        if not load.done:
            # A late write may still land in its slots: they stay held, but nobody reads them.
            load.cancel(late=True)
            self.manager.colder.withdraw(load.plan, arrival.nothing)
            self._late.append(load)
            self.stats.late += 1
        elif not load.finish(self.manager).any():
            arrival.end(Ended.WHOLE)
            load.touch(self.manager.layout)

    def note_limits(
        self,
        chain: Chain,
        found: Sequence[Places | None],
        salt: bytes,
        extra_keys: Sequence[ExtraKey],
        floor: Grade,
    ) -> None:
        """Remember what a tier has of a chain that is not good enough, where that is what keeps it from being used."""
        for link, places in zip(self.links, found, strict=True):
            if places is not None and (places.entries["grade"] < int(floor)).any():
                names: dict[str, Any] = {"salt": salt, "extra_keys": extra_keys, "floor": floor}
                stored, tier = objects_of(places, self.parts), link.tier.name
                limits = self.manager.colder.explain_load(chain.tokens, stored, tier=tier, **names)
                self.limits += [limit for limit in limits if limit not in self.limits]

    # ---------------------------------------------------------------- storing

    def keep(self, sequence: CachedSequence, salt: bytes, extra_keys: Sequence[ExtraKey]) -> None:
        """The present end of a sequence has just been kept resumable: store it where it is to be, now or later.

        Returns at once; the bytes are read from the slots later, in another thread.
        """
        tokens = sequence.tokens
        if not len(tokens):
            return
        self.collect()
        chain = self.manager.colder.chain(tokens, salt=salt, extra_keys=extra_keys)
        end = _End(tokens.copy(), salt, tuple(extra_keys), sequence.floor > Grade.APPROXIMATE)
        if not end.exact:
            self._accept_lossy()
        for number, link in enumerate(self.links):
            if self._waits(number):
                self._remember(chain, end)
            elif self.options.admission is Admission.ALWAYS or not number:
                self._store_now(link, chain, end)
            elif sequence.reused:  # what was used again, and nothing that is new
                again = replace(end, tokens=end.tokens[: sequence.reused])
                self._store_now(link, self.chain(again.tokens, salt, extra_keys), again)
        self._offload()

    def _store_now(self, link: Link, chain: Chain, end: _End) -> None:
        if not self._store(link, chain, end):
            link.stats.not_stored["busy"] += 1

    def _accept_lossy(self) -> None:
        """There are sessions that reuse approximate state, so it is worth keeping."""
        for forms in (*(link.forms for link in self.links), *(cooling.forms for cooling in self.cooling)):
            forms.lossy = True

    def _waits(self, number: int) -> bool:
        """Whether a tier gets ends only once the device fills: what does not outlive the process is no hurry."""
        return number == 0 and not self.links[0].tier.durable

    def _remember(self, chain: Chain, end: _End) -> None:
        name = _name(chain)
        before = self._pending.get(name)
        self._pending[name] = replace(end, exact=True) if before is not None and before.exact else end
        self._pending.move_to_end(name)
        if len(self._pending) > MOST_PENDING:
            self._pending.popitem(last=False)
            self.stats.not_kept["forgotten"] += 1

    def _offload(self) -> None:
        """Copy the ends used longest ago to the nearest tier, while the device is fuller than it should be."""
        while self._pending and self.arriving is None and self.manager.fill() >= self.options.gpu_watermark:
            name, end = next(iter(self._pending.items()))
            chain = self.manager.colder.chain(end.tokens, salt=end.salt, extra_keys=end.extra_keys)
            if not self._store(self.links[0], chain, end):
                return  # the lane is full: later
            del self._pending[name]

    def _store(self, link: Link, chain: Chain, end: _End) -> bool:
        """Begin to store the units of an end that a tier lacks; False when the lane has no room."""
        manager = self.manager
        self.settle()  # nothing is stored that is not there yet
        stored = kept_of(link.find(manager.layout, chain).places, self.parts, exact=end.exact)
        behind = any(each is link for each, _, _ in self._stores)
        for floor in (Grade.CANONICAL, Grade.FAITHFUL, Grade.APPROXIMATE):
            plan = manager.colder.plan_offload(
                chain.tokens, stored, salt=end.salt, extra_keys=end.extra_keys, floor=floor
            )
            if plan is None:
                continue
            self._memory.settle()
            lanes = [each.reading for each in self.links]
            make = partial(link.unit, manager.layout, chain, plan, lanes, exact=end.exact, behind=behind)
            job = link.store(make, self._after_store(link))
            if job is None:
                manager.colder.finish_store(plan)
                return False
            self._stores.append((link, plan, job))
            stored = joined(stored, plan)
        return True

    def _after_store(self, link: Link) -> Callable[[], None]:
        """What a lane does after a publication: see to what is cold in its tier."""
        return self._after[self.links.index(link)]

    def _housekeeping(self, number: int) -> Callable[[], None]:
        link, work = self.links[number], list[Callable[[], None]]()
        if isinstance(link.tier, Rewrites) and self.options.cold_form is not ColdForm.NONE:
            forms = Forms(link.tier.name, self.manager.spec.groups, self.options.cold_form, link.parts)
            layout = link.parts.layout(self.manager.layout)
            self.cooling.append(Cooling(link.tier, layout, forms, self.options))
            work.append(self.cooling[-1].run)
        if number + 1 < len(self.links) and isinstance(link.tier, HandsOn):
            work.append(Demotion(link.tier, self.links[number + 1], self.options).run)

        def run() -> None:
            for each in work:
                each()

        return run

    def collect(self) -> None:
        """Let go of the slots of what has ended, and begin what waits."""
        for _ in range(len(self._stores)):
            link, plan, job = self._stores.popleft()
            if not job.done:
                self._stores.append((link, plan, job))
                continue
            self.manager.colder.finish_store(plan)
            link.count_store(job)
        late, self._late = self._late, []
        for load in late:
            if load.done:
                load.finish(self.manager)
            else:
                self._late.append(load)
        self._offload()

    @property
    def waiting(self) -> bool:
        """Whether transfers hold slots that they will let go of."""
        return bool(self._stores or self._late or self._ahead)

    @property
    def moving(self) -> bool:
        """Whether bytes are on their way now."""
        loads = [
            *self._late,
            *(load for load, _ in self._ahead.values()),
            *([] if self.arriving is None else [self.arriving.load]),
        ]
        return any(not load.done for load in loads) or any(not job.done for _, _, job in self._stores)

    def make_room(self) -> None:
        """Somebody needs room: give up what was fetched ahead, and wait a little for what is being stored."""
        self._drop_ahead()
        self.flush(ROOM_PATIENCE)

    def flush(self, patience_s: float = CLOSE_PATIENCE) -> bool:
        """Wait until everything that is being moved is, but not longer; whether nothing holds slots any more."""
        ends = self._clock() + patience_s
        while self._stores or self._late:
            for _, _, job in self._stores:
                job.wait(max(0.0, ends - self._clock()))
            for load in self._late:
                load.wait(ends, self._clock())
            self.collect()
            if self._clock() >= ends:
                break
        return not (self._stores or self._late)

    def close(self, patience_s: float = CLOSE_PATIENCE) -> None:
        """Store what is to outlive the process, then close the tiers.

        A tier that hangs is left to itself after a while, and what waits for it is lost.
        """
        ends = self._clock() + patience_s
        self.give_up()
        self._drop_ahead()
        self.flush(patience_s)
        for number, link in enumerate(self.links):
            if link.tier.durable:
                self._keep_for_good(number, link, ends)
                break
        for link in self.links:
            link.close(max(0.0, ends - self._clock()))
        for link, _, job in self._stores:
            link.count_store(job)

    def _keep_for_good(self, number: int, link: Link, ends: float) -> None:
        """Store in the first tier that outlives the process what only the device and the tier before have."""
        for end in self._pending.values():
            chain = self.manager.colder.chain(end.tokens, salt=end.salt, extra_keys=end.extra_keys)
            while not self._store(link, chain, end) and self.flush(ends - self._clock()):
                pass
        self.flush(ends - self._clock())
        self._pending.clear()
        before = self.links[number - 1].tier if number else None
        if isinstance(before, HandsOn):
            Demotion(before, link, self.options).run_all(max(0.0, ends - self._clock()))

    def _drop_ahead(self) -> None:
        """Give up what was fetched ahead and not asked for."""
        self.forget_all_ahead()
        self.collect()


def _name(chain: Chain) -> bytes:
    name: bytes = chain.digests[-1].tobytes()
    return name
