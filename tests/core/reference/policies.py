"""Eviction policies in plain Python: what they know of nodes, and which leaf they would evict.

``LRU`` knows nothing.  The others count, per node, the requests that went through it as far as they know; see
``kvloom.core.heat``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tests.core.reference.index import Node
from tests.core.reference.reuse import Reuse, class_of

from kvloom.eviction import EvictionPolicy

Clock = Callable[[], int]


def make_rules(policy: EvictionPolicy, clock: Clock) -> Rules:
    """The reference of a policy."""
    named: dict[str, type[Rules]] = {"lru": Rules, "lfu": Lfu, "priority": Priority, "s3-fifo": TwoQueues, "cost": Cost}
    if policy.key is not None:
        return Keyed(policy.key, clock)
    return named[policy.name](clock)


def _by_stamp(node: Node) -> tuple[int, int]:
    return node.stamp, node.number


class Rules:
    """Least recently used first; needs to know nothing."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def pick(self, leaves: Sequence[Node]) -> tuple[Node, int]:
        """The leaf that goes, and the time up to which other things go first."""
        leaf = self._first(leaves)
        return leaf, leaf.stamp

    def _first(self, leaves: Sequence[Node]) -> Node:
        return min(leaves, key=_by_stamp)

    def born(self, node: Node) -> None:
        """A new node."""

    def opened(self, end: Node) -> None:
        """A request goes on from segment ``end``."""

    def passed(self, node: Node) -> None:
        """A request published segment ``node``."""

    def resumed(self, node: Node) -> None:
        """A checkpoint was made, or a request resumes there; nothing happens for segments."""

    def ended(self, node: Node, priority: int) -> None:
        """A request ended at a segment or root."""

    def noted(self, node: Node, priority: int) -> None:
        """A request of this priority uses the node."""

    def buried(self, node: Node) -> None:
        """The node became a ghost."""

    def revived(self, node: Node) -> None:
        """A ghost is used."""

    def forgotten(self, node: Node) -> None:
        """A ghost went."""

    def joined(self, node: Node) -> None:
        """The node became a leaf that may be evicted."""


class Counting(Rules):
    """Counts uses where requests end, and moves what is new to the parent when a leaf dies."""

    def born(self, node: Node) -> None:
        node.uses = node.folded = 0
        node.is_end = False
        node.priority = 0

    def resumed(self, node: Node) -> None:
        if node.parent is not None and not node.is_segment:
            node.uses += 1
            node.is_end = True

    def noted(self, node: Node, priority: int) -> None:
        node.priority = max(node.priority, priority)

    def ended(self, node: Node, priority: int) -> None:
        self.noted(node, priority)
        if node.parent is not None:
            node.is_end = True
            if not self.counts_all(node):
                node.uses += 1

    def counts_all(self, node: Node) -> bool:
        """Whether every request through the node is counted at once."""
        return False

    def buried(self, node: Node) -> None:
        assert node.parent is not None
        self.noted(node.parent, node.priority)
        if node.is_segment:
            if not self.counts_all(node.parent):
                node.parent.uses += node.uses - node.folded
            node.folded = node.uses
            if node.stamp > node.parent.stamp:
                node.parent.is_end = False


class Keyed(Counting):
    """The lowest key first."""

    def __init__(self, key: Callable[[int, int, int, int], int], clock: Clock) -> None:
        super().__init__(clock)
        self.key = key

    def _first(self, leaves: Sequence[Node]) -> Node:
        return min(leaves, key=lambda n: (self.key(n.uses, n.stamp, n.priority, n.depth), n.number))


class Lfu(Keyed):
    """Least often used first."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(lambda uses, stamp, _priority, _depth: min(uses, 2**20 - 1) * 2**40 + stamp, clock)


class Priority(Keyed):
    """Least important first."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(lambda _uses, stamp, priority, _depth: priority * 2**40 + stamp, clock)


class TwoQueues(Counting):
    """S3-FIFO over leaves."""

    def born(self, node: Node) -> None:
        super().born(node)
        node.main = False
        node.spent = 1
        node.since = self.clock()

    def revived(self, node: Node) -> None:
        node.main = True
        node.spent = node.uses + 1
        node.since = self.clock()

    def _first(self, leaves: Sequence[Node]) -> Node:
        while True:
            small = [n for n in leaves if not n.main]
            from_small = len(small) == len(leaves) or (bool(small) and 10 * len(small) >= len(leaves))
            node = min(small if from_small else [n for n in leaves if n.main], key=lambda n: (n.since, n.number))
            used = max(0, min(3, node.uses - node.spent))
            if used < (2 if from_small else 1):
                return node
            node.spent = node.uses if from_small else node.uses - (used - 1)
            node.main = True
            node.since = self.clock()


class Cost(Counting):
    """The lowest rate of reuse first, as learned."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self.reuse = Reuse()
        self.leaf: Callable[[Node], None]
        self.first_stranded: Callable[[Sequence[Node]], Node | None]

    def born(self, node: Node) -> None:
        super().born(node)
        node.tick = self.reuse.now
        node.trial = None

    def counts_all(self, node: Node) -> bool:
        return node.parent is not None and node.is_segment and (node.depth <= 256 or node.depth % 32 == 0)

    def passed(self, node: Node) -> None:
        if self.counts_all(node):
            self.reuse.reused(node)
            node.uses += 1
            node.is_end = False
            self.reuse.begin(node, class_of(node))
        else:
            node.tick = self.reuse.now

    def opened(self, end: Node) -> None:
        self.reuse.tick()
        for node in end.path[1:]:
            if self.counts_all(node) or node is end:
                self.passed(node)

    def resumed(self, node: Node) -> None:
        super().resumed(node)
        if node.parent is not None and not node.is_segment:
            node.tick = self.reuse.now

    def ended(self, node: Node, priority: int) -> None:
        super().ended(node, priority)
        if node.parent is None:
            return
        if node.trial is not None:
            self.reuse.undo(node)
            self.reuse.begin(node, class_of(node))
        node.tick = self.reuse.now
        self.reuse.run(sum(self.counts_all(n) for n in node.path))

    def buried(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None
        if node.tick > parent.tick:
            trial = parent.trial
            self.reuse.undo(parent)
            parent.tick = node.tick
            if trial is not None:
                self.reuse.begin(parent, trial, node.tick)
        super().buried(node)

    def forgotten(self, node: Node) -> None:
        self.reuse.expired(node)

    def joined(self, node: Node) -> None:
        self.leaf(node)

    def pick(self, leaves: Sequence[Node]) -> tuple[Node, int]:
        def index(node: Node) -> int:
            return self.reuse.index(class_of(node), node.tick)

        stranded = self.first_stranded(sorted(leaves, key=_by_stamp))
        if stranded is not None:
            return stranded, -1
        oldest = min(leaves, key=_by_stamp)
        best = None
        for c in range(8):
            mine = sorted((n for n in leaves if class_of(n) == c), key=_by_stamp)
            if not mine:
                continue
            first, last = mine[0], mine[-1]
            if best is None or (index(first), *_by_stamp(first)) < (index(best), *_by_stamp(best)):
                best = first
            if index(last) < index(best):
                best = last
        assert best is not None
        leaf = oldest if 3 * index(best) >= 2 * index(oldest) else best
        return leaf, oldest.stamp - 1
