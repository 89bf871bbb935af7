"""What ``kvloom bench restore`` shows."""

from __future__ import annotations

import functools
import shutil
import sys
import tempfile
from pathlib import Path

from kvloom.bench.restore import Only, Report, Shape, run
from kvloom.cli import streams
from kvloom.cli.interrupts import cleaning
from kvloom.cli.tables import Sheet
from kvloom.config import format_size
from kvloom.errors import ConfigError


def measure(directory: Path | None, shape: Shape) -> Report:
    """Everything; what was written is removed, however this ends.  ConfigError for a directory that cannot be used."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    try:
        base = Path(tempfile.mkdtemp(prefix="kvloom-restore-", dir=directory))
    except OSError as error:
        raise ConfigError(f"--directory {directory}: {error.strerror or error}; name a directory to write to") from None
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    show = Progress(*columns, console=streams.progress(), transient=True, disable=not sys.stderr.isatty())
    with cleaning(functools.partial(shutil.rmtree, base, ignore_errors=True)), show as progress:
        task = progress.add_task("making a model")
        return run(
            shape,
            base,
            lambda what, done, of: progress.update(task, description=what, completed=done, total=of),
        )


def speeds_of(text: str) -> tuple[int, ...]:
    """MB/s of a list with commas; ConfigError says what is wrong with it."""
    try:
        found = tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise ConfigError(f"--speeds {text!r} is not a list of whole numbers of MB/s, such as 0,1000,400") from None
    if not found or min(found) < 0:
        raise ConfigError(f"--speeds {text!r}: name at least one speed in MB/s, 0 for that of the disk itself")
    return found


def paces_of(text: str) -> tuple[float, ...]:
    """Shares of a list with commas; ConfigError says what is wrong with it."""
    try:
        found = tuple(float(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise ConfigError(f"--paces {text!r} is no list of shares of a core, such as 1,0.05") from None
    if not found or not all(0 < each <= 1 for each in found):
        raise ConfigError(f"--paces {text!r}: name at least one share above 0 and up to 1 (1: transfers do not rest)")
    return found


def only_of(text: str) -> Only:
    """What ``--only`` says; ConfigError for anything else."""
    try:
        return Only(text)
    except ValueError:
        raise ConfigError(f"--only {text!r}: use {', '.join(Only)}") from None


def sheets(report: Report) -> list[Sheet]:
    """The tables."""
    size = format_size(report.bytes_on_disk)
    first = Sheet(
        f"To the first token, with {size} on disk (seconds)",
        ("disk, MB/s", "way"),
        ("first token", "reads", "layer 0 ran", "last read ended", "restored", "reused"),
    )
    for row in report.rows:
        times = (f"{each:.2f}" for each in (row.ttft_s, row.read_s, row.first_layer_s, row.last_read_s))
        speed = "as it is" if row.mbps == 0 else f"{row.mbps:,}"
        first.add(speed, row.way, *times, format_size(row.bytes), f"{row.reused:,}")
    second = Sheet(
        f"A decode step of {report.parameters / 1e6:,.0f} M parameters beside transfers (ms: median, quartiles)",
        ("beside a", "pace"),
        ("alone", "beside", "ratio", "of means", "steps", "moved", "MB/s"),
    )
    for each in report.decode:
        spans = [f"{t.median * 1e3:.2f} ({t.first * 1e3:.2f} to {t.third * 1e3:.2f})" for t in (each.alone, each.step)]
        moved = f"{each.step.steps}", format_size(each.bytes), f"{each.mbps:,.0f}"
        second.add(each.beside, f"{each.pace:g}", *spans, f"{each.ratio:.2f}", f"{each.mean_ratio:.2f}", *moved)
    return [sheet for sheet, rows in ((first, report.rows), (second, report.decode)) if rows]
