"""Boundaries inside longer cached prompts: a request resumes where none ended or forked before.

Rests are the boundaries that stay as long as their path; see ``next_rest``.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
from tests.core.test_working_sets import model, serve

from kvloom.config import Device
from kvloom.core.allocation import REST_SHARE, rest_interval
from kvloom.core.fields import EVICTIONS
from kvloom.core.rules import next_rest
from kvloom.manager import Manager
from kvloom.spec.footprint import peak_bytes
from kvloom.spec.presets import PRESETS, load_preset
from kvloom.types import Int32Array

LONG = 128 * 1024
UNDER_PRESSURE = ("gpt-oss-120b", "gemma-3-27b", "deepseek-v4-flash", "qwen3-next-80b")


def drawing(seed: int) -> Callable[[int], Int32Array]:
    """Makes prompts of so many tokens."""
    random = np.random.default_rng(seed)
    return lambda count: random.integers(0, 30000, count).astype(np.int32)


def answer(manager: Manager, ids: Int32Array, prompt: int) -> None:
    """Serve a prompt and generate what follows it token by token."""
    s = manager.open(ids[:prompt])
    manager.complete(s.restore)
    segment = manager.spec.segment_tokens
    for at in range(0, prompt, segment):
        s.append(ids[at : min(at + segment, prompt)])
        manager.complete(s.commit())
    for at in range(prompt, len(ids)):
        s.append(ids[at : at + 1])
        manager.complete(s.commit())
    manager.complete(s.checkpoint())
    s.close()


def last_rest(manager: Manager, before: int) -> int:
    """The last rest up to a position, 0 when there is none."""
    every = rest_interval(manager.spec)
    rests = range(every, before + 1, every) if every else ()
    return max((p for p in rests if int(next_rest(manager.arrays, p)) == p), default=0)


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_a_first_fork_inside_a_longer_cached_prompt_hits(name: str) -> None:
    """4,096 tokens and 3,000 generated, fork at 2,048: a hit to within one ``snapshot_interval``, and then exactly."""
    draw, spec = drawing(11), load_preset(name)
    manager = Manager(spec, [Device("96GiB")], max_nodes=400)
    talk = draw(4096 + 3000)
    answer(manager, talk, 4096)
    first = serve(manager, np.concatenate([talk[:2048], draw(900)]))
    assert first >= 2048 - max(spec.snapshot_interval, 0)
    assert serve(manager, np.concatenate([talk[:2048], draw(900)])) == 2048, "the place of a fork is known by then"
    assert serve(manager, np.concatenate([talk, draw(100)])) == 4096 + 3000
    manager.check_integrity()


@pytest.mark.parametrize("name", UNDER_PRESSURE)
def test_forks_half_way_hit_in_a_full_pool(name: str) -> None:
    """Four long prompts in turn, always with another second half, in a pool that is full of other prompts before."""
    draw, spec = drawing(12), model(name)
    room = 7 * peak_bytes(spec, LONG, spec.segment_tokens)
    manager = Manager(spec, [Device(room)], max_sequences=2)
    for _ in range(30):
        serve(manager, draw(LONG // 4))
    prompts = [draw(LONG) for _ in range(4)]
    for prompt in prompts:
        serve(manager, prompt)
    half = LONG // 2
    rest = last_rest(manager, half)
    assert rest > half // 2
    for turn in range(3):
        evicted = int(manager.arrays.counters[:, EVICTIONS].sum())
        for prompt in prompts:
            reused = serve(manager, np.concatenate([prompt[:half], draw(half)]))
            assert reused >= (rest * 2 // 3 if turn == 0 else half), "one rest may go with a badly used page"
        assert int(manager.arrays.counters[:, EVICTIONS].sum()) > evicted
    manager.check_integrity()


WITH_RESTS = [name for name in sorted(PRESETS) if rest_interval(load_preset(name))]


def test_models_of_one_kind_have_no_rests_and_neither_has_one_that_needs_nothing_at_the_ends_of_chunks() -> None:
    assert sorted(set(PRESETS) - set(WITH_RESTS)) == [
        "deepseek-v3.2", "llama-3.1-70b", "llama-3.1-8b", "llama-4-scout", "mistral-7b",
    ]  # fmt: skip
    assert int(next_rest(Manager(load_preset("llama-4-scout"), [Device("16GiB")], max_nodes=10).arrays, 5)) == 0


@pytest.mark.parametrize("name", WITH_RESTS)
def test_rests_weigh_an_eighth_of_their_path_at_most_and_half_of_every_prefix_lies_before_one(name: str) -> None:
    spec = load_preset(name)
    every = rest_interval(spec)
    a = Manager(spec, [Device("16GiB")], max_nodes=10).arrays
    rests = [p for p in range(every, 200 * every, every) if int(next_rest(a, p)) == p]
    assert [p // every for p in rests[:8]] == [1, 2, 3, 4, 6, 8, 12, 16]
    assert all(3 * before >= 2 * after for before, after in pairwise(rests[1:]))
    path = sum(g.slot_bytes / g.block_tokens for g in spec.groups if g.block_tokens and not g.window)
    windows = [g for g in spec.groups if g.window and not g.chunked]
    snapshots = [g for g in spec.groups if g.is_snapshot and g.needed_unless_multiple_of == 0]
    boundary = sum(g.slot_bytes * -(-(g.window - 1) // g.block_tokens) for g in windows)
    boundary += sum(g.slot_bytes for g in snapshots)
    for count, position in enumerate(rests, 1):
        assert REST_SHARE * count * boundary <= path * position
    for position in (1, every - 1, every + 1, 5 * every, 7 * every - 1, 9 * every):
        assert int(next_rest(a, position)) == next(p for p in rests if p >= position)
