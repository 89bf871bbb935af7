"""Loads under way: which jobs bring the objects of one plan, and what arrived of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from kvloom.manager import Manager
from kvloom.plan import Chain, TransferPlan
from kvloom.tiers.values import Result
from kvloom.transfer.lanes import Job, Urgency
from kvloom.transfer.link import Link, Results, slot_offsets
from kvloom.transfer.offers import Offer
from kvloom.types import IntArray


@dataclass(slots=True)
class Load:
    """One plan of the manager, in the hands of lanes.

    Attributes:
        chain: of the prompt.
        plan: its slots are held, and nobody sees what lies there, until ``finish``.
        parts: (link, job, objects of the plan that it brings).
    """

    chain: Chain
    plan: TransferPlan
    parts: list[tuple[Link, Job[Results] | None, IntArray]] = field(default_factory=list)

    @classmethod
    def begin(
        cls,
        manager: Manager,
        links: Sequence[Link],
        chain: Chain,
        plan: TransferPlan,
        offer: Offer,
        urgency: Urgency,
        within: float | None,
    ) -> Load:
        """Hand the objects of a plan to the lanes of the tiers that have them."""
        load = cls(chain, plan)
        tiers, index = offer.of_plan(plan)
        offsets = slot_offsets(manager.geometry, plan)
        for tier, link in enumerate(links):
            mine = np.flatnonzero(tiers == tier)
            places = offer.places[tier]
            if len(mine) and places is not None:
                job = link.load(places.take(index[mine]), offsets[mine], urgency, within)
                load.parts.append((link, job, mine))
        return load

    @property
    def done(self) -> bool:
        """Whether nothing of it moves any more."""
        return all(job is None or job.done for _, job, _ in self.parts)

    def hasten(self, within: float) -> None:
        """A request waits for it now."""
        for link, job, _ in self.parts:
            if job is not None:
                link.reading.hasten(job, Urgency.LOAD, within)

    def wait(self, ends_at: float, now: float) -> bool:
        """Wait until it is done, or the time is over; whether it is done."""
        for link, job, _ in self.parts:
            if job is not None and not job.wait(max(0.0, ends_at - now)):
                return False
            now = max(now, link.now())
        return True

    def cancel(self) -> None:
        """Read nothing more than what is being read."""
        for _, job, _ in self.parts:
            if job is not None:
                job.cancel()

    def finish(self, manager: Manager) -> Results:
        """Publish what arrived, give back the other slots, and count; only when it is done."""
        results = np.full(len(self.plan), Result.STOPPED, dtype=np.uint8)
        try:
            for _, job, mine in self.parts:
                found = job.result() if job is not None else None
                if found is not None:
                    results[mine] = found
        finally:
            manager.finish_load(self.plan, results == Result.OK)
        for link, _, mine in self.parts:
            link.count_load(self.plan.group[mine], results[mine])
        return results

    def touch(self, layout: bytes) -> None:
        """Tell the tiers that had it that their unit was used."""
        row = -(-self.plan.position // self.chain.segment) - 1
        for link, _, _ in self.parts:
            link.stats.loads += 1
            link.tier.touch(layout, self.chain.digests[row].tobytes())
