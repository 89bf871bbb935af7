"""Which functions of the core are compiled, and whether all of them are on disk already."""

from __future__ import annotations

import pkgutil
from importlib import import_module
from typing import Any

import kvloom.core
from kvloom.core._jit import jit


@jit
def mark(value: int) -> int:
    """Compiled last of all by a warm-up, so that a copy of it on disk says that all others are there, too."""
    return value + 1


def functions() -> list[Any]:
    """Every compiled function of the core (Numba dispatchers), each once."""
    found: dict[int, Any] = {}
    for module in pkgutil.iter_modules(kvloom.core.__path__):
        for value in vars(import_module(f"kvloom.core.{module.name}")).values():
            if hasattr(value, "py_func") and hasattr(value, "signatures"):
                found[id(value)] = value
    return list(found.values())


def compilations() -> int:
    """How many functions, counted once per signature, this process has compiled and not read from disk."""
    return sum(len(function.stats.cache_misses) for function in functions())


def cache_folder() -> str | None:
    """Where machine code is kept; None when no folder is writable, and every process has to compile anew."""
    folder: str | None = mark.stats.cache_path  # type: ignore[attr-defined]
    return folder


def complete() -> bool:
    """Whether a warm-up of these very sources, with this Numba on this processor, has left everything on disk."""
    load_index = getattr(getattr(getattr(mark, "_cache", None), "_cache_file", None), "_load_index", None)
    return load_index is not None and bool(load_index())
