"""Who is there: nodes of chains, rows of objects, and which units need which of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvloom.tiers.values import DIGEST, OBJECT
from kvloom.types import AnyArray, Int32Array, IntArray

ROW = np.dtype([*OBJECT.descr, ("refs", "<i4"), ("serial", "<i8"), ("depth", "<i4")])
"""An object: how many units need it, the number of its payload (0: none), and the depth of its node."""
NO_ROWS: IntArray = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class End:
    """A unit.

    Attributes:
        needs: int64 ``[k, 4]``: group, first node, first column, count.
        rows: int32, the objects of its chain that it needs: those that were there when it was published.
        n_bytes: that these take.
        record: bytes that the unit takes besides.
        serial: number of this publication.
    """

    needs: IntArray
    rows: Int32Array
    n_bytes: int
    record: int
    serial: int


@dataclass(slots=True, eq=False)
class Node:
    """A node of a chain, or a root, whose depth is -1.

    Attributes:
        tokens: how many this node alone has; ``text``: which ones, where the ledger keeps them.
        n_bytes: that it takes besides its objects.
        anchors: publications under way that build on it.
        rows: int64, its objects.
        uses: of the unit since it was published.
        hits, moment, stamp: of the order in which units go.
    """

    layout: bytes
    digest: bytes
    parent: Node | None
    depth: int
    tokens: int = 0
    text: Int32Array | None = None
    n_bytes: int = 0
    anchors: int = 0
    rows: IntArray = field(default_factory=lambda: NO_ROWS)
    children: dict[bytes, Node] = field(default_factory=dict)
    unit: End | None = None
    uses: int = 0
    hits: float = 0.0
    moment: float = 0.0
    stamp: int = 0

    def above(self) -> list[Node]:
        """The chain, from its first node to this one, without the root."""
        chain: list[Node] = []
        node: Node | None = self
        while node is not None and node.depth >= 0:
            chain.append(node)
            node = node.parent
        chain.reverse()
        return chain

    def ends(self) -> list[Node]:
        """Nodes at or below this one at which a unit ends."""
        found, left = [], [self]
        while left:
            node = left.pop()
            left.extend(node.children.values())
            if node.unit is not None:
                found.append(node)
        return found

    @property
    def root(self) -> Node:
        """Where its chain begins."""
        node = self
        while node.parent is not None:
            node = node.parent
        return node


def needed(needs: IntArray, group: AnyArray, depth: AnyArray, column: AnyArray) -> AnyArray:
    """Which objects some of ``needs`` ask for; bool ``[n]``."""
    found = np.zeros(len(group), np.bool_)
    for need in needs:
        found |= asked(need, group, depth, column)
    return found


def asked(need: IntArray, group: AnyArray, depth: AnyArray, column: AnyArray) -> AnyArray:
    """Which objects one need asks for; bool ``[n]``."""
    mine: AnyArray = (group == need[0]) & ((depth > need[1]) | ((depth == need[1]) & (column >= need[2])))
    return mine


class Books:
    """Nodes and objects, and no bytes."""

    def __init__(self) -> None:
        self.nodes: dict[tuple[bytes, bytes], Node] = {}
        self.roots: dict[tuple[bytes, bytes], Node] = {}
        self.rows = np.zeros(1024, ROW)
        self.objects = self.units = 0
        self.serial = 0
        self._free: list[int] = []
        self._top = 0

    # ---------------------------------------------------------------- finding

    def known(self, layout: bytes, digests: AnyArray) -> list[Node | None]:
        """The node of every digest."""
        raw, get = digests.tobytes(), self.nodes.get
        return [get((layout, raw[at : at + DIGEST])) for at in range(0, len(raw), DIGEST)]

    def gather(self, chain: Sequence[Node | None]) -> tuple[IntArray, IntArray]:
        """The rows of all objects of ``chain``, and the index of the node of each."""
        parts = [NO_ROWS if node is None else node.rows for node in chain]
        if not parts:
            return NO_ROWS, NO_ROWS
        return np.concatenate(parts), np.repeat(np.arange(len(parts)), [len(part) for part in parts])

    # ---------------------------------------------------------------- entering

    def take(self, count: int) -> IntArray:
        """So many free rows."""
        again = [self._free.pop() for _ in range(min(count, len(self._free)))]
        fresh = count - len(again)
        while self._top + fresh > len(self.rows):
            self.rows = np.concatenate([self.rows, np.zeros(len(self.rows), ROW)])
        made = np.array(again + list(range(self._top, self._top + fresh)), np.int64)
        self._top += fresh
        self.objects += count
        return made

    def number(self, count: int) -> IntArray:
        """So many numbers that no payload ever had."""
        self.serial += count
        return np.arange(self.serial - count + 1, self.serial + 1)

    def new_node(self, layout: bytes, digest: bytes, parent: Node, tokens: int, n_bytes: int) -> Node:
        """A node below ``parent``."""
        made = Node(layout, digest, parent, parent.depth + 1, tokens, n_bytes=n_bytes)
        self.nodes[layout, digest] = parent.children[digest] = made
        return made

    # ---------------------------------------------------------------- removing

    def free(self, chain: Sequence[Node], rows: AnyArray) -> None:
        """Drop objects of a chain that nobody needs."""
        if not len(rows):
            return
        self.rows["serial"][rows] = 0
        self._free.extend(rows.tolist())
        self.objects -= len(rows)
        gone = set(rows.tolist())
        for at in np.unique(self.rows["depth"][rows]).tolist():
            node = chain[at]
            node.rows = np.array([row for row in node.rows.tolist() if row not in gone], np.int64)

    def prune(self, node: Node | None) -> int:
        """Forget a node, and those above it, that nothing needs; the bytes that they took."""
        freed = 0
        while node is not None and not (node.children or node.unit or node.anchors or len(node.rows)):
            parent = node.parent
            if parent is None:
                del self.roots[node.layout, node.digest]
            else:
                del self.nodes[node.layout, node.digest], parent.children[node.digest]
            freed += node.n_bytes
            node = parent
        return freed


def array_of(needs: Iterable[tuple[int, int, int, int]]) -> IntArray:
    """int64 ``[k, 4]``, in a fixed order."""
    rows = sorted(needs)
    return np.array(rows, np.int64) if rows else np.empty((0, 4), np.int64)
