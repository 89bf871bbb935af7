"""Every miss says which kind, at which position, in which tier and why: planted causes, explained exactly."""

from __future__ import annotations

from typing import Any

import pytest
from tests.core import specs
from tests.core.specs import full, window
from tests.core.toy_engine import ToyEngine
from tests.core.workshop import engine, ids, prompt_of, reason_list

from kvloom.core.fields import COL_BASE
from kvloom.errors import StaleLeaseError
from kvloom.spec.model_spec import ModelSpec
from kvloom.types import Grade, Kind, Reason

PROMPT = prompt_of(41)
WIDE = ModelSpec("full + window of two segments", (full(4), window(16, 4)), block_size=4, segment_tokens=8)


def cached(spec: ModelSpec, length: int = 41, *, keep: bool = False, kib: int = 300, **options: Any) -> ToyEngine:
    """A cache that has served one request of ``length`` tokens, in whole segments."""
    e = engine(spec, kib, max_nodes=60)
    e.request(PROMPT[:length], keep=keep, **options)
    return e


def why(e: ToyEngine, tokens: list[int] = PROMPT, **options: Any) -> tuple[int, int, list[tuple[Any, ...]]]:
    """(reused tokens, known tokens, limits) of a lookup."""
    s = e.open(tokens, **options)
    assert s.explanation.boundary == s.reused
    assert s.explanation.prompt_tokens == len(tokens)
    assert s.explanation.grade == (s.grade if s.reused else None)
    found = s.reused, s.explanation.known_tokens, reason_list(s)
    s.close()
    return found


def limit(reason: Reason, position: int, kind: Kind | None = None, group: str | None = None) -> tuple[Any, ...]:
    return (reason, position, "device", kind, group)


# ---------------------------------------------------------------- no object is at fault


def test_empty() -> None:
    e = engine(specs.FULL, 64)
    assert why(e) == (0, 0, [limit(Reason.EMPTY, 0)])


def test_a_prompt_of_one_token_cannot_hit() -> None:
    for e in (engine(specs.FULL, 64), cached(specs.FULL)):
        assert why(e, PROMPT[:1]) == (0, 0, [limit(Reason.LAST_TOKEN, 0)])


def test_the_last_token_is_always_computed() -> None:
    e = cached(specs.FULL, keep=True)
    assert why(e) == (40, 40, [limit(Reason.LAST_TOKEN, 40)])


@pytest.mark.parametrize("at", [0, 1, 7, 8, 9, 23, 24, 39])
def test_tokens_differ_at_a_position(at: int) -> None:
    e = cached(specs.FULL)
    other = [*PROMPT[:at], 77, *PROMPT[at + 1 :]]
    assert why(e, other) == (at // 8 * 8, at, [limit(Reason.TOKENS, at)])


def test_the_cached_sequence_ends_earlier() -> None:
    e = cached(specs.FULL, 30, keep=True)
    assert why(e) == (29, 29, [limit(Reason.TOKENS, 29)])


def test_another_salt_or_another_extra_key() -> None:
    e = cached(specs.FULL, salt=b"a", extra_keys=[("lora", "x")])
    for options in ({"salt": b"b"}, {"salt": b"a"}, {"salt": b"a", "extra_keys": [("lora", "y")]}):
        assert why(e, **options) == (0, 0, [limit(Reason.EMPTY, 0)])


def test_known_tokens_but_no_boundary_there() -> None:
    """The prompt ends inside a segment that is known as a whole: nothing was kept at its end."""
    e = cached(specs.FULL)
    assert why(e, PROMPT[:21]) == (16, 21, [limit(Reason.NOT_KEPT, 20)])


# ---------------------------------------------------------------- an object is at fault


def test_a_window_block_was_evicted() -> None:
    e = cached(WIDE)
    e.manager.evict(1)  # the oldest object: a block of the window that the sequence left first
    gone = [limit(Reason.EVICTED, 4, Kind.WINDOW, "window.16")]
    assert why(e, PROMPT[:17]) == (0, 17, gone)
    assert why(e, PROMPT[:9]) == (0, 9, gone)
    assert why(e) == (40, 40, [limit(Reason.LAST_TOKEN, 40)]), "nobody needs that block at 40"


@pytest.mark.parametrize(("position", "hit"), [(36, 32), (32, 32), (28, 24), (24, 24)])
def test_one_window_block_is_missing(position: int, hit: int) -> None:
    e = cached(WIDE)
    assert e.manager.drop("window.16", position) == 1
    assert why(e) == (hit, 40, [limit(Reason.CLEARED, position, Kind.WINDOW, "window.16")])


def test_everything_was_evicted() -> None:
    """Of two segments only the name is left; each kind says where its first missing object begins."""
    e = cached(specs.V4)
    e.manager.evict(10**9)
    reused, known, limits = why(e)
    assert (reused, known) == (0, 32)
    assert limits == [
        limit(Reason.EVICTED, 0, Kind.COMPRESSED, "csa"),
        limit(Reason.EVICTED, 0, Kind.INDEXER, "indexer"),
        limit(Reason.EVICTED, 0, Kind.COMPRESSED, "hca"),
        limit(Reason.EVICTED, 24, Kind.WINDOW, "window.6"),
        limit(Reason.EVICTED, 32, Kind.TAIL, "tail.overlap"),
        limit(Reason.TOKENS, 32),
    ]


def test_one_compressed_block_is_missing() -> None:
    e = cached(specs.V4)
    assert e.manager.drop("hca", 16) == 1
    assert why(e, PROMPT[:33]) == (16, 32, [limit(Reason.CLEARED, 16, Kind.COMPRESSED, "hca")])


def test_a_snapshot_was_never_kept() -> None:
    """Recurrent state is kept every 12 tokens; at 40 it was not, and 36 is the last place where it was."""
    e = cached(specs.RECURRENT)
    assert why(e) == (36, 40, [limit(Reason.NOT_KEPT, 40, Kind.RECURRENT, "state")])


def test_a_window_far_behind_was_never_kept() -> None:
    """The window of three tokens does not reach back to the first half of a segment."""
    e = engine(specs.FULL_WINDOW, 80, max_nodes=40)
    s = e.open(PROMPT)
    e.prefill(s, PROMPT[:8])
    assert why(e, PROMPT[:9]) == (8, 8, [limit(Reason.LAST_TOKEN, 8)])
    a = e.manager.arrays
    column = int(a.group[1, COL_BASE])
    assert a.columns[s.node, column : column + 4].tolist()[:3] == [-1, -1, -1]


def test_below_the_floor() -> None:
    e = engine(specs.FULL, 64)
    s = e.open(PROMPT)
    e.step(s, PROMPT[:8])
    e.step(s, PROMPT[8:16])
    e.step(s, PROMPT[16:20])
    e.step(s, PROMPT[20:24])
    s.close()
    assert why(e, PROMPT[:25]) == (24, 24, [limit(Reason.LAST_TOKEN, 24)])
    assert why(e, PROMPT[:25], floor=Grade.CANONICAL) == (16, 24, [limit(Reason.GRADE, 16, Kind.COMPRESSED, "full")])


def test_quarantined() -> None:
    e = cached(specs.FULL)
    assert e.manager.drop(Kind.COMPRESSED, 28, quarantine=True) == 1
    assert why(e) == (24, 40, [limit(Reason.QUARANTINED, 28, Kind.COMPRESSED, "full")])


def test_cleared() -> None:
    e = cached(specs.FULL)
    assert e.manager.clear() == 10
    assert why(e) == (0, 40, [limit(Reason.CLEARED, 0, Kind.COMPRESSED, "full")])


def test_clearing_one_tenant_leaves_the_other() -> None:
    e = cached(specs.FULL, salt=b"a")
    e.request(PROMPT, salt=b"b", keep=False)
    assert e.manager.clear(b"a") == 10
    assert why(e, salt=b"a")[2] == [limit(Reason.CLEARED, 0, Kind.COMPRESSED, "full")]
    assert why(e, salt=b"b")[0] == 40


def test_two_causes_at_one_boundary() -> None:
    e = cached(specs.V4)
    e.manager.drop(Kind.INDEXER, 8)
    e.manager.drop("tail.overlap", 32, quarantine=True)
    reused, known, limits = why(e, PROMPT[:33])
    assert (reused, known) == (0, 32)
    assert limits == [
        limit(Reason.CLEARED, 8, Kind.INDEXER, "indexer"),
        limit(Reason.QUARANTINED, 32, Kind.TAIL, "tail.overlap"),
    ]


def test_the_tail_is_at_fault_only_where_it_is_needed() -> None:
    """Pending rows are needed at 33 but not at 32: without them the hit falls back to the segment."""
    e = cached(specs.V4, 34, keep=True)
    assert why(e, PROMPT[:34]) == (33, 33, [limit(Reason.LAST_TOKEN, 33)])
    assert e.manager.drop("tail.pending") == 1
    assert why(e, PROMPT[:34]) == (32, 33, [limit(Reason.CLEARED, 33, Kind.TAIL, "tail.pending")])


def test_a_checkpoint_was_evicted_and_a_deeper_one_ends_beyond_the_prompt() -> None:
    e = engine(specs.FULL, 64)
    s = e.open(PROMPT[:6])
    e.step(s, PROMPT[:3])
    e.finish(s.checkpoint())
    e.step(s, PROMPT[3:6])
    e.finish(s.checkpoint())
    s.close()
    e.manager.evict(10**9)
    assert why(e, PROMPT[:6]) == (0, 6, [limit(Reason.EVICTED, 0, Kind.COMPRESSED, "full")])


def test_a_lease_whose_slot_changed_hands_is_void() -> None:
    """Level 3 of the red lines: the generation of a leased slot is checked at use."""
    e = cached(specs.FULL)
    s = e.open(PROMPT)
    s.check()
    slot = int(s.block_table(0)[2])
    e.manager.arrays.generation[slot] += 1
    with pytest.raises(StaleLeaseError, match="'full'"):
        s.check()


def test_misses_and_hits_are_counted_per_kind() -> None:
    e = cached(specs.V4, 33)
    before = e.manager.stats().kinds
    e.open(ids(PROMPT[:40]).tolist()).close()
    after = e.manager.stats().kinds
    assert after[Kind.COMPRESSED].hits - before[Kind.COMPRESSED].hits == 4 + 2
    assert after[Kind.INDEXER].hits - before[Kind.INDEXER].hits == 4
    assert after[Kind.TAIL].hits - before[Kind.TAIL].hits == 1
    assert after[Kind.INDEXER].misses - before[Kind.INDEXER].misses == 1
    assert after[Kind.TAIL].misses - before[Kind.TAIL].misses == 2
