"""Digests, the cuckoo table and metadata bytes: what naming and finding prefixes costs beside the core's own paths."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from time import thread_time_ns
from typing import Any

import numpy as np

from kvloom.bench.metadata import MetadataRow, measure
from kvloom.config import parse_size
from kvloom.core.digests import PrefixKeys, prefix_digests
from kvloom.page_tables.cuckoo import CuckooTable
from kvloom.spec.presets import PRESETS, load_preset
from kvloom.types import AnyArray

SEGMENTS = (16, 64, 128, 256, 1024)
TOKENS = (8_192, 32_768, 131_072, 1_048_576)
ENTRIES = (10_000, 100_000, 1_000_000, 10_000_000)
LOOKUPS = 1_000_000
BATCH = 512
"""Digests in one call: a prompt of 64k tokens in segments of 128."""
DEVICE = parse_size("64GiB")
SEQUENCES = 64
REPEAT = 7
Say = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class DigestRow:
    """Digests of all boundaries of one prompt: median of thread time, and half the range between the quartiles."""

    tokens: int
    segment: int
    us: float
    spread: float


@dataclass(frozen=True, slots=True)
class CuckooRow:
    """A table filled to its capacity.

    Attributes:
        load, bytes_per_entry: filled, without having grown.
        hit_ns, miss_ns, put_ns, remove_ns: thread time per digest, in calls of 512.
        one_read, two_reads: parts of the lookups that found something; there is no third read.
        longest: most entries that one insertion moved.
        growing_ns, rebuilt: per digest when the table began small, and entries entered again by growing, per entry.
        worst_ms: longest call of 512 while it grew.
    """

    entries: int
    load: float
    bytes_per_entry: float
    hit_ns: float
    miss_ns: float
    put_ns: float
    remove_ns: float
    one_read: float
    two_reads: float
    longest: int
    growing_ns: float
    rebuilt: float
    worst_ms: float


@dataclass(frozen=True, slots=True)
class Result:
    """Everything that ``kvloom bench tables`` shows."""

    digests: tuple[DigestRow, ...]
    cuckoo: tuple[CuckooRow, ...]
    metadata: tuple[MetadataRow, ...]

    @property
    def exponents(self) -> dict[int, float]:
        """Growth of the time of digests from 128k to 1M tokens: time ~ tokens ** exponent, by segment."""
        us = {(row.tokens, row.segment): row.us for row in self.digests}
        low, high = TOKENS[-2:]
        return {s: math.log(us[high, s] / us[low, s]) / math.log(high / low) for s in SEGMENTS}

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "digests": [asdict(row) for row in self.digests],
            "digest_exponents": {str(segment): value for segment, value in self.exponents.items()},
            "cuckoo": [asdict(row) for row in self.cuckoo],
            "metadata": [row.to_json() for row in self.metadata],
        }


def run_all(say: Say, *, most_entries: int = ENTRIES[-1], device_bytes: int = DEVICE) -> Result:
    """Run all of it; ``say`` is told what runs, and how many of how many parts are done."""
    sizes = [entries for entries in ENTRIES if entries <= most_entries]
    total = len(TOKENS) + len(sizes) + len(PRESETS)
    digests: list[DigestRow] = []
    for i, tokens in enumerate(TOKENS):
        say(f"digests of {tokens:,} tokens", i, total)
        digests += [time_digests(tokens, segment) for segment in SEGMENTS]
    tables: list[CuckooRow] = []
    for i, entries in enumerate(sizes, len(TOKENS)):
        say(f"cuckoo table of {entries:,}", i, total)
        tables.append(time_cuckoo(entries))
    metadata: list[MetadataRow] = []
    for i, name in enumerate(PRESETS, len(TOKENS) + len(sizes)):
        say(f"metadata of {name}", i, total)
        metadata.append(measure(name, load_preset(name), device_bytes, SEQUENCES))
    return Result(tuple(digests), tuple(tables), tuple(metadata))


def time_digests(tokens: int, segment: int, *, repeat: int = REPEAT) -> DigestRow:
    """Time one call for a whole prompt; the keys of the namespace are there already."""
    keys = PrefixKeys.of(b"namespace")
    ids = np.random.default_rng(tokens).integers(0, 150_000, tokens, dtype=np.int32)
    prefix_digests(keys, ids, segment)
    seen = []
    for _ in range(repeat):
        begun = thread_time_ns()
        prefix_digests(keys, ids, segment)
        seen.append((thread_time_ns() - begun) / 1000)
    low, middle, high = statistics.quantiles(seen, n=4)
    return DigestRow(tokens, segment, middle, (high - low) / 2)


def _parts(count: int) -> Iterator[slice]:
    return (slice(at, at + BATCH) for at in range(0, count, BATCH))


def _each(call: Callable[[slice], object], count: int) -> tuple[float, float]:
    """Nanoseconds per digest of calls with ``BATCH`` digests each, and milliseconds of the longest call."""
    total = worst = 0
    for part in _parts(count):
        begun = thread_time_ns()
        call(part)
        took = thread_time_ns() - begun
        total, worst = total + took, max(worst, took)
    return total / count, worst / 1e6


def time_cuckoo(entries: int) -> CuckooRow:
    """Fill a table, look up a million of its digests and a million others, take some out, and fill one that grows."""
    rng = np.random.default_rng(entries)
    digests = rng.integers(0, 256, (entries, 16), dtype=np.uint8)
    places = np.arange(entries, dtype=np.int64)
    warm = CuckooTable(BATCH)
    warm.put(digests[:BATCH], places[:BATCH])
    warm.find(digests[:BATCH])
    warm.remove(digests[:BATCH])
    table = CuckooTable(entries)
    put_ns, _ = _each(lambda part: table.put(digests[part], places[part]), entries)
    filled = table.stats()
    lookups = min(entries, LOOKUPS)
    wanted = digests[rng.permutation(entries)[:lookups]]
    hit_ns, _ = _each(lambda part: table.find(wanted[part]), lookups)
    found = table.stats()
    others = rng.integers(0, 256, (lookups, 16), dtype=np.uint8)
    miss_ns, _ = _each(lambda part: table.find(others[part]), lookups)
    remove_ns, _ = _each(lambda part: table.remove(wanted[part]), lookups)
    growing_ns, worst_ms, rebuilt = _grow(digests, places)
    return CuckooRow(
        entries=entries,
        load=filled.load,
        bytes_per_entry=filled.bytes_per_entry,
        hit_ns=hit_ns,
        miss_ns=miss_ns,
        put_ns=put_ns,
        remove_ns=remove_ns,
        one_read=found.read_one / lookups,
        two_reads=found.read_two / lookups,
        longest=filled.longest,
        growing_ns=growing_ns,
        rebuilt=rebuilt,
        worst_ms=worst_ms,
    )


def _grow(digests: AnyArray, places: AnyArray) -> tuple[float, float, float]:
    """Fill a table that begins with room for one call: ns per digest, longest call in ms, entries entered again."""
    table = CuckooTable(BATCH)
    each, worst = _each(lambda part: table.put(digests[part], places[part]), len(digests))
    return each, worst, table.stats().rebuilt / len(digests)
