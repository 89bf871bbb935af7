"""The core by handle: one small array of addresses instead of two dozen arrays.

A call from Python into compiled code unpacks every array it is given, about a quarter of a microsecond each.  The hot
path (``kvloom.core.calls``) takes a handle instead, and makes the arrays from it inside.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic
from numba.np.arrayobj import populate_array

from kvloom.core.arrays import Arrays
from kvloom.core.page_table import Rows
from kvloom.types import AnyArray

_STRIDE = 4
"""Numbers per array in a handle: its address and up to three extents."""

_LONG = {
    "free_bits",
    "slot_stamp",
    "node_stamp",
    "reached",
    "page_stamp",
    "counters",
    "scalars",
    "state",
    "order",
    "policy",
    "trials",
}
_REAL = {"scratch"}
"""Arrays of int64 and of float64; all others are int32."""
_DIMENSIONS = dict.fromkeys(
    (
        "table", "free_bits", "free_pages", "free_nodes", "slot_stamp", "node_stamp", "reached", "page_stamp",
        "scalars", "order", "policy", "worth",
    ),
    1,
) | {"span": 3}  # fmt: skip
"""Of ``Arrays`` and of ``Rows.span``; all others have two."""


def make_handle(arrays: Arrays, rows: Rows) -> AnyArray:
    """int64 handle of arrays that stay where they are as long as the handle is used; the caller keeps them alive."""
    every = [*arrays, *rows]
    handle = np.zeros(_STRIDE * len(every), dtype=np.int64)
    for i, array in enumerate(every):
        handle[_STRIDE * i] = array.ctypes.data
        handle[_STRIDE * i + 1 : _STRIDE * i + 1 + array.ndim] = array.shape
    return handle


def _tuple_from_handle(kind: type[Arrays | Rows], begin: int) -> Any:
    """An intrinsic that makes a named tuple of the arrays from number ``begin`` of a handle on."""
    members = []
    for name in kind._fields:
        dimensions = 2 if kind is Rows and name == "table" else _DIMENSIONS.get(name, 2)
        members.append(
            types.Array(
                types.int64 if name in _LONG else types.float64 if name in _REAL else types.int32, dimensions, "C"
            )
        )
    result = cast("Any", types).NamedTuple(members, kind)

    def make(_typing: Any, handle: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            numbers = context.make_array(signature.args[0])(context, builder, args[0]).data

            def number(at: int) -> Any:
                return builder.load(builder.gep(numbers, [ir.Constant(ir.IntType(64), at)]))

            made = []
            for i, member in enumerate(members):
                at = _STRIDE * (begin + i)
                array = context.make_array(member)(context, builder)
                item = 4 if member.dtype is types.int32 else 8
                shape = [number(at + 1 + d) for d in range(member.ndim)]
                strides = [ir.Constant(ir.IntType(64), item)]
                for extent in reversed(shape[1:]):
                    strides.insert(0, builder.mul(strides[0], extent))
                populate_array(
                    array,
                    data=builder.inttoptr(number(at), context.get_data_type(member.dtype).as_pointer()),
                    shape=shape,
                    strides=strides,
                    itemsize=ir.Constant(ir.IntType(64), item),
                    meminfo=None,
                )
                made.append(array._getvalue())
            return context.make_tuple(builder, result, made)

        return result(handle), generate

    return intrinsic(make)


arrays_of = cast("Callable[[AnyArray], Arrays]", _tuple_from_handle(Arrays, 0))
"""The arrays of the core, from a handle; for compiled code."""
rows_of = cast("Callable[[AnyArray], Rows]", _tuple_from_handle(Rows, len(Arrays._fields)))
"""The block tables, from a handle; for compiled code."""
