"""Cells of ``kvloom bench data``: sides that take turns, and what came of them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

Report = Callable[[str], None]
"""Called before every turn with what is measured."""
Side = Callable[[], float]
"""Does the work once; returns seconds."""


@dataclass(frozen=True, slots=True)
class Row:
    """One side of one cell.  Rates are GB/s of payload; medians, and the least and most.

    ``beside`` names what the side is compared with; ``ratio`` is the median of the ratios of each turn, ``wanted`` what
    it has to be.  ``facts``: numbers that say more, such as ``device_bytes``, what the kernel read from the device for
    one restore.
    """

    section: str
    what: str
    object_bytes: int
    total_bytes: int
    gbps: float
    gbps_least: float
    gbps_most: float
    beside: str = ""
    beside_gbps: float | None = None
    ratio: float | None = None
    ratio_least: float | None = None
    ratio_most: float | None = None
    wanted: float | None = None
    facts: Mapping[str, float | int] = field(default_factory=dict)

    @property
    def met(self) -> bool | None:
        """Whether the ratio is what is wanted; None where nothing is."""
        return None if self.wanted is None or self.ratio is None else self.ratio >= self.wanted

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self) | {"met": self.met}


@dataclass(frozen=True, slots=True)
class Cell:
    """What all sides of a cell have in common."""

    section: str
    object_bytes: int
    total_bytes: int


def take_turns(sides: Mapping[str, Side], repeats: int, report: Callable[[], None]) -> dict[str, list[float]]:
    """Seconds of every side; the first turn, a rehearsal, is left out.

    They work in turn, there and back, so that each one comes as often before as behind another.
    """
    times: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(repeats + 1):
        report()
        for name in list(sides) if turn % 2 else reversed(list(sides)):
            seconds = sides[name]()
            if turn:
                times[name].append(seconds)
    return times


def fastest(times: Mapping[str, list[float]], names: Sequence[str]) -> str:
    """Which of the sides ``names`` has the best median."""
    return min(names, key=lambda name: statistics.median(times[name]))


def row(
    cell: Cell,
    what: str,
    times: list[float],
    beside: str = "",
    others: list[float] | None = None,
    facts: Mapping[str, float | int] | None = None,
    wanted: float | None = None,
) -> Row:
    """The row of one side, compared with the times of another where they are given."""
    rates = [cell.total_bytes / seconds / 1e9 for seconds in times]
    made = Row(
        cell.section,
        what,
        cell.object_bytes,
        cell.total_bytes,
        cell.total_bytes / statistics.median(times) / 1e9,
        min(rates),
        max(rates),
        facts=facts or {},
    )
    if others is None:
        return made
    ratios = [b / a for a, b in zip(times, others, strict=True)]
    return replace(
        made,
        beside=beside,
        beside_gbps=cell.total_bytes / statistics.median(others) / 1e9,
        ratio=statistics.median(ratios),
        ratio_least=min(ratios),
        ratio_most=max(ratios),
        wanted=wanted,
    )
