"""A typed door to Numba: every compiled function of the core goes through ``jit``.

Numba's disk cache looks only at the file that a function is written in, but machine code contains what was inlined
from other files too.  So the stamp of every cached function covers the sources of the whole core: after an upgrade
or an edit nothing stale is ever loaded.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterable
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Any, TypeVar, cast

import numba
from numba.core import types

F = TypeVar("F", bound=Callable[..., Any])


@functools.cache
def _sources_stamp() -> bytes:
    """Digest of every source file that compiled code may contain: the core, and the constants of ``kvloom.types``."""
    core = resources.files("kvloom.core")
    constants = (resources.files("kvloom") / "types.py", resources.files("kvloom.kinds") / "cache_state.py")
    return _digest([*core.iterdir(), *constants])


def _digest(files: Iterable[Traversable]) -> bytes:
    digest = hashlib.blake2b(digest_size=32)
    for file in sorted(files, key=lambda f: f.name):
        if file.name.endswith(".py"):
            digest.update(file.name.encode() + b"\0" + hashlib.blake2b(file.read_bytes()).digest())
    return digest.digest()


def _compile(function: F, stamp: bytes, **options: Any) -> F:
    options |= {"nogil": True, "_nrt": False, "no_cfunc_wrapper": True}
    try:
        compiled = numba.njit(cache=True, **options)(function)
    except RuntimeError:  # a read-only installation without a writable cache directory
        return cast("F", numba.njit(**options)(function))
    stamped: Any = getattr(getattr(compiled, "_cache", None), "_cache_file", None)
    if hasattr(stamped, "_source_stamp"):
        stamped._source_stamp = (stamped._source_stamp, stamp)
    else:  # another Numba keeps it elsewhere: rather compile every time than run stale code
        compiled = numba.njit(**options)(function)
    return _widening(compiled)


def _widening(compiled: Any) -> Any:
    """Let calls from compiled code hand over every integer as int64, so that each function is compiled only once.

    Numba would compile a version for every mix of 32-bit, 64-bit and literal integers, three on average.
    """
    template = compiled.get_call_template

    def get_call_template(args: tuple[Any, ...], kws: dict[str, Any]) -> Any:
        return template(tuple(_widest(a) for a in args), kws)

    compiled.get_call_template = get_call_template
    return compiled


def _widest(kind: Any) -> Any:
    if isinstance(kind, types.IntegerLiteral):
        kind = kind.literal_type
    return types.int64 if isinstance(kind, types.Integer) and getattr(kind, "signed", False) else kind


def jit(function: F) -> F:
    """Compile in nopython mode, cached on disk, with the GIL released and without reference counting.

    The core's functions allocate nothing: scratch arrays are arguments.  Numba would otherwise count references to
    every array at every call, atomically, which costs thirty times the work itself.
    """
    # Said aloud: else it takes it from the function that calls it first.
    return _compile(function, _sources_stamp(), forceinline=False)


def inlined(function: F) -> F:
    """Like ``jit``, for small steps of hot loops: always inlined, since passing all arrays costs more than the step."""
    return _compile(function, _sources_stamp(), forceinline=True)


def jit_of(*packages: str) -> Callable[[F], F]:
    """``jit`` for functions of other packages: their stamp covers all sources of those besides the core's."""
    stamp = _sources_stamp() + b"".join(_digest(resources.files(package).iterdir()) for package in packages)
    return functools.partial(_compile, stamp=stamp, forceinline=False)
