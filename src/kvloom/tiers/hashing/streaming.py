"""Copies past the cache, for bytes that nobody looks at soon: a store then costs no read of what it replaces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from numba.core import types
from numba.extending import intrinsic

LINE = 64


def _emit_line(_typing: Any, _dst: Any, _src: Any) -> Any:
    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        from llvmlite import ir

        kind = ir.VectorType(ir.IntType(64), 8)
        dst, src = (builder.inttoptr(a, kind.as_pointer()) for a in args)
        store = builder.store(builder.load(src, align=1), dst, align=LINE)
        store.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)]))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


def _emit_fence(_typing: Any) -> Any:
    def generate(context: Any, builder: Any, _signature: Any, _args: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


copy_line = cast("Callable[[int, int], None]", intrinsic(_emit_line))
"""Copy 64 bytes to an address that is a multiple of 64."""
fence = cast("Callable[[], None]", intrinsic(_emit_fence))
"""Other threads see what was copied before."""
