"""``kvloom bench``: benchmarks that ship with the package."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvloom.cli.failures import guarded

if TYPE_CHECKING:
    from rich.table import Table

    from kvloom.bench.fragmentation import Row

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
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from kvloom.bench.azure import CONVERSATIONS
    from kvloom.bench.fragmentation import BLOCK, run_all
    from kvloom.replay.readers import read_trace

    lengths: list[tuple[int, int]] = list(CONVERSATIONS)
    if trace is not None:
        read = read_trace(trace)
        lengths = list(zip(read.inputs.tolist(), read.outputs.tolist(), strict=True))
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    status = Console(stderr=True, highlight=False)
    with Progress(*columns, console=status, transient=True, disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task("warming up")
        rows = run_all(
            lengths, lambda what, done, of: progress.update(task, description=what, completed=done, total=of)
        )
    if as_json:
        typer.echo(json.dumps({"block_size": BLOCK, "rows": [row.to_json() for row in rows]}, indent=2))
    else:
        Console(highlight=False).print(_table(rows))
    return 0


def _table(rows: list[Row]) -> Table:
    from rich import box
    from rich.table import Table

    from kvloom.config import format_size

    table = Table(
        title="What is used of what is reserved, and the time of an append",
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    for name in ("case", "allocator"):
        table.add_column(name, no_wrap=True)
    for name in ("used", "peak", "copied", "P50 µs", "P99 µs"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        sizes = format_size(row.peak_reserved_bytes), format_size(row.copied_bytes)
        times = f"{row.append_us_p50:,.1f}", f"{row.append_us_p99:,.1f}"
        table.add_row(row.case, row.allocator, f"{row.used:.1%}", *sizes, *times)
    return table
