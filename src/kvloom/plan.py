"""Frozen values through which deciding (manager) and doing (tiers, adapters) meet.

Nothing here holds a reference to the manager.  Arrays are read-only by convention: a receiver
must not write to them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from kvloom.types import Grade, Int32Array, Kind, Reason


def _empty() -> Int32Array:
    return np.empty(0, dtype=np.int32)


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """Slot-to-slot copies inside one device arena, to run in order, before the next forward.

    Copy i: if ``src[i] < 0`` the slot ``dst[i]`` of group ``group[i]`` is filled with zero bytes,
    otherwise slot ``src[i]`` is copied over it.  Then, when ``entries[i] >= 0``, the rows of entry
    ``entries[i]`` and later are set to zero in the destination (a sealed, zero-padded partial block).

    ``ticket`` names the plan in ``Manager.complete`` / ``Manager.abandon``.  Objects that the plan
    publishes stay invisible until it is completed.
    """

    ticket: int
    group: Int32Array = field(default_factory=_empty)
    src: Int32Array = field(default_factory=_empty)
    dst: Int32Array = field(default_factory=_empty)
    entries: Int32Array = field(default_factory=_empty)

    def __len__(self) -> int:
        return len(self.group)


@dataclass(frozen=True, slots=True)
class Limit:
    """One thing that kept a hit from reaching ``position``.

    ``kind`` and ``group`` are None when no object is at fault (tokens differ, last token).
    """

    reason: Reason
    position: int
    tier: str = "device"
    kind: Kind | None = None
    group: str | None = None


@dataclass(frozen=True, slots=True)
class Explanation:
    """What a lookup found and what stopped it.

    ``boundary`` is the number of reused tokens, ``grade`` the grade of the hit (None for a miss).
    ``limits`` says, for the nearest boundary beyond the hit that the tokens would have allowed,
    each thing that was missing there; ``known_tokens`` is how many leading tokens are known to
    the index at all.
    """

    boundary: int
    grade: Grade | None
    prompt_tokens: int
    known_tokens: int
    limits: Sequence[Limit]
