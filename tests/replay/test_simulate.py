"""The real manager over cuts of real traces, beside a plain LRU and beside what must hold."""

from __future__ import annotations

import random
from itertools import count
from pathlib import Path

import numpy as np
import pytest
from tests.replay.plain import AGENTIC, CONVERSATION, lru_hits, random_requests, trace_of

from kvloom.errors import CapacityError, ConfigError
from kvloom.replay.optimum import next_uses, optimum
from kvloom.replay.readers import read_trace
from kvloom.replay.runs import ReplayOptions, block_tokens, choose_policies, replay
from kvloom.replay.simulate import simulate
from kvloom.replay.sizes import DeviceSize, least_block_bytes, trace_block_bytes
from kvloom.replay.streams import Streams
from kvloom.replay.trace import Trace
from kvloom.spec.presets import load_preset

LLAMA = "llama-3.1-8b"
BLOCK_BYTES = 131_072  # of one token of llama-3.1-8b: 32 layers x 2 x 8 heads x 128 x 2 bytes


def cut(path: Path, requests: int) -> Trace:
    trace = read_trace(path)
    refs = int(trace.starts[requests])
    return Trace(
        trace.name,
        trace.form,
        trace.block,
        trace.arrivals[:requests],
        trace.inputs[:requests],
        trace.outputs[:requests],
        trace.sessions[:requests],
        trace.starts[: requests + 1],
        trace.blocks[:refs],
        int(trace.blocks[:refs].max()) + 1,
    )


@pytest.mark.parametrize(("path", "shares"), [(CONVERSATION, (5, 10, 25, 50)), (AGENTIC, (25, 50))])
def test_lru_agrees_with_the_plain_one_request_by_request(path: Path, shares: tuple[int, ...]) -> None:
    trace = read_trace(path)
    options = ReplayOptions(LLAMA, tuple(DeviceSize.parse(f"{s}%") for s in shares), policies=("lru",), cache_only=True)
    for share, report in zip(shares, replay(trace, options), strict=True):
        capacity = int(trace.unique * share / 100)
        assert report.device_bytes == capacity * trace.block * BLOCK_BYTES
        assert report.outcome.block_hits.tolist() == lru_hits(trace, capacity)
        assert report.outcome.passed_through == 0
        assert report.optimum_block_hit_rate == optimum(next_uses(trace), capacity).sum() / trace.blocks.size
        assert report.block_hit_rate <= report.optimum_block_hit_rate <= report.unlimited_block_hit_rate
        assert report.outcome.reused.tolist() == block_tokens(trace, report.outcome.block_hits).tolist()


def test_requests_larger_than_the_tier_leave_what_fits_of_them() -> None:
    trace = read_trace(AGENTIC)
    capacity = int(trace.unique * 0.05)
    (report,) = replay(trace, ReplayOptions(LLAMA, (DeviceSize.parse("5%"),), policies=("lru",), cache_only=True))
    larger = trace.depths() >= capacity
    assert report.outcome.passed_through == int(larger.sum()) > 0
    ours, plain = report.outcome.block_hits, np.array(lru_hits(trace, capacity))
    # One block of such a request is lost to the token that is always recomputed.
    assert abs(int(ours.sum()) - int(plain.sum())) <= 0.001 * trace.blocks.size


@pytest.mark.parametrize("seed", range(5))
def test_random_trees(seed: int) -> None:
    trace = trace_of(random_requests(random.Random(seed), count=120, depth=6, fanout=3), block=16)
    spec = load_preset(LLAMA, block_size=16)
    streams = Streams(trace, answers=False)
    for capacity in (8, 20, 60):
        outcome = simulate(streams, spec, capacity * 16 * BLOCK_BYTES, policy="lru")
        assert outcome.block_hits.tolist() == lru_hits(trace, capacity)


@pytest.mark.parametrize("model", [LLAMA, "gpt-oss-20b", "deepseek-v4-flash"])
def test_everything_that_can_hit_hits_when_nothing_is_dropped(model: str) -> None:
    trace = cut(AGENTIC, 40)
    spec = load_preset(model, block_size=trace.block)
    size = 3 * trace.unique * trace_block_bytes(spec, trace.block)
    plain = simulate(Streams(trace, answers=False), spec, size)
    assert plain.block_hits.tolist() == trace.known().tolist()

    streams = Streams(trace, answers=True)
    outcome = simulate(streams, spec, size)
    assert (outcome.passed_through, outcome.cut_short) == (0, 0)
    assert (outcome.block_hits >= trace.known()).all()
    assert sum(s.evictions for s in outcome.stats.kinds.values()) == 0
    for i in np.flatnonzero(streams.follows >= 0).tolist():
        earlier = int(streams.follows[i])
        computed = int(trace.inputs[earlier] + max(0, int(trace.outputs[earlier]) - 1))
        assert outcome.reused[i] >= computed  # the exact end of an answer is resumable
    assert sum(outcome.ended.values()) == len(trace)


def test_recurrent_state_is_resumable_where_answers_end() -> None:
    trace = cut(AGENTIC, 30)
    spec = load_preset("qwen3-next-80b", block_size=trace.block)
    streams = Streams(trace, answers=True)
    outcome = simulate(streams, spec, 4 * trace.unique * trace_block_bytes(spec, trace.block))
    followers = np.flatnonzero(streams.follows >= 0)
    earlier = streams.follows[followers]
    assert (outcome.reused[followers] >= trace.inputs[earlier] + trace.outputs[earlier] - 1).all()


def test_an_answer_that_does_not_fit_is_cut_short() -> None:
    trace = trace_of([[0, 1], [0, 1]], block=16, inputs=[32, 32], outputs=[64, 0])
    spec = load_preset(LLAMA, block_size=16)
    outcome = simulate(Streams(trace, answers=True), spec, 3 * 16 * BLOCK_BYTES)
    assert (outcome.passed_through, outcome.cut_short) == (0, 1)
    assert outcome.block_hits.tolist() == [0, 2]  # all but the last token
    assert outcome.reused.tolist() == [0, 31]


def test_blocks_of_another_size_than_the_trace() -> None:
    trace = cut(CONVERSATION, 60)
    sizes = (DeviceSize.parse("50%"),)
    (same,) = replay(trace, ReplayOptions(LLAMA, sizes, cache_only=True))
    (finer,) = replay(trace, ReplayOptions(LLAMA, sizes, block=128, cache_only=True))
    assert (same.spec.block_size, finer.spec.block_size) == (512, 128)
    assert same.device_bytes == finer.device_bytes
    assert finer.block_hit_rate == pytest.approx(same.block_hit_rate, abs=0.01)


def test_samples_progress_and_the_clock() -> None:
    trace = cut(CONVERSATION, 50)
    spec = load_preset(LLAMA, block_size=trace.block)
    told: list[int] = []
    ticks = count()
    outcome = simulate(
        Streams(trace, answers=False),
        spec,
        20 * trace.block * BLOCK_BYTES * 10,
        progress=told.append,
        clock=lambda: float(next(ticks)),
    )
    assert told == list(range(1, 51))
    assert [s.requests for s in outcome.samples] == told
    assert outcome.samples[-1].evictions == sum(s.evictions for s in outcome.stats.kinds.values())
    assert (outcome.seconds, outcome.manager_seconds) == (101, 50)


def test_sizes() -> None:
    spec = load_preset(LLAMA, block_size=512)
    unit = trace_block_bytes(spec, 512)
    assert unit == least_block_bytes(spec, 512) == 512 * BLOCK_BYTES
    assert DeviceSize.parse(" 2.5% ").blocks(1000, unit) == 25
    assert DeviceSize.parse("0.001%").blocks(1000, unit) == 1
    assert DeviceSize.parse("1GiB").blocks(1000, unit) == 16
    assert DeviceSize.parse("1GiB").device_bytes(spec, 1000, unit) == 2**30
    for bad in ("%", "0%", "-5%", "many%", "nan%", "12 parsecs", ""):
        with pytest.raises(ConfigError, match="write"):
            DeviceSize.parse(bad)
    hybrid = load_preset("gpt-oss-20b", block_size=128)
    assert least_block_bytes(hybrid, 128) < trace_block_bytes(hybrid, 128)
    assert least_block_bytes(load_preset("mistral-7b"), 128) == 0


def test_a_tier_that_holds_nothing_is_refused() -> None:
    trace = cut(CONVERSATION, 3)
    with pytest.raises(CapacityError, match="at least"):
        replay(trace, ReplayOptions(LLAMA, (DeviceSize.parse("1KiB"),)))


def test_policies_by_name() -> None:
    assert "lru" in choose_policies(["all"])
    assert choose_policies(["lru", "lru"]) == ("lru",)
    with pytest.raises(ConfigError, match="'best' is unknown; use one of: cost, lru"):
        choose_policies(["best"])
