"""What ``kvloom replay`` prints of colder tiers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvloom.cli.tables import Sheet
from kvloom.config import format_size
from kvloom.replay.runs import duration

if TYPE_CHECKING:
    from rich.console import Console

    from kvloom.replay.runs import RunReport


def print_tiers(console: Console, reports: Sequence[RunReport]) -> None:
    """Times to the first token, what came from where, what was written, and what the planner chose."""
    console.print(_times(reports), "", sep="\n")
    console.print(_tiers(reports), "", sep="\n")
    console.print(_ways(reports), "", sep="\n")
    first = next(report.tiered for report in reports if report.tiered is not None)
    speeds = [
        f"{tier.medium.name} {tier.speed / 1e9:g} GB/s + {tier.medium.latency_s * 1e3:g} ms a load"
        for tier in first.tiers
    ]
    console.print(
        f"At {first.prefill_speed:,.0f} tokens/s of prefill; read from {', '.join(speeds)}; "
        f"admission {first.admission.value}.\n",
        soft_wrap=True,
    )


def _times(reports: Sequence[RunReport]) -> Sheet:
    sheet = Sheet(
        "Time to first token, beside the device alone",
        ("tiers", "policy"),
        ("median", "median, alone", "P99", "P99, alone", "all requests", "all, alone"),
    )
    for report in reports:
        if report.tiered is not None:
            own, alone = report.tiered.seconds, report.tiered.seconds_alone
            pairs = [(own.median, alone.median), (own.p99, alone.p99), (own.total, alone.total)]
            sheet.add(report.short_label, report.policy, *(_time(value) for pair in pairs for value in pair))
    return sheet


def _tiers(reports: Sequence[RunReport]) -> Sheet:
    head = (
        "tokens reused",
        "of all prompts",
        "requests",
        "bytes read",
        "bytes written",
        "written per byte stored",
        "units evicted",
        "used once, never there",
    )
    sheet = Sheet("Where prompt tokens came from", ("tiers", "policy", "from"), head)
    for report in reports:
        if report.tiered is None:
            continue
        behind, tokens = report.tiered.behind, int(report.trace.inputs.sum())
        for name, count in behind.tokens_by.items():
            cells = [f"{count:,}", f"{count / tokens:.2%}", f"{behind.served_by[name]:,}"]
            number = next((n for n, tier in enumerate(behind.tiers) if tier.name == name), None)
            if number is not None:
                tier = behind.tiers[number]
                stored = sum(tier.payload.values())
                single, never = report.tiered.once(tier)
                cells += [
                    format_size(tier.read_bytes),
                    format_size(tier.written),
                    f"{tier.written / stored:.3f}" if stored else "–",
                    f"{tier.units_evicted:,}",
                    f"{never / single:.1%}" if single else "–",
                ]
            sheet.add(report.short_label, report.policy, _words(name), *cells, *["–"] * (len(head) - len(cells)))
    return sheet


def _ways(reports: Sequence[RunReport]) -> Sheet:
    from kvloom.manager.ways import Way

    sheet = Sheet("What the planner chose, requests", ("tiers", "policy"), [_words(way.value) for way in Way])
    for report in reports:
        if report.tiered is not None:
            chosen = report.tiered.behind.recovery.stats.chosen
            sheet.add(report.short_label, report.policy, *(f"{chosen[way.value]:,}" for way in Way))
    return sheet


def _words(name: str) -> str:
    """A way or a source for people, everywhere spelt alike."""
    return name.replace("_", " ")


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else duration(seconds)
