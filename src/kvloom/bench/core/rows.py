"""What the benchmark says: one row for every case, beside every peer that has it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvloom.bench.core.scenario import Served


@dataclass(frozen=True, slots=True)
class Times:
    """Thread CPU microseconds of some repetitions: median, 10th and 90th percentile, worst, median of the parts."""

    us: float
    spread: tuple[float, float]
    worst: float
    parts: dict[str, float]

    @classmethod
    def of(cls, served: Sequence[Served], part: str | None = None) -> Times | None:
        """Of whole requests, or of one part; None when the side does nothing there."""
        names = [part] if part else list(served[0].parts)
        if not served[0].parts:
            return None
        taken = np.array([[s.parts[name] for name in names] for s in served], dtype=np.float64) / 1000
        whole = taken.sum(axis=1)
        low, middle, high = (round(float(v), 2) for v in np.percentile(whole, [10, 50, 90]))
        parts = {n: round(float(v), 2) for n, v in zip(names, np.median(taken, axis=0), strict=True)}
        return cls(middle, (low, high), round(float(whole.max()), 2), parts)


@dataclass(frozen=True, slots=True)
class Row:
    """One case.

    Attributes:
        config, case, detail, tokens: what was served; ``detail`` tells cases of one name apart.
        objects: in kvloom's index when the repetitions began.
        repeats: repetitions behind every median.
        ours: None where kvloom does nothing (it has no digests to compute).
        peer, theirs: who else did the same, and its times.
    """

    config: str
    case: str
    detail: str
    tokens: int
    objects: int
    repeats: int
    ours: Times | None
    peer: str | None = None
    theirs: Times | None = None

    @property
    def ratio(self) -> float | None:
        """How many times as long the peer takes."""
        if self.ours is None or self.theirs is None or not self.ours.us:
            return None
        return round(self.theirs.us / self.ours.us, 2)

    def to_json(self) -> dict[str, Any]:
        """Plain values; times in microseconds."""
        row: dict[str, Any] = {
            "config": self.config,
            "case": self.case,
            "detail": self.detail,
            "tokens": self.tokens,
            "objects": self.objects,
            "repeats": self.repeats,
            **_times(self.ours, ""),
        }
        if self.peer is not None:
            row |= {"peer": self.peer, **_times(self.theirs, "peer_"), "ratio": self.ratio}
        return row


def _times(times: Times | None, prefix: str) -> dict[str, Any]:
    return {
        f"{prefix}us": times.us if times else None,
        f"{prefix}spread": list(times.spread) if times else None,
        f"{prefix}worst": times.worst if times else None,
        f"{prefix}parts": times.parts if times else {},
    }


def growth(rows: Sequence[Row], start: int = 131_072) -> dict[str, float]:
    """Exponent of time against tokens from ``start`` on, by ``config case``, where at least two lengths are there."""
    found: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        points = found.setdefault(f"{row.config} {row.case}", [])
        if row.tokens >= start and row.ours is not None and not row.detail and row.tokens not in dict(points):
            points.append((row.tokens, row.ours.us))
    exponents = {}
    for name, points in found.items():
        if len(points) > 1:
            tokens, times = np.log(np.array(points)).T
            exponents[name] = round(float(np.polyfit(tokens, times, 1)[0]), 3)
    return exponents
