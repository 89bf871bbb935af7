"""Which form pays: worked examples, a plain search over random machines, and the measurement itself."""

from __future__ import annotations

import itertools
import json
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kernels import samples

from kvloom.errors import InputError
from kvloom.kernels.choice import CLOSE, CodecSpeed, FormChoice, TierSpeed, choose_form
from kvloom.kernels.measure import kv_like, measure_codecs, sample_group
from kvloom.kernels.slots import slot_format
from kvloom.types import PayloadForm

RAW, LOSSLESS, FP8 = PayloadForm
BOTH = (LOSSLESS, FP8)
CODECS = (
    CodecSpeed(RAW, 10e9, 10e9, 1.0),
    CodecSpeed(LOSSLESS, 0.5e9, 2.5e9, 1.5),
    CodecSpeed(FP8, 9e9, 20e9, 2.0),
)
HOST, NVME, DISK = TierSpeed("host", 9e9, 9e9), TierSpeed("nvme", 3e9, 0.4e9), TierSpeed("disk", 0.5e9, 0.25e9)


def chosen(tier: TierSpeed, *allowed: PayloadForm, recompute: float = 0.0) -> FormChoice:
    return choose_form(CODECS, tier, allowed, group="full", recompute=recompute)


@pytest.mark.parametrize(
    ("tier", "allowed", "form"),
    [
        (HOST, (), RAW),
        (HOST, (LOSSLESS,), RAW),
        (HOST, BOTH, FP8),
        (NVME, (LOSSLESS,), RAW),  # it would be opened more slowly than read
        (NVME, BOTH, FP8),
        (DISK, (), RAW),
        (DISK, (LOSSLESS,), LOSSLESS),
        (DISK, (FP8,), FP8),
        (DISK, BOTH, FP8),
    ],
)
def test_where_each_form_pays(tier: TierSpeed, allowed: tuple[PayloadForm, ...], form: PayloadForm) -> None:
    assert chosen(tier, *allowed).form is form


def test_equally_fast_is_smaller_or_exact() -> None:
    """Opened as fast as raw is read: half the bytes for nothing.  FP8 as fast as lossless is not worth its grade."""
    tier = TierSpeed("disk", 2.5e9, 0.2e9)
    assert chosen(tier, LOSSLESS).form is LOSSLESS
    slow = (CODECS[0], CODECS[1], CodecSpeed(FP8, 9e9, 2.55e9, 2.0))
    assert choose_form(slow, tier, BOTH).form is LOSSLESS
    assert choose_form(slow, tier, (FP8,)).form is RAW


def test_a_form_that_cannot_keep_up_with_prefill_is_left() -> None:
    """Encoding at 0.5 GB/s: fine while the disk writes 0.25 or prefill makes 0.1, not on a faster disk behind 2."""
    disk = TierSpeed("disk", 0.5e9, 0.9e9)
    assert chosen(disk, LOSSLESS, recompute=0.1e9).form is LOSSLESS
    refused = chosen(disk, LOSSLESS, recompute=2e9)
    assert refused.form is RAW
    assert refused.costs[LOSSLESS].verdict == "encodes too slowly to keep up with prefill"


def test_it_says_whether_a_restore_beats_computing() -> None:
    assert chosen(DISK, *BOTH).worth is None
    assert chosen(DISK, *BOTH, recompute=0.1e9).worth is True
    assert chosen(DISK, *BOTH, recompute=2e9).worth is False


def test_the_reasons_can_be_shown() -> None:
    choice = chosen(DISK, *BOTH)
    assert str(choice) == (
        "full in disk: fp8, restores 1.00 GB/s, 2.00 x raw, limited by reading, in 1/2.00 of the bytes, "
        "its state becomes approximate"
    )
    assert [cost.verdict for cost in choice.costs] == ["slower to restore", "slower to restore", "chosen"]
    assert json.loads(json.dumps(choice.to_json()))["costs"][1]["form"] == "lossless"
    assert "no allowed form is faster" in str(chosen(DISK))
    assert chosen(DISK).costs[FP8].verdict == "not allowed here"


def test_bad_measurements() -> None:
    with pytest.raises(InputError, match="RAW"):
        choose_form(CODECS[1:], DISK, BOTH)
    with pytest.raises(InputError, match="one measurement of each"):
        choose_form((*CODECS, CODECS[1]), DISK, BOTH)
    with pytest.raises(InputError, match="above 0"):
        CodecSpeed(RAW, 0, 1, 1)
    with pytest.raises(InputError, match="above 0"):
        TierSpeed("disk", 1, -1)


speeds = st.floats(1e7, 1e11)


@settings(max_examples=300, deadline=None)
@given(
    encode=st.tuples(speeds, speeds),
    decode=st.tuples(speeds, speeds),
    ratio=st.tuples(st.floats(1.01, 4), st.floats(1.5, 4)),
    tier=st.tuples(speeds, speeds),
    allowed=st.sets(st.sampled_from(BOTH)),
    recompute=st.one_of(st.just(0.0), speeds),
)
def test_no_allowed_form_restores_much_faster(
    encode: tuple[float, float],
    decode: tuple[float, float],
    ratio: tuple[float, float],
    tier: tuple[float, float],
    allowed: set[PayloadForm],
    recompute: float,
) -> None:
    codecs = [CodecSpeed(RAW, 1e11, 1e11, 1.0)]
    codecs += [CodecSpeed(*c) for c in zip(BOTH, encode, decode, ratio, strict=True)]
    there = TierSpeed("tier", *tier)
    for order in itertools.permutations(codecs):
        choice = choose_form(order, there, allowed, recompute=recompute)
        best = choice.costs[choice.form]
        assert choice.form is RAW or choice.form in allowed
        assert [cost.form for cost in choice.costs] == list(PayloadForm)
        for cost, codec in zip(choice.costs, codecs, strict=True):
            seconds = max(1 / (there.read * codec.ratio), 1 / codec.decode)
            assert cost.restore == pytest.approx(1 / seconds)
            if cost.verdict in {"about as fast", "slower to restore"}:
                assert best.restore >= cost.restore * (1 - CLOSE)
        assert str(choice) == str(choose_form(codecs, there, allowed, recompute=recompute))


# ---------------------------------------------------------------- measuring


def test_measuring_takes_tens_of_milliseconds() -> None:
    measure_codecs(time.perf_counter, repeats=1)  # compiles
    start = time.process_time()
    speeds = measure_codecs(time.perf_counter)
    assert time.process_time() - start < 0.25
    assert [speed.form for speed in speeds] == list(PayloadForm)
    assert speeds[LOSSLESS].ratio > 1.2
    assert speeds[FP8].ratio > 1.98
    assert choose_form(speeds, DISK, BOTH).form in PayloadForm


def test_the_clock_is_the_callers() -> None:
    """A clock that goes a second with every look: every turn takes one."""
    ticks = itertools.count()
    group = sample_group(layers=1)
    sample = kv_like(group), slot_format(group)
    for speed in measure_codecs(lambda: float(next(ticks)), sample):
        assert speed.encode == speed.decode == group.slot_bytes
    assert next(ticks) == 3 * 5 * 3


def test_forms_that_a_sample_cannot_take_are_left_out() -> None:
    tail, noise = slot_format(samples.TAIL), np.random.Generator(np.random.PCG64(0))
    zeros = np.zeros(tail.nbytes, np.uint8)
    assert [s.form for s in measure_codecs(time.perf_counter, (zeros, tail))] == [RAW, LOSSLESS]
    kept = slot_format(samples.QUANTISED)
    sample = noise.integers(0, 256, kept.nbytes, np.uint8)
    assert [s.form for s in measure_codecs(time.perf_counter, (sample, kept))] == [RAW]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_the_sample_is_finite_and_the_same_every_time(dtype: str) -> None:
    group = sample_group(dtype, layers=1)
    slot = kv_like(group)
    assert slot.shape == (group.slot_bytes,)
    np.testing.assert_array_equal(slot, kv_like(group))
    assert np.isfinite(slot.view(np.float32 if dtype == "float32" else np.float16)).all() or dtype == "bfloat16"
