"""The part of the HTML report about colder tiers.  Imported only when plotly is there."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvloom.config import format_size
from kvloom.manager.ways import Way
from kvloom.replay import charts
from kvloom.replay.html import chart, table
from kvloom.replay.runs import RunReport, duration
from kvloom.replay.tiered import Seconds


def tier_charts(reports: Sequence[RunReport]) -> list[str]:
    """Charts of the runs that had colder tiers (HTML); none without such runs."""
    tiered = [report for report in reports if report.tiered is not None]
    if not tiered:
        return []
    return [
        chart(
            "Time to first token",
            "Share of requests whose first token came within so many seconds; without waiting for other requests. "
            "Dotted: the device alone.",
            times(tiered),
            wide=False,
        ),
        chart(
            "Where prompt tokens came from",
            "What is left was computed.",
            sources(tiered),
            wide=False,
        ),
        chart("Bytes read from and written to colder tiers", "", traffic(tiered), wide=True),
    ]


def times(reports: Sequence[RunReport]) -> str:
    """Cumulative share of requests over seconds, each run beside its device alone."""
    figure = charts.new_figure()
    for n, report in enumerate(reports):
        assert report.tiered is not None
        label, colour = charts.label(report, list(reports)), charts.colour(n)
        for seconds, name, dash in (
            (report.tiered.seconds, label, "solid"),
            (report.tiered.seconds_alone, f"{label}: device alone", "dot"),
        ):
            x, y = _shares(seconds)
            figure.add_scatter(x=x, y=y, name=name, mode="lines", line={"color": colour, "dash": dash, "width": 1.6})
    figure.update_xaxes(type="log", title="seconds")
    figure.update_yaxes(tickformat=".0%", rangemode="tozero", title="requests")
    return charts.as_html(figure)


def _shares(seconds: Seconds) -> tuple[list[float], list[float]]:
    values = np.sort(np.maximum(seconds.values, 1e-4))
    at = np.unique(np.linspace(0, len(values) - 1, min(len(values), charts.MOST_POINTS)).astype(np.int64))
    return values[at].tolist(), ((at + 1) / len(values)).tolist()


def sources(reports: Sequence[RunReport]) -> str:
    """Tokens by where they came from, a bar for every run."""
    figure = charts.new_figure(barmode="stack")
    labels = [charts.label(report, list(reports)) for report in reports]
    shares: list[dict[str, float]] = []
    for report in reports:
        assert report.tiered is not None
        tokens = int(report.trace.inputs.sum())
        shares.append({name: count / tokens for name, count in report.tiered.behind.tokens_by.items()})
    for n, name in enumerate(dict.fromkeys(name for each in shares for name in each)):
        x = [each.get(name, 0.0) for each in shares]
        shown = name.replace("_", " ")
        figure.add_bar(y=labels, x=x, name=shown, orientation="h", marker_color=charts.colour(n))
    figure.update_xaxes(tickformat=".0%", title="prompt tokens")
    figure.update_yaxes(type="category")
    return charts.as_html(figure)


def traffic(reports: Sequence[RunReport]) -> str:
    """GiB read and written of every tier of every run; the kinds of what was written one upon the other."""
    figure = charts.new_figure(barmode="stack")
    read: tuple[list[str], list[float]] = ([], [])
    written: dict[str, tuple[list[str], list[float]]] = {}
    for report in reports:
        assert report.tiered is not None
        for number, tier in enumerate(report.tiered.behind.tiers):
            label = f"{charts.label(report, list(reports))}: {tier.name}"
            read[0].append(f"{label} read")
            read[1].append(tier.read_bytes / 2**30)
            for kind, n_bytes in report.tiered.behind.written_by_kind(number).items():
                part = written.setdefault(kind, ([], []))
                part[0].append(f"{label} written")
                part[1].append(n_bytes / 2**30)
    figure.add_bar(y=read[0], x=read[1], name="read", orientation="h", marker_color=charts.colour(5))
    for n, (kind, (labels, sizes)) in enumerate(sorted(written.items())):
        figure.add_bar(y=labels, x=sizes, name=f"{kind} written", orientation="h", marker_color=charts.colour(n))
    figure.update_xaxes(title="GiB")
    figure.update_yaxes(type="category")
    return charts.as_html(figure)


def tier_tables(reports: Sequence[RunReport]) -> list[str]:
    """Tables of the runs that had colder tiers (HTML)."""
    rows, choices = [], []
    for report in reports:
        if report.tiered is None:
            continue
        own, alone, behind = report.tiered.seconds, report.tiered.seconds_alone, report.tiered.behind
        chosen = [f"{behind.recovery.stats.chosen[way.value]:,}" for way in Way]
        pairs = ((own.median, alone.median), (own.p99, alone.p99), (own.total, alone.total))
        choices.append(
            (
                report.short_label,
                report.policy,
                *(f"{duration(mine)} ({duration(other)})" for mine, other in pairs),
                *chosen,
            )
        )
        for tier in behind.tiers:
            single, never = report.tiered.once(tier)
            rows.append(
                (
                    report.short_label,
                    report.policy,
                    tier.name,
                    format_size(tier.capacity),
                    format_size(tier.in_use),
                    f"{behind.tokens_by[tier.name]:,}",
                    f"{behind.served_by[tier.name]:,}",
                    format_size(tier.read_bytes),
                    format_size(tier.written),
                    f"{tier.units_evicted:,}",
                    f"{never / single:.1%}" if single else "–",
                )
            )
    if not rows:
        return []
    ways = [way.value.replace("_", " ") for way in Way]
    head = ("tiers", "policy", "median (device alone)", "P99 (device alone)", "all (device alone)", *ways)
    return [
        table("Time to first token, and what the planner chose", head, choices, 2),
        table(
            "Colder tiers",
            (
                "tiers",
                "policy",
                "tier",
                "capacity",
                "in use",
                "tokens reused",
                "requests",
                "read",
                "written",
                "units evicted",
                "used once, never there",
            ),
            rows,
            3,
        ),
    ]
