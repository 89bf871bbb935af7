"""Faults that hit other cache managers (rows A2, A4, A5, A7, B4 to B6 and C1), in the manager's own words.

A1 and A3 are in ``test_working_sets``, B1 and B3 in ``test_capacity``.
"""

from __future__ import annotations

import pytest
from tests.core import specs
from tests.core.specs import blocks, snapshots, window
from tests.core.workshop import engine, ids, prompt_of, reason_list, split_engine

from kvloom.config import Device
from kvloom.core.fields import COMMITS, EVICTIONS, PAGE_GROUP, PAGE_USED, USED
from kvloom.core.page_table import FIRST, LAST
from kvloom.manager import CachedSequence, Manager
from kvloom.spec import ModelSpec
from kvloom.spec.presets import PRESETS, load_preset
from kvloom.types import Grade, Kind, Reason

BLOCK_GROUPS = [s for s in specs.ALL if s is not specs.STATE_ONLY]


# ---------------------------------------------------------------- A: matching


@pytest.mark.parametrize("length", [300, 1000, 4000, 4096, 4097])
def test_a2_no_prompt_is_too_short_to_hit(length: int) -> None:
    """A group with an LCM of 4,096 tokens; prompts of 300 to 4,000 tokens, repeated."""
    spec = ModelSpec(
        "LCM of 4096",
        (blocks("hca", Kind.COMPRESSED, 4096, ratio=128), specs.full(128), window(512, 128)),
        block_size=128,
        segment_tokens=4096,
    )
    assert spec.lcm_tokens == 4096
    manager = Manager(spec, [Device("4MiB")], max_nodes=20)
    prompt = ids(prompt_of(length))
    first = manager.open(prompt)
    while first.length < length - 1:
        first.append(prompt[first.length : min(length - 1, (first.length // 4096 + 1) * 4096)])
        first.commit()
    manager.complete(first.checkpoint())
    first.close()
    again = manager.open(prompt)
    assert again.reused == length - 1
    assert [x.reason for x in again.explanation.limits] == [Reason.LAST_TOKEN]
    manager.complete(again.restore)
    assert again.first_block(2) == max(0, length - 512) // 128


@pytest.mark.parametrize("spec", specs.ALL, ids=lambda s: s.name)
def test_a2_every_length_hits_at_its_checkpoint(spec: ModelSpec) -> None:
    for length in range(2, 3 * min(spec.segment_tokens, 20) + 3):
        e = engine(spec, 250, max_nodes=40)
        e.request(prompt_of(length))
        again = e.open(prompt_of(length))
        assert again.reused == length - 1, length
        e.step(again, prompt_of(length)[-1:])


def test_a4_state_is_valid_only_at_an_earlier_position() -> None:
    """Attention reaches 32 tokens, recurrent state was kept at 12 and 24: the hit is 24, then 12, then nothing."""
    e = engine(specs.RECURRENT, 160)
    prompt = prompt_of(33)
    e.request(prompt, keep=False)
    for hit, dropped in ((24, 24), (12, 12), (0, None)):
        s = e.open(prompt)
        assert s.reused == hit
        s.close()
        if dropped:
            assert e.manager.drop(Kind.RECURRENT, dropped) == 1


@pytest.mark.parametrize("spec", specs.ALL, ids=lambda s: s.name)
def test_a4_groups_that_lost_everything_from_a_position_on(spec: ModelSpec) -> None:
    """Each group in turn keeps only what lies before a cut: the hit is the last boundary that it still serves."""
    segment = spec.segment_tokens
    prompt = prompt_of(5 * segment + 1)
    for g, group in enumerate(spec.groups):
        for cut in range(5 * segment, -1, -max(1, segment // 2)):
            e = engine(spec, 400, max_nodes=60)
            e.request(prompt, keep=False)
            e.open(prompt).close()
            for position in range(cut, 5 * segment + 1):
                e.manager.drop(group.name, position)
            s = e.open(prompt)
            toy = e.groups[g]
            lost = [p for p in range(segment, s.reused + 1, segment) if p >= cut and toy.snapshot_needed(p)]
            if toy.snapshot:
                assert s.reused not in lost
            else:
                assert all(block * toy.tokens < cut for block in toy.needed(s.reused))
            e.prefill(s, prompt)
            e.manager.check_integrity()


@pytest.mark.parametrize("spec", specs.ALL, ids=lambda s: s.name)
def test_a4_one_group_is_empty(spec: ModelSpec) -> None:
    """Never a crash, and never a hit at a position where the empty group is needed."""
    prompt = prompt_of(3 * spec.segment_tokens + 3)
    for g, group in enumerate(spec.groups):
        e = engine(spec, 400, max_nodes=60)
        e.request(prompt)
        assert e.manager.drop(group.name) > 0
        s = e.open(prompt)
        toy = e.groups[g]
        assert not (toy.snapshot_needed(s.reused) if toy.snapshot else toy.needed(s.reused))
        e.prefill(s, prompt)
        s.close()


@pytest.mark.parametrize("spec", specs.ALL, ids=lambda s: s.name)
def test_a5_the_next_turn_hits_to_the_end_of_the_answer(spec: ModelSpec) -> None:
    """Prompt, generated answer, checkpoint: the next turn reuses prompt + answer - 1 tokens, to the token."""
    segment = spec.segment_tokens
    for prompt_length, generated in ((4 * segment, 3 * segment), (segment + 1, 2), (2, segment)):
        e = engine(spec, 400, max_nodes=300)
        talk = prompt_of(prompt_length + generated)
        answered = e.open(talk[:prompt_length])
        e.prefill(answered, talk[: prompt_length - 1])
        for token in talk[prompt_length - 1 : -1]:
            e.step(answered, [token])
        e.finish(answered.checkpoint())
        answered.close()
        turn = e.open([*talk, 1, 2, 3])
        assert turn.reused == prompt_length + generated - 1
        assert turn.grade is (Grade.CANONICAL if segment == 1 else Grade.FAITHFUL)
        e.prefill(turn, [*talk, 1, 2, 3])


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_a5_every_preset_without_any_checkpoint(name: str) -> None:
    """4,096 tokens of prompt and 3,000 generated: at least prompt + generated - one segment, or - one interval."""
    spec = load_preset(name)
    manager = Manager(spec, [Device("96GiB")], max_nodes=400)
    talk = ids(prompt_of(7097))
    s = manager.open(talk[:4096])
    manager.complete(s.restore)
    for start in range(0, 7096, spec.segment_tokens):
        for at in range(start, min(start + spec.segment_tokens, 7096), 1 if start >= 4096 else spec.segment_tokens):
            count = 1 if start >= 4096 else min(spec.segment_tokens, 7096 - at)
            s.append(talk[at : at + count])
            manager.complete(s.commit())
    s.close()
    turn = manager.open(talk)
    assert turn.reused >= 7096 - max(spec.segment_tokens, spec.snapshot_interval)
    manager.check_integrity()


def test_a7_a_lora_name_equal_to_somebodys_salt() -> None:
    e = engine(specs.FULL, 64)
    prompt = prompt_of(20)
    e.request(prompt, salt=b"alice", extra_keys=[("lora", "bob")])
    strangers: list[dict[str, object]] = [
        {"salt": b"bob", "extra_keys": [("lora", "alice")]},
        {"salt": b"alicelorabob"},
        {"salt": b"alice", "extra_keys": [("lora", b"bob")]},
        {"salt": b"alice", "extra_keys": [("lorabob", "")]},
        {"salt": b"alice", "extra_keys": [("lora", "bob"), ("lora", "bob")]},
        {"salt": b"alice", "extra_keys": []},
        {"salt": b"", "extra_keys": [("alice", ""), ("lora", "bob")]},
        {"salt": b"alice\x00N", "extra_keys": [("lora", "bob")]},
    ]
    for stranger in strangers:
        s = e.open(prompt, **stranger)
        assert s.reused == 0, stranger
        assert reason_list(s) == [(Reason.EMPTY, 0, "device", None, None)]
        s.close()
    assert e.open(prompt, salt=b"alice", extra_keys=[("lora", "bob")]).reused == 19


# ---------------------------------------------------------------- B: allocation


@pytest.mark.parametrize("spec", [specs.FULL_WINDOW, specs.V4, specs.RECURRENT], ids=lambda s: s.name)
def test_b4_pages_move_between_kinds_and_nobody_loses_a_live_slot(spec: ModelSpec) -> None:
    """While one sequence keeps reading, others push pages from group to group; free + used = total at every step."""
    e = engine(spec, 180, max_nodes=60)
    assert not e.manager.geometry.static_split
    a = e.manager.arrays
    reader = e.open(prompt_of(30, 9))
    e.prefill(reader, prompt_of(29, 9))
    generations = a.generation[_slots_of(e.manager, reader)].tolist()
    owners: set[tuple[int, int]] = set()
    for variant in range(40):
        length = 20 + 7 * (variant % 9)
        e.request(prompt_of(length, variant), keep=variant % 3 > 0)
        owners |= {(p, g) for p, g in enumerate(a.page[:, PAGE_GROUP].tolist()) if g >= 0}
        for g in range(len(spec.groups)):
            mine = a.page[:, PAGE_GROUP] == g
            assert int(a.page[mine, PAGE_USED].sum()) == int(a.group[g, USED])
        e.manager.check_integrity()
        e.check(reader)
    moved = {p for p, _ in owners if len({g for q, g in owners if q == p}) > 1}
    assert moved, "no page ever changed hands: the test shows nothing"
    assert a.generation[_slots_of(e.manager, reader)].tolist() == generations
    reader.close()


def _slots_of(manager: Manager, sequence: CachedSequence) -> list[int]:
    from kvloom.core.page_table import slot_at

    arrays, rows, row = manager.arrays, manager.rows, sequence.row
    found = []
    for g in range(len(arrays.group)):
        first, last = rows.span[row, g, [FIRST, LAST]].tolist()
        found += [int(slot_at(arrays, rows, row, g, block)) for block in range(first, last)]
    return found


def test_b5_a_commit_that_has_to_evict_makes_one_decision() -> None:
    """The arena is full of cached objects: each commit evicts what it needs, publishes once, and that is all."""
    e = split_engine(specs.STATE_ONLY, 40, max_nodes=60)
    assert e.manager.geometry.num_slots.tolist() == [8, 8]
    for variant in range(9):
        e.request(prompt_of(5, variant))
    s = e.open(prompt_of(40, 30))
    a = e.manager.arrays
    assert a.group[:, USED].tolist() == [8, 8]
    s.append(ids(prompt_of(4, 30)))
    e.compute(s, prompt_of(4, 30))
    before = a.counters.copy()
    plan = s.commit()
    assert (a.counters - before)[:, EVICTIONS].tolist() == [1, 1]
    assert (a.counters - before)[:, COMMITS].tolist() == [0, 0], "published before its copy was made"
    e.finish(plan)
    assert (a.counters - before)[:, EVICTIONS].tolist() == [1, 1]
    assert (a.counters - before)[:, COMMITS].tolist() == [1, 1]
    e.manager.check_integrity()
    s.close()
    assert e.open(prompt_of(5, 30)).reused == 4


def rings(rows: int) -> ModelSpec:
    """Windows and pending tokens like those of DeepSeek-V4; blocks and segments of ``rows`` times the smallest."""
    return ModelSpec(
        f"rings of {rows}",
        (
            blocks("csa", Kind.COMPRESSED, 4 * rows, ratio=4, slot_bytes=1024 * rows),
            window(7, rows, 256 * rows),
            snapshots("tail.overlap", Kind.TAIL, first_needed=4),
            snapshots("tail.pending", Kind.TAIL, unless_multiple=4),
        ),
        block_size=rows,
        segment_tokens=4 * rows,
    )


@pytest.mark.parametrize("stepped", [True, False])
def test_b6_rings_of_2_and_of_8_rows_for_pending_tokens_give_the_same_answer(stepped: bool) -> None:
    """A sequence of 101 tokens, its end in the middle of a tail, left and resumed: what a forward reads is the same."""
    talk = prompt_of(101)
    answers = []
    for rows in (2, 8):
        e = engine(rings(rows), 200, max_nodes=200)
        s = e.open(talk[:60])
        e.prefill(s, talk[:59])
        for at in range(59, 101, 1 if stepped else 6):
            e.step(s, talk[at : min(at + (1 if stepped else 6), 101)])
        e.finish(s.checkpoint())
        s.close()
        found = []
        for more in ([9], [9, 8, 7]):
            again = e.open([*talk, *more])
            assert again.reused == 101
            found.append([(e.spec.groups[g].name, entry[0]) for g, entry, _ in e.rows(again) if entry])
            e.prefill(again, [*talk, *more])
            found.append([(e.spec.groups[g].name, entry[0]) for g, entry, _ in e.rows(again) if entry])
            again.close()
        answers.append(found)
        assert [len(f) for f in found] == [25 + 6 + 2, 25 + 6 + 2, 25 + 6 + 2, 26 + 6 + 1]
    assert answers[0] == answers[1]


# ---------------------------------------------------------------- C: transfers


@pytest.mark.parametrize("spec", specs.ALL, ids=lambda s: s.name)
def test_c1_nothing_can_come_between_lookup_and_load(spec: ModelSpec) -> None:
    """After the lookup everything is evicted, cleared and overwritten by others; the load still finds its bytes."""
    length = 2 * spec.segment_tokens + spec.segment_tokens // 2 + 2
    prompt = prompt_of(length, 5)
    e = engine(spec, 300, max_nodes=60)
    e.request(prompt)
    s = e.manager.open(ids(prompt))
    assert s.reused == length - 1
    e.manager.evict(10**9)
    e.manager.clear()
    for variant in range(12):
        e.request(prompt_of(length, 10 + variant), keep=variant % 2 == 0)
    e.manager.check_integrity()
    e.finish(s.restore)
    e.check(s)
    e.step(s, prompt[-1:])


def test_c5_a_completion_for_a_request_that_is_gone_is_counted() -> None:
    e = engine(specs.V4, 200)
    s = e.manager.open(ids(prompt_of(20)))
    s.close()
    assert e.manager.in_use() > 0, "the transfer still writes: its slots are not free"
    e.manager.complete(s.restore)
    assert e.manager.in_use() == 0
    e.manager.complete(s.restore)
    e.manager.abandon(s.restore)
    assert e.manager.stats().completions_ignored == 2
    e.manager.check_integrity()
