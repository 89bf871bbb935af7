"""How ``kvloom bench sessions`` shows its rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvloom.bench.sessions import PLACES
from kvloom.cli.tables import Sheet
from kvloom.config import format_size

if TYPE_CHECKING:
    from kvloom.bench.sessions import Row


_HEADS = {"device": "on device", "prefetched": "prefetched", "arriving": "arriving"}
"""Where the objects that a turn needs were when it began."""


def sheet(rows: Sequence[Row]) -> Sheet:
    """One row for every cap."""
    found = Sheet(
        "Sessions in turn on a device that holds a part of their state",
        ("device", "prefetch"),
        (
            "first token ms",
            "turn ms",
            "of no cap",
            "computed again",
            *(_HEADS.get(place, f"in {place}") for place in PLACES),
            "read",
            "identical",
        ),
    )
    for row in rows:
        loaded = ", ".join(f"{name} {format_size(size)}" for name, size in row.loaded_bytes.items() if size)
        found.add(
            format_size(row.device_bytes) if row.device_share < 1 else "all of it",
            "yes" if row.prefetch else "no",
            f"{1e3 * row.ttft_s:,.1f}",
            f"{1e3 * row.latency_s:,.1f}",
            f"{row.latency_ratio:.2f}",
            f"{row.recomputed:,}",
            *(f"{row.found[place]:.0%}" for place in PLACES),
            loaded or "-",
            "yes" if row.identical else "NO",
        )
    return found
