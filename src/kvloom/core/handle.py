"""The core by handle: one small array of addresses instead of two dozen arrays.

A call from Python into compiled code unpacks every array it is given, about a quarter of a microsecond each.  The hot
path (``kvloom.core.calls``) takes a handle instead, and makes the arrays from it inside.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np
from numba import carray
from numba.core import types
from numba.extending import intrinsic

from kvloom.core._jit import inlined
from kvloom.core.arrays import Arrays
from kvloom.core.page_table import Rows
from kvloom.types import AnyArray

_STRIDE = 4
"""Numbers per array in a handle: its address and up to three extents."""


def make_handle(arrays: Arrays, rows: Rows) -> AnyArray:
    """int64 handle of arrays that stay where they are as long as the handle is used; the caller keeps them alive."""
    every = [*arrays, *rows]
    handle = np.zeros(_STRIDE * len(every), dtype=np.int64)
    for i, array in enumerate(every):
        handle[_STRIDE * i] = array.ctypes.data
        handle[_STRIDE * i + 1 : _STRIDE * i + 1 + array.ndim] = array.shape
    return handle


def _pointer(_typing: Any, _address: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    return types.voidptr(types.int64), generate


_pointer_to = cast("Callable[[int], Any]", intrinsic(_pointer))


@inlined
def _line(h: AnyArray, i: int, dtype: Any) -> AnyArray:
    return carray(_pointer_to(h[_STRIDE * i]), (h[_STRIDE * i + 1],), dtype)  # type: ignore[no-any-return]


@inlined
def _plane(h: AnyArray, i: int, dtype: Any) -> AnyArray:
    at = _STRIDE * i
    return carray(_pointer_to(h[at]), (h[at + 1], h[at + 2]), dtype)  # type: ignore[no-any-return]


@inlined
def _cube(h: AnyArray, i: int, dtype: Any) -> AnyArray:
    at = _STRIDE * i
    return carray(_pointer_to(h[at]), (h[at + 1], h[at + 2], h[at + 3]), dtype)  # type: ignore[no-any-return]


@inlined
def arrays_of(h: AnyArray) -> Arrays:
    """The arrays of the core."""
    return Arrays(
        _plane(h, 0, np.int32),
        _plane(h, 1, np.int32),
        _plane(h, 2, np.int32),
        _plane(h, 3, np.int32),
        _plane(h, 4, np.int32),
        _plane(h, 5, np.int32),
        _line(h, 6, np.int32),
        _line(h, 7, np.int32),
        _line(h, 8, np.int64),
        _line(h, 9, np.int32),
        _line(h, 10, np.int32),
        _line(h, 11, np.int64),
        _line(h, 12, np.int64),
        _line(h, 13, np.int64),
        _line(h, 14, np.int64),
        _plane(h, 15, np.int64),
        _line(h, 16, np.int64),
    )


@inlined
def rows_of(h: AnyArray) -> Rows:
    """The block tables."""
    return Rows(
        _plane(h, 17, np.int32),
        _plane(h, 18, np.int32),
        _cube(h, 19, np.int32),
        _plane(h, 20, np.int32),
        _plane(h, 21, np.int64),
        _plane(h, 22, np.int32),
    )
