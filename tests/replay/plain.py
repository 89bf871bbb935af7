"""The definitions of a block hit, as plainly as possible, and ways to make traces."""

from __future__ import annotations

import json
import random
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from kvloom.replay.trace import NO_SESSION, Trace, make_trace

DATA = Path(__file__).parents[1] / "data"
CONVERSATION = DATA / "conversation_300.jsonl"
AGENTIC = DATA / "agentic_400.jsonl"
AZURE = DATA / "azure_200.csv"


def trace_of(
    requests: Sequence[Sequence[int]], *, block: int = 4, outputs: Sequence[int] = (), inputs: Sequence[int] = ()
) -> Trace:
    """A trace from lists of block ids; prompts fill their blocks unless ``inputs`` says otherwise."""
    n = len(requests)
    return make_trace(
        name="tiny",
        form="mooncake",
        block=block,
        arrivals=np.arange(n, dtype=np.float64),
        inputs=np.array(inputs or [max(1, len(r) * block) for r in requests], dtype=np.int64),
        outputs=np.array(outputs or [0] * n, dtype=np.int64),
        sessions=np.full(n, NO_SESSION, dtype=np.int64),
        counts=np.array([len(r) for r in requests], dtype=np.int64),
        ids=np.array([b for r in requests for b in r], dtype=np.int64),
        lines=np.arange(1, n + 1, dtype=np.int64),
    )


def random_requests(rng: random.Random, count: int, depth: int, fanout: int) -> list[list[int]]:
    """Requests that are paths from the root of a random tree; ids are numbers of tree nodes."""
    nodes: dict[tuple[int, ...], int] = {}
    requests = []
    for _ in range(count):
        path: tuple[int, ...] = ()
        request = []
        for _ in range(rng.randint(1, depth)):
            path = (*path, rng.randrange(fanout))
            request.append(nodes.setdefault(path, len(nodes)))
        requests.append(request)
    return requests


def lru_hits(trace: Trace, capacity: int) -> list[int]:
    """Leading resident blocks at arrival; then every block is touched, the deepest first."""
    cache: OrderedDict[int, None] = OrderedDict()
    hits = []
    for i in range(len(trace)):
        blocks = trace.request(i).tolist()
        hit = 0
        while hit < len(blocks) and blocks[hit] in cache:
            hit += 1
        hits.append(hit)
        for block in reversed(blocks):
            cache[block] = None
            cache.move_to_end(block)
            if len(cache) > capacity:
                cache.popitem(last=False)
    return hits


def farthest_hits(trace: Trace, capacity: int) -> list[int]:
    """Keep the blocks with the nearest next use, block by block; of equal ones the shallower."""
    requests = [trace.request(i).tolist() for i in range(len(trace))]
    cache: set[int] = set()
    hits = []
    depth_of = {block: d for blocks in requests for d, block in enumerate(blocks)}
    for i, blocks in enumerate(requests):
        hit = 0
        while hit < len(blocks) and blocks[hit] in cache:
            hit += 1
        hits.append(hit)
        cache |= set(blocks)
        following = {block: j for j in range(len(requests) - 1, i, -1) for block in requests[j]}
        cache = {block for block in cache if block in following}
        if len(cache) > capacity:
            cache = set(sorted(cache, key=lambda block: (following[block], depth_of[block]))[:capacity])
    return hits


def best_of_all(requests: Sequence[Sequence[int]], capacity: int) -> int:
    """The most block hits that any choice of what to keep can reach, by trying every choice."""
    from itertools import combinations

    states: dict[frozenset[int], int] = {frozenset(): 0}
    for request in requests:
        later: dict[frozenset[int], int] = {}
        for cache, so_far in states.items():
            hit = 0
            while hit < len(request) and request[hit] in cache:
                hit += 1
            union = sorted(cache | set(request))
            for size in range(min(capacity, len(union)) + 1):
                for kept in combinations(union, size):
                    key = frozenset(kept)
                    later[key] = max(later.get(key, 0), so_far + hit)
        states = later
    return max(states.values())


def write_jsonl(path: Path, rows: Sequence[dict[str, object]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path
