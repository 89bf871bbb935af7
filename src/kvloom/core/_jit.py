"""A typed door to Numba: every compiled function of the core goes through ``jit``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba

F = TypeVar("F", bound=Callable[..., Any])


def jit(function: F) -> F:
    """Compile in nopython mode, cached on disk, with the GIL released."""
    return cast("F", numba.njit(cache=True, nogil=True)(function))
