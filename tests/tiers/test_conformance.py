"""Every tier, and the wrapper of tiers, behind the same tests."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from kvloom.testing.conformance import TierConformance
from kvloom.testing.faults import FaultyTier
from kvloom.tiers.contract import Tier
from kvloom.tiers.disk import DiskStore
from kvloom.tiers.host import HostStore

DOCS = Path(__file__).parents[2] / "docs" / "tiers.md"


class TestHost(TierConformance):
    examples = 40

    def make(self, tmp_path: Path, capacity: int) -> Tier:
        return HostStore(capacity)


class TestHostWithRowsForLargeObjects(TierConformance):
    def make(self, tmp_path: Path, capacity: int) -> Tier:
        return HostStore(capacity, object_bytes=32 << 10, threads=1)


class TestDisk(TierConformance):
    survives_restart = True
    examples = 8

    def make(self, tmp_path: Path, capacity: int) -> Tier:
        return DiskStore.open(tmp_path / "store", capacity)


class TestFaulty(TierConformance):
    def make(self, tmp_path: Path, capacity: int) -> Tier:
        return FaultyTier(HostStore(capacity))


class TestExampleOfTheDocs(TierConformance):
    tells_tails = False

    def make(self, tmp_path: Path, capacity: int) -> Tier:
        (code,) = re.findall(r"```python\n(# example tier\n.*?)```", DOCS.read_text(), re.DOTALL)
        names: dict[str, Any] = {"__name__": "example"}
        exec(compile(code, str(DOCS), "exec"), names)
        made: Tier = names["DictTier"](capacity)
        return made
