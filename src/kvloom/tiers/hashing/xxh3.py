"""XXH3-128 with a seed, compiled, in the same pass over the bytes that copies them.

Bytes are loaded once, hashed in registers and stored from there, so checking costs little where memory is what limits.
Only for inputs of more than ``SHORT`` bytes, which the algorithm takes in blocks of 1,024 bytes of 16 stripes; what is
shorter is left to the library.  The specification:
https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np
from numba.core import cgutils, types
from numba.extending import intrinsic

from kvloom.types import AnyArray

SHORT = 240
STRIPE, BLOCK = 64, 1024

SECRET = np.frombuffer(
    bytearray.fromhex(
        "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
        "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
        "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb"
        "170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
    ),
    np.uint64,
)

U: Any = np.uint64
P32_1, P32_2, P32_3 = U(0x9E3779B1), U(0x85EBCA77), U(0xC2B2AE3D)
P64_1, P64_2, P64_3 = U(0x9E3779B185EBCA87), U(0xC2B2AE3D27D4EB4F), U(0x165667B19E3779F9)
P64_4, P64_5 = U(0x85EBCA77C2B2AE63), U(0x27D4EB2F165667C5)


def _emitter(*, store: bool, past: bool, whole: bool) -> Any:
    """Stripes, or whole blocks of them, into accumulators: (to, source, how many, secret, accumulators), all addresses.

    The accumulators stay in registers; a block ends with scrambling them.
    """

    def emit(_typing: Any, _to: Any, _source: Any, _count: Any, _secret: Any, _acc: Any) -> Any:
        def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            from llvmlite import ir

            word = ir.IntType(64)
            kind = ir.VectorType(word, 8)
            to, source, count, secret, acc = args

            def at(address: Any) -> Any:
                return builder.inttoptr(address, kind.as_pointer())

            def every(number: int) -> Any:
                return ir.Constant(kind, [number] * 8)

            def times(index: Any, size: int) -> Any:
                return builder.mul(index, ir.Constant(word, size))

            crossed = ir.Constant(ir.VectorType(ir.IntType(32), 8), [1, 0, 3, 2, 5, 4, 7, 6])
            sums = cgutils.alloca_once_value(builder, builder.load(at(acc), align=8))

            def stripe(here: Any, index: Any) -> None:
                data = builder.load(at(builder.add(source, here)), align=1)
                if store:
                    stored = builder.store(data, at(builder.add(to, here)), align=STRIPE if past else 1)
                    if past:
                        one = builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)])
                        stored.set_metadata("nontemporal", one)
                mixed = builder.xor(data, builder.load(at(builder.add(secret, times(index, 8))), align=1))
                product = builder.mul(builder.and_(mixed, every(0xFFFFFFFF)), builder.lshr(mixed, every(32)))
                swapped = builder.shuffle_vector(data, ir.Constant(kind, ir.Undefined), crossed)
                builder.store(builder.add(builder.load(sums), builder.add(swapped, product)), sums)

            def scramble() -> None:
                value = builder.load(sums)
                value = builder.xor(value, builder.lshr(value, every(47)))
                value = builder.xor(value, builder.load(at(builder.add(secret, ir.Constant(word, 128))), align=1))
                builder.store(builder.mul(value, every(int(P32_1))), sums)

            with cgutils.for_range(builder, count) as outer:
                if whole:
                    with cgutils.for_range(builder, ir.Constant(word, BLOCK // STRIPE)) as inner:
                        stripe(builder.add(times(outer.index, BLOCK), times(inner.index, STRIPE)), inner.index)
                    scramble()
                else:
                    stripe(times(outer.index, STRIPE), outer.index)
            builder.store(builder.load(sums), at(acc), align=8)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 5), generate

    return emit


Steps = Callable[[int, int, int, int, int], None]
hash_stripes = cast("Steps", intrinsic(_emitter(store=False, past=False, whole=False)))
hash_blocks = cast("Steps", intrinsic(_emitter(store=False, past=False, whole=True)))
copy_stripes = cast("Steps", intrinsic(_emitter(store=True, past=False, whole=False)))
copy_blocks = cast("Steps", intrinsic(_emitter(store=True, past=False, whole=True)))
stream_blocks = cast("Steps", intrinsic(_emitter(store=True, past=True, whole=True)))
"""The same past the cache; the address is a multiple of 64."""


def scratch() -> tuple[AnyArray, AnyArray]:
    """What one thread computes in: uint64 ``[8]`` of accumulators, ``[24]`` of secret."""
    return np.zeros(8, np.uint64), np.zeros(24, np.uint64)
