"""The offline optimum: against every possible choice on tiny traces, and block by block on real ones."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from tests.replay.plain import AGENTIC, AZURE, CONVERSATION, best_of_all, farthest_hits, random_requests, trace_of

from kvloom.replay.optimum import next_uses, optimum
from kvloom.replay.readers import read_trace


@pytest.mark.parametrize("seed", range(60))
def test_no_choice_does_better(seed: int) -> None:
    rng = random.Random(seed)
    requests = random_requests(rng, count=rng.randint(2, 6), depth=3, fanout=2)
    trace = trace_of(requests)
    for capacity in range(5):
        hits = optimum(next_uses(trace), capacity)
        assert int(hits.sum()) == best_of_all(requests, capacity), (requests, capacity)


@pytest.mark.parametrize("seed", range(10))
def test_request_by_request(seed: int) -> None:
    trace = trace_of(random_requests(random.Random(seed), count=40, depth=8, fanout=3))
    for capacity in (0, 1, 3, 10, 30, 1000):
        assert optimum(next_uses(trace), capacity).tolist() == farthest_hits(trace, capacity)


@pytest.mark.parametrize("path", [CONVERSATION, AGENTIC, AZURE])
def test_without_a_limit_everything_known_hits(path: Path) -> None:
    trace = read_trace(path)
    assert optimum(next_uses(trace), trace.unique).tolist() == trace.known().tolist()


def test_a_cut_of_a_real_trace() -> None:
    trace = read_trace(CONVERSATION)
    for share in (0.01, 0.05, 0.25):
        capacity = int(trace.unique * share)
        assert optimum(next_uses(trace), capacity).tolist() == farthest_hits(trace, capacity)


def test_what_an_answer_leaves_behind_counts() -> None:
    trace = trace_of([[0, 1], [2, 3], [0, 1, 4, 5]])
    uses = next_uses(trace, {0: trace.request(2)[2:3]})
    assert optimum(uses, 10).tolist() == [0, 0, 3]
    assert optimum(uses, 2).tolist() == [0, 0, 2]
    assert optimum(next_uses(trace), 10).tolist() == [0, 0, 2]
