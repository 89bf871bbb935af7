"""Which unit goes next."""

from __future__ import annotations

import enum
import heapq
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator

from kvloom.tiers.ledger.nodes import Node

ROUND_LEAST = 16
HITS_THAT_COUNT = 4
STALE_LEAST = 64


class Order(enum.Enum):
    """Which unit goes first."""

    HEAT = "heat"
    """As in ``tiers.host``: an access counter that halves with every round of the clock."""
    ROUNDS = "rounds"
    """As in ``tiers.disk``: used longest ago, a hit counting like half a round of all units, four of them at most."""


class Going(ABC):
    """All units, in the order in which they go."""

    @abstractmethod
    def use(self, node: Node, *, hit: bool) -> None:
        """The unit that ends at ``node`` is new, or was used (``hit``)."""

    @abstractmethod
    def forget(self, node: Node) -> None:
        """No unit ends there any more."""

    @abstractmethod
    def worth(self, node: Node) -> float:
        """Its uses, as far as they still count."""

    @abstractmethod
    def first(self) -> Node | None:
        """The one that goes next."""

    @abstractmethod
    def in_order(self) -> Iterator[Node]:
        """All of them; nothing may change meanwhile."""


class ByHeat(Going):
    """``Order.HEAT``."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, float, int, int, Node]] = []
        self._clock, self._number, self._units = 0.0, 0, 0

    def use(self, node: Node, *, hit: bool) -> None:
        """See ``Going``."""
        self._clock += 1 / max(self._units, ROUND_LEAST)
        self._units += node.stamp == 0
        node.hits = node.hits * 2.0 ** (node.moment - self._clock) + 1.0
        node.moment = self._clock
        self._number += 1
        node.stamp = self._number
        key = math.log2(node.hits) + self._clock
        heapq.heappush(self._heap, (key, node.moment, -node.depth, node.stamp, node))
        if len(self._heap) > 2 * self._units + STALE_LEAST:
            self._heap = [each for each in self._heap if each[3] == each[4].stamp]
            heapq.heapify(self._heap)

    def forget(self, node: Node) -> None:
        """See ``Going``."""
        self._units -= node.stamp != 0
        node.hits, node.stamp = 0.0, 0

    def worth(self, node: Node) -> float:
        """See ``Going``."""
        return node.hits * math.exp2(node.moment - self._clock)

    def first(self) -> Node | None:
        """See ``Going``."""
        while self._heap and self._heap[0][3] != self._heap[0][4].stamp:
            heapq.heappop(self._heap)
        return self._heap[0][4] if self._heap else None

    def in_order(self) -> Iterator[Node]:
        """See ``Going``."""
        heap = self._heap
        ahead = [(heap[0][:4], 0)] if heap else []
        while ahead:
            (*_, stamp), at = heapq.heappop(ahead)
            for below in (2 * at + 1, 2 * at + 2):
                if below < len(heap):
                    heapq.heappush(ahead, (heap[below][:4], below))
            if heap[at][4].stamp == stamp:
                yield heap[at][4]


class ByRounds(Going):
    """``Order.ROUNDS``."""

    def __init__(self) -> None:
        self._units: dict[int, Node] = {}
        self._sorted: list[Node] | None = None
        self._clock = 0

    def use(self, node: Node, *, hit: bool) -> None:
        """See ``Going``."""
        self._clock += 1
        node.hits += hit
        node.moment = self._clock
        self._units[id(node)] = node
        self._sorted = None

    def forget(self, node: Node) -> None:
        """See ``Going``."""
        del self._units[id(node)]
        node.hits = 0.0
        if self._sorted and self._sorted[-1] is node:
            self._sorted.pop()
        else:
            self._sorted = None

    def worth(self, node: Node) -> float:
        """See ``Going``."""
        return node.hits

    def first(self) -> Node | None:
        """See ``Going``."""
        if self._sorted is None:
            self._sorted = list(self.in_order())[::-1]
        return self._sorted[-1] if self._sorted else None

    def in_order(self) -> Iterator[Node]:
        """See ``Going``."""
        half = len(self._units) / 2
        worth = [
            (node.moment + min(node.hits, HITS_THAT_COUNT) * half, -node.depth, number, node)
            for number, node in enumerate(self._units.values())
        ]
        return (node for *_, node in sorted(worth, key=lambda each: each[:3]))


def going(order: Order) -> Going:
    """What keeps this order."""
    return ByHeat() if order is Order.HEAT else ByRounds()
