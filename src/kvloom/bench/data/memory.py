"""Copies within memory: plain ones, tiers that keep objects there, and checksums over what is copied."""

from __future__ import annotations

import functools
import hashlib
import importlib
import itertools
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import xxhash

from kvloom.bench.data.rows import Cell, Report, Row, Side, row, take_turns
from kvloom.bench.data.world import WARM_BYTES, Bytes, World
from kvloom.tiers.contract import Tier
from kvloom.tiers.disk.files import aligned

MEMCPY = "memcpy"
WANTED = {"host, verified": 0.7, "host, not verified": 0.9}
"""Of copying with one thread, at least."""
THREADS = 2

Digest = Callable[[memoryview], object]
MakeTier = Callable[[int, int], Tier]
"""An empty tier for so many bytes of payload, in objects of so many bytes."""


def memory_rows(world: World, tiers: Mapping[str, MakeTier], repeats: int, report: Report) -> list[Row]:
    """Plain copies of all bytes, and restores of all objects from each tier, into the same memory."""
    total, into = len(world.payload), aligned(len(world.payload))
    into[:] = 0
    made: dict[str, Tier] = {}
    try:
        with ThreadPoolExecutor(THREADS) as pool:
            sides: dict[str, Side] = {
                MEMCPY: lambda: copy(world.payload, into, None),
                f"memcpy, {THREADS} threads": lambda: copy(world.payload, into, pool),
            }
            for name, make in tiers.items():
                tier = made[name] = make(total + WARM_BYTES, world.size)
                world.store(tier)
                places, offsets, _ = world.find(tier)
                sides[f"restore from {name}"] = functools.partial(world.restore, tier, places, into, offsets)
            times = take_turns(sides, repeats, lambda: report(f"memory {world.size >> 10} KiB"))
            for name, side in sides.items():
                into[:] = 0
                side()
                world.check(name, into)
    finally:
        for tier in made.values():
            tier.close()
    cell = Cell("memory", world.size, total)
    limit = times.pop(MEMCPY)
    wanted = {f"restore from {name}": least for name, least in WANTED.items()}
    beside = [row(cell, name, seconds, MEMCPY, limit, None, wanted.get(name)) for name, seconds in times.items()]
    return [row(cell, MEMCPY, limit), *beside]


def copy(source: Bytes, into: Bytes, pool: ThreadPoolExecutor | None) -> float:
    """Seconds for all bytes, at once or in as many parts as there are threads."""
    begun = time.perf_counter()
    if pool is None:
        np.copyto(into, source)
    else:
        bounds = [len(source) * i // THREADS for i in range(THREADS + 1)]
        parts = [slice(a, b) for a, b in itertools.pairwise(bounds)]
        for _ in pool.map(lambda part: np.copyto(into[part], source[part]), parts):
            pass
    return time.perf_counter() - begun


def checksums() -> dict[str, Digest]:
    """What can be measured here; blake3 where it is installed."""
    made: dict[str, Digest] = {
        "xxh3-128 (the tiers')": xxhash.xxh3_128_digest,
        "xxh3-64": xxhash.xxh3_64_digest,
        "crc32": zlib.crc32,
        "sha256": lambda part: hashlib.sha256(part).digest(),
    }
    try:
        blake3 = importlib.import_module("blake3").blake3
    except ImportError:
        return made
    return {**made, "blake3": lambda part: blake3(part).digest()}


def checksum_rows(payload: Bytes, sizes: Sequence[int], repeats: int, report: Report) -> list[Row]:
    """Every checksum over objects of each size, with one thread."""
    data = payload.data

    def over(digest: Digest, size: int) -> float:
        begun = time.perf_counter()
        for at in range(0, len(data), size):
            digest(data[at : at + size])
        return time.perf_counter() - begun

    made = []
    for size in sizes:
        sides = {name: functools.partial(over, digest, size) for name, digest in checksums().items()}
        times = take_turns(sides, repeats, functools.partial(report, f"checksums {size >> 10} KiB"))
        cell = Cell("checksum", size, len(payload))
        made += [row(cell, name, seconds) for name, seconds in times.items()]
    return made
