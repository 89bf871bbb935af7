"""What the fp8 form computes, in plain NumPy: slow, obvious, and what the compiled loops are compared with bit by bit.

E4M3 is the one of the OCP 8-bit Floating Point Specification (OFP8, revision 1.0): sign, 4 exponent bits of bias 7, 3
mantissa bits, no infinities, 0x7F and 0xFF not a number, largest value 448.  Scales are powers of two stored like E8M0
of the OCP Microscaling Formats (MX) Specification 1.0: the exponent plus 127.  Blocks are longer than MX's 32, and the
scale is the smallest that needs no saturation, where MX's may cut the largest elements of a block.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvloom.kernels.slots import BLOCK
from kvloom.types import AnyArray

LARGEST = 448.0
LOWEST_EXPONENT = {"bfloat16": -124, "float16": -15, "float32": -126}
"""Of a scale: from there on every value of the form has an exact place among the subnormals of the dtype."""
LARGEST_FINITE = {"bfloat16": 0x7F7F, "float16": 0x7BFF, "float32": 0x7F7FFFFF}
"""Bits of the largest finite value: what rounds up beyond it becomes it."""
WORDS = {"bfloat16": np.uint16, "float16": np.uint16, "float32": np.uint32}

MAGNITUDES = np.array(
    [code % 8 * 2.0**-9 if code < 8 else (1 + code % 8 / 8) * 2.0 ** (code // 8 - 7) for code in range(127)]
)
"""The value of every code from 0x00 to 0x7E."""


def values_of(words: AnyArray, dtype: str) -> npt.NDArray[np.float64]:
    """The elements whose bits are ``words`` (uint16 or uint32), as float64."""
    with np.errstate(invalid="ignore"):  # signalling NaNs are welcome
        if dtype == "bfloat16":
            return (words.astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)
        return words.view(np.float16 if dtype == "float16" else np.float32).astype(np.float64)


def words_of(values: npt.NDArray[np.float64], dtype: str) -> AnyArray:
    """The bits of values that ``dtype`` can hold exactly."""
    if dtype == "bfloat16":
        return (values.astype(np.float32).view(np.uint32) >> np.uint32(16)).astype(np.uint16)
    return values.astype(np.float16 if dtype == "float16" else np.float32).view(WORDS[dtype])


def scale_exponents(largest: npt.NDArray[np.float64], dtype: str) -> npt.NDArray[np.int64]:
    """The smallest k with ``largest / 2**k <= 448``, but at least the lowest of the dtype."""
    mantissa, exponent = np.frexp(largest / LARGEST)  # mantissa in [0.5, 1)
    smallest = np.where(mantissa == 0.5, exponent - 1, exponent)
    return np.where(largest > 0, np.maximum(smallest, LOWEST_EXPONENT[dtype]), LOWEST_EXPONENT[dtype])


def encode_codes(scaled: npt.NDArray[np.float64]) -> npt.NDArray[np.uint8]:
    """Values of at most 448 as E4M3 codes, to the nearest one, ties to the even code; the sign of zero is kept."""
    halfway = (MAGNITUDES[1:] + MAGNITUDES[:-1]) / 2
    code = np.searchsorted(halfway, np.abs(scaled), side="left")
    tie = (code < len(halfway)) & (halfway[np.minimum(code, len(halfway) - 1)] == np.abs(scaled))
    code += tie & (code % 2 == 1)
    signed: npt.NDArray[np.uint8] = (code + 128 * np.signbit(scaled)).astype(np.uint8)
    return signed


def quantise(words: AnyArray, dtype: str) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]] | None:
    """``words`` [n] as (codes uint8 [n], scales uint8 [blocks]); None when an element is not finite."""
    values = values_of(words, dtype)
    if not np.isfinite(values).all():
        return None
    starts = np.arange(0, len(values), BLOCK)
    exponents = scale_exponents(np.maximum.reduceat(np.abs(values), starts), dtype)
    scaled = np.ldexp(values, -np.repeat(exponents, BLOCK)[: len(values)])
    return encode_codes(scaled), (exponents + 127).astype(np.uint8)


def dequantise(codes: npt.NDArray[np.uint8], scales: npt.NDArray[np.uint8], dtype: str) -> AnyArray:
    """The bits [n] of what ``codes`` and ``scales`` stand for; IndexError for a code that is not a number."""
    exponents = np.repeat(scales.astype(np.int64) - 127, BLOCK)[: len(codes)]
    magnitudes = np.ldexp(MAGNITUDES[codes & 0x7F], exponents)
    largest = values_of(np.array([LARGEST_FINITE[dtype]], WORDS[dtype]), dtype)[0]
    return words_of(np.where(codes >= 0x80, -1.0, 1.0) * np.minimum(magnitudes, largest), dtype)
