"""One cold tier as transfers see it: what of it fits this model, a lane for reading, one for writing, and counters."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvloom.core.allocation import columns_of
from kvloom.plan import ArenaGeometry, Chain, TransferPlan
from kvloom.spec.model_spec import ModelSpec
from kvloom.tiers.contract import Tier
from kvloom.tiers.values import Fill, Found, Need, NewObject, Places, Published, Result, Unit
from kvloom.transfer.lanes import Job, Lane, State, Urgency
from kvloom.transfer.memory import SlotMemory
from kvloom.transfer.options import TransferOptions
from kvloom.transfer.stats import TierStats
from kvloom.types import AnyArray, Grade, IntArray, PayloadForm

_LOG = logging.getLogger(__name__)
STAGED = 32 << 20
"""Bytes that lie between a tier and an arena that is no host memory."""
_YIELD_S, _YIELDS_S = 0.02, 1.0
"""Seconds that a store waits for loads before each object, and for a whole unit, at most."""

Results = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of the groups of a model: bytes of one ``slot``, and ``columns`` in a segment; int64 ``[groups]``."""

    slot: IntArray
    columns: IntArray

    @classmethod
    def of(cls, spec: ModelSpec) -> Sizes:
        """Those of ``spec``."""
        slots = np.array([group.slot_bytes for group in spec.groups], dtype=np.int64)
        columns = np.array([columns_of(group, spec.segment_tokens) for group in spec.groups], dtype=np.int64)
        return cls(slots, columns)


class Link:
    """One tier.  Its methods belong to the manager's thread, but for what its lanes run."""

    def __init__(
        self,
        tier: Tier,
        memory: SlotMemory,
        spec: ModelSpec,
        geometry: ArenaGeometry,
        options: TransferOptions,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.tier, self.stats = tier, TierStats()
        self._memory, self._spec, self._geometry = memory, spec, geometry
        self._sizes, self._clock = Sizes.of(spec), clock
        self._window = options.prefetch_window
        self.reading = Lane(
            f"kvloom-load-{tier.name}", {Urgency.LOAD: 64, Urgency.PREFETCH: options.most_prefetches}, clock
        )
        self.writing = Lane(
            f"kvloom-store-{tier.name}", {Urgency.STORE: options.most_stores, Urgency.DEMOTE: 64}, clock
        )

    def now(self) -> float:
        """Monotonic seconds."""
        return self._clock()

    # ---------------------------------------------------------------- finding

    def find(self, layout: bytes, chain: Chain) -> Found:
        """What the tier has of a chain, as far as it fits the model."""
        found = self.tier.lookup(layout, chain.digests, root=chain.root)
        entries = found.places.entries
        fits = (entries["form"] == PayloadForm.RAW) & (entries["grade"] <= int(Grade.CANONICAL))
        fits &= entries["group"] < len(self._spec.groups)
        group = entries["group"][fits].astype(np.int64)
        fits[fits] &= entries["column"][fits] < self._sizes.columns[group]
        fits[fits] &= entries["length"][fits] == self._sizes.slot[entries["group"][fits].astype(np.int64)]
        places = found.places if fits.all() else found.places.take(fits)
        return Found(found.known, found.boundary, places, found.tails)

    # ---------------------------------------------------------------- loading

    def load(self, places: Places, offsets: IntArray, urgency: Urgency, within: float | None) -> Job[Results] | None:
        """Begin to read objects to ``offsets`` of the arena; the job returns the ``Result`` of each.

        A prefetch reads ``prefetch_window`` blocks at a time.  None when the lane is full, or hangs.
        """
        if self.reading.hung:
            return None
        pieces = [np.arange(len(places))]
        if urgency is Urgency.PREFETCH:
            order = np.argsort(places.rows, kind="stable")
            begins = np.flatnonzero(np.diff(places.rows[order] // self._window)) + 1
            pieces = np.split(order, begins)

        def work(job: Job[Results]) -> Generator[None, None, Results]:
            results = np.full(len(places), Result.STOPPED, dtype=np.uint8)
            for number, piece in enumerate(pieces):
                if number:
                    yield
                if job.stopped():
                    break
                begun = self._clock()
                results[piece] = self._read(places.take(piece), offsets[piece], job.stopped)
                self.stats.load_seconds += self._clock() - begun
            return results

        return self.reading.submit(urgency, work, within)

    def _read(self, places: Places, offsets: IntArray, stop: Callable[[], bool]) -> Results:
        memory = self._memory.host_memory()
        if memory is not None:
            return self.tier.read(places, memory, offsets, stop).results
        lengths = places.entries["length"].astype(np.int64)
        results = np.full(len(places), Result.STOPPED, dtype=np.uint8)
        staging = np.empty(0, dtype=np.uint8)
        for piece in _pieces(lengths, STAGED):
            if stop():
                break
            size = lengths[piece]
            if int(size.sum()) > len(staging):
                staging = np.zeros(int(size.sum()), dtype=np.uint8)
            begin = np.cumsum(size) - size
            results[piece] = self.tier.read(places.take(piece), staging, begin, stop).results
            for i in np.flatnonzero(results[piece] == Result.OK).tolist():
                part = staging[int(begin[i]) : int(begin[i] + size[i])]
                self._memory.write_slots(offsets[piece][i : i + 1], size[i : i + 1], part)
        return results

    # ---------------------------------------------------------------- storing

    def store(self, unit: Unit, after: Callable[[], None]) -> Job[Published] | None:
        """Begin to publish a unit; ``after`` runs in the lane, when it is done.  None when the lane is full."""

        def work(_job: Job[Published]) -> Generator[None, None, Published]:
            yield from ()  # a publication is one piece
            published = self.tier.publish(unit)
            after()
            return published

        return self.writing.submit(Urgency.STORE, work)

    def unit(self, layout: bytes, chain: Chain, plan: TransferPlan, gives_way_to: Sequence[Lane]) -> Unit:
        """What ``plan`` stores, as a unit whose payloads are read from the arena by the lane that publishes it."""
        patience = [_YIELDS_S]

        def payload(group: int, offset: int) -> Fill:
            def write(into: memoryview) -> None:
                self._give_way(gives_way_to, patience)
                self._memory.read_slot(offset, into)

            return Fill(self._spec.groups[group].slot_bytes, write)

        items = zip(plan.row.tolist(), plan.group.tolist(), plan.column.tolist(), plan.grade.tolist(), strict=True)
        offsets = slot_offsets(self._geometry, plan).tolist()
        objects = [
            NewObject(row, group, column, Grade(grade), payload(group, offset))
            for (row, group, column, grade), offset in zip(items, offsets, strict=True)
        ]
        needs = [Need(group, row, count, column) for group, row, column, count in plan.needs.tolist()]
        rows, tokens = -(-plan.position // chain.segment), chain.tokens[: plan.position]
        return Unit(layout, chain.root, chain.digests[:rows], tokens, chain.segment, tuple(objects), tuple(needs))

    def _give_way(self, lanes: Sequence[Lane], patience: list[float]) -> None:
        """Let loads go first for a while."""
        begun = self._clock()
        while patience[0] > 0 and any(lane.busy(Urgency.LOAD) for lane in lanes):
            time.sleep(0.001)
            if self._clock() - begun > _YIELD_S:
                break
        patience[0] -= self._clock() - begun

    # ---------------------------------------------------------------- counting

    def count_load(self, group: AnyArray, results: Results) -> int:
        """Enter what arrived and what did not; returns the bytes that arrived."""
        good = results == Result.OK
        for code in results[~good].tolist():
            self.stats.failed[Result(code).name.lower()] += 1
        names, counts = np.unique(group[good], return_counts=True)
        for g, count in zip(names.tolist(), counts.tolist(), strict=True):
            self.stats.objects_loaded[self._spec.groups[g].name] += count
            self.stats.bytes_loaded[self._spec.groups[g].kind.name.lower()] += count * self._spec.groups[g].slot_bytes
        return int((self._sizes.slot[group[good]]).sum())

    def count_store(self, plan: TransferPlan, job: Job[Published]) -> None:
        """Enter how a publication ended, or that it did not."""
        if job.state is State.FAILED:
            self.stats.not_stored["failed"] += 1
            _LOG.error("storing in tier %s failed", self.tier.name, exc_info=job.failure)
            return
        done = job.result() if job.done else None
        if done is None:
            self.stats.not_stored["hung"] += 1
        elif not done.stored:
            self.stats.not_stored[done.outcome.value] += 1
        else:
            self.stats.stores += 1
            for g, count in zip(*np.unique(plan.group, return_counts=True), strict=True):
                spec = self._spec.groups[int(g)]
                self.stats.bytes_stored[spec.kind.name.lower()] += int(count) * spec.slot_bytes


def slot_offsets(geometry: ArenaGeometry, plan: TransferPlan) -> IntArray:
    """Byte offset in the arena of every slot of a plan."""
    offsets = np.zeros(len(plan), dtype=np.int64)
    for g in np.unique(plan.group).tolist():
        mine = plan.group == g
        offsets[mine] = geometry.slot_offsets(g, plan.slot[mine])
    return offsets


def _pieces(lengths: IntArray, most: int) -> list[IntArray]:
    """Runs of indices whose lengths are ``most`` together, or a single one that is longer."""
    ends = np.cumsum(lengths)
    begin, found = 0, []
    while begin < len(lengths):
        base = int(ends[begin - 1]) if begin else 0
        end = max(begin + 1, int(np.searchsorted(ends, base + most, side="right")))
        found.append(np.arange(begin, end))
        begin = end
    return found
