"""How an arena is cut: exact capacity (FAILURES B2), no cliff between sizes, shares that a mix of sessions can use."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.core import specs
from tests.core.workshop import cut_statically

from kvloom.config import Device, parse_size
from kvloom.core.geometry import SMALLEST_REQUEST, fits, plan_geometry, smallest_arena, split_statically
from kvloom.errors import CapacityError
from kvloom.manager import CachedSequence, Manager
from kvloom.spec.footprint import peak_bytes
from kvloom.spec.model_spec import ModelSpec
from kvloom.spec.presets import PRESETS, load_preset

MIB = 1 << 20
LENGTHS = (8192, 32_768, 131_072)
Tokens = npt.NDArray[np.int32]


def lengths(spec: ModelSpec) -> list[int]:
    return [n for n in LENGTHS if n <= (spec.max_positions or n)]


def extend(manager: Manager, sequence: CachedSequence, tokens: Tokens) -> None:
    """Append in segments, and commit."""
    segment = manager.spec.segment_tokens
    while sequence.length < len(tokens):
        end = sequence.length // segment * segment + segment
        manager.complete(sequence.append(tokens[sequence.length : end]))
        manager.complete(sequence.commit())


def answer(manager: Manager, tokens: Tokens, decoded: int) -> None:
    """A whole request: prefill, decode to the full length, close."""
    sequence = manager.open(tokens[:-decoded])
    manager.complete(sequence.restore)
    extend(manager, sequence, tokens[:-decoded])
    batch = manager.batch([sequence])
    for token in tokens[-decoded:]:
        for plan in manager.step(batch, np.array([token], dtype=np.int32)):
            manager.complete(plan)
    for plan in manager.finish(batch):
        manager.complete(plan)
    assert sequence.length == len(tokens)
    sequence.close()


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_b2_usable_context_is_that_of_the_exact_peak(name: str) -> None:
    """The tier that a request is told to need is hardly larger than its state, and the request runs in it."""
    spec = load_preset(name)
    for tokens in lengths(spec):
        peak, tier = peak_bytes(spec, tokens, spec.segment_tokens), smallest_arena(spec, tokens)
        assert tier <= peak * (1.15 if peak > 256 * MIB else 1.8), (tokens, tier / peak)
        manager = Manager(spec, [Device(tier)], max_sequences=1)
        for other in range(3):  # the second and the third find a full cache
            answer(manager, np.random.default_rng(other).integers(0, 1000, tokens, dtype=np.int32), 300)
        manager.check_integrity()


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_more_memory_is_never_worse(name: str) -> None:
    spec = load_preset(name)
    for tokens in [1, 40, 1000, *lengths(spec)]:
        tier = smallest_arena(spec, tokens)
        for size in (tier, tier + 1, *(int(tier * 1.03**k) for k in range(1, 160))):
            assert fits(spec, plan_geometry(spec, size), tokens), (tokens, size)


@settings(max_examples=60, deadline=None)
@given(spec=st.sampled_from(specs.ALL), tokens=st.integers(2, 400), more=st.integers(0, 1 << 19))
def test_the_smallest_arena_is_the_smallest(spec: ModelSpec, tokens: int, more: int) -> None:
    tier = smallest_arena(spec, tokens)
    assert fits(spec, plan_geometry(spec, tier + more), tokens)
    if tier > peak_bytes(spec, max(tokens, SMALLEST_REQUEST), spec.segment_tokens):
        assert not fits(spec, plan_geometry(spec, tier - 1), tokens)


@settings(max_examples=60, deadline=None)
@given(spec=st.sampled_from(specs.ALL), size=st.integers(1 << 12, 1 << 17), more=st.integers(0, 1 << 15))
def test_a_larger_static_split_gives_no_group_less(spec: ModelSpec, size: int, more: int) -> None:
    size += peak_bytes(spec, SMALLEST_REQUEST, 1)
    small, large = split_statically(spec, size), split_statically(spec, size + more)
    assert (small.num_slots <= large.num_slots).all()
    assert small.arena_bytes <= size
    assert size - small.arena_bytes < 2 * small.slot_bytes.max()


@pytest.mark.parametrize("size", ["512MiB", "1GiB", "2GiB", "4GiB"])
def test_v4_flash_opens_many_short_sequences_at_once(size: str) -> None:
    manager = Manager(load_preset("deepseek-v4-flash"), [Device(size)], max_sequences=16)
    for k in range(16):
        tokens = np.arange(k, k + 40, dtype=np.int32)
        sequence = manager.open(tokens)
        manager.complete(sequence.restore)
        extend(manager, sequence, tokens[:-1])
    manager.check_integrity()


def rotate(spec: ModelSpec, size: str | int, conversations: int) -> list[int]:
    """Tokens reused in three later turns of conversations of 1,000 tokens that take turns, one open at a time."""
    manager, rng = Manager(spec, [Device(size)], max_sequences=1), np.random.default_rng(0)
    chats = [rng.integers(0, 1000, 1000, dtype=np.int32) for _ in range(conversations)]
    reused = []
    for turn in range(4):
        for i in range(conversations):
            chats[i] = np.concatenate([chats[i], rng.integers(0, 1000, 21, dtype=np.int32)])
            sequence = manager.open(chats[i])
            manager.complete(sequence.restore)
            if turn:
                reused.append(sequence.reused)
            extend(manager, sequence, chats[i])
            manager.complete(sequence.checkpoint())
            sequence.close()
    manager.check_integrity()
    return reused


@pytest.mark.parametrize(
    ("name", "size", "conversations"),
    [
        ("deepseek-v4-flash", "180MiB", 2),
        ("deepseek-v4-flash", "300MiB", 4),
        ("deepseek-v4-flash", "512MiB", 8),
        ("deepseek-v4-flash", "1GiB", 16),
        ("deepseek-v4-flash", "2GiB", 32),
        ("deepseek-v4-flash", "4GiB", 64),
        ("qwen3-next-80b", "800MiB", 4),
        ("kimi-linear-48b", "2GiB", 8),
    ],
)
def test_as_many_conversations_hit_as_memory_holds(name: str, size: str, conversations: int) -> None:
    assert min(rotate(load_preset(name), size, conversations)) >= 1000


def test_a_static_split_has_room_for_checkpoints() -> None:
    spec = load_preset("deepseek-v4-flash")
    geometry = plan_geometry(spec, 80 * MIB)
    assert geometry.static_split
    shares = dict(zip((g.name for g in spec.groups), geometry.num_slots.tolist(), strict=True))
    assert shares["tail.hca"] == shares["tail.csa"] == 3
    assert shares["csa"] < 80
    assert min(rotate(spec, 80 * MIB, 1)) >= 1000
    with cut_statically():
        assert min(rotate(spec, "512MiB", 2)) >= 1000


def test_too_little_room_says_where_fixed_shares_end() -> None:
    spec = load_preset("deepseek-v4-flash")
    manager = Manager(spec, [Device("80MiB")])
    with pytest.raises(CapacityError, match=rf"fixed shares; from {90 * MIB} bytes on, groups give each other pages"):
        manager.open(np.zeros(20_000, dtype=np.int32))
    for k in range(3):
        manager.open(np.arange(k, k + 40, dtype=np.int32))
    with pytest.raises(CapacityError, match=rf"no free slot.*from {90 * MIB} bytes on"):
        manager.open(np.arange(9, 49, dtype=np.int32))
    moving = Manager(spec, [Device(parse_size("90MiB"))])
    with pytest.raises(CapacityError) as refused:
        moving.open(np.zeros(20_000, dtype=np.int32))
    assert "fixed" not in str(refused.value)


def test_an_arena_of_many_millions_of_slots() -> None:
    """The bitmap of free slots has five levels here; nothing of this is touched."""
    spec = load_preset("deepseek-v4-flash", block_size=16)
    manager = Manager(spec, [Device("600GiB")], max_sequences=1)
    assert len(manager.arrays.slot) > 64**4
    sequence = manager.open(np.arange(40, dtype=np.int32))
    manager.complete(sequence.restore)
    manager.complete(sequence.append(np.arange(40, dtype=np.int32)))
    manager.complete(sequence.commit())
    sequence.check()
    sequence.close()
