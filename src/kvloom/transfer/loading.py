"""Loads under way: which jobs bring the objects of one plan, and what arrived of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from kvloom.manager import Manager
from kvloom.manager.ways import Standing
from kvloom.plan import Chain, TransferPlan
from kvloom.tiers.values import Places, Result
from kvloom.transfer.bringer import Results
from kvloom.transfer.jobs import Job, Urgency
from kvloom.transfer.link import Link
from kvloom.transfer.offers import Offer
from kvloom.transfer.progress import Progress, Way
from kvloom.transfer.stages import Stages, stages_of
from kvloom.transfer.units import copied_first, slot_offsets
from kvloom.types import AnyArray, IntArray

SMALLEST_STEP = 32 << 10
"""Bytes of a piece that is read only to see how fast it goes."""


@dataclass(frozen=True, slots=True)
class Bringing:
    """What one tier brings: ``item`` int64 ``[records]``, the object of the plan that each record is a part of, and
    ``payload`` int64 ``[records]``, its bytes in the tier.

    ``job`` is None when the lane took no more; ``number`` is the place of the tier; ``ends`` int64 ``[pieces]``: bytes
    that have come with each piece.
    """

    number: int
    link: Link
    job: Job[Results] | None
    progress: Progress
    item: IntArray
    payload: IntArray
    ends: IntArray

    @property
    def n_bytes(self) -> int:
        """Of all pieces."""
        return int(self.ends[-1])

    def results(self) -> Results | np.uint8:
        """What became of every record; one code for all when its job did not run, or raised."""
        if self.job is not None and self.job.failure is not None:
            return np.uint8(Result.IO_ERROR)
        found = None if self.job is None else self.job.result()
        return np.uint8(Result.STOPPED) if found is None else found


@dataclass(slots=True)
class Load:
    """One plan of the manager, in the hands of lanes.

    Attributes:
        chain: of the prompt.
        plan: its slots are held, and nobody sees what lies there, until ``finish`` (or ``ColderTiers.begin_arriving``).
        stages: in which its records come.
        bringing: by tier.
    """

    chain: Chain
    plan: TransferPlan
    stages: Stages
    bringing: list[Bringing] = field(default_factory=list)

    @classmethod
    def begin(
        cls,
        manager: Manager,
        links: Sequence[Link],
        chain: Chain,
        plan: TransferPlan,
        offer: Offer,
        way: Way,
        window: int,
        wanted: AnyArray | None = None,
    ) -> Load:
        """Hand the records of a plan to the lanes of the tiers that have them.

        A prefetch reads ``window`` blocks of every group at a time, so that it can give way; a load its stages.
        ``wanted``: bool ``[len(plan)]``, the objects to bring; None: all of them.
        """
        parts = links[0].parts
        tiers, index = offer.of_plan(plan)
        offsets = slot_offsets(manager.geometry, plan)
        count = parts.count[plan.group]
        item = np.repeat(np.arange(len(plan)), count)
        part = np.arange(len(item)) - np.repeat(np.cumsum(count) - count, count)
        first = copied_first(plan, chain.segment, manager.spec)
        stages = stages_of(plan, item, part, first, parts, way.restoring)
        load = cls(chain, plan, stages)
        for tier, link in enumerate(links):
            here = tiers[item] == tier
            mine = np.flatnonzero(here if wanted is None else here & wanted[item])
            known = offer.places[tier]
            if not len(mine) or known is None:
                continue
            places = known.take(index[item[mine]] + part[mine])
            where = offsets[item[mine]] + parts.begin[plan.group[item[mine]], part[mine]]
            if way.urgency is Urgency.PREFETCH:
                pieces = _by_rows(places, window)
            else:
                pieces = [np.flatnonzero(stages.of_record[mine] == stage) for stage in range(stages.count)]
                if stages.count == 1:
                    pieces = np.array_split(pieces[0], min(way.steps, max(1, places.nbytes // SMALLEST_STEP)))
            progress = Progress(link.pace)
            job = link.load(places, where, pieces, way, progress)
            payload = places.entries["length"].astype(np.int64)
            ends = np.cumsum([int(payload[piece].sum()) for piece in pieces])
            load.bringing.append(Bringing(tier, link, job, progress, item[mine], payload, ends))
        return load

    @property
    def done(self) -> bool:
        """Whether nothing of it moves any more."""
        return all(each.job is None or each.job.done for each in self.bringing)

    def hasten(self, within: float) -> None:
        """A request waits for it now."""
        for each in self.bringing:
            if each.job is not None:
                each.link.reading.hasten(each.job, Urgency.LOAD, within)

    def wait(self, ends_at: float, now: float) -> bool:
        """Wait until it is done, or the time is over; whether it is done."""
        for each in self.bringing:
            if each.job is not None and not each.job.wait(max(0.0, ends_at - now)):
                return False
            now = max(now, each.link.now())
        return True

    def wait_for(self, seconds: float) -> bool:
        """Wait until it is done, but no longer than ``seconds``; whether it is."""
        now = self.bringing[0].link.now() if self.bringing else 0.0
        return self.wait(now + seconds, now)

    def wait_first(self, seconds: float) -> bool:
        """The same for its first stage, ``seconds`` for every tier; whether each has brought it or brings no more."""
        for each in self.bringing:
            if each.job is not None and not each.job.done and not each.progress.wait(1, seconds):
                return False
        return True

    def cancel(self, *, late: bool = False) -> None:
        """Read nothing more than what is being read; ``late``: see ``Job.cancel``."""
        for each in self.bringing:
            if each.job is not None:
                each.job.cancel(late=late)

    def objects(self) -> dict[str, tuple[int, int]]:
        """By tier, how many objects it brings and about how many of them are there, by their bytes."""
        found = {}
        for each in self.bringing:
            brings = len(np.unique(each.item))
            read = sum(piece.n_bytes for piece in each.progress.pieces)
            there = brings if each.job is not None and each.job.done else brings * read // max(1, each.n_bytes)
            found[each.link.tier.name] = brings, there
        return found

    @property
    def jobs(self) -> list[Job[Results]]:
        """Those that bring it."""
        return [each.job for each in self.bringing if each.job is not None]

    def standing(self, begun: float) -> Standing:
        """How far it has come since ``begun``."""
        total = came = following = 0
        arrived = begun
        for each in self.bringing:
            pieces = len(each.progress.pieces)  # the lane adds to them meanwhile
            total += each.n_bytes
            came += int(each.ends[pieces - 1]) if pieces else 0
            following += int(each.ends[min(pieces, len(each.ends) - 1)])
            arrived = max(arrived, each.progress.pieces[pieces - 1].ended) if pieces else arrived
        return Standing(came / max(1, total), arrived - begun, following / max(1, total))

    def results(self) -> Results:
        """What became of every object, counted; only when it is done.  An object arrived when all of its parts did."""
        results = np.zeros(len(self.plan), dtype=np.uint8)
        brought = np.zeros(len(self.plan), dtype=np.bool_)
        for each in self.bringing:
            np.maximum.at(results, each.item, each.results())
            brought[each.item] = True
        results[~brought] = Result.STOPPED
        for each in self.bringing:
            mine, place = np.unique(each.item, return_inverse=True)
            payload = np.bincount(place, weights=each.payload).astype(np.int64)
            each.link.count_load(self.plan.group[mine], results[mine], payload)
        return results

    def finish(self, manager: Manager) -> Results:
        """Publish what arrived, give back the other slots, and count; only when it is done."""
        results = np.full(len(self.plan), Result.STOPPED, dtype=np.uint8)
        try:
            results = self.results()
        finally:
            manager.colder.finish_load(self.plan, results == Result.OK)
        return results

    def touch(self, layout: bytes) -> None:
        """Tell the tiers that had it that their unit was used."""
        row = -(-self.plan.position // self.chain.segment) - 1
        for each in self.bringing:
            each.link.touch(layout, self.chain.digests[row].tobytes())


def _by_rows(places: Places, window: int) -> list[IntArray]:
    order = np.argsort(places.rows, kind="stable")
    begins = np.flatnonzero(np.diff(places.rows[order] // window)) + 1
    return np.split(order, begins)
