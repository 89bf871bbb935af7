"""One cold tier as transfers see it: what of it fits this model, lanes to read, write and ask in, and counters.

Nothing of a tier runs in the thread of the requests: whatever hangs or raises there is a miss, and counted.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from kvloom.plan import ArenaGeometry, Chain, TransferPlan
from kvloom.spec.model_spec import ModelSpec
from kvloom.tiers.contract import Tier
from kvloom.tiers.values import Found, Places, Published, Result, Unit, no_places
from kvloom.transfer.bringer import Bringer, Results
from kvloom.transfer.forms import Forms
from kvloom.transfer.jobs import Job, State, Urgency
from kvloom.transfer.lanes import Lane
from kvloom.transfer.memory import SlotMemory
from kvloom.transfer.offers import kept_of, lacking
from kvloom.transfer.options import ColdForm, TransferOptions
from kvloom.transfer.pace import Pace, Rest, resting
from kvloom.transfer.parts import Parts
from kvloom.transfer.progress import Piece, Progress, Way
from kvloom.transfer.stats import TierStats
from kvloom.transfer.units import UnitMaker
from kvloom.types import AnyArray, Grade, IntArray

BEHIND = 10
"""Niceness of threads that store: nobody waits for them, and a decode step wants the processor."""
PORTION = 16 << 20
"""Bytes of a call of a tier while a job has to keep to its pace: some milliseconds of one core for a tier that does not
ask ``stop`` on the way.  (Portions of 4 MiB from a disk cost twice the time per byte.)"""

T = TypeVar("T")
ASK_PATIENCE, TIER_PATIENCE = 2.0, 10.0
"""Seconds that a question to a tier may take which no request waits for, and closing it."""
_LOOK_S = 0.05


@dataclass(frozen=True, slots=True)
class Stored:
    """What a publication did, and the payload of what it brought, bytes by kind."""

    published: Published
    payload: Counter[str]


class Link:
    """One tier.  Its methods belong to the manager's thread, but for what its lanes run.

    ``hurried``: asked while a request waits; once it says so nobody waits any longer.
    """

    def __init__(
        self,
        tier: Tier,
        memory: SlotMemory,
        spec: ModelSpec,
        geometry: ArenaGeometry,
        options: TransferOptions,
        clock: Callable[[], float] = time.monotonic,
        lane: type[Lane] = Lane,
        pace: Pace | None = None,
    ) -> None:
        self.tier, self.stats, self.pace = tier, TierStats(), pace or Pace()
        self._memory, self._spec = memory, spec
        self._clock = clock
        self.hurried: Callable[[], bool] = lambda: False
        self.parts = Parts.of(spec)
        self.forms = Forms(tier.name, spec.groups, options.cold_form if tier.durable else ColdForm.NONE, self.parts)
        self.bringer = Bringer(tier, memory, self.parts, self.forms)
        self.units = UnitMaker(spec, geometry, memory, self.parts, self.forms, clock)
        self.reading = lane(
            f"kvloom-load-{tier.name}",
            {Urgency.LOAD: 64, Urgency.PREFETCH: options.most_prefetches},
            clock,
            pace=self.pace,
        )
        self.writing = lane(
            f"kvloom-store-{tier.name}",
            {Urgency.STORE: options.most_stores, Urgency.DEMOTE: 64},
            clock,
            BEHIND,
            self.pace,
        )
        self.asking = lane(f"kvloom-ask-{tier.name}", {Urgency.LOAD: 8}, clock, pace=self.pace)
        self.stats.raised = {lane: each.raised for lane, each in zip(("read", "write", "ask"), self.lanes, strict=True)}

    @property
    def lanes(self) -> tuple[Lane, Lane, Lane]:
        """To read, to write and to ask in."""
        return self.reading, self.writing, self.asking

    def now(self) -> float:
        """Monotonic seconds."""
        return self._clock()

    # ---------------------------------------------------------------- finding

    def find(self, layout: bytes, chain: Chain, patience_s: float = ASK_PATIENCE) -> Found:
        """What the tier has of a chain, as far as it fits the model; nothing when it does not say so in time."""
        own = self.parts.layout(layout)
        found = self._ask(
            lambda: self._fitting(self.tier.lookup(own, chain.digests, root=chain.root), chain), patience_s
        )
        if found is not None:
            return found
        nothing = np.zeros(len(chain.digests), np.bool_)
        return Found(nothing, nothing.copy(), no_places(own))

    def _fitting(self, found: Found, chain: Chain) -> Found:
        entries, rows = found.places.entries, found.places.rows
        fits = (entries["grade"] <= int(Grade.CANONICAL)) & self.parts.known(entries["group"], entries["column"])
        fits &= (rows >= 0) & (rows < len(chain.digests))
        fits[fits] = self.forms.fits(entries[fits])
        return found if fits.all() else replace(found, places=found.places.take(fits))

    def missing(self, layout: bytes, chain: Chain, plan: TransferPlan, *, exact: bool) -> TransferPlan:
        """What of a plan the tier still lacks; asked in the lane that stores, where others were stored since."""
        found = self._fitting(self.tier.lookup(self.parts.layout(layout), chain.digests, root=chain.root), chain)
        return lacking(kept_of(found.places, self.parts, exact=exact), plan)

    def touch(self, layout: bytes, digest: bytes) -> None:
        """The unit that ends at this node was used."""
        self.stats.loads += 1
        own = self.parts.layout(layout)
        self._ask(lambda: self.tier.touch(own, digest), ASK_PATIENCE)

    def _ask(self, question: Callable[[], T], patience_s: float) -> T | None:
        """What a tier answers within ``patience_s``; None when it does not, and at once while it owes an answer."""

        def work(_job: Job[T]) -> Generator[None, None, T]:
            yield from ()
            return question()

        job = None if self.asking.hung else self.asking.submit(Urgency.LOAD, work, patience_s)
        if job is None:
            self.stats.unanswered += 1
            return None
        ends = self._clock() + patience_s
        while not job.wait(min(_LOOK_S, max(0.0, ends - self._clock()))):
            if self._clock() >= ends or self.hurried():
                job.cancel()
                self.stats.unanswered += 1
                return None
        return None if job.failure is not None else job.result()

    def close(self, patience_s: float) -> None:
        """End the lanes and close the tier; one that hangs is left to itself."""
        ends = self._clock() + patience_s
        ended = [lane.close(max(0.0, ends - self._clock())) for lane in (self.reading, self.writing)]
        if all(ended) and not self.asking.hung:
            self._ask(self.tier.close, max(TIER_PATIENCE, ends - self._clock()))
        self.asking.close(0)

    # ---------------------------------------------------------------- loading

    def load(
        self, places: Places, offsets: IntArray, pieces: Sequence[IntArray], way: Way, progress: Progress
    ) -> Job[Results] | None:
        """Begin to read records to ``offsets`` of the arena; the job returns the ``Result`` of each.

        It reads the ``pieces`` (indices of records) one after the other, and tells ``progress`` of each.  None when the
        lane is full, or hangs.
        """
        if self.reading.hung:
            return None

        def work(job: Job[Results]) -> Generator[None, None, Results]:
            def stop() -> bool:
                job.rest()
                return job.stopped()

            results = np.full(len(places), Result.STOPPED, dtype=np.uint8)
            for number, piece in enumerate(pieces):
                if number:
                    yield
                if job.stopped():
                    break
                begun, n_bytes, rests = self._clock(), places.take(piece).nbytes, job.rests
                left, cut = piece, False
                while len(left) and not job.stopped():
                    if cut:
                        yield
                    now, left = self._portion(job, places, left)
                    cut = cut or len(left) > 0
                    results[now] = self.bringer.read(places.take(now), offsets[now], stop)
                ended, rested = self._clock(), cut or job.rests > rests
                if rested:
                    self.stats.paced_seconds += ended - begun
                else:
                    self.stats.load_seconds += ended - begun
                whole = not results[piece].any()
                if whole and not rested:
                    self.forms.read.note(n_bytes, ended - begun)
                progress.passed_one(Piece(begun, ended, n_bytes, rested), whole)
            return results

        return self.reading.submit(way.urgency, work, way.within)

    def _portion(self, job: Job[Results], places: Places, piece: IntArray) -> tuple[IntArray, IntArray]:
        """What to read now of a piece, and what is left of it: all at once, unless the job has to keep to its pace."""
        if not self.pace.slows(job):
            return piece, piece[:0]
        ends = np.cumsum(places.entries["length"][piece].astype(np.int64))
        size = max(1, int(np.searchsorted(ends, PORTION, side="right")))
        return piece[:size], piece[size:]

    # ---------------------------------------------------------------- storing

    def store(self, make: Callable[[Rest], Unit], after: Callable[[Rest], None]) -> Job[Stored] | None:
        """Begin to publish what ``make`` makes; ``after`` runs in the lane when it is done.  None when it is full.

        Both are to rest between what they do.
        """

        def work(job: Job[Stored]) -> Generator[None, None, Stored]:
            yield from ()  # a publication is one piece
            unit, begun, rests = resting(make(job.rest), job.rest), self._clock(), job.rests
            published = self.tier.publish(unit)
            if job.rests == rests:
                self.forms.write.note(published.bytes_written, self._clock() - begun)
            after(job.rest)
            return Stored(published, self._payload(unit))

        return self.writing.submit(Urgency.STORE, work)

    # ---------------------------------------------------------------- counting

    def count_load(self, group: AnyArray, results: Results, payload: IntArray) -> None:
        """Enter what arrived and what did not.  ``payload``: bytes of every object, as they were read."""
        good = results == Result.OK
        for code in results[~good].tolist():
            self.stats.failed[Result(code).name.lower()] += 1
        for g in np.unique(group[good]).tolist():
            spec, mine = self._spec.groups[g], good & (group == g)
            self.stats.objects_loaded[spec.name] += int(np.count_nonzero(mine))
            self.stats.bytes_loaded[spec.kind.name.lower()] += int(payload[mine].sum())

    def _payload(self, unit: Unit) -> Counter[str]:
        found: Counter[str] = Counter()
        for item in unit.objects:
            found[self._spec.groups[item.group].kind.name.lower()] += item.size
        return found

    def count_store(self, job: Job[Stored]) -> None:
        """Enter how a publication ended, or that it did not."""
        if job.state is State.FAILED:
            self.stats.not_stored["failed"] += 1  # what it raised was told by the lane
            return
        done = job.result() if job.done else None
        if done is None:
            self.stats.not_stored["hung"] += 1
        elif not done.published.stored:
            self.stats.not_stored[done.published.outcome.value] += 1
        else:
            self.stats.stores += 1
            self.stats.bytes_stored.update(done.payload)
