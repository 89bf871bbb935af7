"""``VirtualTier``: a cold tier that knows everything about its objects but their bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from kvloom.errors import InputError
from kvloom.replay.virtual.clock import VirtualClock
from kvloom.replay.virtual.medium import Medium
from kvloom.tiers.contract import Usage
from kvloom.tiers.ledger import PLACE, Accounts, Ledger, Node
from kvloom.tiers.values import (
    Digests,
    Fill,
    Found,
    Outcome,
    Places,
    Published,
    ReadResult,
    Result,
    Unit,
    no_places,
)
from kvloom.types import AnyArray, IntArray


def _nothing(_into: memoryview) -> None:
    """The payload of what has none."""


def _no_payload(_node: Node, _number: int, row: AnyArray) -> Fill:
    return Fill(int(row["length"]), _nothing)


class _Prices(Accounts):
    """Of a medium."""

    def __init__(self, medium: Medium) -> None:
        self._medium = medium

    def object_bytes(self, lengths: IntArray) -> IntArray:
        """See ``Accounts``."""
        page = self._medium.page
        made: IntArray = self._medium.header + -(-lengths.astype(np.int64) // page) * page
        return made

    def node_bytes(self, tokens: int, needs: int) -> int:
        """See ``Accounts``."""
        size = self._medium.node + 4 * tokens + 16 * needs
        return -(-size // self._medium.page) * self._medium.page


class VirtualTier:
    """See ``Tier`` and ``HandsOn``, whose promises it keeps but for the bytes: a read writes nothing.

    Belongs to one thread.  What it holds takes memory, what it could hold does not.

    Args:
        medium: how it counts bytes, and what goes first.
        capacity: bytes.
        clock: goes on by what reads take.
        speed: bytes read per second; that of the medium by default.

    Attributes:
        written: bytes published, with headers and padding.
        payload: bytes of objects published, by group.
        read_bytes: bytes of objects that were read.
        ever: digests of all nodes that were ever held.
        ledger: who is there.
    """

    def __init__(self, medium: Medium, capacity: int, clock: VirtualClock, speed: float | None = None) -> None:
        self.medium, self.capacity = medium, capacity
        self.speed, self._clock = speed or medium.speed, clock
        self.written = self.read_bytes = 0
        self.payload: Counter[int] = Counter()
        self.ever: set[bytes] = set()
        limit, goal = int(medium.full * capacity), int(medium.goal * capacity)
        self.ledger = Ledger(_Prices(medium), limit, goal, order=medium.order)
        self._closed = False

    @property
    def name(self) -> str:
        """That of the medium."""
        return self.medium.name

    @property
    def durable(self) -> bool:
        """As the medium."""
        return self.medium.durable

    @property
    def in_use(self) -> int:
        """Bytes."""
        return self.ledger.in_use

    @property
    def units_evicted(self) -> int:
        """Units that went to make room."""
        return self.ledger.units_evicted

    @property
    def objects_evicted(self) -> int:
        """Objects that went with them."""
        return self.ledger.objects_evicted

    def read_s(self, n_bytes: int) -> float:
        """Seconds that one read takes."""
        return self.medium.latency_s + n_bytes / self.speed

    # ---------------------------------------------------------------- the contract

    def lookup(self, layout: bytes, digests: Digests, *, root: bytes | None = None) -> Found:
        """See ``Tier.lookup``."""
        if self._closed:
            nothing = np.zeros(len(digests), np.bool_)
            return Found(nothing, nothing.copy(), no_places(layout, PLACE))
        return self.ledger.find(layout, digests, root)

    def read(
        self,
        places: Places,
        into: npt.NDArray[np.uint8],
        offsets: IntArray,
        stop: Callable[[], bool] = lambda: False,
    ) -> ReadResult:
        """See ``Tier.read``; takes its time, and leaves ``into`` as it is."""
        lengths = places.entries["length"].astype(np.int64)
        ends = offsets + lengths
        if len(ends) and (int(offsets.min()) < 0 or int(ends.max()) > len(into)):
            raise InputError("the objects do not fit at the offsets that they are to be read to")
        if not len(places):
            return ReadResult(np.empty(0, np.uint8), 0, 0)
        if stop():
            return ReadResult(np.full(len(places), Result.STOPPED, np.uint8), 0, 0)
        there = self.ledger.there(places) & (not self._closed)
        size = int(lengths[there].sum())
        self.read_bytes += size
        self._clock.advance(self.read_s(size))
        return ReadResult(np.where(there, Result.OK, Result.MISSING).astype(np.uint8), size, 1)

    def publish(self, unit: Unit) -> Published:
        """See ``Tier.publish``; payloads are not asked for."""
        if self._closed:
            return Published(Outcome.UNAVAILABLE, reason="the tier is closed")
        draft = self.ledger.begin(unit)
        if isinstance(draft, Published):
            return draft
        done = self.ledger.commit(draft)
        written = -(-done.bytes_written // self.medium.run) * self.medium.run
        self.written += written
        self.ever.update(draft.names[len(draft.known) :])
        for group, length in draft.about[draft.fresh][:, [1, 5]].tolist():
            self.payload[group] += length
        return Published(done.outcome, done.objects, written)

    def touch(self, layout: bytes, digest: bytes) -> None:
        """See ``Tier.touch``."""
        node = self._unit_at(layout, digest)
        if node is not None:
            self.ledger.use(node)

    def clear(self, layout: bytes | None = None, root: bytes | None = None) -> int:
        """See ``Tier.clear``."""
        gone = self.ledger.units_of(layout, root)
        for node in gone:
            self.ledger.drop_unit(node)
        return len(gone)

    def usage(self) -> Usage:
        """See ``Tier.usage``."""
        return Usage(self.in_use, self.capacity, self.ledger.objects, self.ledger.units)

    def close(self) -> None:
        """See ``Tier.close``."""
        self._closed = True

    # ---------------------------------------------------------------- moving on

    def coldest(self, n_bytes: int) -> Iterator[tuple[bytes, bytes]]:
        """See ``HandsOn.coldest``; worked out as it is asked for, while nothing else may change."""
        return ((node.layout, node.digest) for node in self.ledger.coldest(n_bytes))

    def hits(self, layout: bytes, digest: bytes) -> float:
        """See ``HandsOn.hits``."""
        node = self._unit_at(layout, digest)
        return float(node.uses) if node is not None else 0.0

    def unit(self, layout: bytes, digest: bytes) -> Unit | None:
        """See ``HandsOn.unit``; payloads and tokens are nothing but long."""
        node = self._unit_at(layout, digest)
        if node is None:
            return None
        tokens = np.broadcast_to(np.int32(0), sum(each.tokens for each in node.above()))
        return self.ledger.unit(node, tokens, _no_payload)

    def _unit_at(self, layout: bytes, digest: bytes) -> Node | None:
        return None if self._closed else self.ledger.unit_at(layout, digest)

    def check_integrity(self) -> None:
        """The books are consistent; AssertionError otherwise.  Looks at everything."""
        self.ledger.check_integrity()
