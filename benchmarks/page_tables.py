"""Ways from (group, block) to a slot for groups of mixed block sizes, at every density of what is resident.

    python benchmarks/page_tables.py [--tokens 1048576] [--repeat 7] [--json]

Four groups with 256, 64, 4 and 8 tokens per block.  What is resident lies around kept boundaries, in runs of 16 blocks
(``runs``: consecutive slots, as a fresh arena gives them) or anywhere (``scattered``, slots at random, as an old one).

* ``dense``: one int32 per block of the range.
* ``hybrid``: a directory of leaves of 64 blocks, each chosen by what is in it: empty, a run of consecutive slots
  (bitmap and first slot), or packed (bitmap and the slots of what is resident).  Two or three reads.
* ``extents``: sorted runs of consecutive blocks with consecutive slots, found by bisection.
* ``cuckoo``: kvloom's hash table, keyed by group and block.

All of them are compiled and built once; what changing them costs is not counted, which favours ``hybrid`` and
``extents``.  Nanoseconds of thread time per lookup, median over the repetitions; bytes per block of the range.

``--columns`` looks at the place in kvloom where most entries are empty, the columns of the prefix index: managers are
filled as an engine fills them, and the bytes of a node's columns are counted as they are (``dense``), as a leaf of
``hybrid``, and dense but with only those columns of a window that the end of a segment can need (``trimmed``).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numba
import numpy as np

from kvloom.bench.metadata import fill
from kvloom.config import Device
from kvloom.core.fields import COL_BASE, COLUMNS, NTOKENS
from kvloom.manager.manager import Manager
from kvloom.page_tables.cuckoo import CuckooTable
from kvloom.spec.model_spec import GroupSpec, ModelSpec, TensorSpec
from kvloom.spec.presets import PRESETS, load_preset
from kvloom.types import Kind

BLOCK_TOKENS = (256, 64, 4, 8)
DENSITIES = (0.01, 0.03, 0.1, 0.3, 0.6, 1.0)
RUN = 16
LOOKUPS = 200_000
_U = np.uint64


class Hybrid(NamedTuple):
    """Leaves of 64 blocks."""

    bits: Any  # uint64 [leaves]: which of 64 blocks are resident
    first: Any  # int32 [leaves]: first slot of a run (~slot), else where the leaf's slots begin in ``packed``
    packed: Any  # int32 [residents of packed leaves]


class Extents(NamedTuple):
    """Runs of consecutive blocks with consecutive slots."""

    start: Any  # int32 [n]
    length: Any  # int32 [n]
    slot: Any  # int32 [n]


@numba.njit(forceinline=True)
def _ones(x: int) -> int:
    x = x - ((x >> _U(1)) & _U(0x5555555555555555))
    x = (x & _U(0x3333333333333333)) + ((x >> _U(2)) & _U(0x3333333333333333))
    x = (x + (x >> _U(4))) & _U(0x0F0F0F0F0F0F0F0F)
    return np.int64((x * _U(0x0101010101010101)) >> _U(56))


@numba.njit
def find_dense(table: Any, at: Any, out: Any) -> None:
    """One read."""
    for n in range(at.shape[0]):
        out[n] = table[at[n]]


@numba.njit
def find_hybrid(t: Hybrid, at: Any, out: Any) -> None:
    """Two reads, three in packed leaves."""
    for n in range(at.shape[0]):
        leaf, i = at[n] >> 6, _U(at[n] & 63)
        word = t.bits[leaf]
        if (word >> i) & _U(1) == _U(0):
            out[n] = -1
            continue
        rank = _ones(word & ((_U(1) << i) - _U(1)))
        first = t.first[leaf]
        out[n] = ~first + rank if first < 0 else t.packed[first + rank]


@numba.njit
def find_extents(t: Extents, at: Any, out: Any) -> None:
    """Bisection."""
    for n in range(at.shape[0]):
        low, high = 0, t.start.shape[0]
        while low < high:
            middle = (low + high) >> 1
            if t.start[middle] <= at[n]:
                low = middle + 1
            else:
                high = middle
        out[n] = -1
        if low > 0 and at[n] - t.start[low - 1] < t.length[low - 1]:
            out[n] = t.slot[low - 1] + at[n] - t.start[low - 1]


def build_hybrid(table: Any) -> Hybrid:
    """Choose every leaf by what is in it."""
    leaves = -(-len(table) // 64)
    bits, first = np.zeros(leaves, dtype=np.uint64), np.zeros(leaves, dtype=np.int32)
    packed: list[Any] = []
    used = 0
    for leaf in range(leaves):
        part = table[64 * leaf : 64 * leaf + 64]
        slots = part[part >= 0]
        bits[leaf] = sum(1 << int(i) for i in np.flatnonzero(part >= 0))
        if len(slots) and (np.diff(slots) == 1).all():
            first[leaf] = ~slots[0]
        else:
            first[leaf] = used
            packed.append(slots)
            used += len(slots)
    return Hybrid(bits, first, np.concatenate([*packed, np.zeros(0, dtype=np.int32)]).astype(np.int32))


def build_extents(table: Any) -> Extents:
    """Join what is consecutive."""
    at = np.flatnonzero(table >= 0)
    slots = table[at]
    begins = np.flatnonzero(np.r_[True, (np.diff(at) != 1) | (np.diff(slots) != 1)])
    lengths = np.diff(np.r_[begins, len(at)])
    return Extents(at[begins].astype(np.int32), lengths.astype(np.int32), slots[begins])


def keys_of(groups: Any, blocks: Any) -> Any:
    """Group and block as the 128 bits of a digest: uint8 [n, 16]."""
    words = np.stack([np.asarray(groups, dtype=np.uint64), np.asarray(blocks, dtype=np.uint64)], axis=1)
    return np.ascontiguousarray(words).view(np.uint8)


def residents(blocks: int, density: float, pattern: str, rng: Any) -> Any:
    """Dense table of one group: slots of what is resident, else -1."""
    table = np.full(blocks, -1, dtype=np.int32)
    if density >= 1:
        where = np.arange(blocks)
    elif pattern == "runs":
        starts = rng.choice(max(1, blocks // RUN), max(1, round(density * blocks / RUN)), replace=False) * RUN
        where = np.sort((starts[:, None] + np.arange(min(RUN, blocks))[None, :]).ravel())
    else:
        where = np.sort(rng.choice(blocks, max(1, round(density * blocks)), replace=False))
    slots = np.arange(len(where), dtype=np.int32)
    table[where] = slots if pattern == "runs" else rng.permutation(slots)
    return table


def say(line: str) -> None:
    """Print."""
    sys.stdout.write(line + "\n")


def timed(call: Callable[[], Any], lookups: int, repeat: int) -> float:
    """Median nanoseconds per lookup."""
    call()
    seen = []
    for _ in range(repeat):
        begun = time.thread_time_ns()
        call()
        seen.append((time.thread_time_ns() - begun) / lookups)
    return statistics.median(seen)


def measure(tokens: int, density: float, pattern: str, repeat: int) -> list[dict[str, Any]]:
    """All ways at one density, each checked against the dense table."""
    rng = np.random.default_rng(0)
    tables = [residents(tokens // size, density, pattern, rng) for size in BLOCK_TOKENS]
    table = np.concatenate(tables)
    group = np.repeat(np.arange(len(tables)), [len(t) for t in tables])
    block = np.concatenate([np.arange(len(t)) for t in tables])
    here = np.flatnonzero(table >= 0)
    at = np.r_[rng.choice(here, LOOKUPS // 2), rng.integers(0, len(table), LOOKUPS // 2)]
    at = rng.permutation(at)
    scan = here[: min(len(here), LOOKUPS)]
    hybrid, extents, cuckoo = build_hybrid(table), build_extents(table), CuckooTable(len(here))
    cuckoo.put(keys_of(group[here], block[here]), table[here].astype(np.int64))
    ways: dict[str, tuple[int, Callable[[Any, Any], Any]]] = {
        "dense": (table.nbytes, lambda q, out: find_dense(table, q, out)),
        "hybrid": (sum(a.nbytes for a in hybrid), lambda q, out: find_hybrid(hybrid, q, out)),
        "extents": (sum(a.nbytes for a in extents), lambda q, out: find_extents(extents, q, out)),
        "cuckoo": (cuckoo.stats().bytes, lambda q, out: out.__setitem__(slice(None), cuckoo.find(keys[id(q)]))),
    }
    keys = {id(q): keys_of(group[q], block[q]) for q in (at, scan)}
    rows = []
    for name, (size, find) in ways.items():
        out = np.empty(len(at), dtype=np.int64)
        find(at, out)
        if not np.array_equal(out, table[at]):
            raise AssertionError(f"{name} finds other slots than dense")
        ordered = np.empty(len(scan), dtype=np.int64)
        rows.append(
            {
                "density": density,
                "pattern": pattern,
                "way": name,
                "bytes_per_block": size / len(table),
                "random_ns": timed(lambda find=find, out=out: find(at, out), len(at), repeat),
                "in_order_ns": timed(lambda find=find, out=ordered: find(scan, out), len(scan), repeat),
            }
        )
    return rows


def mixed_spec() -> ModelSpec:
    """DeepSeek-V4 as engines with one block size per group cut it: 256 / 64 / 4 / 8 tokens, windows 128 / 8 / 128."""

    def group(name: str, kind: Kind, tensor: TensorSpec, ratio: int, block: int, window: int) -> GroupSpec:
        return GroupSpec(name, kind, (0,), (tensor,), ratio, block, window)

    rows = TensorSpec("keys", (43 * 584,), "uint8", entry_axis=0)
    groups = (
        group("compressed", Kind.COMPRESSED, TensorSpec("compressed_kv", (15_400,), "uint8", entry_axis=0), 4, 256, 0),
        group("window.128", Kind.WINDOW, rows, 1, 64, 128),
        group("state.4", Kind.WINDOW, TensorSpec("state", (21 * 2048,), "float32", entry_axis=0), 1, 4, 8),
        group("state.128", Kind.WINDOW, TensorSpec("state", (20 * 1024,), "float32", entry_axis=0), 1, 8, 128),
    )
    return ModelSpec("256/64/4/8", groups, block_size=256, segment_tokens=256)


def columns(spec: ModelSpec) -> dict[str, Any]:
    """What a node's columns hold when 80 % of 16 GiB are in use."""
    manager = Manager(spec, [Device(16 << 30)], max_sequences=1)
    fill(manager)
    a = manager.arrays
    rows = a.columns[a.trunk[:, NTOKENS] == spec.segment_tokens] >= 0
    trimmed = 0
    for g, group in enumerate(spec.groups):
        width = int(a.group[g, COLUMNS])
        trimmed += min(width, -(-(group.window - 1) // group.block_tokens)) if group.window else width
    mine = [rows[:, int(row[COL_BASE]) :][:, : int(row[COLUMNS])] for row in a.group]
    return {
        "model": spec.name,
        "columns": rows.shape[1],
        "resident": float(rows.mean()),
        "resident_by_group": {g.name: float(part.mean()) for g, part in zip(spec.groups, mine, strict=True)},
        "dense": 4 * rows.shape[1],
        "hybrid": 8 * -(-rows.shape[1] // 64) + 4 + 4 * float(rows.sum(axis=1).mean()),
        "trimmed": 4 * trimmed,
        "dense_share_of_kv": len(rows) * 4 * rows.shape[1] / manager.stats().used,
    }


def show_columns(*, as_json: bool) -> None:
    """Columns of every preset, and of mixed block sizes."""
    rows = [columns(spec) for spec in (*map(load_preset, PRESETS), mixed_spec())]
    if as_json:
        json.dump({"rows": rows}, sys.stdout, indent=2)
        return
    say("| model | columns | resident | dense, bytes | hybrid | trimmed | dense of KV |\n|---|---|---|---|---|---|---|")
    for r in rows:
        sizes = f"{r['dense']} | {r['hybrid']:.0f} | {r['trimmed']}"
        say(f"| {r['model']} | {r['columns']} | {r['resident']:.0%} | {sizes} | {r['dense_share_of_kv']:.4%} |")


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1 << 20)
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--columns", action="store_true")
    args = parser.parse_args()
    if args.columns:
        show_columns(as_json=args.json)
        return 0
    rows = []
    for pattern in ("runs", "scattered"):
        for density in DENSITIES:
            rows += measure(args.tokens, density, pattern, args.repeat)
    if args.json:
        json.dump({"tokens": args.tokens, "block_tokens": BLOCK_TOKENS, "rows": rows}, sys.stdout, indent=2)
        return 0
    say("| resident | density | way | bytes per block | random, ns | in order, ns |\n|---|---|---|---|---|---|")
    for r in rows:
        times = f"{r['random_ns']:.1f} | {r['in_order_ns']:.1f}"
        say(f"| {r['pattern']} | {r['density']:.0%} | {r['way']} | {r['bytes_per_block']:.2f} | {times} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
