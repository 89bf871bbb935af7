"""Rows of blocks in host memory: append new rows to a sequence's blocks and read all rows back contiguously.

One compiled call does for one state tensor of one layer what would take a dozen array operations.  It works on
raw addresses; callers guarantee that every block in the range is held and every buffer is large enough.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numba
from numba.core import cgutils, types
from numba.extending import intrinsic

from kvloom.types import IntArray


def _emit_memcpy(_typing: Any, _dst: Any, _src: Any, _size: Any) -> Any:
    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        from llvmlite import ir

        byte_pointer = ir.IntType(8).as_pointer()
        kind = ir.FunctionType(byte_pointer, [byte_pointer, byte_pointer, ir.IntType(64)])
        function = cgutils.get_or_insert_function(builder.module, kind, "memcpy")
        dst, src = (builder.inttoptr(a, byte_pointer) for a in args[:2])
        builder.call(function, [dst, src, args[2]])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


def _emit_zero(_typing: Any, _dst: Any, _size: Any) -> Any:
    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        from llvmlite import ir

        byte_pointer = ir.IntType(8).as_pointer()
        kind = ir.FunctionType(byte_pointer, [byte_pointer, ir.IntType(32), ir.IntType(64)])
        function = cgutils.get_or_insert_function(builder.module, kind, "memset")
        builder.call(function, [builder.inttoptr(args[0], byte_pointer), ir.Constant(ir.IntType(32), 0), args[1]])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


memcpy = cast("Callable[[int, int, int], None]", intrinsic(_emit_memcpy))
zero = cast("Callable[[int, int], None]", intrinsic(_emit_zero))


def _extend_rows(  # noqa: PLR0917
    offsets: IntArray,
    first: int,
    entries: int,
    lead: int,
    row_bytes: int,
    base: int,
    source: int,
    source_lead: int,
    source_row: int,
    count: int,
    start: int,
    out: int,
    begin: int,
    dead: int,
    skip_from: int,
    skip_to: int,
) -> None:
    """Write ``count`` new rows as entries [start, start + count); read the entries [begin, start + count) to ``out``.

    A block holds ``[lead, entries]`` rows of ``row_bytes`` bytes at ``base + offsets[block - first]``.  The source is
    ``[lead, count]`` rows, ``source_lead`` and ``source_row`` bytes apart.  ``out`` is ``[lead, dead + entries read]``
    rows, contiguous; the ``dead`` rows become zeros.  The blocks [skip_from, skip_to) are not read (their place in
    ``out`` stays as it is).  ``count`` 0 writes nothing; ``out`` 0 reads nothing.
    """
    end = start + count
    for i in range(count):
        at = start + i
        block = base + offsets[at // entries - first]
        for h in range(lead):
            to = block + (h * entries + at % entries) * row_bytes
            memcpy(to, source + h * source_lead + i * source_row, row_bytes)
    if out == 0:
        return
    head = (dead + end - begin) * row_bytes
    for h in range(lead):
        to = out + h * head
        if dead:
            zero(to, dead * row_bytes)
            to += dead * row_bytes
        at = begin
        while at < end:
            block, row = at // entries, at % entries
            size = min(entries - row, end - at)
            if block < skip_from or block >= skip_to:
                memcpy(to, base + offsets[block - first] + (h * entries + row) * row_bytes, size * row_bytes)
            to += size * row_bytes
            at += size


def _compiled() -> Callable[..., None]:
    """The compiled kernel, cached on disk where there is a place for it."""
    try:
        return cast("Callable[..., None]", numba.njit(cache=True)(_extend_rows))
    except RuntimeError:  # a read-only installation without a writable cache directory
        return cast("Callable[..., None]", numba.njit(_extend_rows))


extend_rows = _compiled()
