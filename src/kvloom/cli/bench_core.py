"""What ``kvloom bench core`` asks for and shows."""

from __future__ import annotations

from collections.abc import Iterable

from kvloom.bench.core.rows import Row
from kvloom.cli.tables import Sheet
from kvloom.errors import ConfigError


def names(text: str, option: str, known: Iterable[str]) -> tuple[str, ...]:
    """The names of a list with commas, all of them when it is empty."""
    asked = tuple(name.strip() for name in text.split(",") if name.strip())
    for name in asked:
        if name not in known:
            raise ConfigError(f"--{option} {name!r} is not known; use one of: {', '.join(known)}")
    return asked or tuple(known)


def numbers(text: str, option: str, default: tuple[int, ...]) -> tuple[int, ...]:
    """The whole numbers of a list with commas, ``default`` when it is empty."""
    try:
        asked = tuple(int(part.replace("_", "")) for part in text.split(",") if part.strip())
    except ValueError:
        raise ConfigError(f"--{option} {text!r} is not a list of whole numbers, such as 8192,131072") from None
    if any(number < 1024 for number in asked):
        raise ConfigError(f"--{option} {text!r}: use at least 1024")
    return asked or default


def core_table(rows: list[Row]) -> Sheet:
    """A line for every row and peer."""
    peers = any(row.peer for row in rows)
    numbers = ("tokens", "kvloom", "p10-p90", *(("beside", "µs", "ratio") if peers else ()))
    sheet = Sheet("Metadata work, µs of CPU time", ("config", "case"), numbers)
    for row in rows:
        case = f"{row.case}: {row.detail}" if row.detail else row.case
        spread = f"{row.ours.spread[0]:,.0f}-{row.ours.spread[1]:,.0f}" if row.ours else ""
        cells = [row.config, case, f"{row.tokens:,}", f"{row.ours.us:,.1f}" if row.ours else "-", spread]
        if peers:
            ratio = f"{row.ratio:,.1f}x" if row.ratio is not None else ""
            cells += [row.peer or "", f"{row.theirs.us:,.1f}" if row.theirs else "", ratio]
        sheet.add(*cells)
    return sheet
