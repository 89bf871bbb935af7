"""Slots to payloads and back: every kind of group, every form, and payloads that somebody else made."""

from __future__ import annotations

import struct
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kernels import samples
from tests.kernels.samples import slot_of

from kvloom.errors import FormatError, InputError, UnsupportedError
from kvloom.kernels import lossless, reference
from kvloom.kernels.forms import decode, encode, encoded_grade, forms_of, payload_bytes
from kvloom.kernels.headers import HEADER
from kvloom.kernels.measure import kv_like, sample_group
from kvloom.kernels.slots import PADDING, Run, SlotFormat, may_fp8, slot_format
from kvloom.spec.model_spec import GroupSpec
from kvloom.spec.presets import PRESETS, load_preset
from kvloom.types import Grade, PayloadForm

RAW, LOSSLESS, FP8 = PayloadForm
GROUPS = pytest.mark.parametrize("group", samples.ALL, ids=samples.ident)
CONVERTIBLE = pytest.mark.parametrize("group", samples.CONVERTIBLE, ids=samples.ident)
KEPT = pytest.mark.parametrize("group", samples.KEPT, ids=samples.ident)


def blank(fmt: SlotFormat, fill: int = 0xA5) -> Any:
    return np.full(-(-fmt.nbytes // 8) * 8, fill, np.uint8)[: fmt.nbytes]


def smooth(fmt: SlotFormat) -> Any:
    """A slot that compresses."""
    slot = blank(fmt, 0)
    slot[::16] = 7
    return slot


# ---------------------------------------------------------------- slots


@GROUPS
def test_runs_cover_the_slot_once(group: GroupSpec) -> None:
    fmt = slot_format(group)
    at = 0
    for run in fmt.runs:
        assert run.offset == at
        at += run.nbytes
    assert at == fmt.nbytes == group.slot_bytes
    payload = sum(run.nbytes for run in fmt.runs if run.dtype != PADDING)
    assert payload == group.entry_bytes * group.block_entries
    assert fmt.has_fp8 == may_fp8(group)


def test_runs_are_where_the_spec_puts_tensors() -> None:
    fmt = slot_format(samples.MIXED)
    stride, offsets = samples.MIXED.layer_stride, samples.MIXED.tensor_offsets
    expected = [
        Run(layer * stride + offset, count, dtype, dtype == "bfloat16")
        for layer in range(2)
        for offset, count, dtype in zip(offsets, (320, 24, 8), ("bfloat16", "uint8", "int64"), strict=True)
    ]
    assert [run for run in fmt.runs if run.dtype != PADDING] == expected


def test_adjoining_tensors_are_one_run_unless_a_block_of_scales_would_join_them() -> None:
    assert slot_format(samples.FULL).runs == (Run(0, 4 * 1024, "bfloat16", converts=True),)
    keys = samples.tensor("keys", (1, 20), "bfloat16")  # 160 elements: no whole number of blocks
    runs = slot_format(samples.blocks(keys, samples.tensor("values", (1, 44), "bfloat16"), layers=1)).runs
    assert [(run.offset, run.count, run.blocks) for run in runs] == [(0, 160, 2), (320, 352, 3)]


def test_presets() -> None:
    """What the shipped models may become: no snapshot converts, nor what is quantised already."""
    kinds = set()
    for name in PRESETS:
        for group in load_preset(name).groups:
            fmt = slot_format(group)
            assert sum(run.nbytes for run in fmt.runs) == group.slot_bytes
            converts = may_fp8(group)
            kinds.add((group.kind, converts))
            if group.is_snapshot or not {t.dtype for t in group.tensors} & set(reference.WORDS):
                assert not converts
    assert len(kinds) >= 4


# ---------------------------------------------------------------- there and back


@GROUPS
@pytest.mark.parametrize("form", [RAW, LOSSLESS])
def test_exact_forms_bring_back_every_byte(group: GroupSpec, form: PayloadForm) -> None:
    fmt = slot_format(group)
    for slot in (smooth(fmt), slot_of(fmt)):
        payload, into = encode(form, slot, fmt), blank(fmt)
        if payload is None:
            assert form is LOSSLESS
            continue
        assert form is RAW or len(payload) < fmt.nbytes
        decode(form, payload, into, fmt)
        np.testing.assert_array_equal(into, slot)
    assert encode(LOSSLESS, smooth(fmt), fmt) is not None or fmt.nbytes <= 512


def test_lossless_says_when_it_is_no_smaller() -> None:
    fmt = slot_format(samples.QUANTISED)
    noise = np.random.Generator(np.random.PCG64(0)).integers(0, 256, fmt.nbytes, np.uint8)
    assert encode(LOSSLESS, noise, fmt) is None


def test_lossless_makes_kv_smaller() -> None:
    group = sample_group()
    fmt, slot = slot_format(group), kv_like(group)
    payload = encode(LOSSLESS, slot, fmt)
    assert payload is not None
    assert len(slot) / len(payload) > 1.3
    into = blank(fmt)
    decode(LOSSLESS, payload, into, fmt)
    np.testing.assert_array_equal(into, slot)


@CONVERTIBLE
def test_fp8_is_the_reference_run_by_run(group: GroupSpec) -> None:
    fmt = slot_format(group)
    slot, into = slot_of(fmt), blank(fmt)
    payload = encode(FP8, slot, fmt)
    assert payload is not None
    assert len(payload) == payload_bytes(FP8, fmt)
    decode(FP8, payload, into, fmt)
    at = HEADER.size
    for run in fmt.runs:
        before, after = (x[run.offset : run.offset + run.nbytes] for x in (slot, into))
        if run.converts:
            codes, scales = reference.quantise(before.view(reference.WORDS[run.dtype]), run.dtype) or (None, None)
            expected = np.concatenate([scales, codes])
            words = after.view(reference.WORDS[run.dtype])
            np.testing.assert_array_equal(words, reference.dequantise(codes, scales, run.dtype))
        elif run.dtype == PADDING:
            expected = before[:0]
            assert not after.any()
        else:
            expected = before
            np.testing.assert_array_equal(after, before)
        np.testing.assert_array_equal(payload[at : at + len(expected)], expected)
        at += len(expected)
    assert at == len(payload)


def test_fp8_halves_and_quarters() -> None:
    for dtype, least in (("bfloat16", 1.98), ("float32", 3.96)):
        fmt = slot_format(sample_group(dtype))
        assert fmt.nbytes / (payload_bytes(FP8, fmt) or 0) >= least


@CONVERTIBLE
def test_an_object_that_is_not_finite_stays_raw(group: GroupSpec) -> None:
    fmt = slot_format(group)
    slot = slot_of(fmt)
    for run in (run for run in fmt.runs if run.converts):
        words = slot[run.offset : run.offset + run.nbytes].view(reference.WORDS[run.dtype])
        kept = words[-1]
        for bits in (reference.LARGEST_FINITE[run.dtype] + 1, reference.LARGEST_FINITE[run.dtype] + 2):
            words[-1] = bits
            assert encode(FP8, slot, fmt) is None
        words[-1] = kept
    assert encode(FP8, slot, fmt) is not None


@KEPT
def test_what_must_stay_exact_has_no_fp8_form(group: GroupSpec) -> None:
    fmt = slot_format(group)
    assert not may_fp8(group)
    assert forms_of(fmt) == (RAW, LOSSLESS)
    for call in (
        lambda: encode(FP8, slot_of(fmt), fmt),
        lambda: decode(FP8, bytes(100), blank(fmt), fmt),
        lambda: payload_bytes(FP8, fmt),
    ):
        with pytest.raises(UnsupportedError, match=f"'{group.name}' has no fp8 form"):
            call()


def test_grades() -> None:
    for grade in Grade:
        assert encoded_grade(RAW, grade) is encoded_grade(LOSSLESS, grade) is grade
        assert encoded_grade(FP8, grade) is Grade.APPROXIMATE


def test_buffers_of_every_sort() -> None:
    fmt = slot_format(samples.FULL)
    slot = slot_of(fmt)
    expected = encode(FP8, slot, fmt)
    assert expected is not None
    shifted = np.zeros(fmt.nbytes + 1, np.uint8)
    shifted[1:] = slot
    for source in (slot.tobytes(), bytearray(slot), memoryview(slot), shifted[1:], slot.view(np.uint16)):
        for form in (LOSSLESS, FP8):
            payload, plain = encode(form, source, fmt), encode(form, slot, fmt)
            assert (payload is None) == (plain is None)
            if payload is not None:
                np.testing.assert_array_equal(payload, plain)
    out, into = bytearray(len(expected)), bytearray(fmt.nbytes)
    assert encode(FP8, slot, fmt, out) is not None
    assert out == expected.tobytes()
    decode(FP8, bytes(out), into, fmt)
    again = blank(fmt)
    decode(FP8, expected, again, fmt)
    assert into == again.tobytes()


def test_bad_buffers() -> None:
    fmt = slot_format(samples.FULL)
    slot, payload = smooth(fmt), encode(LOSSLESS, smooth(fmt), fmt)
    assert payload is not None
    for form in PayloadForm:
        with pytest.raises(InputError, match=f"has {fmt.nbytes} bytes, not"):
            encode(form, slot[:-1], fmt)
        with pytest.raises(InputError, match="not 8"):
            decode(form, payload, bytearray(8), fmt)
        with pytest.raises(InputError, match="writable"):
            decode(form, payload, bytes(fmt.nbytes), fmt)
        with pytest.raises(InputError, match="aligned"):
            decode(form, payload, np.zeros(fmt.nbytes + 1, np.uint8)[1:], fmt)
        with pytest.raises(InputError, match="contiguous"):
            encode(form, np.zeros((fmt.nbytes, 2), np.uint8)[:, 0], fmt)
    with pytest.raises(InputError, match="leave out away"):
        encode(LOSSLESS, slot, fmt, bytearray(10))
    with pytest.raises(InputError, match="is written into"):
        encode(FP8, slot, fmt, bytearray(10))


def test_threads() -> None:
    fmt = slot_format(sample_group())
    slots = [kv_like(sample_group(), seed) for seed in range(4)]

    def there_and_back(slot: Any) -> bool:
        into, good = blank(fmt), True
        for form in (LOSSLESS, FP8) * 3:
            payload = encode(form, slot, fmt)
            assert payload is not None
            decode(form, payload, into, fmt)
            good &= form is FP8 or bool((into == slot).all())
        return good

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(there_and_back, slots))


# ---------------------------------------------------------------- payloads that somebody else made


def damaged(form: PayloadForm, fmt: SlotFormat, payload: Any) -> None:
    """It is refused, and the slot is as it was."""
    into = blank(fmt)
    with pytest.raises(FormatError, match=f"group '{fmt.group}'"):
        decode(form, payload, into, fmt)
    assert (into == 0xA5).all()


@CONVERTIBLE
@pytest.mark.parametrize("form", PayloadForm)
def test_other_lengths_are_refused(group: GroupSpec, form: PayloadForm) -> None:
    fmt = slot_format(group)
    payload = encode(form, smooth(fmt), fmt)
    if payload is None:
        pytest.skip("too small a group to compress")
    for length in {0, 1, HEADER.size - 1, HEADER.size, HEADER.size + 1, len(payload) // 2, len(payload) - 1}:
        damaged(form, fmt, payload[:length].copy())
    damaged(form, fmt, np.append(payload, np.uint8(0)))


@pytest.mark.parametrize("form", [LOSSLESS, FP8])
def test_every_byte_of_the_header_matters(form: PayloadForm) -> None:
    fmt = slot_format(samples.FULL)
    payload = encode(form, smooth(fmt), fmt)
    assert payload is not None
    for at in range(HEADER.size):
        for bit in range(8):
            wrong = payload.copy()
            wrong[at] ^= 1 << bit
            damaged(form, fmt, wrong)


def test_payloads_of_another_form_or_group_are_refused() -> None:
    formats = [slot_format(group) for group in samples.CONVERTIBLE]
    payloads = {(form, fmt): encode(form, smooth(fmt), fmt) for form in (LOSSLESS, FP8) for fmt in set(formats)}
    tried = 0
    for (form, fmt), payload in payloads.items():
        for other in PayloadForm:
            for target in set(formats):
                if payload is not None and (other, target) != (form, fmt) and target.runs != fmt.runs:
                    damaged(other, target, payload)
                    tried += 1
    assert tried > 50


def test_fp8_with_impossible_codes_or_scales_is_refused() -> None:
    fmt = slot_format(samples.FULL)
    payload = encode(FP8, smooth(fmt), fmt)
    assert payload is not None
    blocks = fmt.runs[0].blocks
    for at, value in ((HEADER.size, 255), (HEADER.size, 0), (HEADER.size + blocks, 0x7F), (len(payload) - 1, 0xFF)):
        wrong = payload.copy()
        wrong[at] = value
        damaged(FP8, fmt, wrong)


def lossless_of(planes: list[tuple[int, int, bytes]], fmt: SlotFormat) -> Any:
    """A payload with planes (method, length in the table, bytes) made by hand."""
    head = encode(LOSSLESS, smooth(fmt), fmt)
    assert head is not None
    table = b"".join(struct.pack("<II", method, length) for method, length, _ in planes)
    return np.frombuffer(head[: HEADER.size].tobytes() + table + b"".join(p for _, _, p in planes), np.uint8)


def test_planes_that_lie() -> None:
    fmt = slot_format(samples.FULL)
    count = fmt.nbytes // 2
    plane = bytes(range(256)) * (count // 256)
    good = zstandard.ZstdCompressor().compress(plane)
    raw, squeezed = (0, count, plane), (1, len(good), good)
    into = blank(fmt)
    decode(LOSSLESS, lossless_of([raw, squeezed], fmt), into, fmt)
    np.testing.assert_array_equal(into.reshape(-1, 2)[:, 0], np.frombuffer(plane, np.uint8))
    np.testing.assert_array_equal(into.reshape(-1, 2)[:, 1], np.frombuffer(plane, np.uint8))
    bomb = zstandard.ZstdCompressor().compress(bytes(1 << 28))
    nameless = zstandard.ZstdCompressor(write_content_size=False).compress(plane)
    more = zstandard.ZstdCompressor().compress(plane + b"x")
    huge = bytearray(good)
    huge[4:6] = b"\xff\xff"
    for bad in (
        (1, len(bomb), bomb),
        (1, len(nameless), nameless),
        (1, len(more), more),
        (1, len(good) + 1, good + b"\0"),
        (1, 2 * len(good), good + good),
        (1, len(good) - 1, good[:-1]),
        (1, len(huge), bytes(huge)),
        (1, 4, b"\x28\xb5\x2f\xfd"),
        (1, 0, b""),
        (1, 7, b"nothing"),
        (0, count - 1, plane[:-1]),
        (0, count + 1, plane + b"x"),
        (2, count, plane),
        (0, 2**32 - 1, plane),
    ):
        damaged(LOSSLESS, fmt, lossless_of([raw, bad], fmt))
        damaged(LOSSLESS, fmt, lossless_of([bad, squeezed], fmt))


@settings(max_examples=300, deadline=None)
@given(
    form=st.sampled_from([LOSSLESS, FP8]),
    group=st.sampled_from([samples.FULL, samples.HALF, samples.MIXED]),
    flips=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(1, 255)), min_size=1, max_size=4),
    cut=st.floats(0.5, 1),
)
def test_random_damage(form: PayloadForm, group: GroupSpec, flips: list[tuple[float, int]], cut: float) -> None:
    """It is refused and nothing is written, or the slot is whole; nothing else is ever raised."""
    fmt = slot_format(group)
    payload = encode(form, smooth(fmt), fmt)
    assert payload is not None
    wrong = payload.copy()[: max(1, int(len(payload) * cut))]
    for place, mask in flips:
        wrong[int(place * len(wrong))] ^= mask
    into = blank(fmt)
    try:
        decode(form, wrong, into, fmt)
    except FormatError:
        assert (into == 0xA5).all()
    else:
        assert len(wrong) == len(payload)
        for run in fmt.runs:
            if run.converts and form is FP8:
                words = into[run.offset : run.offset + run.nbytes].view(reference.WORDS[run.dtype])
                assert np.isfinite(reference.values_of(words, run.dtype)).all()


def test_levels_open_alike() -> None:
    fmt = slot_format(samples.FULL)
    slot = smooth(fmt)
    for level in (1, 3, 9):
        payload, into = lossless.encode_lossless(slot, fmt, level), blank(fmt)
        assert payload is not None
        decode(LOSSLESS, payload, into, fmt)
        np.testing.assert_array_equal(into, slot)
