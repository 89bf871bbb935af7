"""The report of ``kvloom spec`` as tables for a terminal."""

from __future__ import annotations

from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from kvloom.cli.tables import Sheet, facts

_LEGEND = (
    "plain full attention is kind compressed with ratio 1; exact window replay: tokens to run again to rebuild all "
    "windows from nothing; LCM: of the tokens of all blocks"
)


def spec_table(report: dict[str, Any]) -> RenderableType:
    """A report of :func:`kvloom.spec.report.spec_report`, for people."""
    title = f"{report['model']}  ({report['format']} format)"
    kinds = Sheet(title, ("kind",), ("layers", "bytes/token", f"at {report['context']:,} tokens", "share"))
    total = max(report["bytes_per_request"], 1)
    for name, row in report["kinds"].items():
        per_token = f"{row['bytes_per_token']:,}" if row["bytes_per_token"] else "–"
        size = row["bytes_per_request"]
        kinds.add(name, str(row["layers"]), per_token, _size(size), f"{size / total:.1%}")
    kinds.add(Text("total", "bold"), "", "", Text(_size(report["bytes_per_request"]), "bold"), "")
    groups = Sheet(
        "KV cache groups",
        ("group", "kind", "holds"),
        ("layers", "slot", "pad", "/page", "waste"),
        prose={"holds": 16},
    )
    for row in report["groups"]:
        groups.add(
            row["name"],
            row["kind"],
            _holds(row),
            str(row["layers"]),
            _size(row["slot_bytes"]),
            f"{row['padding']:.1%}",
            f"{row['slots_per_page']:,}",
            f"{row['page_waste']:.1%}",
        )
    notes = [Text(f"* {note}", style="dim") for note in report["notes"]]
    return Group(kinds, Text(), groups, Text(), facts(_facts(report)), *notes, Text(f"* {_LEGEND}", style="dim"))


def _facts(report: dict[str, Any]) -> list[tuple[str, str]]:
    page, pages = report["page"], report["pages_by_tier"]
    return [
        ("global bytes per token", f"{report['global_bytes_per_token']:,}"),
        ("bytes of full windows", f"{report['window_bytes']:,}"),
        ("exact window replay", f"{report['exact_replay_tokens']:,} tokens"),
        ("LCM / segment", f"{report['lcm_tokens']:,} / {report['segment_tokens']:,} tokens"),
        ("page", f"{_size(page['bytes'])}, worst waste {page['worst_waste']:.1%}"),
        ("page by tier", ", ".join(f"{_size(row['bytes'])} from {_size(row['tier_bytes'])}" for row in pages)),
        ("slots of one request at its peak", _size(report["slot_bytes_per_request"])),
    ]


def _holds(row: dict[str, Any]) -> str:
    if not row["block_tokens"]:
        return "snapshot"
    span = f"{row['block_tokens']:,} tokens"
    if row["ratio"] > 1:
        span += f" = {row['block_entries']:,} × {row['ratio']}"
    if row["window"]:
        span += f", {'chunk' if row['chunked'] else 'window'} {row['window']:,}"
    return span


def _size(count: int) -> str:
    """Bytes in the unit that people read (binary)."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            break
        value /= 1024
    return f"{count} B" if unit == "B" else f"{value:,.2f} {unit}"
