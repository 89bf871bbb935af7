"""Full traces through the real manager, beside a plain LRU and a plain optimum written out here.

    python tools/replay_traces.py DIR [--model PRESET] [--optimum]

DIR holds ``conversation_trace.jsonl`` (blocks of 512) and ``agentic_dev_blk256.jsonl`` (256), or other files of these
forms.  Exit code 1 when the hit rates of LRU differ by more than 0.001 anywhere, or ``cost`` misses 0.002 more than
LRU, on the whole trace or on either half of it, or misses its limits on these two traces.  ``--optimum`` also checks
the optimum against the slow way of finding it (minutes).
"""

from __future__ import annotations

import argparse
import heapq
import sys
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path
from time import perf_counter

import numpy as np

from kvloom.errors import KVLoomError
from kvloom.replay.readers import read_trace
from kvloom.replay.runs import ReplayOptions, replay
from kvloom.replay.sizes import DeviceSize
from kvloom.replay.trace import Trace, renumber

SHARES = (1, 5, 10, 25, 50)
TOLERANCE = 0.001
WORSE = 0.002
"""How much more ``cost`` may miss than LRU, anywhere."""
LIMITS = {
    "conversation_trace.jsonl": {5: 0.780, 10: 0.706},
    "agentic_dev_blk256.jsonl": {5: 0.181, 10: 0.063},
}
"""Miss ratios that ``cost`` reaches on the two traces, by share of the unique blocks."""


def leading(blocks: list[int], cache: OrderedDict[int, None] | dict[int, int]) -> int:
    """Leading blocks that are cached."""
    hits = 0
    while hits < len(blocks) and blocks[hits] in cache:
        hits += 1
    return hits


def plain_lru(requests: list[list[int]], capacity: int) -> int:
    """Block hits of LRU that touches the blocks of a request from the deepest to the first."""
    cache: OrderedDict[int, None] = OrderedDict()
    total = 0
    for blocks in requests:
        total += leading(blocks, cache)
        for block in reversed(blocks):
            cache[block] = None
            cache.move_to_end(block)
            if len(cache) > capacity:
                cache.popitem(last=False)
    return total


def plain_optimum(requests: list[list[int]], capacity: int) -> int:
    """Block hits when the blocks whose next use is farthest, and of these the deepest, are dropped."""
    following: dict[int, int] = {}
    uses: list[list[int]] = []
    for i in range(len(requests) - 1, -1, -1):
        uses.append([following.get(block, -1) for block in requests[i]])
        following.update(dict.fromkeys(requests[i], i))
    uses.reverse()
    cache: dict[int, int] = {}
    heap: list[tuple[int, int, int]] = []
    total = 0
    for blocks, nexts in zip(requests, uses, strict=True):
        total += leading(blocks, cache)
        for depth, (block, following_use) in enumerate(zip(blocks, nexts, strict=True)):
            if following_use < 0:
                cache.pop(block, None)
                continue
            cache[block] = following_use
            heapq.heappush(heap, (-following_use, -depth, block))
        while len(cache) > capacity:
            use, _, block = heapq.heappop(heap)
            if cache.get(block) == -use:
                del cache[block]
    return total


def halves(trace: Trace) -> list[Trace]:
    """The first and the second half of the requests, as traces of their own."""
    middle = len(trace) // 2
    made = []
    for number, (begin, end) in enumerate(((0, middle), (middle, len(trace))), start=1):
        starts = trace.starts[begin : end + 1] - trace.starts[begin]
        blocks, unique = renumber(trace.blocks[trace.starts[begin] : trace.starts[end]].astype(np.int64))
        columns = {name: getattr(trace, name)[begin:end] for name in ("arrivals", "inputs", "outputs", "sessions")}
        name = f"{trace.name}, half {number}"
        made.append(replace(trace, name=name, starts=starts, blocks=blocks, unique=unique, **columns))
    return made


def check(trace: Trace, model: str, *, with_optimum: bool) -> bool:
    """Print one line per size; True when LRU agrees with the plain one and ``cost`` is within its bounds."""
    requests = [trace.request(i).tolist() for i in range(len(trace))]
    print(f"{trace.name}: {len(trace)} requests, {trace.unique} unique blocks of {trace.block}")
    good = True
    for share in SHARES:
        options = ReplayOptions(model, (DeviceSize.parse(f"{share}%"),), policies=("lru", "cost"), cache_only=True)
        began = perf_counter()
        report, learned = replay(trace, options)
        seconds = perf_counter() - began
        capacity = max(1, int(trace.unique * share / 100))
        plain = plain_lru(requests, capacity) / trace.blocks.size
        ours, best = report.block_hit_rate, report.optimum_block_hit_rate
        off = abs(ours - plain)
        line = f"  {share:3d} %  misses: lru {1 - ours:.5f} plain {1 - plain:.5f}  optimum {1 - best:.5f}"
        if with_optimum:
            slow = plain_optimum(requests, capacity) / trace.blocks.size
            line += f" plain {1 - slow:.5f}"
            off = max(off, abs(slow - best))
        misses, most = 1 - learned.block_hit_rate, 1 - ours + WORSE
        most = min(
            most, *(limits[share] for name, limits in LIMITS.items() if trace.name == name and share in limits), 1
        )
        fine = off <= TOLERANCE and misses <= most
        good &= fine
        print(
            f"{line}  cost {misses:.5f} (at most {most:.5f})  {seconds:.1f} s  {'ok' if fine else 'DIFFERS'}",
            flush=True,
        )
    return good


def main() -> int:
    """Check every trace with prefix hashes in the folder."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", default="llama-3.1-8b")
    parser.add_argument("--optimum", action="store_true")
    arguments = parser.parse_args()
    paths = sorted(arguments.folder.glob("*.jsonl"))
    if not paths:
        print(f"{arguments.folder}: no .jsonl trace there", file=sys.stderr)
        return 2
    try:
        whole = [read_trace(path) for path in paths]
        traces = [part for trace in whole for part in (trace, *halves(trace))]
        agreed = [check(trace, arguments.model, with_optimum=arguments.optimum) for trace in traces]
    except KVLoomError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0 if all(agreed) else 1


if __name__ == "__main__":
    sys.exit(main())
