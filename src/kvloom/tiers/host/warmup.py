"""Compile every loop of the host tier, by using it on a few small units."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np

from kvloom.core import cuckoo
from kvloom.tiers.hashing import sums
from kvloom.tiers.host import checked, counting, heap, nodes, pages, records
from kvloom.tiers.host.arrays import MINIMUM
from kvloom.tiers.host.store import HostStore
from kvloom.tiers.values import Need, NewObject, Unit
from kvloom.types import Grade, PayloadForm

_MODULES: tuple[ModuleType, ...] = (checked, counting, heap, nodes, pages, records, sums, cuckoo)
_SIZES = (200, 3000, 9000)
_LAYOUT, _ROOT = bytes(32), bytes([1]) * 32


def warm_up() -> int:
    """Compile what is not on disk yet, and return how many functions that were.  Takes some seconds the first time."""
    before = _compilations()
    with HostStore(4 * MINIMUM) as tier:
        for number in range(40):  # more than fits, so that units are evicted
            unit = _unit(number, 1 + number % 3)
            tier.publish(unit)
            found = tier.lookup(_LAYOUT, unit.digests, root=_ROOT)
            lengths = found.places.entries["length"].astype(np.int64)
            into = np.zeros(max(1, int(lengths.sum())), np.uint8)
            tier.read(found.places, into, np.cumsum(lengths) - lengths)
            tier.touch(_LAYOUT, unit.digests[-1].tobytes())
            tier.unit(_LAYOUT, unit.digests[-1].tobytes())
            for places in tier.cold_objects(10.0, 1 << 20):
                tier.rewrite(places.take(np.array([0])), [b"x"], PayloadForm.LOSSLESS, Grade.FAITHFUL)
        tier.coldest(1 << 20)
        list(tier.catalogue())
        tier.clear()
    return _compilations() - before


def _unit(number: int, rows: int) -> Unit:
    """A chain of ``rows`` nodes and a shorter end; chains of even numbers begin alike."""
    digests = np.zeros((rows + 1, 32), np.uint8)
    for row in range(rows + 1):
        digests[row, :3] = number if number % 2 or row else 0, row + 1, 7
    tokens = np.arange(4 * rows + 2, dtype=np.int32)
    objects = [
        NewObject(row, group, 0, Grade.FAITHFUL, bytes([row]) * size)
        for row in range(rows + 1)
        for group, size in enumerate(_SIZES)
    ]
    needs = [Need(group, 0, rows + 1) for group in range(len(_SIZES))]
    return Unit(_LAYOUT, _ROOT, digests, tokens, 4, objects, needs)


def functions() -> list[Any]:
    """Every compiled function of the host tier (Numba dispatchers), each once."""
    found = {id(value): value for module in _MODULES for value in vars(module).values()}
    return [value for value in found.values() if hasattr(value, "py_func") and hasattr(value, "signatures")]


def _compilations() -> int:
    return sum(len(function.stats.cache_misses) for function in functions())
