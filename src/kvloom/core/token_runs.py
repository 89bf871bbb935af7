"""Comparing and copying runs of token ids, eight at a time.

Written as intrinsics because a plain loop over so few elements (a segment may have 16) is not vectorised: its
compiler wants longer ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from kvloom.types import AnyArray

_WORD = ir.IntType(32)
_LANES = ir.VectorType(_WORD, 8)


def _pointers(context: Any, builder: Any, signature: Any, args: Any) -> tuple[Any, Any, Any]:
    """Where row ``args[1]`` of ``args[0]`` begins, where ``args[2][args[3]]`` lies, and the count."""
    table = context.make_array(signature.args[0])(context, builder, args[0])
    run = context.make_array(signature.args[2])(context, builder, args[2])
    width = builder.extract_value(table.shape, 1)
    return builder.gep(table.data, [builder.mul(args[1], width)]), builder.gep(run.data, [args[3]]), args[4]


def _eights(builder: Any, count: Any) -> Any:
    return builder.and_(count, ir.Constant(ir.IntType(64), -8))


def _lanes(builder: Any, pointer: Any, at: Any) -> Any:
    return builder.bitcast(builder.gep(pointer, [at]), _LANES.as_pointer())


def _same_run(_typing: Any, table: Any, _row: Any, run: Any, _start: Any, _count: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        left, right, count = _pointers(context, builder, signature, args)
        lanes = cgutils.alloca_once_value(builder, ir.Constant(_LANES, [0] * 8))
        rest = cgutils.alloca_once_value(builder, ir.Constant(_WORD, 0))
        eights, eight = _eights(builder, count), ir.Constant(ir.IntType(64), 8)
        with cgutils.for_range_slice(builder, ir.Constant(ir.IntType(64), 0), eights, eight) as (i, _):
            mine = builder.load(_lanes(builder, left, i), align=4)
            yours = builder.load(_lanes(builder, right, i), align=4)
            builder.store(builder.or_(builder.load(lanes), builder.xor(mine, yours)), lanes)
        one = ir.Constant(ir.IntType(64), 1)
        with cgutils.for_range_slice(builder, eights, count, one) as (i, _):
            different = builder.xor(builder.load(builder.gep(left, [i])), builder.load(builder.gep(right, [i])))
            builder.store(builder.or_(builder.load(rest), different), rest)
        wide = builder.bitcast(builder.load(lanes), ir.IntType(256))
        same_lanes = builder.icmp_unsigned("==", wide, ir.Constant(ir.IntType(256), 0))
        same_rest = builder.icmp_unsigned("==", builder.load(rest), ir.Constant(_WORD, 0))
        return builder.and_(same_lanes, same_rest)

    return types.boolean(table, types.int64, run, types.int64, types.int64), generate


def _copy_run(_typing: Any, table: Any, _row: Any, run: Any, _start: Any, _count: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        target, source, count = _pointers(context, builder, signature, args)
        eights, eight = _eights(builder, count), ir.Constant(ir.IntType(64), 8)
        with cgutils.for_range_slice(builder, ir.Constant(ir.IntType(64), 0), eights, eight) as (i, _):
            builder.store(builder.load(_lanes(builder, source, i), align=4), _lanes(builder, target, i), align=4)
        one = ir.Constant(ir.IntType(64), 1)
        with cgutils.for_range_slice(builder, eights, count, one) as (i, _):
            builder.store(builder.load(builder.gep(source, [i])), builder.gep(target, [i]))
        return context.get_dummy_value()

    return types.void(table, types.int64, run, types.int64, types.int64), generate


same_run = cast("Callable[[AnyArray, int, AnyArray, int, int], bool]", intrinsic(_same_run))
"""``same_run(table, row, run, start, count)``: whether ``table[row, :count]`` equals ``run[start:start + count]``.

Both int32 and contiguous; the caller checked the bounds.
"""
copy_run = cast("Callable[[AnyArray, int, AnyArray, int, int], None]", intrinsic(_copy_run))
"""``copy_run(table, row, run, start, count)``: ``table[row, :count] = run[start:start + count]``; see ``same_run``."""
