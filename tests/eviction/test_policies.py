"""Policies through the public API: which prefix goes, and how other packages bring theirs."""

from __future__ import annotations

from importlib.metadata import EntryPoint, EntryPoints

import numpy as np
import pytest
from tests.core import specs

from kvloom.config import Device
from kvloom.errors import ConfigError, InputError
from kvloom.eviction import POLICIES, EvictionPolicy, find_policy, registry
from kvloom.manager import Manager
from kvloom.replay.runs import choose_policies

SEGMENT = specs.FULL.segment_tokens
SHALLOW_LAST = EvictionPolicy("shallow-last", key=lambda _uses, stamp, _priority, depth: stamp - (depth << 40))


def manager(policy: EvictionPolicy | str, segments: int) -> Manager:
    """A plain model with room for so many segments."""
    per_segment = sum(g.slot_bytes * (SEGMENT // g.block_tokens) for g in specs.FULL.groups)
    made = Manager(specs.FULL, [Device(segments * per_segment)], policy=policy, max_nodes=8 * segments)
    assert made.geometry.arena_bytes >= segments * per_segment - 16
    return made


def ask(m: Manager, prompt: int, segments: int = 1, priority: int = 0) -> int:
    """Serve prompt number ``prompt``; the segments that were reused."""
    ids = np.full(segments * SEGMENT + 1, 0, dtype=np.int32)
    ids[: len(ids)] = [(prompt >> (i % 8)) & 1 for i in range(len(ids))]
    sequence = m.open(ids, salt=str(prompt).encode(), priority=priority)
    reused = sequence.reused
    m.complete(sequence.restore)
    if reused < segments * SEGMENT:
        sequence.append(ids[reused:-1])
        m.complete(sequence.commit())
    sequence.close()
    m.check_integrity()
    return reused // SEGMENT


def test_lfu_keeps_what_was_used_often() -> None:
    for policy, kept in (("lfu", 1), ("lru", 0)):
        m = manager(policy, 4)
        for _ in range(4):
            ask(m, 100)
        for prompt in range(8):
            ask(m, prompt)
        assert ask(m, 100) == kept, policy


def test_priority_keeps_what_was_asked_for_with_a_high_one() -> None:
    for policy, kept in (("priority", 1), ("lru", 0)):
        m = manager(policy, 4)
        ask(m, 100, priority=3)
        for prompt in range(8):
            ask(m, prompt)
        assert ask(m, 100) == kept, policy


def test_s3_fifo_lets_a_scan_pass() -> None:
    m = manager("s3-fifo", 4)
    for _ in range(4):
        ask(m, 100)
    for prompt in range(12):
        ask(m, prompt)
    assert ask(m, 100) == 1


def test_a_policy_of_ones_own_decides() -> None:
    """The longest goes first, though it was used last."""
    m = manager(SHALLOW_LAST, 4)
    ask(m, 0)
    ask(m, 1, segments=3)
    ask(m, 2)
    assert ask(m, 0) == 1
    assert ask(m, 1, segments=3) < 3


def test_cost_keeps_some_of_many_sessions_in_turn() -> None:
    """Ten prompts take turns where eight fit: LRU drops each just before it comes again."""
    hits = {}
    for policy in ("lru", "cost"):
        m = manager(policy, 8)
        for _ in range(20):
            for prompt in range(10):
                ask(m, prompt)
        hits[policy] = sum(ask(m, prompt) for _ in range(10) for prompt in range(10))
    assert hits["lru"] == 0
    assert hits["cost"] >= 0.8 * 70


def test_unknown_policies_are_refused() -> None:
    with pytest.raises(ConfigError, match="cost, lru, lfu, priority, s3-fifo"):
        find_policy("best")
    with pytest.raises(ConfigError, match="needs a key function"):
        EvictionPolicy("nothing")
    with pytest.raises(ConfigError, match="cannot be compiled"):
        manager(EvictionPolicy("bad", key=lambda *facts: len(str(facts))), 4)
    with pytest.raises(InputError, match="priority"):
        manager("priority", 4).open([1, 2, 3], priority=1 << 20)
    with pytest.raises(InputError, match="priority"):
        manager("priority", 4).open([1, 2, 3], priority=-1)


def test_installed_packages_offer_policies(monkeypatch: pytest.MonkeyPatch) -> None:
    points = EntryPoints(
        [
            EntryPoint("shallow-last", f"{__name__}:SHALLOW_LAST", registry.ENTRY_POINTS),
            EntryPoint("broken", f"{__name__}:NOWHERE", registry.ENTRY_POINTS),
            EntryPoint("number", f"{__name__}:SEGMENT", registry.ENTRY_POINTS),
        ]
    )
    monkeypatch.setattr(registry, "entry_points", lambda group: points.select(group=group))
    assert find_policy("shallow-last") is SHALLOW_LAST
    with pytest.raises(ConfigError, match="cannot be loaded"):
        find_policy("broken")
    with pytest.raises(ConfigError, match="no kvloom"):
        find_policy("number")
    with pytest.raises(ConfigError, match="shallow-last"):
        find_policy("best")


def test_replay_takes_every_policy() -> None:
    assert choose_policies(["all"]) == POLICIES
    assert choose_policies(["s3-fifo", "cost", "s3-fifo"]) == ("s3-fifo", "cost")
