"""``kvloom replay`` on recordings of ``kvloom run --record``."""

from __future__ import annotations

from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.markup import escape

from kvloom.cli import streams
from kvloom.cli.tables import Sheet
from kvloom.cli.warmup import ensure_compiled
from kvloom.config import Device, format_size
from kvloom.engine.memory import require_books, require_tables
from kvloom.errors import InputError
from kvloom.replay.rerun import Rerun, rerun
from kvloom.replay.runs import duration

if TYPE_CHECKING:
    from kvloom.replay.recording import Recording
    from kvloom.replay.sizes import DeviceSize

EXIT_DIFFERS = 1


def replay_recordings(
    recordings: list[Recording],
    devices: tuple[DeviceSize, ...],
    policies: tuple[str, ...],
    prefill_speed: float | None,
    html: Path | None,
    *,
    as_json: bool,
) -> int:
    """Replay every recording with every size and policy, its own unless given; returns the exit code."""
    from kvloom.cli.replay import to_json, write_html

    for device in devices:
        if device.size is None:
            raise InputError(
                f"device {device.asked!r}: a recording has no blocks to take a share of; write a size such as 2GiB"
            )
    for recording in recordings:
        for size, asked in _sizes(recording, devices):
            made = recording.made
            require_books(made.spec, size, asked)
            require_tables(made.spec, size, made.max_nodes, made.max_sequences, f"{recording.path}, line 1")
    ensure_compiled()
    reports = _run(recordings, devices, policies, prefill_speed)
    if html is not None:
        from kvloom.replay.rerun_html import rerun_report

        write_html(html, rerun_report(reports))
    if as_json:
        streams.emit_json(to_json([report.to_json() for report in reports]))
    else:
        _print(reports, html)
    return EXIT_DIFFERS if any(report.same is False for report in reports) else 0


def _sizes(recording: Recording, devices: tuple[DeviceSize, ...]) -> list[tuple[int, str]]:
    """Bytes of every tier, and how it was asked for."""
    own = recording.made.device
    return [(device.size or own, device.asked) for device in devices] or [(own, format_size(own))]


def _run(
    recordings: list[Recording],
    devices: tuple[DeviceSize, ...],
    policies: tuple[str, ...],
    prefill_speed: float | None,
) -> list[Rerun]:
    from kvloom.cli.replay import progress_bar

    reports: list[Rerun] = []
    runs = max(1, len(devices)) * max(1, len(policies))
    with progress_bar() as progress:
        task = progress.add_task("reading", total=runs * sum(len(recording) for recording in recordings))
        done = 0
        for recording in recordings:
            for size, asked in _sizes(recording, devices):
                for policy in policies or (recording.made.policy,):
                    what = escape(f"{recording.name}, {asked}, {policy}")
                    progress.update(task, description=what, completed=done)
                    report = rerun(
                        recording,
                        policy=policy,
                        device=Device(size),
                        asked=asked,
                        prefill_speed=prefill_speed,
                        progress=partial(_advance, progress.update, task, done),
                    )
                    reports.append(report)
                    done += len(recording)
    return reports


def _advance(update: Any, task: Any, before: int, done: int) -> None:
    update(task, completed=before + done)


def _print(reports: list[Rerun], html: Path | None) -> None:
    console = streams.screen()
    for _, group in groupby(reports, key=lambda report: id(report.recording)):
        of_recording = list(group)
        first = of_recording[0]
        made = first.recording.made
        console.print(
            f"{escape(first.recording.name)} on {escape(made.spec.name)}: {first.requests:,} requests, "
            f"{first.prompt_tokens:,} prompt tokens, {len(first.recording):,} calls; recorded under "
            f"{escape(made.policy)} in {format_size(made.device)}\n",
            soft_wrap=True,
        )
        console.print(_rates(of_recording), "", sep="\n")
        console.print(_kinds(of_recording), "", sep="\n")
        for report in of_recording:
            if report.as_recorded or report.refused:
                left = f"; {report.refused:,} refused, {report.left_out:,} calls left out" if report.refused else ""
                console.print(f"{report.policy}, {report.device}: {report.verdict}{left}", markup=False, soft_wrap=True)
    if html is not None:
        console.print(f"Report: {html}", markup=False)


def _rates(reports: list[Rerun]) -> Sheet:
    head = ("device size", "tokens hit", "tokens saved", "prefill time saved", "time of the run")
    sheet = Sheet("Hit rates", ("device", "policy"), head)
    for report in reports:
        sheet.add(
            report.device,
            report.policy,
            format_size(report.device_bytes),
            f"{report.token_hit_rate:.2%}",
            f"{report.reused:,}",
            "–" if report.saved_seconds is None else duration(report.saved_seconds),
            duration(report.seconds),
        )
    return sheet


def _kinds(reports: list[Rerun]) -> Sheet:
    columns = ("hits", "misses", "evictions", "not kept for lack of room", "kept on the device")
    sheet = Sheet("Cache objects on the device, by kind", ("device", "policy", "kind"), columns)
    for report in reports:
        for kind, s in sorted(report.stats.kinds.items()):
            counts = [f"{n:,}" for n in (s.hits, s.misses, s.evictions, s.unkept)]
            sheet.add(report.device, report.policy, kind.name.lower(), *counts, format_size(s.bytes))
    return sheet
