"""The fp8 form's loops: blocks of 128 elements to E4M3 codes with a power-of-two scale each, and back.

``reference`` says what they compute.  Everything is exact but the one rounding to E4M3: dividing by a power of two
rounds nothing, and a code times its scale has an exact place in the source's dtype, which the lowest scales see to.
So with ``a`` the largest magnitude of a block, an element x comes back with an error of at most

    max(|x| / 16, a / 229376, 2**(lowest - 10)),     lowest: -124 (bfloat16), -15 (float16), -126 (float32)

and what came back once comes back unchanged from then on.  Floats are handled as bits, so that compilers vectorise the
loops; helpers are in this file, because the cache of compiled code looks at this file alone.

The loops assume that the thread does not flush subnormals to zero (the default everywhere).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np
from numba.core import types
from numba.extending import intrinsic

from kvloom.kernels._jit import compiled, expanded, inlined
from kvloom.types import AnyArray

_BLOCK, _AHEAD = 128, 32
_U = np.uint32


def _emit_float(_typing: Any, _bits: Any) -> Any:
    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        from llvmlite import ir

        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.uint32), generate


def _emit_bits(_typing: Any, _value: Any) -> Any:
    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        from llvmlite import ir

        return builder.bitcast(args[0], ir.IntType(32))

    return types.uint32(types.float32), generate


def _emit_prefetch(_typing: Any, _address: Any) -> Any:
    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        from llvmlite import ir

        pointer, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [pointer, number, number, number])
        function = builder.module.declare_intrinsic("llvm.prefetch", [pointer], kind)
        hints = (ir.Constant(number, value) for value in (0, 3, 1))  # to read, into the nearest cache, data
        builder.call(function, [builder.inttoptr(args[0], pointer), *hints])
        return context.get_dummy_value()

    return types.void(types.int64), generate


_float = cast("Callable[[Any], Any]", intrinsic(_emit_float))
_bits = cast("Callable[[Any], Any]", intrinsic(_emit_bits))
_prefetch = cast("Callable[[int], None]", intrinsic(_emit_prefetch))


@inlined
def _half(m: Any) -> Any:
    """The float32 bits of a float16's magnitude."""
    tiny = _bits(np.float32(np.int32(m)) * np.float32(2.0**-24))
    return tiny if m < _U(0x400) else (m << _U(13)) + _U(112 << 23)


@inlined
def _inverse(exponent: Any) -> Any:
    """``2**-exponent`` as float32."""
    return _float(_U(127 - exponent) << _U(23))


@inlined
def _code(bits: Any, inverse: Any) -> Any:
    """The code of the float32 ``bits`` times ``inverse``, which is at most 448."""
    magnitude = _float(bits & _U(0x7FFFFFFF)) * inverse
    m = _bits(magnitude)
    rounded = _U(_U(m + _U(0x7FFFF)) + _U((m >> _U(20)) & _U(1)))  # to the nearest, ties to even
    normal = _U(_U(rounded >> _U(20)) - _U(120 << 3))
    tiny = _U(_bits(magnitude + np.float32(16384.0)) - _U(0x46800000))  # the adder rounds to multiples of 2**-9
    code = tiny if m < _U(121 << 23) else normal
    return np.uint8(code | _U(_U(bits >> _U(24)) & _U(0x80)))


@inlined
def _widened(bits: Any, mantissa: int) -> Any:
    """The float32 bits of an element."""
    if mantissa == 10:
        return _half(_U(bits) & _U(0x7FFF)) | (_U(bits) & _U(0x8000)) << _U(16)
    return _U(bits) << _U(23 - mantissa)


@expanded
def _extremes(x: AnyArray, count: int, word: Any, most: int) -> Any:
    """The largest and the least magnitude of ``x[:count]``, as bits."""
    largest, least = word(0), word(most)
    for i in range(count):
        m = word(x[i] & word(most))
        largest, least = max(largest, m), min(least, m)
    return largest, least


@expanded
def _round(x: AnyArray, out: AnyArray, shift: Any, word: Any, width: int, drop: int) -> None:
    """A whole block whose codes are all normal: ``drop`` bits are rounded off, to the nearest, ties to even.

    ``shift``: what rebiases the exponent, and half of the last bit that stays.  The sign bit is above all carries.
    """
    for i in range(_BLOCK):
        rounded = word(word(x[i] + shift) + word(word(x[i] >> word(drop)) & word(1)))
        out[i] = np.uint8(
            word(word(rounded >> word(drop)) & word(0x7F)) | word(word(rounded >> word(width - 8)) & word(0x80))
        )


# Largest magnitudes first, for as many blocks as stay in the nearest cache: twice as fast as block by block, since no
# block waits for its own; and while these are rounded the next ones are fetched.  A whole block with normal codes only,
# the usual case, needs integers only; others go by way of floats.


@expanded
def _quantise(
    source: AnyArray, codes: AnyArray, scales: AnyArray, word: Any, width: int, mantissa: int, bias: int, lowest: int
) -> bool:
    """``source`` ``word`` [n], bits; ``codes`` uint8 [n]; ``scales`` uint8 [blocks].  False: not all finite, give up.

    An element has ``width`` bits, ``mantissa`` of them behind an exponent with this ``bias``.
    """
    most, drop = (1 << (width - 1)) - 1, mantissa - 3
    shifts = np.empty(_AHEAD, word)  # of blocks that _round takes, which is never 0
    for first in range(0, len(scales), _AHEAD):
        last = min(first + _AHEAD, len(scales))
        worst = word(0)
        for block in range(first, last):
            x = source[block * _BLOCK : (block + 1) * _BLOCK]
            whole = len(x) == _BLOCK
            largest, least = _extremes(x, _BLOCK, word, most) if whole else _extremes(x, len(x), word, most)
            worst = max(worst, largest)
            exponent: Any = np.int64(largest >> word(mantissa)) - bias - 8
            if (largest & word((1 << mantissa) - 1)) > word(3 << (mantissa - 2)):
                exponent += 1  # above 1.75 * 2**8
            exponent = max(exponent, lowest)
            scales[block] = np.uint8(exponent + 127)
            plain = whole and np.int64(least) >= max(1, exponent + bias - 6) << mantissa
            shift = (1 << (drop - 1)) - 1 - ((exponent + bias - 7) << mantissa)
            shifts[block - first] = word(shift) if plain else word(0)
        if worst > word(most - (1 << mantissa)):
            return False
        for block in range(first, last):
            x, out = source[block * _BLOCK : (block + 1) * _BLOCK], codes[block * _BLOCK : (block + 1) * _BLOCK]
            shift = shifts[block - first]
            if shift != word(0):
                for line in range(_BLOCK * width // 512):
                    _prefetch(source.ctypes.data + (block + _AHEAD) * (_BLOCK * width // 8) + line * 64)
                _round(x, out, shift, word, width, drop)
                continue
            inverse = _inverse(np.int64(scales[block]) - 127)
            for i in range(len(x)):
                out[i] = _code(_widened(x[i], mantissa), inverse)
    return True


@compiled
def _quantise_bfloat16(source: AnyArray, codes: AnyArray, scales: AnyArray) -> bool:
    return _quantise(source, codes, scales, np.uint16, 16, 7, 127, -124)


@compiled
def _quantise_float16(source: AnyArray, codes: AnyArray, scales: AnyArray) -> bool:
    return _quantise(source, codes, scales, np.uint16, 16, 10, 15, -15)


@compiled
def _quantise_float32(source: AnyArray, codes: AnyArray, scales: AnyArray) -> bool:
    return _quantise(source, codes, scales, np.uint32, 32, 23, 127, -126)


@inlined
def _value(code: Any, scale: Any) -> Any:
    """The float32 bits of the magnitude of ``code`` times ``scale``."""
    m = _U(code & np.uint8(0x7F)) << _U(20)
    normal = _float(m + _U(120 << 23))
    tiny = _float(m + _U(121 << 23)) - np.float32(0.015625)
    return _bits((tiny if m < _U(8 << 20) else normal) * scale)


@compiled
def _dequantise_bfloat16(codes: AnyArray, scales: AnyArray, out: AnyArray) -> None:
    """``codes`` uint8 [n], ``scales`` uint8 [blocks]; ``out`` uint16 [n], bits."""
    for block in range(len(scales)):
        x = codes[block * _BLOCK : (block + 1) * _BLOCK]
        to = out[block * _BLOCK : (block + 1) * _BLOCK]
        scale = _float(_U(scales[block]) << _U(23))
        for i in range(len(x)):
            magnitude = min(_value(x[i], scale) >> _U(16), _U(0x7F7F))
            to[i] = np.uint16(magnitude | (_U(x[i] & np.uint8(0x80)) << _U(8)))


@compiled
def _dequantise_float16(codes: AnyArray, scales: AnyArray, out: AnyArray) -> None:
    """Like ``_dequantise_bfloat16``."""
    for block in range(len(scales)):
        x = codes[block * _BLOCK : (block + 1) * _BLOCK]
        to = out[block * _BLOCK : (block + 1) * _BLOCK]
        scale = _float(_U(scales[block]) << _U(23))
        for i in range(len(x)):
            bits = _value(x[i], scale)
            normal = min((bits >> _U(13)) - _U(112 << 10), _U(0x7BFF))
            tiny = _U(np.int32(min(_float(bits), np.float32(1.0)) * np.float32(2.0**24)))
            magnitude = tiny if bits < _U(113 << 23) else normal
            to[i] = np.uint16(magnitude | (_U(x[i] & np.uint8(0x80)) << _U(8)))


@compiled
def _dequantise_float32(codes: AnyArray, scales: AnyArray, out: AnyArray) -> None:
    """Like ``_dequantise_bfloat16``, with ``out`` uint32."""
    for block in range(len(scales)):
        x = codes[block * _BLOCK : (block + 1) * _BLOCK]
        to = out[block * _BLOCK : (block + 1) * _BLOCK]
        scale = _float(_U(scales[block]) << _U(23))
        for i in range(len(x)):
            magnitude = min(_value(x[i], scale), _U(0x7F7FFFFF))
            to[i] = magnitude | (_U(x[i] & np.uint8(0x80)) << _U(24))


@compiled
def plausible(codes: AnyArray, scales: AnyArray, lowest: int, highest: int) -> bool:
    """Whether all codes are numbers and all scales lie in [lowest, highest]: what ``quantise`` writes, no more."""
    worst, least, most = np.uint8(0), np.uint8(255), np.uint8(0)
    for i in range(len(codes)):
        worst = max(worst, np.uint8(codes[i] & np.uint8(0x7F)))
    for i in range(len(scales)):
        least = min(least, scales[i])
        most = max(most, scales[i])
    return bool(worst < 0x7F and least >= lowest and most <= highest)


QUANTISE = {"bfloat16": _quantise_bfloat16, "float16": _quantise_float16, "float32": _quantise_float32}
"""By dtype: (bits, codes, scales) -> whether all elements are finite; only then is the result to be used."""
DEQUANTISE = {"bfloat16": _dequantise_bfloat16, "float16": _dequantise_float16, "float32": _dequantise_float32}
"""By dtype: (codes, scales, bits)."""
SCALE_BYTES = {"bfloat16": (3, 247), "float16": (112, 135), "float32": (1, 247)}
"""By dtype: the lowest and the highest scale, as stored."""
