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
    """Like ``compiled``, for steps of loops: there is no call left."""
    return _compile(function, forceinline=True)


def expanded(function: F) -> F:
    """Like ``inlined``, but before anything is optimised: what is constant in a call is constant in its loops."""
    return _compile(function, inline="always")


def _compile(function: F, **options: Any) -> F:
    try:
        return cast("F", numba.njit(cache=True, nogil=True, **options)(function))
    except RuntimeError:  # a read-only installation without a writable cache directory
        return cast("F", numba.njit(nogil=True, **options)(function))
