"""From the device to cold tiers: which ends of sequences are stored where, and when: now, or once the device fills."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from kvloom.manager.sequence import CachedSequence
from kvloom.plan import Chain, TransferPlan
from kvloom.tiers.values import Unit
from kvloom.transfer.ground import Ground, Names, name_of
from kvloom.transfer.jobs import Job
from kvloom.transfer.landing import Landing
from kvloom.transfer.link import Link, Stored
from kvloom.transfer.moving import Moving
from kvloom.transfer.offers import kept_of
from kvloom.transfer.options import Admission
from kvloom.transfer.pace import Rest
from kvloom.transfer.stuck import Moving as Jobs
from kvloom.transfer.stuck import Stuck
from kvloom.types import Grade, Int32Array

END_PATIENCE_S = 1.0
"""Seconds that a request waits at most for ends of its prompt that are on their way to a tier."""
MOST_PENDING = 4096
"""Ends of sequences that are remembered to be copied once the device fills."""


@dataclass(frozen=True, slots=True)
class _End:
    """An end of a sequence that was kept resumable; ``exact``: for one that does not accept approximate state."""

    tokens: Int32Array
    names: Names
    exact: bool


class Keeping:
    """Stores go on behind requests, while their slots are held.

    ``moving``: what is done after a store; ``stuck``: whom nobody waits for.
    """

    def __init__(self, ground: Ground, landing: Landing, moving: Moving, stuck: Stuck) -> None:
        self._stuck = stuck
        self._ground, self._landing, self._after = ground, landing, moving.after
        self._forms = [*(link.forms for link in ground.links), *(cooling.forms for cooling in moving.cooling)]
        self._pending: OrderedDict[bytes, _End] = OrderedDict()
        self._stores: deque[tuple[Link, Chain, TransferPlan, Job[Stored]]] = deque()

    @property
    def jobs(self) -> list[Job[Stored]]:
        """Those whose slots are held."""
        return [job for _, _, _, job in self._stores]

    @property
    def moving(self) -> Jobs:
        """The same, with their lanes."""
        return [(link.writing, job) for link, _, _, job in self._stores]

    def keep(self, sequence: CachedSequence, names: Names) -> None:
        """Store the present end of a sequence where it is to be, or remember it."""
        ground, (salt, keys) = self._ground, names
        end = _End(sequence.tokens.copy(), (salt, tuple(keys)), sequence.floor > Grade.APPROXIMATE)
        if not end.exact:  # there are sessions that reuse approximate state, so it is worth keeping
            for forms in self._forms:
                forms.lossy = True
        chain = ground.chain(end.tokens, end.names)
        for number, link in enumerate(ground.links):
            if self._waits(number):
                self._remember(chain, end)
            elif ground.options.admission is Admission.ALWAYS or not number:
                self._store_now(number, link, chain, end)
            elif sequence.reused:  # what was used again, and nothing that is new
                again = ground.chain(end.tokens[: sequence.reused], end.names)
                self._store_now(number, link, again, end)
        self.offload()

    def _store_now(self, number: int, link: Link, chain: Chain, end: _End) -> None:
        if not self._store(number, chain, end):
            link.stats.not_stored["busy"] += 1

    def _waits(self, number: int) -> bool:
        """Whether a tier gets ends only once the device fills: what does not outlive the process is no hurry."""
        return number == 0 and not self._ground.links[0].tier.durable

    def _remember(self, chain: Chain, end: _End) -> None:
        name = name_of(chain)
        before = self._pending.get(name)
        self._pending[name] = replace(end, exact=end.exact or (before is not None and before.exact))
        self._pending.move_to_end(name)
        if len(self._pending) > MOST_PENDING:
            self._pending.popitem(last=False)
            self._ground.stats.not_kept["forgotten"] += 1

    def offload(self) -> None:
        """Copy the ends used longest ago to the nearest tier, while the device is fuller than it should be."""
        ground = self._ground
        while self._pending and self._landing.arriving is None:
            if ground.manager.fill() < ground.options.gpu_watermark:
                return
            name, end = next(iter(self._pending.items()))
            if not self._store(0, ground.chain(end.tokens, end.names), end):
                return  # the lane is full: later
            del self._pending[name]

    def _store(self, number: int, chain: Chain, end: _End) -> bool:
        """Begin to store the units of an end that a tier lacks; False when the lane has no room."""
        ground, (salt, keys) = self._ground, end.names
        manager, link = ground.manager, ground.links[number]
        self._landing.settle()  # nothing is stored that is not there yet
        stored = kept_of(link.find(manager.layout, chain).places, ground.parts, exact=end.exact)
        behind = any(each is link for each, _, _, _ in self._stores)
        plans = manager.colder.plan_units(chain.tokens, stored, salt=salt, extra_keys=keys)
        if plans:
            ground.memory.settle()
        lanes = [each.reading for each in ground.links]
        for at, plan in enumerate(plans):

            def make(rest: Rest, plan: TransferPlan = plan) -> Unit:
                if behind:
                    plan = link.missing(manager.layout, chain, plan, exact=end.exact)
                return link.units.make(manager.layout, chain, plan, lanes, rest, exact=end.exact)

            job = link.store(make, self._after[number])
            if job is None:
                for left in plans[at:]:
                    manager.colder.finish_store(left)
                return False
            self._stores.append((link, chain, plan, job))
        return True

    def await_ends(self, chain: Chain, here: Callable[[], int], patience_s: float = END_PATIENCE_S) -> None:
        """Wait, not for long, for stores of ends of a chain that the device has dropped since they began.

        Until such a store has ended neither the device nor the tier would find it.  ``here``: how many tokens of the
        chain the device has.
        """
        under_way = [
            (plan.position, job)
            for _, stored, plan, job in self._stores
            if not job.done
            and stored.root == chain.root
            and plan.position <= len(chain.tokens)
            and np.array_equal(stored.tokens[: plan.position], chain.tokens[: plan.position])
        ]
        if under_way:
            reached = here()
            wanted = [job for position, job in under_way if position > reached]
            self._stuck.wait(self.moving, wanted, min(patience_s, END_PATIENCE_S))

    def collect(self) -> None:
        """Let go of the slots of what has ended."""
        for _ in range(len(self._stores)):
            link, chain, plan, job = self._stores.popleft()
            if not job.done:
                self._stores.append((link, chain, plan, job))
                continue
            self._ground.manager.colder.finish_store(plan)
            link.count_store(job)

    def keep_for_good(self, number: int, flush: Callable[[], bool]) -> None:
        """Store in a tier all ends that were only remembered; ``flush`` waits until there is room in its lane."""
        for end in self._pending.values():
            chain = self._ground.chain(end.tokens, end.names)
            while not self._store(number, chain, end) and flush():
                pass
        self._pending.clear()

    def count_left(self) -> None:
        """The lanes have ended: count what became of what was still under way."""
        for link, _, _, job in self._stores:
            link.count_store(job)
