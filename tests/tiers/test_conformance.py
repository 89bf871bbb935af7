"""Every tier, and the wrapper of tiers, behind the same tests."""

from __future__ import annotations

from pathlib import Path

from tests.tiers.keyed.stores import Dict, example

from kvloom.testing.conformance import TierConformance
from kvloom.testing.faults import FaultyTier
from kvloom.tiers.contract import HandsOn, Tier
from kvloom.tiers.disk import DiskStore
from kvloom.tiers.host import HostStore
from kvloom.tiers.keyed import KeyedTier


class TestHost(TierConformance):
    examples = 40

    def make(self, tmp_path: Path, capacity: int) -> Tier:
        return HostStore(capacity)

    def damage(self, tier: Tier, tmp_path: Path) -> bool:
        assert isinstance(tier, HostStore)
        used = tier._books.memory[: 4 << 20]
        used[100::256] ^= 0x10
        return True


class TestHostWithRowsForLargeObjects(TierConformance):
    def make(self, tmp_path: Path, capacity: int) -> Tier:
        return HostStore(capacity, object_bytes=32 << 10, threads=1)


class TestDisk(TierConformance):
    survives_restart = True
    examples = 8

    def make(self, tmp_path: Path, capacity: int) -> Tier:
        return DiskStore.open(tmp_path / "store", capacity)

    def damage(self, tier: Tier, tmp_path: Path) -> bool:
        for path in (tmp_path / "store" / "extents").iterdir():
            data = bytearray(path.read_bytes())
            for at in range(4096 + 300, len(data), 256):
                data[at] ^= 0x10
            path.write_bytes(data)
        return True


class TestFaulty(TierConformance):
    def make(self, tmp_path: Path, capacity: int) -> Tier:
        return FaultyTier(HostStore(capacity))


class TestKeyedInMemory(TierConformance):
    examples = 40

    def make(self, tmp_path: Path, capacity: int) -> Tier:
        return KeyedTier(Dict(), capacity, name="memory", at_once=4)


class TestExampleOfTheDocs(TierConformance):
    survives_restart = True

    def make(self, tmp_path: Path, capacity: int) -> Tier:
        made: Tier = example()["FilesTier"](tmp_path / "kv", capacity)
        return made

    def damage(self, tier: Tier, tmp_path: Path) -> bool:
        for path in (tmp_path / "kv").glob("o*"):
            data = path.read_bytes()
            path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        return True


def test_the_example_of_the_docs_is_short_and_hands_units_on(tmp_path: Path) -> None:
    assert len(example()["source"].splitlines()) <= 60
    assert isinstance(example()["FilesTier"](tmp_path, 1 << 20), HandsOn)
