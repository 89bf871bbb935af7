"""The exact offline optimum under prefix semantics.

After each request keep, of everything cached and the request's own blocks, the C blocks whose next use is nearest
(nothing has to be kept; of equal next uses the deeper block goes first).  A parent is used whenever its child is, so
what is kept is closed under prefixes, and the number of block hits is the largest that any policy can reach.

Blocks with the same next use are interchangeable but for their depth, so it suffices to count, per later request, how
many of its leading blocks are kept: the work depends on the number of forks, not of blocks.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np

from kvloom.replay.trace import Trace
from kvloom.types import Int32Array, IntArray


@dataclass(frozen=True, slots=True)
class NextUses:
    """For every request, how many blocks that it leaves behind are next used by which later request.

    Request i has the entries ``starts[i]`` to ``starts[i + 1]`` of ``request`` (the later one) and ``count``.
    """

    starts: list[int]
    request: list[int]
    count: list[int]


def next_uses(trace: Trace, more: dict[int, Int32Array] | None = None) -> NextUses:
    """The next uses of every block of every request.

    ``more``: blocks that a request leaves behind besides those of its prompt (its answer), by request.
    """
    more = more or {}
    never = len(trace)
    upcoming = np.full(trace.unique, never, dtype=np.int64)
    parts: list[tuple[list[int], list[int]]] = []
    for i in range(len(trace) - 1, -1, -1):
        blocks = trace.request(i)
        left = np.concatenate([blocks, more[i]]) if i in more else blocks
        uses = upcoming[left]
        upcoming[blocks] = i
        uses = uses[uses < never]
        at = np.flatnonzero(np.diff(uses)) + 1
        edges = np.concatenate([[0], at, [len(uses)]]) if len(uses) else np.zeros(1, dtype=np.int64)
        parts.append((uses[edges[:-1]].tolist(), np.diff(edges).tolist()))
    parts.reverse()
    starts = np.concatenate([[0], np.cumsum([len(uses) for uses, _ in parts])]).astype(np.int64)
    return NextUses(
        starts.tolist(), [use for uses, _ in parts for use in uses], [n for _, counts in parts for n in counts]
    )


def optimum(uses: NextUses, capacity: int) -> IntArray:
    """Block hits of every request with room for ``capacity`` blocks, int64 [requests]."""
    requests = len(uses.starts) - 1
    kept = [0] * requests  # by later request: its blocks that are cached now
    total = 0
    farthest: list[int] = []  # negated, a heap; entries that are used up stay until they surface
    hits = np.zeros(requests, dtype=np.int64)
    for i in range(requests):
        hits[i] = kept[i]
        total -= kept[i]
        for e in range(uses.starts[i], uses.starts[i + 1]):
            later, count = uses.request[e], uses.count[e]
            if not kept[later]:
                heapq.heappush(farthest, -later)
            kept[later] += count
            total += count
        while total > capacity:
            later = -farthest[0]
            dropped = min(kept[later], total - capacity)
            kept[later] -= dropped
            total -= dropped
            if not kept[later]:
                heapq.heappop(farthest)
    return hits
