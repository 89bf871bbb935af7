"""``Ledger``: finding units, taking them in, and dropping them in their order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from kvloom.tiers.ledger import drafts
from kvloom.tiers.ledger.drafts import Draft
from kvloom.tiers.ledger.nodes import Books, End, Node, asked
from kvloom.tiers.ledger.order import Order, going
from kvloom.tiers.values import (
    MOST_TAILS,
    OBJECT,
    Digests,
    Fill,
    Found,
    Need,
    NewObject,
    Places,
    Published,
    Unit,
    check_digests,
    check_layout,
    no_places,
)
from kvloom.types import AnyArray, Grade, Int32Array, IntArray, PayloadForm

PLACE = np.dtype([*OBJECT.descr, ("row", "<i8"), ("serial", "<i8")])
_FIELDS = [*(name for name, *_ in OBJECT.descr), "serial"]
_ANY_LENGTH = 1 << 31


class Accounts:
    """What things cost, and who is told when they go; as it is, payloads alone cost what they have, and nobody is told.

    Called while the ledger is changed: nothing may call back.
    """

    def object_bytes(self, lengths: IntArray) -> IntArray:
        """What objects of so many bytes take."""
        return lengths

    def node_bytes(self, tokens: int, needs: int) -> int:
        """What a node takes; ``needs`` is 0 unless a unit ends there."""
        return 0

    def unit_bytes(self, nodes: int, tokens: int, needs: int, objects: int) -> int:
        """What a unit takes besides: nodes and tokens of its chain, needs, and objects that it asks for."""
        return 0

    def objects_gone(self, chain: Sequence[Node], rows: AnyArray) -> None:
        """These payloads of a chain are not found any more; ``rows`` are their ``ROW``s."""

    def unit_gone(self, node: Node, end: End) -> None:
        """This publication of a unit does not count any more."""


class Ledger(Books):
    """Belongs to one thread at a time.

    Args:
        accounts: what things cost.
        limit: bytes that may be in use.
        goal: bytes that are to be in use once room had to be made.
        order: which unit goes first.
        keeps_tokens: whether nodes keep their tokens, so that ``unit`` has them.

    Attributes:
        in_use: bytes of all that is found.
        reserved: bytes of the publication under way.
        units_evicted, objects_evicted: what went to make room.
    """

    def __init__(
        self, accounts: Accounts, limit: int, goal: int | None = None, *, order: Order, keeps_tokens: bool = False
    ) -> None:
        super().__init__()
        self.accounts, self.limit, self.goal = accounts, limit, limit if goal is None else goal
        self.order, self.keeps_tokens = going(order), keeps_tokens
        self.in_use = self.reserved = self.units_evicted = self.objects_evicted = 0

    # ---------------------------------------------------------------- finding

    def find(self, layout: bytes, digests: Digests, root: bytes | None) -> Found:
        """See ``Tier.lookup``; places have the fields of ``PLACE``."""
        check_layout(layout)
        check_digests(digests)
        nodes = self.known(layout, digests)
        known = np.array([node is not None for node in nodes], np.bool_)
        boundary = np.array([node is not None and node.unit is not None for node in nodes], np.bool_)
        rows, at = self.gather(nodes)
        places = no_places(layout, PLACE)
        if len(rows):
            about, entries = self.rows[rows], np.empty(len(rows), PLACE)
            for name in _FIELDS:
                entries[name] = about[name]
            entries["row"] = rows
            places = Places(layout, digests[at], entries, at)
        return Found(known, boundary, places, self._tails(layout, nodes, root))

    def _tails(self, layout: bytes, nodes: list[Node | None], root: bytes | None) -> npt.NDArray[np.int32]:
        deepest = max((i for i, node in enumerate(nodes) if node is not None), default=-1)
        parent = nodes[deepest] if deepest >= 0 else self.roots.get((layout, root or b""))
        found: dict[int, None] = {}
        if parent is not None:
            below = parent.tokens if parent.depth >= 0 else _ANY_LENGTH
            for child in reversed(parent.children.values()):
                if len(found) == MOST_TAILS:
                    break
                if child.unit is not None and child.tokens < below:
                    found[child.tokens] = None
        return np.array([(deepest, tokens) for tokens in found], np.int32).reshape(-1, 2)

    def there(self, places: Places) -> AnyArray:
        """Which objects still are what was looked up; bool ``[m]``."""
        rows, serials = places.entries["row"], places.entries["serial"]
        inside = (rows >= 0) & (rows < len(self.rows)) & (serials > 0)
        about = self.rows[np.where(inside, rows, 0)]
        for name in _FIELDS:
            inside &= about[name] == places.entries[name]
        found: AnyArray = inside
        return found

    def unit_at(self, layout: bytes, digest: bytes) -> Node | None:
        """The node, if a unit ends there."""
        node = self.nodes.get((layout, digest))
        return node if node is not None and node.unit is not None else None

    def units_of(self, layout: bytes | None, root: bytes | None) -> list[Node]:
        """Where units end: all, or those of one namespace of one layout."""
        if layout is None or root is None:
            return [node for node in self.nodes.values() if node.unit is not None]
        begin = self.roots.get((layout, root))
        return [] if begin is None else begin.ends()

    def coldest(self, n_bytes: int) -> Iterator[Node]:
        """Where the units end that would go next to free this many bytes; nothing may change meanwhile."""
        passed: list[Int32Array] = []
        left, most = n_bytes, 0
        for node in self.order.in_order():
            if left <= 0:
                return
            yield node
            assert node.unit is not None
            passed.append(node.unit.rows)
            most += node.unit.n_bytes
            if most >= left:  # only then it matters what they share
                rows, counts = np.unique(np.concatenate(passed), return_counts=True)
                about = self.rows[rows]
                left = n_bytes - int(self.accounts.object_bytes(about["length"][about["refs"] == counts]).sum())
                most = 0

    def unit(self, node: Node, tokens: Int32Array, payload: Callable[[Node, int, AnyArray], Fill]) -> Unit:
        """The unit that ends at a node, for elsewhere; ``payload`` of a node, the number of a row, and the row."""
        assert node.unit is not None
        chain, end = node.above(), node.unit
        objects = [
            NewObject(
                int(row["depth"]),
                int(row["group"]),
                int(row["column"]),
                Grade(int(row["grade"])),
                payload(chain[row["depth"]], number, row),
                PayloadForm(int(row["form"])),
            )
            for number, row in zip(end.rows.tolist(), self.rows[end.rows], strict=True)
        ]
        digests = np.frombuffer(b"".join(each.digest for each in chain), np.uint8).reshape(len(chain), -1)
        wants = [Need(group, first, count, column) for group, first, column, count in end.needs.tolist()]
        return Unit(node.layout, node.root.digest, digests, tokens, chain[0].tokens, objects, wants)

    # ---------------------------------------------------------------- taking in

    def begin(self, unit: Unit) -> Draft | Published:
        """Room for a unit, which stays reserved until ``commit`` or ``abandon``; or why there is nothing to do."""
        return drafts.begin(self, unit)

    def commit(self, draft: Draft) -> Published:
        """The unit is there, or ``INCOMPLETE`` when what it builds on went meanwhile."""
        return drafts.commit(self, draft)

    def abandon(self, draft: Draft) -> None:
        """Nothing came of it."""
        drafts.abandon(self, draft)

    def use(self, node: Node) -> None:
        """A unit was used."""
        node.uses += 1
        self.order.use(node, hit=True)

    def hits(self, node: Node) -> float:
        """Decayed count of the uses of a unit; 0 when it was never used since it was published."""
        return self.order.worth(node) if node.uses else 0.0

    # ---------------------------------------------------------------- removing

    def evict(self) -> bool:
        """Drop the unit that goes next; False when there is none."""
        node = self.order.first()
        if node is None:
            return False
        before = self.objects
        self.drop_unit(node)
        self.units_evicted += 1
        self.objects_evicted += before - self.objects
        return True

    def drop_unit(self, node: Node) -> None:
        """A unit is gone, with all that no other one needs."""
        end = node.unit
        assert end is not None
        self.order.forget(node)
        self.units -= 1
        self.in_use -= end.record
        node.unit, node.uses = None, 0
        self.accounts.unit_gone(node, end)
        self.drop_refs(end.rows, node.above())
        self.in_use -= self.prune(node)

    def drop_refs(self, rows: AnyArray, chain: Sequence[Node]) -> None:
        """Some objects of a chain are needed once less; those that nobody needs go."""
        self.rows["refs"][rows] -= 1
        self.drop_objects(rows[self.rows["refs"][rows] <= 0], chain)

    def drop_objects(self, rows: AnyArray, chain: Sequence[Node]) -> None:
        """Objects of a chain go."""
        self.payloads_gone(rows, chain)
        self.free(chain, rows)

    def payloads_gone(self, rows: AnyArray, chain: Sequence[Node]) -> None:
        """Payloads of objects go; the rows may take others."""
        if len(rows):
            self.accounts.objects_gone(chain, self.rows[rows])
            self.in_use -= int(self.accounts.object_bytes(self.rows["length"][rows]).sum())

    def quarantine(self, layout: bytes, digest: bytes, row: int, serial: int) -> bool:
        """An object is not found again, nor any unit that needs it; False when it was gone already."""
        node = self.nodes.get((layout, digest))
        if node is None or self.rows["serial"][row] != serial or not (node.rows == row).any():
            return False
        for end in node.ends():
            if end.unit is not None and (end.unit.rows == row).any():
                self.drop_unit(end)
        if self.rows["serial"][row] == serial:  # a publication under way builds on it
            self.drop_objects(np.array([row]), node.above())
            self.in_use -= self.prune(node)
        return True

    # ---------------------------------------------------------------- for tests

    def check_integrity(self) -> None:
        """The books are consistent; AssertionError otherwise.  Looks at everything, while nothing is under way."""
        refs: Counter[int] = Counter()
        ends = self.units_of(None, None)
        for node in ends:
            assert node.unit is not None
            refs.update(node.unit.rows.tolist())
            rows, depth = self.gather(node.above())
            assert set(node.unit.rows.tolist()) <= set(rows.tolist())
            about = self.rows[rows]
            assert (about["depth"] == depth).all()
            for need in node.unit.needs:
                assert asked(need, about["group"], depth, about["column"]).sum() >= need[3], "a unit is not whole"
        nodes = [*self.nodes.values(), *self.roots.values()]
        held = [row for node in nodes for row in node.rows.tolist()]
        assert len(set(held)) == len(held) == self.objects
        assert len(ends) == self.units
        table = self.rows
        assert {row: int(table["refs"][row]) for row in held} == dict(refs), "counts of objects are wrong"
        assert (table["serial"][held] > 0).all(), "an object has no payload"
        size = int(self.accounts.object_bytes(table["length"][held].astype(np.int64)).sum())
        size += sum(node.n_bytes for node in nodes) + sum(node.unit.record for node in ends if node.unit)
        assert self.reserved == 0, "bytes are reserved for nothing"
        assert size == self.in_use <= self.limit
        for node in nodes:
            assert node.children or node.unit or len(node.rows), "a node that nothing needs is still there"
            assert not node.anchors, "a publication ended and still holds a node"
            assert all(child.parent is node for child in node.children.values())
