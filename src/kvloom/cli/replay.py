"""``kvloom replay``: progress while it runs, then tables, JSON or an HTML report."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvloom.cli import streams
from kvloom.cli.failures import guarded
from kvloom.cli.warmup import ensure_compiled
from kvloom.errors import InputError
from kvloom.transfer.options import Admission

if TYPE_CHECKING:
    from rich.progress import Progress

    from kvloom.cli.tables import Sheet
    from kvloom.replay.runs import ReplayOptions, RunReport
    from kvloom.replay.trace import Trace


@guarded
def replay(
    traces: Annotated[
        list[Path],
        typer.Argument(
            metavar="TRACE...", help="Trace files: Mooncake, agentic or Azure; or recordings of kvloom run --record."
        ),
    ],
    *,
    model: Annotated[
        str | None,
        typer.Option(help="Preset name, directory with a config.json, or such a file; a recording has its own."),
    ] = None,
    device: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SIZE|P%",
            help="Device tier: a size, or a share of the trace's unique blocks; repeat for more (default for a "
            "recording: its own).",
        ),
    ] = None,
    host: Annotated[
        list[str] | None,
        typer.Option(metavar="SIZE|P%", help="Host tier behind the device, as --device; repeat for more."),
    ] = None,
    disk: Annotated[
        list[str] | None,
        typer.Option(metavar="SIZE|P%", help="Disk tier behind device and host, as --device; repeat for more."),
    ] = None,
    host_speed: Annotated[
        float | None, typer.Option(metavar="GB_S", help="GB per second read from the host tier (default: 50).")
    ] = None,
    disk_speed: Annotated[
        float | None, typer.Option(metavar="GB_S", help="GB per second read from the disk tier (default: 7).")
    ] = None,
    admission: Annotated[
        Admission | None,
        typer.Option(help="What goes to a disk behind a host: always, or what was used again (default: always)."),
    ] = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(help="Eviction policy, or all; repeat for more (default: cost; for a recording its own)."),
    ] = None,
    block: Annotated[
        int | None, typer.Option(min=1, max=65536, help="Tokens per block (default: the trace's own, else 128).")
    ] = None,
    cache_only: Annotated[
        bool, typer.Option("--cache-only", help="Prompts only, as whole blocks: answers are not cached.")
    ] = False,
    prefill_speed: Annotated[
        float | None,
        typer.Option(
            metavar="TOK_S",
            help="Tokens per second of prefill, to count the seconds saved (default with --host or --disk: 8000).",
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object on stdout and nothing else there.")
    ] = False,
    html: Annotated[Path | None, typer.Option(help="Write a report with charts to this file.")] = None,
) -> int:
    """Replay traces through the real manager, without a model, and compare with the offline optimum.

    A recording of kvloom run --record is replayed call by call and compared with the run.

    Exit code: 1 when a recording, replayed with its own settings, does not give what was recorded, else 0.
    """
    from kvloom.cli.replay_options import colder_of, require_trace, sizes_of
    from kvloom.engine.files import require_file
    from kvloom.replay.readers import read_input
    from kvloom.replay.recording import Recording
    from kvloom.replay.runs import ReplayOptions, choose_policies
    from kvloom.spec.presets import PRESETS

    if prefill_speed is not None and not 0 < prefill_speed < float("inf"):
        raise InputError(f"--prefill-speed {prefill_speed:g} is not above 0; write tokens per second, such as 8000")
    devices = sizes_of(device, "device")
    colder = colder_of(sizes_of(host, "host"), sizes_of(disk, "disk"), host_speed, disk_speed, admission)
    policies = choose_policies(policy or ())
    if html is not None:
        _check_html(html)
    if model is not None and model.lower() not in PRESETS:
        require_file(model)
    inputs = [read_input(path, block=block) for path in traces]
    recordings = [one for one in inputs if isinstance(one, Recording)]
    if recordings:
        from kvloom.cli.recordings import replay_recordings

        if len(recordings) < len(inputs):
            raise InputError(f"{recordings[0].path} is a recording and others are traces; replay them apart")
        require_trace(recordings[0].path, model, block, colder, cache_only=cache_only)
        return replay_recordings(recordings, devices, policies, prefill_speed, html, as_json=as_json)
    for missing, option in ((model is None, "--model PRESET"), (not devices, "--device SIZE")):
        if missing:
            raise InputError(f"{traces[0]} is a trace, which needs {option}: add it (recordings have their own)")
    assert model is not None
    options = ReplayOptions(
        model=model,
        devices=devices,
        policies=policies or ("cost",),
        block=block,
        cache_only=cache_only,
        prefill_speed=prefill_speed,
        colder=colder,
    )
    reports = _run([one for one in inputs if not isinstance(one, Recording)], options)
    if html is not None:
        from kvloom.replay.html import html_report

        write_html(html, html_report(reports))
    if as_json:
        streams.emit_json(to_json([report.to_json() for report in reports]))
    else:
        _print(reports, html)
    return 0


def write_html(path: Path, text: str) -> None:
    """Write a report; raises InputError."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"--html {path}: {error.strerror or error}; name a file that can be written") from None


def to_json(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """One run: its keys; always ``runs``, a list of all of them."""
    return {**runs[0], "runs": runs} if len(runs) == 1 else {"runs": runs}


def _check_html(path: Path) -> None:
    """Say now, not after minutes, that the report cannot be made."""
    from kvloom.replay.html import require_plotly

    require_plotly()
    folder = path.parent
    if path.is_dir() or not folder.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
        raise InputError(f"--html {path}: cannot write there; name a file in a folder that exists and is writable")


def progress_bar() -> Progress:
    """What shows how far a replay is."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=streams.progress(), transient=True, disable=not sys.stderr.isatty())


def _run(traces: list[Trace], options: ReplayOptions) -> list[RunReport]:
    from rich.markup import escape

    from kvloom.engine.memory import require_books
    from kvloom.replay.runs import load_spec
    from kvloom.replay.runs import replay as replay_trace
    from kvloom.replay.sizes import trace_block_bytes

    for trace in traces:
        spec = load_spec(options, trace)  # what cannot be used is said before anything runs
        unit = trace_block_bytes(spec, trace.block)
        for device in options.devices:
            require_books(spec, device.device_bytes(spec, trace.unique, unit), device.asked)
        options.colder.sized(spec, trace.unique, unit)
    ensure_compiled()
    reports: list[RunReport] = []
    with progress_bar() as progress:
        task = progress.add_task("reading", total=options.runs * sum(len(trace) for trace in traces))
        for trace in traces:
            before = options.runs * sum(len(each) for each in traces[: traces.index(trace)])
            ended = -1

            def say(what: str, done: int, before: int = before, size: int = len(trace)) -> None:
                nonlocal ended
                ended += done == 0
                progress.update(task, description=escape(what), completed=before + ended * size + done)

            reports += replay_trace(trace, options, say)
    return reports


# ---------------------------------------------------------------- for a terminal


def _print(reports: list[RunReport], html: Path | None) -> None:
    from rich.markup import escape

    from kvloom.replay.runs import by_trace

    console = streams.screen()
    for of_trace in by_trace(reports):
        first = of_trace[0]
        console.print(
            f"{escape(first.trace.name)} on {escape(first.spec.name)}: {len(first.trace):,} requests, "
            f"{int(first.trace.inputs.sum()):,} prompt tokens, {first.trace.unique:,} unique blocks of "
            f"{first.trace.block}; without a limit {first.unlimited_block_hit_rate:.2%} of the blocks hit\n",
            soft_wrap=True,
        )
        console.print(_rates(of_trace), "", sep="\n")
        console.print(_kinds(of_trace), "", sep="\n")
        if any(report.tiered for report in of_trace):
            from kvloom.cli.replay_tiers import print_tiers

            print_tiers(console, of_trace)
        passed = sum(report.outcome.passed_through for report in of_trace)
        if passed:
            console.print(f"{passed:,} requests were larger than the tier and passed through.\n")
    if html is not None:
        console.print(f"Report: {html}", markup=False)


def _tiers_head(reports: list[RunReport]) -> str:
    return "tiers" if any(report.tiered for report in reports) else "device"


def _rates(reports: list[RunReport]) -> Sheet:
    from kvloom.cli.tables import Sheet
    from kvloom.config import format_size
    from kvloom.replay.runs import duration

    head = (
        "device size",
        "blocks hit",
        "tokens hit",
        "optimum, blocks",
        "tokens saved",
        "prefill time saved",
        "time of the run",
    )
    sheet = Sheet("Hit rates", (_tiers_head(reports), "policy"), head)
    for report in reports:
        sheet.add(
            report.short_label,
            report.policy,
            format_size(report.device_bytes),
            f"{report.block_hit_rate:.2%}",
            f"{report.token_hit_rate:.2%}",
            f"{report.optimum_block_hit_rate:.2%}",
            f"{report.saved_tokens:,}",
            "–" if report.saved_seconds is None else duration(report.saved_seconds),
            duration(report.outcome.seconds),
        )
    return sheet


def _kinds(reports: list[RunReport]) -> Sheet:
    from kvloom.cli.tables import Sheet
    from kvloom.config import format_size

    head = ("hits", "misses", "evictions", "kept on the device")
    sheet = Sheet("Cache objects on the device, by kind", (_tiers_head(reports), "policy", "kind"), head)
    for report in reports:
        for kind, s in sorted(report.outcome.stats.kinds.items()):
            counts = [f"{n:,}" for n in (s.hits, s.misses, s.evictions)]
            sheet.add(report.short_label, report.policy, kind.name.lower(), *counts, format_size(s.bytes))
    return sheet
