"""The match against brute force: on random trees with holes, grades and checkpoints it finds the deepest boundary."""

from __future__ import annotations

import random

import numpy as np
import pytest
from tests.core import specs
from tests.core.reference.rules import Group
from tests.core.specs import blocks, chunks, full, snapshots, window
from tests.core.workshop import engine, ids

from kvloom.core.arrays import Arrays
from kvloom.core.block_pool import release, take_slot
from kvloom.core.fields import COL_BASE, COLUMNS, GRADE, NTOKENS, SLOT_BASE
from kvloom.core.hybrid_match import best_boundary, first_bad_group, walk
from kvloom.core.lifecycle import READY, move
from kvloom.core.objects import adopt, refresh_spine
from kvloom.core.prefix_index import drop_anchor, new_node, take_node
from kvloom.manager import Manager
from kvloom.spec.model_spec import ModelSpec
from kvloom.types import Kind

MANY_WINDOWS = ModelSpec(
    "windows of many sizes",
    tuple(window(size, block) for size, block in ((1, 4), (3, 1), (4, 2), (9, 4), (20, 2)))
    + tuple(chunks(size, block) for size, block in ((6, 4), (8, 2), (12, 4), (7, 1))),
    block_size=4,
    segment_tokens=4,
)
WIDE_SEGMENTS = ModelSpec(
    "segments wider than the windows",
    (full(4), window(3, 2), window(30, 4), chunks(10, 4), chunks(24, 2)),
    block_size=4,
    segment_tokens=12,
)
EVERYTHING = ModelSpec(
    "every kind at once",
    (
        blocks("ratio", Kind.COMPRESSED, 8, ratio=4),
        blocks("indexer", Kind.INDEXER, 4, ratio=2),
        window(5, 4),
        chunks(16, 4),
        snapshots("overlap", Kind.TAIL, first_needed=4),
        snapshots("pending", Kind.TAIL, unless_multiple=4),
        snapshots("state", Kind.RECURRENT),
    ),
    block_size=4,
    segment_tokens=8,
    snapshot_interval=16,
)
SPECS = (*specs.ALL, MANY_WINDOWS, WIDE_SEGMENTS, EVERYTHING)

Boundary = tuple[int, int, int]
"""(position, segments before it, checkpoint node or -1), as the core says it."""


class Tree:
    """One path of segments with checkpoints along it, made object by object, with holes."""

    def __init__(self, spec: ModelSpec, seed: int) -> None:
        self.random = random.Random(seed)
        self.manager: Manager = engine(spec, 900, max_nodes=80).manager
        self.arrays: Arrays = self.manager.arrays
        self.groups = [Group(spec, g) for g in range(len(spec.groups))]
        self.segment = spec.segment_tokens
        depth = self.random.randint(1, 9)
        self.tokens = ids([self.random.randrange(2) for _ in range((depth + 1) * self.segment)])
        self.hole = self.random.choice([0.0, 0.03, 0.1, 0.3, 0.6])
        self.worse = self.random.choice([0.0, 0.05, 0.3])
        self.root = int(take_node(self.arrays))
        self.nodes = [self.root]
        self.checkpoints: list[tuple[int, int]] = []
        for k in range(depth + 1):
            self._checkpoints(k)
            if k < depth:
                self.nodes.append(self._node(k, self.segment))

    def _checkpoints(self, k: int) -> None:
        lengths = range(1, self.segment)
        for count in self.random.sample(lengths, min(len(lengths), self.random.choice([0, 0, 1, 2, 4]))):
            self.checkpoints.append((k, self._node(k, count)))
            if self.random.random() < 0.3:  # somebody else's
                other = self.tokens.copy()
                other[k * self.segment + self.random.randrange(count)] ^= 1
                self._node(k, count, other)

    def _node(self, k: int, count: int, tokens: np.ndarray[tuple[int], np.dtype[np.int32]] | None = None) -> int:
        a, start = self.arrays, k * self.segment
        n = int(new_node(a, self.nodes[k], self.tokens if tokens is None else tokens, start, count))
        holes = self.hole if self.random.random() < 0.7 else 0.0
        for group in self.groups:
            first, columns = a.group[group.index, [COL_BASE, COLUMNS]].tolist()
            for c in range(first, first + columns):
                if self.random.random() >= holes:
                    self._publish(group.index, n, c)
        refresh_spine(a, n)
        if self.random.random() < 0.5:  # the rest stays held, as by running sequences
            drop_anchor(a, n)
        return n

    def _publish(self, g: int, n: int, c: int) -> None:
        a = self.arrays
        s = int(take_slot(a, g))
        if s < 0:
            return
        a.slot[s, GRADE] = self.random.randrange(2) if self.random.random() < self.worse else 2
        move(a.slot, s, READY)
        adopt(a, n, c, g, s)
        release(a, g, s)

    # ---------------------------------------------------------------- brute force

    def resumable(self, k: int, checkpoint: int, floor: int) -> bool:
        """Every object that every group needs at this boundary is there, at the floor or better."""
        a = self.arrays
        position = k * self.segment + (int(a.trunk[checkpoint, NTOKENS]) if checkpoint >= 0 else 0)
        end = checkpoint if checkpoint >= 0 else self.nodes[k]
        for group in self.groups:
            if group.snapshot:
                needed = [(end, 0)] if group.snapshot_needed(position) else []
            else:
                places = [divmod(block, group.columns) for block in group.needed(position)]
                needed = [(self.nodes[at + 1] if at < k else checkpoint, column) for at, column in places]
            for n, column in needed:
                local = int(a.columns[n, a.group[group.index, COL_BASE] + column])
                if local < 0 or a.slot[a.group[group.index, SLOT_BASE] + local, GRADE] < floor:
                    return False
        return True

    def best(self, limit: int, floor: int) -> Boundary:
        """By trying all."""
        ends = [(k * self.segment, k, -1) for k in range(len(self.nodes))]
        ends += [(k * self.segment + int(self.arrays.trunk[n, NTOKENS]), k, n) for k, n in self.checkpoints]
        able = [b for b in ends if b[0] <= limit and (b[0] == 0 or self.resumable(b[1], b[2], floor))]
        return max(able)


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.name)
def test_the_match_is_the_deepest_boundary_that_brute_force_finds(spec: ModelSpec) -> None:
    path = np.zeros(81, dtype=np.int32)
    found: set[Boundary] = set()
    for seed in range(60):
        tree = Tree(spec, seed)
        tree.manager.namespaces.by_name.clear()
        for limit in {tree.random.randint(0, len(tree.tokens) - 1) for _ in range(12)} | {len(tree.tokens) - 1}:
            depth, _ = walk(tree.arrays, tree.root, tree.tokens, limit, 0, path)
            assert path[: depth + 1].tolist() == tree.nodes[: depth + 1]
            for floor in range(3):
                wanted = tree.best(limit, floor)
                _, complete = walk(tree.arrays, tree.root, tree.tokens, limit, floor, path)
                got = tuple(int(v) for v in best_boundary(tree.arrays, path, complete, tree.tokens, limit, floor))
                assert got == wanted, (spec.name, seed, limit, floor)
                position, k, checkpoint = got
                assert int(first_bad_group(tree.arrays, path, k, checkpoint, position, floor)) == -1
                found.add((position % tree.segment, min(k, 2), min(checkpoint, 0)))
    assert any(k for _, k, _ in found)
    assert spec.segment_tokens == 1 or any(tail for tail, _, _ in found)


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.name)
def test_verification_refuses_every_boundary_that_brute_force_refuses(spec: ModelSpec) -> None:
    path = np.zeros(81, dtype=np.int32)
    refused = 0
    for seed in range(100, 140):
        tree = Tree(spec, seed)
        path[: len(tree.nodes)] = tree.nodes
        for k, n in [*tree.checkpoints, *((k, -1) for k in range(1, len(tree.nodes)))]:
            position = k * tree.segment + (int(tree.arrays.trunk[n, NTOKENS]) if n >= 0 else 0)
            for floor in range(3):
                bad = int(first_bad_group(tree.arrays, path, k, n, position, floor)) >= 0
                assert bad != tree.resumable(k, n, floor)
                refused += bad
    assert refused
