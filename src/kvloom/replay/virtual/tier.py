"""``VirtualTier``: a cold tier that knows everything about its objects but their bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from kvloom.errors import InputError
from kvloom.replay.virtual.books import Books, Node, asked
from kvloom.replay.virtual.clock import VirtualClock
from kvloom.replay.virtual.medium import Medium
from kvloom.replay.virtual.order import going
from kvloom.replay.virtual.publishing import Publisher
from kvloom.tiers.contract import Usage
from kvloom.tiers.values import (
    MOST_TAILS,
    OBJECT,
    Digests,
    Fill,
    Found,
    Need,
    NewObject,
    Outcome,
    Places,
    Published,
    ReadResult,
    Result,
    Unit,
    check_digests,
    check_layout,
    no_places,
)
from kvloom.types import AnyArray, Grade, Int32Array, IntArray, PayloadForm

PLACE = np.dtype([*OBJECT.descr, ("row", "<i8"), ("generation", "<u4")])
_FIELDS = [name for name, *_ in OBJECT.descr]


def _nothing(_into: memoryview) -> None:
    """The payload of what has none."""


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
        units_evicted, objects_evicted: what went to make room.
        ever: digests of all nodes that were ever held.
    """

    def __init__(self, medium: Medium, capacity: int, clock: VirtualClock, speed: float | None = None) -> None:
        self.medium, self.capacity = medium, capacity
        self.speed, self._clock = speed or medium.speed, clock
        self.written = self.read_bytes = self.units_evicted = self.objects_evicted = 0
        self.payload: Counter[int] = Counter()
        self.ever: set[bytes] = set()
        self.in_use = 0
        self.books, self.order = Books(), going(medium.order)
        self._publisher = Publisher(self)
        self._closed = False

    @property
    def name(self) -> str:
        """That of the medium."""
        return self.medium.name

    @property
    def durable(self) -> bool:
        """As the medium."""
        return self.medium.durable

    def read_s(self, n_bytes: int) -> float:
        """Seconds that one read takes."""
        return self.medium.latency_s + n_bytes / self.speed

    # ---------------------------------------------------------------- the contract

    def lookup(self, layout: bytes, digests: Digests, *, root: bytes | None = None) -> Found:
        """See ``Tier.lookup``."""
        check_layout(layout)
        check_digests(digests)
        nodes: list[Node | None] = [None] * len(digests)
        if not self._closed:
            nodes = self.books.known(layout, digests)
        known = np.array([node is not None for node in nodes], np.bool_)
        boundary = np.array([node is not None and node.unit is not None for node in nodes], np.bool_)
        rows, at = self.books.gather(nodes)
        places = no_places(layout, PLACE)
        if len(rows):
            about, entries = self.books.rows[rows], np.empty(len(rows), PLACE)
            for name in (*_FIELDS, "generation"):
                entries[name] = about[name]
            entries["row"] = rows
            places = Places(layout, digests[at], entries, at)
        return Found(known, boundary, places, self._tails(layout, nodes, root))

    def _tails(self, layout: bytes, nodes: list[Node | None], root: bytes | None) -> npt.NDArray[np.int32]:
        deepest = max((i for i, node in enumerate(nodes) if node is not None), default=-1)
        parent = nodes[deepest] if deepest >= 0 else self.books.roots.get((layout, root or b""))
        found: dict[int, None] = {}
        if parent is not None and not self._closed:
            below = parent.tokens if parent.depth >= 0 else 1 << 31
            for child in reversed(parent.children.values()):
                if len(found) == MOST_TAILS:
                    break
                if child.unit is not None and child.tokens < below:
                    found[child.tokens] = None
        return np.array([(deepest, tokens) for tokens in found], np.int32).reshape(-1, 2)

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
        about = self.books.rows[places.entries["row"]]
        there = (about["generation"] == places.entries["generation"]) & (not self._closed)
        size = int(lengths[there].sum())
        self.read_bytes += size
        self._clock.advance(self.read_s(size))
        return ReadResult(np.where(there, Result.OK, Result.MISSING).astype(np.uint8), size, 1)

    def publish(self, unit: Unit) -> Published:
        """See ``Tier.publish``; payloads are not asked for."""
        if self._closed:
            return Published(Outcome.UNAVAILABLE, reason="the tier is closed")
        return self._publisher.publish(unit)

    def touch(self, layout: bytes, digest: bytes) -> None:
        """See ``Tier.touch``."""
        node = self._unit_at(layout, digest)
        if node is not None:
            self.use(node)

    def clear(self, layout: bytes | None = None, root: bytes | None = None) -> int:
        """See ``Tier.clear``."""
        everything = layout is None or root is None
        gone = [
            node
            for node in self.books.nodes.values()
            if node.unit is not None and (everything or (node.layout, _root_of(node).digest) == (layout, root))
        ]
        for node in gone:
            self.drop_unit(node)
        return len(gone)

    def usage(self) -> Usage:
        """See ``Tier.usage``."""
        return Usage(self.in_use, self.capacity, self.books.objects, self.books.units)

    def close(self) -> None:
        """See ``Tier.close``."""
        self._closed = True

    # ---------------------------------------------------------------- moving on

    def coldest(self, n_bytes: int) -> Iterator[tuple[bytes, bytes]]:
        """See ``HandsOn.coldest``; worked out as it is asked for, while nothing else may change."""
        passed: list[Int32Array] = []
        left, most = n_bytes, 0
        for node in self.order.in_order():
            if left <= 0:
                return
            yield node.layout, node.digest
            assert node.unit is not None
            passed.append(node.unit.rows)
            most += node.unit.n_bytes
            if most >= left:  # only then it matters what they share
                rows, counts = np.unique(np.concatenate(passed), return_counts=True)
                about = self.books.rows[rows]
                left = n_bytes - int(self.object_bytes(about["length"][about["refs"] == counts]).sum())
                most = 0

    def hits(self, layout: bytes, digest: bytes) -> float:
        """See ``HandsOn.hits``."""
        node = self._unit_at(layout, digest)
        return float(node.uses) if node is not None else 0.0

    def unit(self, layout: bytes, digest: bytes) -> Unit | None:
        """See ``HandsOn.unit``; payloads and tokens are nothing but long."""
        node = self._unit_at(layout, digest)
        if node is None or node.unit is None:
            return None
        chain = node.above()
        objects = [
            NewObject(depth, group, column, Grade(grade), Fill(length, _nothing), PayloadForm(form))
            for group, column, form, grade, length, _, _, depth in self.books.rows[node.unit.rows].tolist()
        ]
        digests = np.frombuffer(b"".join(each.digest for each in chain), np.uint8).reshape(len(chain), -1)
        tokens = np.broadcast_to(np.int32(0), sum(each.tokens for each in chain))
        wants = [Need(group, first, count, column) for group, first, column, count in node.unit.needs.tolist()]
        return Unit(layout, _root_of(node).digest, digests, tokens, chain[0].tokens, objects, wants)

    # ---------------------------------------------------------------- for its publisher

    def object_bytes(self, lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """What objects of so many bytes take."""
        page = self.medium.page
        made: npt.NDArray[np.int64] = self.medium.header + -(-lengths.astype(np.int64) // page) * page
        return made

    def node_bytes(self, tokens: int, needs: int) -> int:
        """What a node takes."""
        size = self.medium.node + 4 * tokens + 16 * needs
        return -(-size // self.medium.page) * self.medium.page

    def use(self, node: Node) -> None:
        """A unit was used."""
        node.uses += 1
        self.order.use(node, hit=True)

    def evict(self) -> bool:
        """Drop the unit that goes next; False when there is none."""
        node = self.order.first()
        if node is None:
            return False
        before = self.books.objects
        self.drop_unit(node)
        self.units_evicted += 1
        self.objects_evicted += before - self.books.objects
        return True

    def drop_unit(self, node: Node) -> None:
        """A unit is gone, with all that no other one needs."""
        assert node.unit is not None
        self.order.forget(node)
        self.books.units -= 1
        self.drop_refs(node.unit.rows, node.above())
        node.unit, node.uses = None, 0
        self.in_use -= self.books.prune(node)

    def drop_refs(self, rows: AnyArray, chain: list[Node]) -> None:
        """Some objects of a chain are needed once less; those that nobody needs go."""
        table = self.books.rows
        table["refs"][rows] -= 1
        gone = rows[table["refs"][rows] <= 0]
        self.in_use -= int(self.object_bytes(table["length"][gone]).sum())
        self.books.free(chain, gone)

    def _unit_at(self, layout: bytes, digest: bytes) -> Node | None:
        node = None if self._closed else self.books.nodes.get((layout, digest))
        return node if node is not None and node.unit is not None else None

    def check_integrity(self) -> None:
        """The books are consistent; AssertionError otherwise.  Looks at everything."""
        refs: Counter[int] = Counter()
        ends = [node for node in self.books.nodes.values() if node.unit is not None]
        for node in ends:
            assert node.unit is not None
            refs.update(node.unit.rows.tolist())
            rows, depth = self.books.gather(node.above())
            assert set(node.unit.rows.tolist()) <= set(rows.tolist())
            about = self.books.rows[rows]
            assert (about["depth"] == depth).all()
            for need in node.unit.needs:
                assert asked(need, about["group"], depth, about["column"]).sum() >= need[3], "a unit is not whole"
        nodes = [*self.books.nodes.values(), *self.books.roots.values()]
        held = [row for node in nodes for row in node.rows.tolist()]
        assert len(set(held)) == len(held) == self.books.objects
        assert len(ends) == self.books.units
        table = self.books.rows
        assert {row: int(table["refs"][row]) for row in held} == dict(refs), "counts of objects are wrong"
        size = int(self.object_bytes(table["length"][held]).sum()) + sum(node.n_bytes for node in nodes)
        assert size == self.in_use <= self.capacity
        for node in nodes:
            assert node.children or node.unit or len(node.rows), "a node that nothing needs is still there"
            assert all(child.parent is node for child in node.children.values())


def _root_of(node: Node) -> Node:
    while node.parent is not None:
        node = node.parent
    return node
