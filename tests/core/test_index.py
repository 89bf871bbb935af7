"""The prefix index: found by hash, trusted only token by token; what happens when it is full."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from tests.core import specs
from tests.core.toy_engine import ToyEngine
from tests.core.workshop import engine, ids, prompt_of, reason_list

from kvloom.core.child_table import SAMPLES, find_child, hash_segment
from kvloom.core.fields import COL_BASE, COLUMNS, GHOST_HEAD, GHOST_NEXT, NODES_USED, NTOKENS, PARENT, RESIDENT, ROOT
from kvloom.errors import CapacityError, ConfigError
from kvloom.spec.model_spec import ModelSpec
from kvloom.types import Reason

WIDE = ModelSpec("segments longer than the samples", (specs.full(32, 4096),), block_size=32, segment_tokens=64)


def twins(count: int, length: int = 64) -> list[list[int]]:
    """Different segments with the same samples, so with the same hash below one parent."""
    sampled = set(range(length - 1, -1, -(length // SAMPLES)))
    free = [i for i in range(length) if i not in sampled][:count]
    base = prompt_of(length)
    found = [[90 if i == at else t for i, t in enumerate(base)] for at in free]
    assert len({int(hash_segment(0, ids(tokens), 0, length)) for tokens in found}) == 1
    return found


def test_segments_with_equal_hashes_are_told_apart() -> None:
    e = engine(WIDE, 400, max_nodes=64)
    for tokens in twins(20):
        e.request([*tokens, 1], keep=False)
    for tokens in twins(20):
        s = e.open([*tokens, 1])
        assert s.reused == 64
        s.close()
    s = e.open([*twins(21)[20], 1])
    assert s.reused == 0
    assert reason_list(s)[0][:2] == (Reason.TOKENS, twins(21)[19].index(90))
    e.manager.check_integrity()


@pytest.mark.parametrize("order", [[0, 1, 2, 3, 4], [4, 3, 2, 1, 0], [2, 0, 4, 1, 3]])
def test_one_of_many_equal_hashes_goes_and_the_others_are_still_found(order: list[int]) -> None:
    """Removal from the open-addressing table closes the gap."""
    e = engine(WIDE, 400, max_nodes=6)
    a, living = e.manager.arrays, twins(5)
    for tokens in living:
        e.request([*tokens, 1], keep=False)
    root = int(a.node[a.trunk[:, NTOKENS] == 64, ROOT][0])
    for tokens in [living[at] for at in order]:
        living.remove(tokens)
        for other in living:  # leaves the one at hand as the oldest
            e.open([*other, 1]).close()
        assert e.manager.evict(1) == 2 * 4096
        living.append(prompt_of(64, 10 + len(order)))
        order = order[1:]
        e.request([*living[-1], 1], keep=False)  # takes the place of the ghost
        assert find_child(a, root, ids(tokens), 0) < 0
        assert all(find_child(a, root, ids(other), 0) >= 0 for other in living)
        e.manager.check_integrity()


@pytest.mark.parametrize("spec", specs.ALL, ids=lambda s: s.name)
@pytest.mark.parametrize("nodes", [4, 6, 9])
def test_a_full_index_makes_room_and_new_prompts_still_hit(spec: ModelSpec, nodes: int) -> None:
    """Few nodes, much memory: the index may not freeze with old prompts in it."""
    e = engine(spec, 600, max_nodes=nodes)
    length = 2 * spec.segment_tokens + 1 if spec.segment_tokens > 1 else 3
    for variant in range(25):
        e.request(prompt_of(length, variant), keep=spec.segment_tokens > 1)
        s = e.open(prompt_of(length, variant))
        assert s.reused == (length - 1 if spec.snapshot_interval != 12 else s.reused)
        assert s.reused > 0
        s.close()
        e.manager.check_integrity()
    assert e.manager.stats().nodes <= nodes


def test_an_index_full_of_running_sequences_lets_them_run_unpublished() -> None:
    e = engine(specs.FULL, 200, max_nodes=5)
    running = [e.open(prompt_of(33, v)) for v in range(4)]
    for v, s in enumerate(running):
        e.prefill(s, prompt_of(33, v))
        e.finish(s.checkpoint())
        e.manager.check_integrity()
    for s in running:
        e.check(s)
        s.close()
    assert e.manager.in_use() == 0
    e.request(prompt_of(20, 9))
    assert e.open(prompt_of(20, 9)).reused == 19


def test_more_tenants_than_places() -> None:
    """Each tenant has a root; the roots of those that left no object behind are given back."""
    e = engine(specs.FULL, 64, max_nodes=6)
    for tenant in range(40):
        e.request(prompt_of(12), salt=b"%d" % tenant)
        s = e.open(prompt_of(12), salt=b"%d" % tenant)
        assert s.reused == 11
        s.close()
        e.manager.check_integrity()
    running = [e.open([1, 2], salt=b"x%d" % tenant) for tenant in range(6)]
    with pytest.raises(CapacityError, match="index is full"):
        e.open([1, 2], salt=b"one more")
    running.pop().close()
    e.open([1, 2], salt=b"one more")
    e.manager.check_integrity()


def test_one_place_is_enough_to_run() -> None:
    e = engine(specs.V4, 200, max_nodes=1)
    for _ in range(2):
        e.request(prompt_of(40), [1, 2, 3])
    assert e.manager.stats().nodes == 1
    with pytest.raises(ConfigError, match="max_nodes"):
        engine(specs.V4, 200, max_nodes=0)


def test_ghosts_go_leaf_first_and_explain_until_then() -> None:
    e = engine(specs.FULL, 200, max_nodes=9)
    e.request(prompt_of(57), keep=False)
    assert int(e.manager.arrays.scalars[NODES_USED]) == 8
    e.manager.clear()
    s = e.open(prompt_of(57))
    assert reason_list(s) == [(Reason.CLEARED, 0, "device", s.explanation.limits[0].kind, "full")]
    s.close()
    for place in range(1, 8):  # one place is free; then each new node takes the place of the deepest ghost
        e.request(prompt_of(9, place), keep=False)
        s = e.open(prompt_of(57))
        assert s.explanation.known_tokens == 56 - 8 * (place - 1)
        s.close()
        e.manager.check_integrity()


def _ghosts(e: ToyEngine) -> int:
    a = e.manager.arrays
    count, n = 0, int(a.scalars[GHOST_HEAD])
    while n >= 0:
        count, n = count + 1, int(a.node[n, GHOST_NEXT])
    return count


def test_a_ghost_comes_back_to_life_with_its_ancestors() -> None:
    e = engine(specs.FULL, 200, max_nodes=30)
    e.request(prompt_of(41), keep=False)
    e.manager.evict(10**9)
    ghosts = _ghosts(e)
    assert ghosts == 5
    e.request(prompt_of(25), keep=False)
    assert _ghosts(e) == 2
    assert e.open(prompt_of(41)).reused == 24
    e.manager.check_integrity()


def test_eviction_leaves_nothing_that_cannot_hit() -> None:
    """Dropping a block of a prefix group drops everything that only that block made reachable."""
    for spec in specs.ALL:
        e = engine(spec, 300, max_nodes=200)
        for variant, extra in itertools.product(range(2), range(3)):
            e.request([*prompt_of(3 * spec.segment_tokens + 2, variant), *prompt_of(5, 40 + extra)])
        full = [g for g, group in enumerate(e.groups) if not group.snapshot and not spec.groups[g].window]
        while e.manager.evict(1):
            a = e.manager.arrays
            for node in np.flatnonzero(a.node[:, RESIDENT] > 0).tolist():
                chain = [node]
                while a.trunk[chain[-1], PARENT] >= 0:
                    chain.append(int(a.trunk[chain[-1], PARENT]))
                for above in chain[1:-1]:
                    for g in full:
                        first, count = a.group[g, [COL_BASE, COLUMNS]].tolist()
                        assert (a.columns[above, first : first + count] >= 0).all(), spec.name
        assert e.manager.stats().used == 0


def test_the_engine_is_a_witness() -> None:
    """The toy engine notices a swapped slot, a stale row and a wrong snapshot: its silence means something."""
    for spec in (specs.FULL, specs.V4, specs.RECURRENT):
        for group in range(len(spec.groups)):
            e = ToyEngine(engine(spec, 300).manager)
            s = e.open(prompt_of(40))
            e.prefill(s, prompt_of(31))
            slot = int(s.block_table(group)[(s.num_blocks(group) - 1) % len(s.block_table(group))])
            content = e.arena.read(group, slot)
            last = max(i for i, entry in enumerate(content) if entry)
            content[last] = (content[last][0] ^ 1, content[last][1])  # type: ignore[index]
            with pytest.raises(AssertionError):
                e.step(s, [1])
