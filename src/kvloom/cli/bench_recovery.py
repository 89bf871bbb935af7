"""How ``kvloom bench recovery`` shows its cells."""

from __future__ import annotations

from kvloom.bench.recovery import NOISE, WORSE, Result
from kvloom.cli.tables import Sheet
from kvloom.config import format_size

_WAYS = ("recompute", "restore", "exact_replay")


def sheet(result: Result) -> Sheet:
    """One row for every cell: what every way took, what was best, what the planner picked."""
    found = Sheet(
        "Seconds to the first token by every way back, and what the planner picked",
        ("model", "tokens", "disk", "device"),
        ("recompute ms", "restore ms", "replay ms", "best", "picked", "planner ms", "regret"),
    )
    for cell in result.cells:
        times = [f"{1e3 * cell.measured_s[way]:,.1f}" if way in cell.measured_s else "-" for way in _WAYS]
        speed = f"{format_size(int(cell.bytes_per_s))}/s"
        names = cell.model, f"{cell.tokens:,}", speed, cell.device
        found.add(*names, *times, cell.best, cell.picked, f"{1e3 * cell.planner_s:,.1f}", f"{cell.regret:.0%}")
    return found


def summary(result: Result) -> list[str]:
    """What all cells say together."""
    best = ", ".join(f"{way} {count}" for way, count in sorted(result.best().items()))
    worst = max(cell.against_computing for cell in result.cells)
    slow = sum(cell.against_computing > 1.0 + WORSE for cell in result.cells)
    return [
        f"best was: {best}",
        f"the best, or within {NOISE:.0%} of it, was picked in {result.right()} of {len(result.cells)} cells",
        f"the first token came at most {worst:.2f} times as late as by computing; in {slow} cells later than 1.1 times",
    ]
