"""The fp8 loops beside plain NumPy and beside torch, bit by bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kernels.samples import SIGN, TRAILING, finite

from kvloom.kernels import reference
from kvloom.kernels.fp8 import DEQUANTISE, QUANTISE, SCALE_BYTES, plausible
from kvloom.kernels.reference import LARGEST_FINITE, LOWEST_EXPONENT, WORDS, values_of
from kvloom.kernels.slots import BLOCK

torch = pytest.importorskip("torch")

DTYPES = pytest.mark.parametrize("dtype", list(WORDS))
HALVES = pytest.mark.parametrize("dtype", ["bfloat16", "float16"])


def quantised(words: Any, dtype: str) -> tuple[Any, Any] | None:
    codes, scales = np.full(len(words), 0x7F, np.uint8), np.zeros(-(-len(words) // BLOCK), np.uint8)
    return (codes, scales) if QUANTISE[dtype](words, codes, scales) else None


def dequantised(codes: Any, scales: Any, dtype: str) -> Any:
    out = np.zeros(len(codes), WORDS[dtype])
    DEQUANTISE[dtype](codes, scales, out)
    return out


def by_torch(words: Any, scales: Any, dtype: str) -> tuple[Any, Any]:
    """The codes and the elements that torch's conversions make of the same scales."""
    kind = getattr(torch, dtype)
    values = torch.from_numpy(words.copy()).view(kind).double()
    power = torch.exp2(torch.from_numpy(scales).double() - 127).repeat_interleave(BLOCK)[: len(words)]
    codes = (values / power).float().to(torch.float8_e4m3fn)  # exact but for the last step
    largest = torch.finfo(kind).max
    back = (codes.double() * power).clamp(-largest, largest).to(kind)
    return codes.view(torch.uint8).numpy(), back.view(getattr(torch, f"uint{words.itemsize * 8}")).numpy()


def check(words: Any, dtype: str) -> None:
    """Everything that must hold of finite elements."""
    found = quantised(words, dtype)
    expected = reference.quantise(words, dtype)
    assert found is not None
    assert expected is not None
    codes, scales = found
    np.testing.assert_array_equal(scales, expected[1])
    np.testing.assert_array_equal(codes, expected[0])
    back = dequantised(codes, scales, dtype)
    np.testing.assert_array_equal(back, reference.dequantise(codes, scales, dtype))
    torch_codes, torch_back = by_torch(words, scales, dtype)
    np.testing.assert_array_equal(codes, torch_codes)
    np.testing.assert_array_equal(back, torch_back)
    assert plausible(codes, scales, *SCALE_BYTES[dtype])
    check_error(words, back, dtype)
    again = quantised(back, dtype)
    assert again is not None
    np.testing.assert_array_equal(dequantised(*again, dtype), back)  # once converted, never worse


def check_error(words: Any, back: Any, dtype: str) -> None:
    """The bound that the module states."""
    x, y = values_of(words, dtype), values_of(back, dtype)
    starts = np.arange(0, len(x), BLOCK)
    largest = np.repeat(np.maximum.reduceat(np.abs(x), starts), BLOCK)[: len(x)]
    bound = np.maximum(np.maximum(np.abs(x) / 16, largest / 229376), 2.0 ** (LOWEST_EXPONENT[dtype] - 10))
    assert (np.abs(x - y) <= bound).all()
    assert (np.signbit(x) == np.signbit(y)).all()


def all_finite(dtype: str) -> Any:
    words = np.arange(1 << 16, dtype=np.uint16)
    return words[(words & 0x7FFF) <= LARGEST_FINITE[dtype]]


# ---------------------------------------------------------------- all of them


@HALVES
def test_every_finite_pattern_among_its_neighbours(dtype: str) -> None:
    check(all_finite(dtype), dtype)


@HALVES
@pytest.mark.parametrize("above", range(0, 20, 1))
def test_every_finite_pattern_below_a_larger_one(dtype: str, above: int) -> None:
    """The first of each block is up to 2**19 times the others: all codes, normal, tiny, tied and zero."""
    words = all_finite(dtype)
    words = np.resize(words, -(-len(words) // (BLOCK - 1)) * (BLOCK - 1)).reshape(-1, BLOCK - 1)
    magnitude = (words & 0x7FFF).max(axis=1).astype(np.int64) + (above << TRAILING[dtype])
    first = np.minimum(magnitude, LARGEST_FINITE[dtype]).astype(np.uint16)
    check(np.ascontiguousarray(np.column_stack([first, words])).ravel(), dtype)


@HALVES
def test_every_pattern_that_is_not_finite_is_refused(dtype: str) -> None:
    words = np.arange(1 << 16, dtype=np.uint16)
    bad = words[(words & 0x7FFF) > LARGEST_FINITE[dtype]]
    assert len(bad) == 2 * ((1 << TRAILING[dtype]) - 1 + 1)
    for word in bad.tolist():
        for place, length in ((0, 1), (127, 128), (128, 130), (3, 300)):
            block = np.zeros(length, np.uint16)
            block[place] = word
            assert quantised(block, dtype) is None


def test_all_codes_and_scales_come_back() -> None:
    codes = np.resize(np.array([c for c in range(256) if c & 0x7F != 0x7F], np.uint8), 254 * BLOCK)
    for dtype, (lowest, highest) in SCALE_BYTES.items():
        scales = np.resize(np.arange(lowest, highest + 1, dtype=np.uint8), 254)
        back = dequantised(codes, scales, dtype)
        np.testing.assert_array_equal(back, reference.dequantise(codes, scales, dtype))
        assert np.isfinite(values_of(back, dtype)).all()


# ---------------------------------------------------------------- edges


@DTYPES
@pytest.mark.parametrize("length", [1, 2, 127, 128, 129, 255, 256, 257, 128 * 128, 128 * 129 + 1])
def test_lengths(dtype: str, length: int) -> None:
    check(finite(np.random.Generator(np.random.PCG64(length)), length, dtype), dtype)


@DTYPES
def test_zeros_keep_their_sign(dtype: str) -> None:
    words = np.zeros(300, WORDS[dtype])
    words[1::2] = SIGN[dtype]
    check(words, dtype)
    codes, scales = quantised(words, dtype) or (None, None)
    assert set(codes.tolist()) == {0x00, 0x80}
    assert set(scales.tolist()) == {LOWEST_EXPONENT[dtype] + 127}


@DTYPES
def test_what_rounds_up_beyond_the_largest_becomes_the_largest(dtype: str) -> None:
    words = np.full(BLOCK, LARGEST_FINITE[dtype], WORDS[dtype])
    words[::2] |= WORDS[dtype](SIGN[dtype])
    check(words, dtype)
    codes, scales = quantised(words, dtype) or (None, None)
    np.testing.assert_array_equal(dequantised(codes, scales, dtype), words)


@DTYPES
def test_subnormals(dtype: str) -> None:
    trailing = TRAILING[dtype]
    for top in (1, 2, 5, 1 << (trailing - 1), (1 << trailing) - 1, 1 << trailing, 3 << trailing):
        check(np.unique(np.linspace(0, top, 500).astype(WORDS[dtype])), dtype)


def test_float32_edges() -> None:
    """Ties and their neighbours on both sides, at every scale's border."""
    words = []
    for exponent in (0, 1, 2, 100, 126, 127, 128, 134, 135, 136, 200, 253, 254):
        for mantissa in (
            0,
            1,
            0x080000,
            0x07FFFF,
            0x080001,
            0x180000,
            0x17FFFF,
            0x5FFFFF,
            0x600000,
            0x600001,
            0x7FFFFF,
        ):
            words += [exponent << 23 | mantissa, SIGN["float32"] | exponent << 23 | mantissa]
    for word in words:
        check(np.array([word], np.uint32), "float32")
        check(np.array([word, 135 << 23, *range(40)], np.uint32), "float32")
    check(np.array(words, np.uint32), "float32")


@pytest.mark.parametrize("bad", [0x7F800000, 0xFF800000, 0x7F800001, 0x7FC00000, 0xFFFFFFFF])
def test_float32_that_is_not_finite_is_refused(bad: int) -> None:
    for place in (0, 127, 128, 299):
        words = np.zeros(300, np.uint32)
        words[place] = bad
        assert quantised(words, "float32") is None
        assert reference.quantise(words, "float32") is None


@settings(max_examples=150, deadline=None)
@given(
    dtype=st.sampled_from(list(WORDS)),
    seed=st.integers(0, 2**32 - 1),
    length=st.integers(1, 700),
    span=st.integers(1, 40),
)
def test_random_blocks(dtype: str, seed: int, length: int, span: int) -> None:
    check(finite(np.random.Generator(np.random.PCG64(seed)), length, dtype, span), dtype)


# ---------------------------------------------------------------- what is plausible


@DTYPES
def test_only_what_is_written_is_plausible(dtype: str) -> None:
    lowest, highest = SCALE_BYTES[dtype]
    codes, scales = np.zeros(200, np.uint8), np.full(2, lowest, np.uint8)
    assert plausible(codes, scales, lowest, highest)
    for code in (0x7F, 0xFF):
        codes[131] = code
        assert not plausible(codes, scales, lowest, highest)
    codes[131] = 0x7E
    for scale, good in ((lowest - 1, False), (highest, True), (highest + 1, False), (255, False)):
        scales[1] = scale
        assert plausible(codes, scales, lowest, highest) is good
