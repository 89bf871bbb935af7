"""How ``kvloom bench recovery`` shows its cells."""

from __future__ import annotations

from dataclasses import replace

from kvloom.bench.recovery import MODELS, MOST_TOKENS, SHORT, Sweep
from kvloom.bench.recovery_cells import NOISE, WORSE, Result
from kvloom.cli.tables import Sheet
from kvloom.config import format_size
from kvloom.errors import InputError

_WAYS = ("recompute", "restore", "exact_replay")


def sweep_of(short: bool, models: str, contexts: str, speeds: str, rounds: int | None, cell_s: float | None) -> Sweep:
    """What to measure; InputError for a model, a context or a speed that there is not."""
    sweep = SHORT if short else Sweep()
    if models:
        names = tuple(name.strip() for name in models.split(","))
        unknown = [name for name in names if name not in MODELS]
        if unknown:
            raise InputError(f"--models: there is no {unknown[0]!r}; name some of {', '.join(MODELS)}")
        sweep = replace(sweep, models=names)
    if contexts:
        tokens = _numbers(contexts, "--contexts", "64,1024")
        if not all(n.is_integer() and 1 <= n <= MOST_TOKENS for n in tokens):
            raise InputError(f"--contexts {contexts!r}: write whole numbers between 1 and {MOST_TOKENS}")
        sweep = replace(sweep, contexts=tuple(int(n) for n in tokens))
    if speeds:
        found = _numbers(speeds, "--speeds", "0.25,4,256")
        if not all(0.01 <= speed <= 1e6 for speed in found):
            raise InputError(f"--speeds {speeds!r}: write MB/s between 0.01 and 1000000")
        sweep = replace(sweep, speeds=tuple(speed * 1e6 for speed in found))
    if rounds is not None:
        sweep = replace(sweep, rounds=rounds)
    return sweep if cell_s is None else replace(sweep, cell_s=cell_s)


def _numbers(text: str, option: str, example: str) -> tuple[float, ...]:
    try:
        return tuple(dict.fromkeys(float(part) for part in text.split(",")))
    except ValueError:
        raise InputError(f"{option} {text!r} is no list of numbers; write for example {option} {example}") from None


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
        "computing, measured twice, is apart by {half:.1%} (half of the cells), {nine_tenths:.1%} (9 of 10), "
        "{most:.1%} (all)".format(**result.noise()),
    ]
