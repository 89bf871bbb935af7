"""What ``kvloom bench recovery`` found: a cell, all of them, and whether they show what they should."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kvloom.manager.ways import Way

NOISE = 0.05
"""What is within this of the best is as good."""
WORSE = 0.1
"""How much later than by computing the first token may come."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell; seconds to the first token, medians.

    Attributes:
        model, tokens, bytes_per_s: where; ``device``: ``windows lost`` or ``empty``.
        measured_s: by way, of runs that were forced to go it and of the planner's that went it.
        picked: what the planner took most often; ``planner_s``: its own runs.
        estimated_s: what it expected of every way in its last run.
        replayed: tokens that the replay forwarded, 0 where there was none.
        again_s: recompute, forced as often once more: beside its ``measured_s`` what the machine can tell apart.
        opening_s: of a recompute, what passed before its first forward: asking the tiers, choosing, opening.
        rounds: turns of every way.
        given_up: of the planner's loads, how many.
    """

    model: str
    tokens: int
    bytes_per_s: float
    device: str
    measured_s: dict[str, float]
    picked: str
    planner_s: float
    estimated_s: dict[str, float | None]
    replayed: int
    again_s: float
    opening_s: float
    rounds: int
    given_up: int

    @property
    def noise(self) -> float:
        """How far two measurements of the same way are apart, as a share."""
        first, second = self.measured_s[Way.RECOMPUTE.value], self.again_s
        return max(first, second) / min(first, second) - 1.0

    @property
    def best(self) -> str:
        """The way that was measured fastest."""
        return min(self.measured_s, key=lambda way: self.measured_s[way])

    @property
    def regret(self) -> float:
        """How much longer than the best way what was picked takes, as a share."""
        return self.measured_s[self.picked] / self.measured_s[self.best] - 1.0

    @property
    def against_computing(self) -> float:
        """The planner's time as a share of computing's."""
        return self.planner_s / ((self.measured_s[Way.RECOMPUTE.value] + self.again_s) / 2.0)

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        shown = {
            "best": self.best,
            "regret": self.regret,
            "against_recompute": self.against_computing,
            "noise": self.noise,
        }
        return asdict(self) | shown


@dataclass(frozen=True, slots=True)
class Result:
    """All cells."""

    cells: tuple[Cell, ...]

    def best(self) -> Counter[str]:
        """In how many cells every way was best."""
        return Counter(cell.best for cell in self.cells)

    def right(self) -> int:
        """In how many cells the best way was picked, within the noise."""
        return sum(cell.regret <= NOISE for cell in self.cells)

    def noise(self) -> dict[str, float]:
        """How far two measurements of recompute are apart: half of the cells are below, 9 of 10, all."""
        apart = sorted(cell.noise for cell in self.cells) or [0.0]
        return {"half": apart[len(apart) // 2], "nine_tenths": apart[len(apart) * 9 // 10], "most": apart[-1]}

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        worst = max((cell.against_computing for cell in self.cells), default=0.0)
        return {
            "cells": len(self.cells),
            "best": dict(self.best()),
            "picked": dict(Counter(cell.picked for cell in self.cells)),
            "best_picked": self.right(),
            "worst_against_recompute": worst,
            "worse_than_recompute": sum(cell.against_computing > 1.0 + WORSE for cell in self.cells),
            "noise": self.noise(),
            "rows": [cell.to_json() for cell in self.cells],
        }


def verdict(result: Result, needed: Sequence[Way] = (Way.RECOMPUTE, Way.RESTORE, Way.EXACT_REPLAY)) -> list[str]:
    """What a full sweep should show and this one does not."""
    found, best = [], result.best()
    found += [f"{way.value} was best in {best[way.value]} cells" for way in needed if best[way.value] < 5]
    if result.right() < 0.9 * len(result.cells):
        found.append(f"the best way was picked in {result.right()} of {len(result.cells)} cells")
    slow = [cell for cell in result.cells if cell.against_computing > 1.0 + WORSE]
    if slow:
        worst = max(slow, key=lambda cell: cell.against_computing)
        found.append(f"{len(slow)} cells were more than a tenth slower than computing; the worst {worst.to_json()}")
    return found
