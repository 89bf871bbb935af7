"""``kvloom bench``: benchmarks that ship with the package."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvloom.cli import streams
from kvloom.cli.failures import guarded
from kvloom.cli.warmup import ensure_compiled

if TYPE_CHECKING:
    from kvloom.bench.fragmentation import Row
    from kvloom.cli.tables import Sheet

bench = typer.Typer(name="bench", help="Measure kvloom beside what it replaces.", no_args_is_help=True)


@bench.command()
@guarded
def fragmentation(
    trace: Annotated[
        Path | None, typer.Option(help="Trace file whose lengths are the third case (default: a sample of Azure's).")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object on stdout and nothing else there.")
    ] = False,
) -> int:
    """Contiguous allocation, reserved or growing, beside paging: what is used of what is reserved, and append times."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from kvloom.bench.azure import CONVERSATIONS
    from kvloom.bench.fragmentation import BLOCK, run_all
    from kvloom.replay.readers import read_trace

    lengths: list[tuple[int, int]] = list(CONVERSATIONS)
    if trace is not None:
        read = read_trace(trace)
        lengths = list(zip(read.inputs.tolist(), read.outputs.tolist(), strict=True))
    ensure_compiled()
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=streams.progress(), transient=True, disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task("warming up")
        rows = run_all(
            lengths, lambda what, done, of: progress.update(task, description=what, completed=done, total=of)
        )
    if as_json:
        streams.emit_json({"block_size": BLOCK, "rows": [row.to_json() for row in rows]})
    else:
        streams.screen().print(_table(rows))
    return 0


@bench.command()
@guarded
def tables(
    entries: Annotated[int, typer.Option(min=10_000, help="Largest cuckoo table.")] = 10_000_000,
    device: Annotated[str, typer.Option(help="Device tier whose metadata is added up.")] = "64GiB",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object on stdout and nothing else there.")
    ] = False,
) -> int:
    """Digests of prefixes, the table from digests to places, and metadata bytes per KV byte for every preset."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from kvloom.bench.tables import run_all
    from kvloom.cli.bench_tables import sheets
    from kvloom.config import parse_size

    device_bytes = parse_size(device)
    ensure_compiled()
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=streams.progress(), transient=True, disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task("warming up")
        result = run_all(
            lambda what, done, of: progress.update(task, description=what, completed=done, total=of),
            most_entries=entries,
            device_bytes=device_bytes,
        )
    if as_json:
        streams.emit_json(result.to_json())
    else:
        for sheet in sheets(result):
            streams.screen().print(sheet)
    return 0


def _table(rows: list[Row]) -> Sheet:
    from kvloom.cli.tables import Sheet
    from kvloom.config import format_size

    sheet = Sheet(
        "What is used of what is reserved, and the time of an append",
        ("case", "allocator"),
        ("used", "peak", "copied", "P50 µs", "P99 µs"),
    )
    for row in rows:
        sizes = format_size(row.peak_reserved_bytes), format_size(row.copied_bytes)
        times = f"{row.append_us_p50:,.1f}", f"{row.append_us_p99:,.1f}"
        sheet.add(row.case, row.allocator, f"{row.used:.1%}", *sizes, *times)
    return sheet
