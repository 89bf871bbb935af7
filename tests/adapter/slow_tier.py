"""A disk store whose reads wait, fail or are looked at, one by one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.adapter.shop import SHAPE, Shop

from kvloom.adapters.transformers import Engine, attach
from kvloom.tiers.disk import DiskStore
from kvloom.tiers.values import Places, ReadResult, Result
from kvloom.transfer import parts
from kvloom.transfer.options import Restoring, TransferOptions


class SlowTier:
    """A tier around a store.  ``before`` is called with the number of every read, from 0 on, and what it is to bring.

    Attributes:
        spoil: numbers of reads whose first record does not arrive, and how; ``spoil_from``: all reads from that one on.
        reads: reads so far.
    """

    def __init__(self, inner: DiskStore) -> None:
        self.inner = inner
        self.name, self.durable = inner.name, inner.durable
        self.lookup, self.publish, self.touch = inner.lookup, inner.publish, inner.touch
        self.clear, self.usage, self.close = inner.clear, inner.usage, inner.close
        self.before: Callable[[int, Places], None] = lambda _number, _places: None
        self.spoil: dict[int, Result] = {}
        self.spoil_from = 1 << 30
        self.reads = 0

    def read(self, places: Places, into: Any, offsets: Any, stop: Callable[[], bool] = lambda: False) -> ReadResult:
        number, self.reads = self.reads, self.reads + 1
        self.before(number, places)
        found = self.inner.read(places, into, offsets, stop)
        how = self.spoil.get(number, Result.INTEGRITY if number >= self.spoil_from else None)
        if how is None:
            return found
        results = found.results.copy()
        results[0] = how
        at, length = int(offsets[0]), int(places.entries["length"][0])
        into[at : at + length] = 0x5A  # what nobody verified must not be read: this would change any answer
        return replace(found, results=results)


class Hold:
    """Reads of blocks that have nothing of the layers before ``layer`` wait until ``let`` is set."""

    def __init__(self, engine: Engine, tier: SlowTier, layer: int = 2) -> None:
        self.let, self.held = threading.Event(), threading.Event()
        self._layer, self._spec, self._parts = layer, engine.spec, engine.cold.links[0].parts
        tier.before = self

    def __call__(self, _number: int, places: Places) -> None:
        group = places.entries["group"].astype(np.int64)
        part = places.entries["column"].astype(np.int64) % self._parts.count[group]
        blocks = np.array([not self._spec.groups[g].is_snapshot for g in group.tolist()])
        if blocks.all() and self._parts.first_layer[group, part].min() >= self._layer:
            self.held.set()
            assert self.let.wait(60)


def layered(shop: Shop, family: str, **options: Any) -> tuple[Engine, SlowTier]:
    """An engine that takes every restore layer by layer, from a tier whose reads can be held."""
    tier = SlowTier(shop.store())
    chosen = {"restoring": Restoring.LAYERS, **options.pop("chosen", {})}
    model = shop.lab.model(family, options.pop("dtype", "float32"))
    engine = attach(model, **{**SHAPE, **options}, tiers=[tier], transfers=TransferOptions(**chosen))
    return engine, tier


@pytest.fixture
def cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut the slots of tiny models, too: every layer is a part."""
    monkeypatch.setattr(parts, "SMALLEST", 1)


def bytes_of(engine: Engine, group: int, slots: Any) -> bytes:
    """The bytes of slots of a group."""
    size = engine.spec.groups[group].slot_bytes
    memory = engine.arena.host_memory()
    assert memory is not None
    offsets = engine.manager.geometry.slot_offsets(group, np.asarray(slots))
    return b"".join(memory[at : at + size].tobytes() for at in offsets.tolist())
