"""How this package compiles: cached on disk, with the GIL released.  A compiled function uses only its own file."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba

F = TypeVar("F", bound=Callable[..., Any])


def compiled(function: F) -> F:
    """``function`` in nopython mode, compiled when it is first called; safe to call from several threads."""
    return _compile(function, forceinline=False)


def inlined(function: F) -> F:
    """Like ``compiled``, for steps of loops: what is constant in a call becomes constant in the loop."""
    return _compile(function, forceinline=True)


def _compile(function: F, **options: Any) -> F:
    try:
        return cast("F", numba.njit(cache=True, nogil=True, **options)(function))
    except RuntimeError:  # a read-only installation without a writable cache directory
        return cast("F", numba.njit(nogil=True, **options)(function))
