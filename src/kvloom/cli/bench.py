"""``kvloom bench``: benchmarks that ship with the package."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvloom.cli import streams
from kvloom.cli.failures import guarded
from kvloom.cli.interrupts import cleaning
from kvloom.cli.warmup import ensure_compiled

if TYPE_CHECKING:
    from kvloom.bench.core.sides import Side
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
    from kvloom.config import size_option
    from kvloom.core.geometry import plan_geometry
    from kvloom.spec.presets import PRESETS, load_preset

    device_bytes = size_option(device, "--device")
    for name in PRESETS:  # what cannot be measured is said before a minute of measuring
        plan_geometry(load_preset(name), device_bytes)
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


@bench.command()
@guarded
def core(
    config: Annotated[
        str, typer.Option(help="full, gptoss, gemma3, dsv4: which, with commas between (default: all).")
    ] = "",
    case: Annotated[
        str,
        typer.Option(
            help="cold, hit50, hit100, chunked, decode256, free, evict, adversarial, lists, digests (default: all)."
        ),
    ] = "",
    tokens: Annotated[str, typer.Option(help="Prompt lengths (default: 8192,32768,131072).")] = "",
    objects: Annotated[int, typer.Option(help="Objects in the index before anything is measured.", min=1)] = 1_000_000,
    evict_objects: Annotated[
        str,
        typer.Option(help="Index sizes for eviction and lookup (default: 10000,100000,1000000; 10000000 takes 6 GB)."),
    ] = "",
    repeats: Annotated[int, typer.Option(help="Turns of every side.", min=5)] = 5,
    segment: Annotated[
        int | None, typer.Option(help="Tokens per segment (default: the largest block, as finely as it can be cut).")
    ] = None,
    peer: Annotated[
        list[str] | None,
        typer.Option(help="vllm=PYTHON or sglang=PYTHON: measure beside it; the Python of its own environment."),
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Write the JSON object to this file too.")] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object on stdout and nothing else there.")
    ] = False,
) -> int:
    """What the metadata work of a request costs: lookup, lease, allocation, commit, eviction; alone or beside peers."""
    from kvloom.bench.core.report import report, require_writable, write
    from kvloom.bench.core.run import CASES, EVICT_OBJECTS, TOKENS, Settings, run_all
    from kvloom.bench.core.scenario import CONFIGS
    from kvloom.bench.core.sides import Local, Peer, PeerName
    from kvloom.cli.bench_core import core_table, names, numbers

    settings = Settings(
        names(config, "config", CONFIGS),
        names(case, "case", CASES),
        numbers(tokens, "tokens", TOKENS),
        objects,
        numbers(evict_objects, "evict-objects", EVICT_OBJECTS),
        repeats,
    )
    peers = [PeerName.parse(text) for text in peer or []]
    require_writable(output)
    sides: list[Side] = [Local(segment)]
    ensure_compiled()
    try:
        sides += [Peer(name) for name in peers]
        versions = {side.name: side.version() for side in sides}
        with streams.progress().status("") as spinner:
            rows = list(run_all(settings, sides, spinner.update))
        result = report(settings, sides, versions, rows)
    finally:
        for side in sides:
            side.close()
    if output is not None:
        write(output, result)
    if as_json:
        streams.emit_json(result)
    else:
        streams.screen().print(core_table(rows))
    return 0


@bench.command()
@guarded
def data(
    directory: Annotated[
        Path | None,
        typer.Option(help="On the disk to measure; a folder is made there and removed (default: for temporary files)."),
    ] = None,
    size: Annotated[str, typer.Option(help="Bytes of payload per cell, a multiple of 128MiB.")] = "512MiB",
    repeats: Annotated[int, typer.Option(help="Turns of every side.", min=5)] = 9,
    peer: Annotated[
        list[str] | None,
        typer.Option(help="vllm=PYTHON: its file system tier beside the disk store; the Python of its environment."),
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Write the JSON object to this file too.")] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object on stdout and nothing else there.")
    ] = False,
) -> int:
    """Restore and store speeds beside plain copies and plain direct I/O in the same run; checksums and cold forms."""
    import tempfile

    from kvloom.bench.core.report import require_writable, write
    from kvloom.bench.data.run import Settings, report_of
    from kvloom.cli.bench_data import codec_sheet, measure, notes, peer_names, sheets
    from kvloom.config import size_option

    settings = Settings(size_option(size, "--size"), repeats)
    require_writable(output)
    place = Path(tempfile.gettempdir()) if directory is None else directory
    versions, rows, codecs = measure(place, settings, peer_names(peer or []))
    result = report_of(place, settings, versions, rows, codecs)
    if output is not None:
        write(output, result)
    if as_json:
        streams.emit_json(result)
    else:
        for sheet in (*sheets(rows), codec_sheet(codecs)):
            streams.screen().print(sheet)
    for note in notes(rows, settings.total):
        streams.say(f"kvloom: note: {note}")
    return 0


@bench.command()
@guarded
def recovery(
    short: Annotated[bool, typer.Option("--short", help="A few cells only, to see that it works.")] = False,
    models: Annotated[str, typer.Option(help="Which of the models, with commas between (default: all).")] = "",
    contexts: Annotated[str, typer.Option(help="Tokens of the prompts, with commas between.")] = "",
    speeds: Annotated[str, typer.Option(help="MB/s of the disk, with commas between.")] = "",
    rounds: Annotated[
        int | None, typer.Option(min=1, help="Turns of every way in every cell, at least (default: 7).")
    ] = None,
    cell: Annotated[
        float | None, typer.Option(min=0.0, help="Seconds of a cell that has had its rounds (default: 3).")
    ] = None,
    directory: Annotated[
        Path | None,
        typer.Option(help="Where the disk store lies meanwhile (default: the temporary folder)."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object on stdout and nothing else there.")
    ] = False,
) -> int:
    """Computing, restoring and replaying, each measured, beside what the planner picked: disk speed, context, model."""
    import shutil
    import tempfile

    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from kvloom.bench.recovery import run_all
    from kvloom.cli.bench_recovery import sheet, summary, sweep_of
    from kvloom.errors import InputError

    if directory is not None and not directory.is_dir():
        raise InputError(f"--directory {directory} is no folder; name one that exists")
    sweep = sweep_of(short, models, contexts, speeds, rounds, cell)
    ensure_compiled()
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=streams.progress(), transient=True, disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task("warming up")
        place = Path(tempfile.mkdtemp(prefix="kvloom-bench-", dir=directory))
        with cleaning(lambda: shutil.rmtree(place, ignore_errors=True)):
            result = run_all(
                sweep,
                lambda what, done, of: progress.update(task, description=what, completed=done, total=of),
                place,
            )
    if as_json:
        streams.emit_json(result.to_json())
    else:
        streams.screen().print(sheet(result))
        for line in summary(result):
            streams.screen().print(line)
    return 0


@bench.command()
@guarded
def sessions(
    family: Annotated[str, typer.Option(help="gpt_oss, gemma3, qwen3_next or deepseek_v4; tiny, random.")] = "gpt_oss",
    count: Annotated[int, typer.Option(min=2, help="Sessions.")] = 16,
    tokens: Annotated[int, typer.Option(min=64, help="Prompt of every session.")] = 4096,
    turns: Annotated[int, typer.Option(min=1, help="Turns that are measured, behind the first one.")] = 2,
    share: Annotated[str, typer.Option(help="Device caps, as shares of what all sessions need.")] = "0.25,0.125",
    host: Annotated[float, typer.Option(min=0.01, max=100, help="Cap of the host tier, as such a share.")] = 1.5,
    directory: Annotated[Path | None, typer.Option(help="Where the disk stores lie meanwhile.")] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object on stdout and nothing else there.")
    ] = False,
) -> int:
    """Many sessions in turn on a device that holds a part of their state, host memory and disk behind it.

    Exit code: 1 when nothing was computed again and yet an answer was not that of the run without a cap, else 0.
    """
    import shutil
    import tempfile

    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from kvloom.bench.sessions import SHAPES, Shape, run_all
    from kvloom.cli.bench_sessions import sheet
    from kvloom.errors import InputError

    if family not in SHAPES:
        raise InputError(f"--family {family!r} is not measured here; use one of: {', '.join(SHAPES)}")
    try:
        shares = tuple(float(part) for part in share.split(","))
    except ValueError:
        shares = ()
    if not shares or not all(0 < part < 1 for part in shares):
        raise InputError(f"--share {share!r} is no list of shares; write numbers between 0 and 1, such as 0.25,0.125")
    if directory is not None and not directory.is_dir():
        raise InputError(f"--directory {directory} is no folder; name one that exists")
    ensure_compiled()
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    place = tempfile.mkdtemp(dir=directory, prefix="kvloom-bench-")
    with (
        cleaning(lambda: shutil.rmtree(place, ignore_errors=True)),
        Progress(*columns, console=streams.progress(), transient=True, disable=not sys.stderr.isatty()) as progress,
    ):
        task = progress.add_task("warming up")
        shape = Shape(family, count, tokens, turns)
        rows = list(
            run_all(
                shape,
                Path(place),
                shares,
                host,
                lambda what, done, of: progress.update(task, description=what, completed=done, total=of),
            )
        )
    if as_json:
        streams.emit_json({"shape": shape.to_json(), "rows": [row.to_json() for row in rows]})
    else:
        streams.screen().print(sheet(rows))
    # What was computed again in other pieces than before may round otherwise: no answer to compare bit for bit.
    return 0 if all(row.identical or row.recomputed for row in rows) else 1


@bench.command()
@guarded
def restore(
    directory: Annotated[
        Path | None,
        typer.Option(help="On the disk to measure; a folder is made there and removed (default: for temporary files)."),
    ] = None,
    tokens: Annotated[int, typer.Option(help="Tokens of the prefix.", min=1024)] = 8192,
    layers: Annotated[int, typer.Option(help="Layers of the model, an even number.", min=4)] = 12,
    speeds: Annotated[str, typer.Option(help="MB/s of the disk, with commas between; 0: as it is.")] = "0,1000,400",
    repeats: Annotated[int, typer.Option(help="Turns of every way; the median is shown.", min=1)] = 3,
    only: Annotated[str, typer.Option(help="restore, decode, or all.")] = "all",
    paces: Annotated[
        str, typer.Option(help="Shares of a core that transfers beside a decode take, with commas between; 1: all.")
    ] = "1,0.05",
    steps: Annotated[int, typer.Option(help="Decode steps alone, and beside transfers, at least.", min=2)] = 120,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object on stdout and nothing else there.")
    ] = False,
) -> int:
    """Time to the first token behind a prefix on disk, whole or layer by layer; a decode beside loads and stores."""
    from kvloom.bench.restore import Shape
    from kvloom.cli.bench_restore import measure, only_of, paces_of, sheets, speeds_of
    from kvloom.errors import ConfigError

    if layers % 2:
        raise ConfigError(f"--layers {layers} is odd; every other layer has full attention, so use an even number")
    ensure_compiled()
    shape = Shape(
        layers,
        tokens,
        speeds=speeds_of(speeds),
        repeats=repeats,
        steps=steps,
        paces=paces_of(paces),
        only=only_of(only),
    )
    report = measure(directory, shape)
    if as_json:
        streams.emit_json(report.to_json())
    else:
        for sheet in sheets(report):
            streams.screen().print(sheet)
    if not report.identical:
        streams.say("kvloom: the first logits of these ways differ, which must never be")
        return 1
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
