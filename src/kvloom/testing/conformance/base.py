"""What all parts of the suite share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest

from kvloom.testing.conformance.strict import Strict
from kvloom.testing.units import MIB, World
from kvloom.tiers.contract import Tier

ROOT, OTHER = b"r" * 32, b"o" * 32
WORLD = World()


class Base(ABC):
    """Makes tiers, and says what they can."""

    survives_restart: ClassVar[bool] = False
    """Whether a tier that is closed and made again at the same path holds what it held."""
    tells_tails: ClassVar[bool] = True
    """Whether ``Found.tails`` is filled in."""
    capacity: ClassVar[int] = 64 * MIB
    """Where nothing has to go; at least this much is needed."""
    small: ClassVar[int] = 16 * MIB
    """Where a few of the units below fit, and dozens do not."""
    examples: ClassVar[int] = 15
    """Runs of the state machine."""

    @abstractmethod
    def make(self, tmp_path: Path, capacity: int) -> Tier:
        """A tier of ``capacity`` bytes; at the same path again after ``close`` for one that survives restarts."""

    def damage(self, tier: Tier, tmp_path: Path) -> bool:
        """Change a byte, at least, of every payload that lies on the medium; False where a test cannot do that."""
        return False

    def open(self, tmp_path: Path, capacity: int) -> Strict:
        """A tier whose calls are checked."""
        return Strict(self.make(tmp_path, capacity), capacity)

    @pytest.fixture
    def tier(self, tmp_path: Path) -> Iterator[Strict]:
        """An empty tier."""
        made = self.open(tmp_path, self.capacity)
        yield made
        made.close()
