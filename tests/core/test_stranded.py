"""Under ``cost`` no kind is stranded: what an eviction left without a boundary goes before anything that serves one."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from tests.core.differential import Life
from tests.core.worlds import WORLDS, World

from kvloom.core.arrays import Arrays
from kvloom.core.fields import (
    COL_BASE,
    COLUMNS,
    DEPTH,
    HEAP_AT,
    NTOKENS,
    OWNER,
    OWNER_COL,
    PARENT,
    QUEUE,
    REST,
    RULE,
    RULE_PREFIX,
    RULE_SNAPSHOT,
    SLOT_BASE,
    SPINE,
    STATE,
    SURPLUS,
)
from kvloom.core.lifecycle import COMMITTED
from kvloom.core.policies import STRANDED, resumable
from kvloom.core.rules import blocks_at, first_block_needed, next_rest, snapshot_needed
from kvloom.manager import Manager

HYBRID = [w for w in WORLDS if len(w.spec.groups) > 1]


def path_of(a: Arrays, n: int) -> list[int]:
    """Segments from the first to ``n``, and ``n`` itself where it is a checkpoint."""
    path = []
    while a.trunk[n, NTOKENS] > 0:
        path.append(n)
        n = int(a.trunk[n, PARENT])
    return path[::-1]


def reachable(a: Arrays, n: int) -> bool:
    """Whether a request could resume at the end of ``n``."""
    path, segment = path_of(a, n), a.tokens.shape[1]
    prefix = any(a.group[:, RULE] == RULE_PREFIX)
    whole = [m for m in path if a.trunk[m, NTOKENS] == segment]
    return bool(resumable(a, n)) and not (prefix and any(a.trunk[m, SPINE] < 0 for m in whole))


def needed_at(a: Arrays, n: int) -> set[int]:
    """Global slots of everything that resuming at the end of ``n`` needs."""
    path = path_of(a, n)
    position = sum(int(a.trunk[m, NTOKENS]) for m in path)
    found = set()
    for g in range(len(a.group)):
        base, slot_base = int(a.group[g, COL_BASE]), int(a.group[g, SLOT_BASE])
        if a.group[g, RULE] == RULE_SNAPSHOT:
            if snapshot_needed(a, g, position):
                found.add(slot_base + int(a.columns[n, base]))
            continue
        per = int(a.group[g, COLUMNS])
        first = 0 if a.group[g, RULE] == RULE_PREFIX else int(first_block_needed(a, g, position))
        for block in range(first, int(blocks_at(a, g, position))):
            found.add(slot_base + int(a.columns[path[block // per], base + block % per]))
    return found


def cached(a: Arrays) -> set[int]:
    """Global slots of all objects of the index."""
    return {s for s in range(len(a.slot)) if a.slot[s, STATE] == COMMITTED and a.slot[s, OWNER] >= 0}


def group_of(a: Arrays, s: int) -> int:
    return max(g for g in range(len(a.group)) if a.group[g, SLOT_BASE] <= s)


def auxiliary(a: Arrays, s: int) -> bool:
    n = a.slot[s, OWNER]
    return bool(a.group[group_of(a, s), RULE] != RULE_PREFIX and a.trunk[n, NTOKENS] == a.tokens.shape[1])


def waits_for_a_rest(a: Arrays, s: int) -> bool:
    """Whether a path that grows on will need it at a rest that it has not come to yet."""
    n, segment = int(a.slot[s, OWNER]), a.tokens.shape[1]
    if not auxiliary(a, s) or a.worth[s] != REST:
        return False
    rest = int(next_rest(a, int(a.node[n, DEPTH]) * segment))
    at_rest = [m for m in range(len(a.node)) if a.trunk[m, NTOKENS] == segment and a.node[m, DEPTH] * segment == rest]
    return not any(n in path_of(a, m) for m in at_rest)


def settle(life: Life) -> Manager:
    """Let every plan and sequence end."""
    manager = life.fast
    for plan in life.plans:
        manager.complete(plan)
    for sequence in manager.running():
        sequence.close()
    return manager


def check_order(manager: Manager, most: int) -> int:
    """Evict thing by thing; returns how many went because they served nothing."""
    a, count = manager.arrays, 0
    for _ in range(most):
        before = cached(a)
        nodes = [n for n in range(len(a.node)) if a.trunk[n, NTOKENS] > 0]
        serving = set().union(*(needed_at(a, n) for n in nodes if reachable(a, n)))
        useless = {s for s in before - serving if not waits_for_a_rest(a, s)}
        kept = {s for s in serving if not auxiliary(a, s) or a.worth[s] != SURPLUS}
        for n in nodes:
            assert a.node[n, HEAP_AT] < 0 or a.heat[n, QUEUE] == STRANDED or reachable(a, n)
        owners = {s: (int(a.slot[s, OWNER]), int(a.slot[s, OWNER_COL])) for s in before}
        if not manager.evict(1):
            break
        gone = {
            s for s in before if a.slot[s, STATE] != COMMITTED or (a.slot[s, OWNER], a.slot[s, OWNER_COL]) != owners[s]
        }
        if useless:
            assert not gone & kept, (useless, gone & kept)
            count += bool(gone & useless)
    return count


@pytest.mark.parametrize("world", HYBRID, ids=lambda w: w.name)
@settings(
    max_examples=5,
    deadline=None,
    derandomize=True,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
@given(seed=st.integers(0, 2**20), steps=st.integers(20, 150))
def test_what_serves_no_boundary_goes_before_what_serves_one(world: World, seed: int, steps: int) -> None:
    life = Life(world, seed, policy="cost")
    life.run(steps)
    check_order(settle(life), 60)
