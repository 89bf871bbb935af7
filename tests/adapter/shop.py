"""Engines with disk stores in one directory, and cold answers to compare with."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from tests.tiers.disk.faults import FailingOps

from kvloom.adapters.transformers import Engine, attach
from kvloom.engine.answers import Answer, answer, cold_chunked, prefill_chunks
from kvloom.tiers.disk import DiskStore

SHAPE: dict[str, Any] = {"device": "4MiB", "block_size": 16, "segment": 32, "snapshot_interval": 32}
COUNT = 4


class Shop:
    """Engines with stores in one directory, and cold answers."""

    def __init__(self, lab: Any, place: Path) -> None:
        self.lab, self.place = lab, place
        self.ops = FailingOps()
        self.now = 1000.0

    def store(self) -> DiskStore:
        return DiskStore.open(self.place, 64 << 20, ops=self.ops, clock=lambda: self.now)

    def engine(self, family: str, *, dtype: str = "float32", store: DiskStore | None = None, **options: Any) -> Engine:
        model = options.pop("model", None) or self.lab.model(family, dtype)
        return attach(model, **{**SHAPE, **options}, store=store or self.store())

    def ids(self, count: int = 6 * 32 + 11, seed: int = 0) -> list[int]:
        found: list[int] = self.lab.ids(count, seed)[0].tolist()
        return found

    def ask(self, engine: Engine, ids: list[int], **options: Any) -> tuple[int, Answer]:
        """Open, answer, close: (reused tokens, answer)."""
        with engine.open(ids, **options) as session:
            found = answer(session, count=COUNT, started=time.perf_counter())
            reused = session.reused
        if engine.cold is not None:
            engine.cold.flush()
        engine.manager.check_integrity()
        assert len(engine.manager.transfers) == 0
        assert engine.manager.in_use() == 0
        return reused, found

    def once(self, family: str, ids: list[int], *, engine: dict[str, Any] | None = None, **options: Any) -> int:
        """Reused tokens of one request to a fresh engine, whose answer is that of a cold run."""
        with self.engine(family, **(engine or {})) as made:
            reused, found = self.ask(made, ids, **options)
            assert found.same_as(self.cold(made, ids))
        return reused

    @staticmethod
    def cold(engine: Engine, ids: list[int]) -> Answer:
        return cold_chunked(engine.model, ids, prefill_chunks(len(ids), engine.spec.segment_tokens), count=COUNT)

    def size(self) -> int:
        return sum(path.stat().st_size for path in (self.place / "extents").iterdir())


def flip(place: Path, every: int) -> int:
    """Flip one byte of every ``every``-th page of the extents but the first; returns how many."""
    count = 0
    for path in (place / "extents").iterdir():
        data = bytearray(path.read_bytes())
        for at in range(4096 + 1000, len(data), 4096 * every):
            data[at] ^= 0x10
            count += 1
        path.write_bytes(data)
    return count
