"""Tiers that each break one promise, and the suite for each, as a newcomer would write it.  Run by test_wrong_tiers."""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tests.tiers.keyed.stores import Dict

from kvloom.testing.conformance import TierConformance
from kvloom.tiers.contract import Tier
from kvloom.tiers.keyed import KeyedTier
from kvloom.tiers.keyed.sealed import HEADER, Sealed
from kvloom.tiers.ledger import Ledger, Order
from kvloom.tiers.values import Digests, Found, Outcome, Places, Published, ReadResult, Result, Unit
from kvloom.types import IntArray

Stop = Callable[[], bool]
Memory = npt.NDArray[np.uint8]


class Right(KeyedTier):
    def __init__(self, capacity: int) -> None:
        self.bytes = Dict()
        super().__init__(self.bytes, capacity, name="mine")


class ForgetsStop(Right):
    def read(self, places: Places, into: Memory, offsets: IntArray, stop: Stop = lambda: False) -> ReadResult:
        return super().read(places, into, offsets)


class LeavesBytes(Right):
    """Copies first and looks at the result afterwards."""

    def read(self, places: Places, into: Memory, offsets: IntArray, stop: Stop = lambda: False) -> ReadResult:
        done = super().read(places, into, offsets, stop)
        for i in np.flatnonzero(done.results != Result.OK).tolist():
            into[offsets[i] : offsets[i] + int(places.entries["length"][i]) // 2] = 7
        return done


class EvictsObjects(Right):
    """Drops the oldest object, whatever needs it."""

    def _new_ledger(self) -> Ledger:
        class ByObject(Ledger):
            def evict(self) -> bool:
                held = np.flatnonzero(self.rows["serial"] > 0)
                if not len(held):
                    return False
                row = held[np.argmin(self.rows["serial"][held])]
                node = next(node for node in self.nodes.values() if (node.rows == row).any())
                self.drop_objects(np.array([row]), node.above())
                for end in node.ends():
                    assert end.unit is not None
                    end.unit = replace(end.unit, rows=end.unit.rows[end.unit.rows != row])
                return True

        return ByObject(self._garbage, self._capacity, order=Order.HEAT, keeps_tokens=True)


class IgnoresLayout(Right):
    one = b"1" * 32

    def lookup(self, layout: bytes, digests: Digests, *, root: bytes | None = None) -> Found:
        found = super().lookup(self.one, digests, root=root)
        return replace(found, places=replace(found.places, layout=layout))

    def read(self, places: Places, into: Memory, offsets: IntArray, stop: Stop = lambda: False) -> ReadResult:
        return super().read(replace(places, layout=self.one), into, offsets, stop)

    def publish(self, unit: Unit) -> Published:
        return super().publish(replace(unit, layout=self.one))

    def touch(self, layout: bytes, digest: bytes) -> None:
        super().touch(self.one, digest)

    def clear(self, layout: bytes | None = None, root: bytes | None = None) -> int:
        return super().clear(None if layout is None else self.one, root)


class RaisesWhenFull(Right):
    def publish(self, unit: Unit) -> Published:
        usage = self.usage()
        if usage.bytes + sum(item.size + HEADER for item in unit.objects) > usage.capacity:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().publish(unit)


class ChecksNothing(Right):
    def read(self, places: Places, into: Memory, offsets: IntArray, stop: Stop = lambda: False) -> ReadResult:
        done = super().read(places, into, offsets, stop)
        for i in np.flatnonzero(done.results == Result.INTEGRITY).tolist():
            entry = places.entries[i]
            raw = self.bytes.kept[Sealed.of_row(places.layout, places.digests[i].tobytes(), entry).key]
            into[offsets[i] : offsets[i] + int(entry["length"])] = np.frombuffer(raw[HEADER:], np.uint8)
            done.results[i] = Result.OK
        return done


class SaysItIsThere(Right):
    """Takes what it cannot complete."""

    def publish(self, unit: Unit) -> Published:
        done = super().publish(unit)
        return Published(Outcome.PUBLISHED) if done.outcome is Outcome.INCOMPLETE else done


class TestForgetsStop(TierConformance):
    examples = 2

    def make(self, tmp_path: Path, capacity: int) -> Tier:
        kind: Any = globals()[type(self).__name__.removeprefix("Test")]
        made: Tier = kind(capacity)
        return made

    def damage(self, tier: Tier, tmp_path: Path) -> bool:
        assert isinstance(tier, Right)
        kept = tier.bytes.kept
        kept.update({key: raw[:-1] + bytes([raw[-1] ^ 1]) for key, raw in kept.items()})
        return True


class TestLeavesBytes(TestForgetsStop):
    pass


class TestEvictsObjects(TestForgetsStop):
    pass


class TestIgnoresLayout(TestForgetsStop):
    pass


class TestRaisesWhenFull(TestForgetsStop):
    pass


class TestChecksNothing(TestForgetsStop):
    pass


class TestSaysItIsThere(TestForgetsStop):
    pass


class TestRight(TestForgetsStop):
    pass
