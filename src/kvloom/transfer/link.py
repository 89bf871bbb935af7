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
import numpy.typing as npt

from kvloom.errors import StoreError
from kvloom.plan import ArenaGeometry, Chain, TransferPlan
from kvloom.spec.model_spec import ModelSpec
from kvloom.tiers.contract import Tier
from kvloom.tiers.values import Found, Need, NewObject, Places, Published, ReadResult, Result, Unit, no_places
from kvloom.transfer.forms import Forms
from kvloom.transfer.lanes import Job, Lane, State, Urgency
from kvloom.transfer.memory import SlotMemory
from kvloom.transfer.offers import kept_of, lacking
from kvloom.transfer.options import ColdForm, TransferOptions
from kvloom.transfer.parts import Parts
from kvloom.transfer.progress import Piece, Progress, Way
from kvloom.transfer.stats import TierStats
from kvloom.types import AnyArray, Grade, IntArray, PayloadForm

BEHIND = 10
"""Niceness of threads that store: nobody waits for them, and a decode step wants the processor."""
STAGED = 32 << 20
"""Bytes that lie between a tier and an arena that is no host memory."""
_YIELD_S, _YIELDS_S = 0.02, 1.0
"""Seconds that a store waits for loads before each object, and for a whole unit, at most."""

Results = npt.NDArray[np.uint8]
T = TypeVar("T")
ASK_PATIENCE, TIER_PATIENCE = 2.0, 10.0
"""Seconds that a question to a tier may take which no request waits for, and closing it."""
_LOOK_S = 0.05
_CODES = len(Result)


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
    ) -> None:
        self.tier, self.stats = tier, TierStats()
        self._memory, self._spec, self._geometry = memory, spec, geometry
        self._clock = clock
        self.hurried: Callable[[], bool] = lambda: False
        self.parts = Parts.of(spec)
        self._snapshots = np.array([group.is_snapshot for group in spec.groups], dtype=np.bool_)
        self.forms = Forms(tier.name, spec.groups, options.cold_form if tier.durable else ColdForm.NONE, self.parts)
        self.reading = lane(
            f"kvloom-load-{tier.name}", {Urgency.LOAD: 64, Urgency.PREFETCH: options.most_prefetches}, clock
        )
        self.writing = lane(
            f"kvloom-store-{tier.name}", {Urgency.STORE: options.most_stores, Urgency.DEMOTE: 64}, clock, BEHIND
        )
        self.asking = lane(f"kvloom-ask-{tier.name}", {Urgency.LOAD: 8}, clock)
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
            results = np.full(len(places), Result.STOPPED, dtype=np.uint8)
            for number, piece in enumerate(pieces):
                if number:
                    yield
                if job.stopped():
                    break
                begun, part = self._clock(), places.take(piece)
                if len(piece):
                    results[piece] = self._read(part, offsets[piece], job.stopped)
                ended = self._clock()
                self.stats.load_seconds += ended - begun
                whole = not results[piece].any()
                if whole:
                    self.forms.read.note(part.nbytes, ended - begun)
                progress.passed_one(Piece(begun, ended, part.nbytes), whole)
            return results

        return self.reading.submit(way.urgency, work, way.within)

    def _read(self, places: Places, offsets: IntArray, stop: Callable[[], bool]) -> Results:
        """Read what lies as it is straight into the arena, where that can be; the rest through other memory.

        Where it says that something is there, anybody may read it.
        """
        memory = self._memory.host_memory()
        raw = places.entries["form"] == PayloadForm.RAW
        if memory is None or not raw.any():
            return self._read_staged(places, offsets, stop)
        if raw.all():
            return _checked(self.tier.read(places, memory, offsets, stop), len(places))
        results = np.empty(len(places), dtype=np.uint8)
        results[raw] = _checked(self.tier.read(places.take(raw), memory, offsets[raw], stop), int(raw.sum()))
        results[~raw] = self._read_staged(places.take(~raw), offsets[~raw], stop)
        return results

    def _read_staged(self, places: Places, offsets: IntArray, stop: Callable[[], bool]) -> Results:
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
            results[piece] = _checked(self.tier.read(places.take(piece), staging, begin, stop), len(piece))
            for i in np.flatnonzero(results[piece] == Result.OK).tolist():
                payload = staging[int(begin[i]) : int(begin[i] + size[i])]
                if not self._put(places.entries[piece[i]], payload, int(offsets[piece[i]])):
                    results[piece[i]] = Result.INTEGRITY
        self._memory.settle()
        return results

    def _put(self, entry: AnyArray, payload: npt.NDArray[np.uint8], offset: int) -> bool:
        """Bring the verified payload of a part to its place; False when it is not what its form says."""
        group, form = int(entry["group"]), int(entry["form"])
        part = int(entry["column"]) % int(self.parts.count[group])
        memory, size = self._memory.host_memory(), int(self.parts.size[group, part])
        if form == PayloadForm.RAW:
            slot = payload
        elif memory is not None:
            return self.forms.decode(form, (group, part), payload, memory[offset : offset + size])
        else:
            slot = np.empty(-(-size // 8), np.uint64).view(np.uint8)[:size]
            if not self.forms.decode(form, (group, part), payload, slot):
                return False
        self._memory.write_slots(np.array([offset]), np.array([size]), slot)
        return True

    # ---------------------------------------------------------------- storing

    def store(self, make: Callable[[], Unit], after: Callable[[], None]) -> Job[Stored] | None:
        """Begin to publish what ``make`` makes; ``after`` runs in the lane when it is done.  None when it is full."""

        def work(_job: Job[Stored]) -> Generator[None, None, Stored]:
            yield from ()  # a publication is one piece
            unit, begun = make(), self._clock()
            published = self.tier.publish(unit)
            self.forms.write.note(published.bytes_written, self._clock() - begun)
            after()
            return Stored(published, self._payload(unit))

        return self.writing.submit(Urgency.STORE, work)

    def unit(
        self,
        layout: bytes,
        chain: Chain,
        plan: TransferPlan,
        gives_way_to: Sequence[Lane],
        *,
        exact: bool = False,
        behind: bool = False,
    ) -> Unit:
        """What ``plan`` stores, in the forms that pay, or in exact ones; made by the lane that publishes it.

        ``behind``: others were being stored when it was planned, so the tier may have some of it by now.
        """
        if behind:
            found = self._fitting(self.tier.lookup(self.parts.layout(layout), chain.digests, root=chain.root), chain)
            plan = lacking(kept_of(found.places, self.parts, exact=exact), plan)
        patience = [_YIELDS_S]

        def reading(offset: int) -> Callable[[memoryview], None]:
            def read(into: memoryview) -> None:
                self._give_way(gives_way_to, patience)
                self._memory.read_slot(offset, into)

            return read

        parts, segment, forms = self.parts, chain.segment, self.forms.for_unit(plan.group, exact=exact)
        count = parts.count[plan.group]
        offsets = slot_offsets(self._geometry, plan).tolist()
        items = zip(plan.row.tolist(), plan.group.tolist(), plan.column.tolist(), plan.grade.tolist(), strict=True)
        objects: list[NewObject] = []
        for (row, group, column, grade), offset in zip(items, offsets, strict=True):
            reads = [reading(offset + begin) for begin in parts.begin[group, : parts.count[group]].tolist()]
            objects += self.forms.make((row, group, column), Grade(grade), forms[group], reads)
        if not parts.whole:
            # As a restore wants them: what it copies, then layer by layer, so that a stage lies together on the disk.
            item = np.repeat(np.arange(len(plan)), count)
            part = np.arange(len(item)) - np.repeat(np.cumsum(count) - count, count)
            layer = parts.first_layer[plan.group[item], part]
            first = copied_first(plan, segment, self._snapshots)[item]
            order = np.lexsort((plan.column[item], plan.row[item], plan.group[item], layer, ~first))
            objects = [objects[i] for i in order.tolist()]
        needs = [
            Need(g, row, count * int(parts.count[g]), column * int(parts.count[g]))
            for g, row, column, count in plan.needs.tolist()
        ]
        rows, tokens = -(-plan.position // segment), chain.tokens[: plan.position]
        digests = chain.digests[:rows]
        return Unit(parts.layout(layout), chain.root, digests, tokens, segment, tuple(objects), tuple(needs))

    def _give_way(self, lanes: Sequence[Lane], patience: list[float]) -> None:
        """Let loads go first for a while."""
        begun = self._clock()
        while patience[0] > 0 and any(lane.busy(Urgency.LOAD) for lane in lanes):
            time.sleep(0.001)
            if self._clock() - begun > _YIELD_S:
                break
        patience[0] -= self._clock() - begun

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


def copied_first(plan: TransferPlan, segment: int, snapshots: AnyArray) -> AnyArray:
    """Which objects of a plan are copied before the first forward, bool ``[n]``: snapshots, and a checkpoint's blocks.

    ``snapshots``: bool ``[groups]``.
    """
    first: AnyArray = snapshots[plan.group]
    if plan.position % segment:
        first = first | (plan.row == plan.position // segment)
    return first


def slot_offsets(geometry: ArenaGeometry, plan: TransferPlan) -> IntArray:
    """Byte offset in the arena of every slot of a plan."""
    offsets = np.zeros(len(plan), dtype=np.int64)
    for g in np.unique(plan.group).tolist():
        mine = plan.group == g
        offsets[mine] = geometry.slot_offsets(g, plan.slot[mine])
    return offsets


def _checked(read: ReadResult, count: int) -> Results:
    """The results of a read; StoreError when they are not one known code for each of ``count`` objects."""
    results = read.results
    if results.shape != (count,) or (results >= _CODES).any():
        raise StoreError(f"a tier says what became of {results.shape} objects of {count}, or in unknown codes")
    return results


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
