"""What every cold tier is: host memory, disk, and whatever others put behind the device.

A tier keeps prefix units under digests and brings their objects back, verified.  It decides nothing about prefixes.
``kvloom.testing.conformance`` runs the same tests against any of them; ``docs/tiers.md`` shows how to write one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from kvloom.tiers.values import Digests, Found, Places, Published, ReadResult, Unit
from kvloom.types import IntArray


@dataclass(frozen=True, slots=True)
class Usage:
    """How full a tier is: ``bytes`` of everything that it holds, never above ``capacity``; objects and units."""

    bytes: int
    capacity: int
    objects: int
    units: int


class Tier(Protocol):
    """A cold tier.  All methods are thread-safe, and none raises for what the medium does."""

    @property
    def name(self) -> str:
        """A short word for reports and metrics, such as ``"host"`` or ``"disk"``."""

    @property
    def durable(self) -> bool:
        """Whether what is published outlives the process."""

    def lookup(self, layout: bytes, digests: Digests, *, root: bytes | None = None) -> Found:
        """What is there of a chain of nodes (uint8 ``[n, 32]``, n may be 0), for objects of this layout (32 bytes).

        ``root``: digest of the empty prefix; where it is given and no node is known, ``Found.tails`` are those of it.
        """

    def read(
        self,
        places: Places,
        into: npt.NDArray[np.uint8],
        offsets: IntArray,
        stop: Callable[[], bool] = lambda: False,
    ) -> ReadResult:
        """Verify objects and put their payloads into ``into`` (uint8, contiguous) at ``offsets``.

        Where one is not ``OK`` its region is as it was, or zero.  Nothing is written after the call ended.  ``stop`` is
        asked every few MiB by whoever does the work, without locks, since it may sleep; what was not read then is
        ``STOPPED``.
        """

    def publish(self, unit: Unit) -> Published:
        """Take a unit, whole or not at all: it is found only once all that its boundary needs is there."""

    def touch(self, layout: bytes, digest: bytes) -> None:
        """The unit that ends at this node was used."""

    def clear(self, layout: bytes | None = None, root: bytes | None = None) -> int:
        """Remove everything, or all of one namespace of one layout; returns how many units went."""

    def usage(self) -> Usage:
        """How full it is; cheap enough to be asked often."""

    def close(self) -> None:
        """Give everything back.  From now on nothing is found and nothing taken."""


@runtime_checkable
class HandsOn(Tier, Protocol):
    """A tier whose units can be moved on to the next one before it evicts them.  Thread-safe, too."""

    def coldest(self, n_bytes: int) -> Iterable[tuple[bytes, bytes]]:
        """(layout, digest) of the units that would go next to free this many bytes, first the one that goes first."""

    def hits(self, layout: bytes, digest: bytes) -> float:
        """Decayed count of the uses of a unit; 0 when it was never used since it was published, or is not there."""

    def unit(self, layout: bytes, digest: bytes) -> Unit | None:
        """A unit as it can be published elsewhere, whole; None when it is not there (any more)."""
