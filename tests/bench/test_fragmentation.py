"""The contiguous baseline, and what the benchmark says about it."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from kvloom.bench.azure import CONVERSATIONS
from kvloom.bench.contiguous import ContiguousManager, Extents, Move
from kvloom.bench.fragmentation import Case, cases, check_size, run_case, stores
from kvloom.bench.stores import Contiguous, Paged, one_layer, reserve
from kvloom.cli.app import app
from kvloom.errors import CapacityError, ConfigError, InputError, SequenceError

TOKENS = np.arange(64, dtype=np.int32)


@given(st.lists(st.integers(min_value=1, max_value=40), max_size=40), st.randoms(use_true_random=False))
def test_ranges_never_overlap_and_nothing_is_lost(sizes: list[int], rng: random.Random) -> None:
    extents, held = Extents(200), {}
    for size in sizes:
        offset = extents.take(size)
        if offset < 0:
            assert extents.largest() < size
        else:
            held[offset] = size
        if held and rng.random() < 0.5:
            gone = rng.choice(sorted(held))
            extents.give(gone, held.pop(gone))
        cells = [c for at, n in held.items() for c in range(at, at + n)]
        assert len(cells) == len(set(cells))
        assert len(cells) + extents.free() == 200
    for offset, size in held.items():
        extents.give(offset, size)
    assert (extents.free(), extents.largest()) == (200, 200)


def test_reserving_and_growing() -> None:
    reserve = ContiguousManager(1000, 10, max_tokens=50)
    sequence = reserve.open(TOKENS[:5])
    assert reserve.reserved == 500
    assert sequence.append(TOKENS[:5]) == Move()
    sequence.commit()
    reserve.open(TOKENS[:1])
    with pytest.raises(CapacityError, match="no contiguous 500 bytes are free: 0 of 1000"):
        reserve.open(TOKENS[:1])
    sequence.close()
    sequence.close()
    assert reserve.reserved == 500
    with pytest.raises(SequenceError):
        sequence.append(TOKENS[:1])

    grow = ContiguousManager(1000, 10, max_tokens=50, step=8)
    sequence = grow.open(TOKENS[:5])
    assert grow.reserved == 80
    sequence.append(TOKENS[:8])
    with pytest.raises(SequenceError):
        sequence.append(TOKENS[:1])
    sequence.commit()
    assert sequence.append(TOKENS[:1]) == Move(source=0, target=80, size=80)
    assert grow.reserved == 80 + 160  # the old range stays until the move was run
    sequence.rollback()
    assert (grow.reserved, sequence.length, sequence.offset) == (160, 8, 80)
    other = grow.open(TOKENS[:1])
    assert other.offset == 0  # what was given back is used again
    with pytest.raises(CapacityError, match="more than the 50"):
        sequence.append(TOKENS[:43])
    assert sequence.length == 8
    with pytest.raises(InputError):
        ContiguousManager(1000, 10, max_tokens=50, step=0)


def test_every_allocator_keeps_the_same_state() -> None:
    case = Case("tiny", ((100, 3), (20, 200), (64, 64)), 512, 3, together=True)
    size = int(one_layer(64).groups[0].bytes_per_token)
    rng = np.random.default_rng(0)
    for make in stores(case):
        store = make()
        expected = []
        held = []
        for n, (prompt, answer) in enumerate(case.requests):
            tokens = np.arange(prompt + answer, dtype=np.int32) + n * 1000
            rows = rng.integers(0, 256, (prompt + answer, size), dtype=np.uint8)
            held.append(store.open(tokens[:prompt]))
            held[-1].append(tokens[:prompt], rows[:prompt])
            expected.append((tokens, rows, prompt))
        for step in range(max(answer for _, answer in case.requests)):
            for sequence, (tokens, rows, prompt) in zip(held, expected, strict=True):
                at = prompt + step
                if at < len(tokens):
                    sequence.append(tokens[at : at + 1], rows[at : at + 1])
        for sequence, (_, rows, _) in zip(held, expected, strict=True):
            assert (store.read(sequence) == rows).all()
            sequence.close()
        assert store.reserved() == 0
        assert (store.copied > 0) == (store.name == "grow")


def test_what_is_used_of_what_is_reserved() -> None:
    first, second, azure = cases()
    assert [sum(r) for r in first.requests] == [1024] * 8
    assert len(second.requests) == 16
    assert all(512 <= sum(r) <= 4096 for r in second.requests)
    assert azure.requests == CONVERSATIONS
    used = {}
    for case in (first, replace(second, requests=tuple((n + a - 1, 1) for n, a in second.requests))):
        for make in stores(case):
            row = run_case(case, make)
            used[case.name, row.allocator] = row.used
    assert used[first.name, "reserve"] == 0.5
    assert used[second.name, "reserve"] <= 0.25
    assert used[first.name, "paged"] == 1
    assert used[second.name, "paged"] >= 0.96
    short = replace(azure, requests=azure.requests[:24])
    rows = {row.allocator: row for row in (run_case(short, make) for make in stores(short))}
    assert rows["paged"].used >= 0.96
    assert rows["reserve"].used <= 0.25
    assert rows["grow"].copied_bytes > 0 == rows["paged"].copied_bytes


def test_arenas_cost_address_space_only() -> None:
    arena = reserve(1 << 38)
    arena[[0, -1]] = 7
    assert (arena[0], arena[1 << 37], arena[-1]) == (7, 0, 7)
    with pytest.raises(ConfigError, match="address space"):
        reserve(1 << 62)


def test_traces_that_are_too_long_for_real_memory_are_refused() -> None:
    case = Case("long", ((900_000, 10), (5, 5), (40_000, 1)), 1 << 20, 2, together=False)
    check_size(case, most_bytes=1_840_011 * 4096)
    with pytest.raises(InputError, match=r"long: the 2 longest requests have 940,011 tokens, which takes 7\.0 GiB"):
        check_size(case, most_bytes=1_840_011 * 4096 - 1)
    trace = Path(__file__).parents[1] / "data" / "agentic_400.jsonl"
    done = CliRunner().invoke(app, ["bench", "fragmentation", "--trace", str(trace), "--json"])
    assert done.exit_code == 2
    assert "use a trace with shorter requests" in done.stderr


def test_names() -> None:
    assert Contiguous(100, 1, max_tokens=10, step=None).name == "reserve"
    assert Paged(1 << 24, 64, max_sequences=1).name == "paged"


@pytest.mark.slow
def test_the_command() -> None:
    done = CliRunner().invoke(app, ["bench", "fragmentation", "--json"])
    assert done.exit_code == 0, done.stderr
    report = json.loads(done.stdout)
    used = {(row["case"], row["allocator"]): row["used"] for row in report["rows"]}
    assert len(used) == 9
    assert used["8 x 1k of 2k", "reserve"] <= 0.55
    assert used["16 x 0.5-4k of 8k", "reserve"] <= 0.25
    assert min(share for (_, allocator), share in used.items() if allocator == "paged") >= 0.96
    assert all(row["append_us_p99"] >= row["append_us_p50"] > 0 for row in report["rows"])
