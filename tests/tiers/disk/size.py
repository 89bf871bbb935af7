"""A prefix of a million tokens through a disk store: ``python -m tests.tiers.disk.size --tokens 1048576``.

The objects have the sizes that deepseek-v4-flash's really have, and bytes from a counter-based generator, so that every
byte can be checked without being kept.  One process stores the chain, another one checks and restores all of it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvloom.spec.presets import load_preset
from kvloom.tiers.disk import DiskStore, Fill, Need, NewObject, Unit
from kvloom.types import Grade, Kind

SPEC = load_preset("deepseek-v4-flash")
SEGMENT = SPEC.segment_tokens
LAYOUT, ROOT = hashlib.sha256(b"size").digest(), b"r" * 32
PARTS = 64 << 20
"""Bytes that are made for comparison at a time."""


def digests(nodes: int) -> npt.NDArray[np.uint8]:
    """Names of the nodes."""
    names = b"".join(hashlib.sha256(b"node" + i.to_bytes(8, "little")).digest() for i in range(nodes))
    return np.frombuffer(names, np.uint8).reshape(nodes, 32)


def payload(node: int, group: int, into: memoryview) -> None:
    """The only right bytes of an object."""
    words = np.random.Philox(key=np.array([node, group], np.uint64)).random_raw(-(-len(into) // 8))
    into[:] = words.view(np.uint8).data[: len(into)]


def chain(tokens: int, have: int) -> Unit:
    """The unit at the end of so many tokens, of which the first ``have`` are stored with what they bring."""
    nodes, first = tokens // SEGMENT, have // SEGMENT
    items, needs = [], []
    for number, group in enumerate(SPEC.groups):
        whole = group.kind in {Kind.COMPRESSED, Kind.INDEXER}
        begin = 0 if whole else nodes - 1
        needs.append(Need(number, begin, nodes - begin))
        items += [(node, number, group.slot_bytes) for node in range(max(first, begin), nodes)]
    objects = [
        NewObject(node, group, 0, Grade.CANONICAL, Fill(size, lambda into, n=node, g=group: payload(n, g, into)))
        for node, group, size in sorted(items)
    ]
    ids = np.arange(tokens, dtype=np.int32) % 129_280
    return Unit(LAYOUT, ROOT, digests(nodes), ids, SEGMENT, objects, needs)


def store(directory: Path, tokens: int, chunk: int) -> dict[str, Any]:
    """Publish the chain, ``chunk`` tokens at a time."""
    making, size = 0.0, 0
    with DiskStore.open(directory, 16 << 30) as opened:
        begun = time.perf_counter()
        for end in range(chunk, tokens + 1, chunk):
            began = time.perf_counter()
            unit = chain(end, end - chunk)
            making += time.perf_counter() - began
            done = opened.publish(unit)
            assert done.stored, done
            size += sum(item.size for item in unit.objects)
        seconds = time.perf_counter() - begun - making
    return {"seconds": seconds, "payload_bytes": size, "peak_rss_bytes": peak()}


def restore(directory: Path, tokens: int) -> dict[str, Any]:
    """Verify the store, then read everything into one buffer, kind by kind, and compare every byte."""
    kinds: dict[str, dict[str, float]] = {}
    names = digests(tokens // SEGMENT)
    with DiskStore.open(directory) as opened:
        begun = time.perf_counter()
        checked = opened.verify()
        verifying = time.perf_counter() - begun
        assert checked.ok, checked
        begun = time.perf_counter()
        found = opened.lookup(LAYOUT, names)
        looking = time.perf_counter() - begun
        assert found.known.all()
        assert found.boundary[-1]
        places = found.places
        ends = np.array([group.kind not in {Kind.COMPRESSED, Kind.INDEXER} for group in SPEC.groups])
        last = places.rows == len(names) - 1
        places = places.take(~ends[places.entries["group"]] | last)
        lengths = places.entries["length"].astype(np.int64)
        starts = np.cumsum(lengths) - lengths
        into = np.empty(int(lengths.sum()), np.uint8)
        into[:] = 0  # as an arena is: there before anything is read
        for kind in Kind:
            groups = [number for number, group in enumerate(SPEC.groups) if group.kind is kind]
            which = np.flatnonzero(np.isin(places.entries["group"], groups))
            if not len(which):
                continue
            begun = time.perf_counter()
            done = opened.read(places.take(which), into, starts[which])
            seconds = time.perf_counter() - begun
            assert done.ok, done.reason
            kinds[kind.name.lower()] = {
                "objects": len(which),
                "bytes": int(lengths[which].sum()),
                "read_bytes": done.bytes_read,
                "seconds": seconds,
            }
    right = bytearray(int(lengths.max()))
    for row, entry, start, size in zip(
        places.rows.tolist(), places.entries, starts.tolist(), lengths.tolist(), strict=True
    ):
        view = memoryview(right)[:size]
        payload(row, int(entry["group"]), view)
        assert into[start : start + size].data == view, (row, entry)
    count = sum(kind["objects"] for kind in kinds.values())
    assert count == len(places) == sum(need.count for need in chain(tokens, tokens).needs)
    times = {"verify_seconds": verifying, "lookup_seconds": looking}
    return {**times, "objects": count, "bytes": len(into), "kinds": kinds, "peak_rss_bytes": peak()}


def peak() -> int:
    """Most bytes that this process had in memory at a time."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def on_disk(directory: Path) -> int:
    """What ``du`` says."""
    done = subprocess.run(["du", "-s", "-B1", str(directory)], capture_output=True, text=True, check=True)
    return int(done.stdout.split()[0])


def run(base: Path, tokens: int, chunk: int) -> dict[str, Any]:
    """Both processes; raises when anything is not as it should be."""
    place = base / "store"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}

    def part(name: str) -> dict[str, Any]:
        command = [sys.executable, "-m", "tests.tiers.disk.size", "--part", name, "--directory", str(place)]
        command += ["--tokens", str(tokens), "--chunk", str(chunk)]
        root = Path(__file__).parents[3]
        done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        result: dict[str, Any] = json.loads(done.stdout)
        return result

    stored = part("store")
    size = on_disk(place)
    assert stored["payload_bytes"] <= size <= 1.05 * stored["payload_bytes"] + (1 << 20), (size, stored)
    return {"tokens": tokens, "chunk": chunk, "du_bytes": size, "store": stored, "restore": part("restore")}


def main() -> int:
    """0 when every byte came back."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=1 << 20)
    parser.add_argument("--chunk", type=int, default=None, help="tokens published at a time (default: all)")
    parser.add_argument("--directory", type=Path, default=None, help="where the store lies (default: a temporary one)")
    parser.add_argument("--part", choices=("store", "restore"), help="only this, in this process")
    arguments = parser.parse_args()
    chunk = arguments.chunk or arguments.tokens
    if arguments.tokens % chunk or chunk % SEGMENT:
        parser.error(f"--tokens is a multiple of --chunk, and that of {SEGMENT}")
    if arguments.part == "store":
        print(json.dumps(store(arguments.directory, arguments.tokens, chunk)))
    elif arguments.part == "restore":
        print(json.dumps(restore(arguments.directory, arguments.tokens)))
    else:
        base = Path(tempfile.mkdtemp(prefix="kvloom-size-", dir=arguments.directory))
        try:
            print(json.dumps(run(base, arguments.tokens, chunk), indent=1))
        finally:
            shutil.rmtree(base)
    return 0


if __name__ == "__main__":
    sys.exit(main())
