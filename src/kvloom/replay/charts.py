"""The charts of the HTML report, each as a piece of HTML.  Imported only when plotly is there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import plotly.graph_objects as go

from kvloom.replay.runs import RunReport
from kvloom.replay.simulate import Ended, Sample
from kvloom.types import IntArray

_COLOURS = ("#2f6fed", "#e0662f", "#2a9d76", "#8a4fd3", "#c23b6a", "#6b7a90", "#b8860b")
_OPTIMUM, _UNLIMITED = "#1d2433", "#9aa3b5"
MOST_POINTS = 600
MOST_DOTS = 4000
_WORDS = {
    "empty": "nothing cached yet",
    "tokens": "no cached prefix goes on like this",
    "last_token": "as long as it can be",
    "not_kept": "the state there was never kept",
    "evicted": "dropped to make room",
    "grade": "grade below the floor",
}


def by_size(reports: list[RunReport]) -> str:
    """Block hit rate by size: policies, the optimum, no limit."""
    figure = new_figure()
    runs = sorted(reports, key=lambda r: r.device_bytes)
    sizes = list({r.device_label: r for r in runs}.values())
    labels = [r.device_label for r in sizes]
    for n, policy in enumerate(dict.fromkeys(r.policy for r in runs)):
        rates = {r.device_label: r.block_hit_rate for r in runs if r.policy == policy}
        figure.add_bar(x=labels, y=[rates.get(label) for label in labels], name=policy, marker_color=colour(n))
    marks = {"mode": "markers", "x": labels}
    best = [r.optimum_block_hit_rate for r in sizes]
    figure.add_scatter(
        **marks,
        y=best,
        name="optimum",
        marker={"symbol": "line-ew-open", "size": 34, "color": _OPTIMUM, "line_width": 3},
    )
    figure.add_hline(y=runs[0].unlimited_block_hit_rate, line_dash="dot", line_color=_UNLIMITED)
    figure.update_yaxes(tickformat=".0%", rangemode="tozero", title="block hits")
    figure.update_xaxes(type="category", title="device tier; dotted: no limit")
    return as_html(figure)


def reasons(runs: Sequence[tuple[str, Ended, int]]) -> str:
    """Why lookups ended: one bar per run (label, what ended its lookups, requests), coloured by reason and kind."""
    figure = new_figure(barmode="stack")
    labels = [label for label, _, _ in runs]
    keys = sorted({key for _, ended, _ in runs for key in ended}, key=str)
    for n, (reason, kind) in enumerate(keys):
        name = _WORDS.get(reason, reason) if kind is None else f"{kind}: {_WORDS.get(reason, reason)}"
        shares = [ended[(reason, kind)] / max(1, requests) for _, ended, requests in runs]
        figure.add_bar(y=labels, x=shares, name=name, orientation="h", marker_color=colour(n))
    figure.update_xaxes(tickformat=".0%", title="requests")
    figure.update_yaxes(type="category")
    return as_html(figure)


def over_time(reports: list[RunReport]) -> str:
    """Block hit rate in a sliding window of requests: every run, the optimum of the largest size, no limit."""
    figure = new_figure(height=340)
    trace = reports[0].trace
    window = max(1, len(trace) // 50)
    at = np.unique(np.linspace(0, len(trace) - 1, min(MOST_POINTS, len(trace))).astype(np.int64))
    largest = max(reports, key=lambda r: r.device_bytes)
    depths = trace.depths()

    def line(hits: IntArray, name: str, **style: Any) -> None:
        rate = _windowed(hits, depths, window)[at]
        figure.add_scatter(x=at + 1, y=rate, name=name, mode="lines", line=style)

    line(largest.unlimited_hits, "no limit", color=_UNLIMITED, dash="dot")
    line(largest.optimum_hits, f"optimum, {largest.device_label}", color=_OPTIMUM, width=1.2)
    for n, report in enumerate(reports):
        line(report.outcome.block_hits, label(report, reports), color=colour(n), width=1.6)
    figure.update_yaxes(tickformat=".0%", rangemode="tozero", title="block hits")
    figure.update_xaxes(title=f"request (window of {window:,})")
    return as_html(figure)


def fill(samples: Sequence[Sample]) -> str:
    """Bytes of committed objects by kind over the trace, with the evictions so far."""
    figure = new_figure()
    at = [s.requests for s in samples]
    for n, kind in enumerate(sorted(samples[-1].bytes_of) if samples else ()):
        gib = [s.bytes_of[kind] / 2**30 for s in samples]
        figure.add_scatter(
            x=at, y=gib, name=kind.name.lower(), stackgroup="bytes", line={"color": colour(n), "width": 1}
        )
    figure.add_scatter(
        x=at,
        y=[s.evictions for s in samples],
        name="evictions so far",
        yaxis="y2",
        line={"color": _OPTIMUM, "dash": "dash"},
    )
    figure.update_layout(
        yaxis={"title": "GiB", "rangemode": "tozero"},
        yaxis2={
            "title": "evictions",
            "overlaying": "y",
            "side": "right",
            "rangemode": "tozero",
            "showgrid": False,
            "tickmode": "auto",
        },
    )
    figure.update_xaxes(title="request")
    return as_html(figure)


def lengths(report: RunReport) -> str:
    """Prompt length against the share of it that was reused."""
    figure = new_figure()
    inputs, reused = report.trace.inputs, report.outcome.reused
    every = max(1, len(inputs) // MOST_DOTS)
    x, y = inputs[::every], (reused / inputs)[::every]
    figure.add_scattergl(
        x=x,
        y=y,
        mode="markers",
        name="requests",
        showlegend=False,
        marker={"size": 4, "opacity": 0.35, "color": _COLOURS[0]},
    )
    figure.update_xaxes(type="log", title="prompt tokens")
    figure.update_yaxes(tickformat=".0%", title="reused", range=[-0.02, 1.02])
    return as_html(figure)


def _windowed(hits: IntArray, of: IntArray, window: int) -> npt.NDArray[np.float64]:
    """hits / of over the last ``window`` requests, float64 [requests]."""

    def sums(values: IntArray) -> IntArray:
        total = np.concatenate([[0], np.cumsum(values)])
        begin = np.maximum(np.arange(len(values)) + 1 - window, 0)
        part: IntArray = total[1:] - total[begin]
        return part

    rate: npt.NDArray[np.float64] = sums(hits) / np.maximum(sums(of), 1)
    return rate


def label(report: RunReport, reports: list[RunReport]) -> str:
    """The device size of a run, with its policy where there are several."""
    several = len({r.policy for r in reports}) > 1
    return f"{report.device_label}, {report.policy}" if several else report.device_label


def colour(n: int) -> str:
    """Of the n-th series."""
    return _COLOURS[n % len(_COLOURS)]


def new_figure(*, height: int = 320, barmode: str = "group") -> go.Figure:
    """An empty figure in the style of the report."""
    return go.Figure(
        layout={
            "template": "plotly_white",
            "height": height,
            "barmode": barmode,
            "margin": {"l": 60, "r": 20, "t": 12, "b": 48},
            "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
            "font": {"family": 'system-ui, "Segoe UI", Roboto, sans-serif', "size": 12, "color": "#1d2433"},
            "hovermode": "closest",
        }
    )


def as_html(figure: go.Figure) -> str:
    """A figure as a piece of HTML."""
    text: str = figure.to_html(
        full_html=False, include_plotlyjs=False, config={"displayModeBar": False, "responsive": True}
    )
    return text
