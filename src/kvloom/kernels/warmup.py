"""Compile every loop of the cold forms, by using it on small slots."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvloom.kernels import fp8, planes
from kvloom.kernels.forms import decode, encode, forms_of
from kvloom.kernels.slots import FP8_SOURCES, slot_format
from kvloom.spec.model_spec import GroupSpec, TensorSpec
from kvloom.types import Kind


def warm_up() -> int:
    """Compile what is not on disk yet, and return how many functions that were.  Takes a few seconds the first time."""
    before = _compilations()
    for dtype in FP8_SOURCES:
        tensor = TensorSpec("keys", (1, 100), dtype, entry_axis=1)
        fmt = slot_format(GroupSpec("warm up", Kind.COMPRESSED, (0,), (tensor,), block_tokens=10))
        slot, into = np.zeros(fmt.nbytes, np.uint8), np.zeros(fmt.nbytes, np.uint8)
        for form in forms_of(fmt):
            payload = encode(form, slot, fmt)
            assert payload is not None
            decode(form, payload, into, fmt)
    return _compilations() - before


def functions() -> list[Any]:
    """Every compiled function of the cold forms (Numba dispatchers), each once."""
    found = {id(value): value for module in (fp8, planes) for value in vars(module).values()}
    return [value for value in found.values() if hasattr(value, "py_func") and hasattr(value, "signatures")]


def _compilations() -> int:
    return sum(len(function.stats.cache_misses) for function in functions())
