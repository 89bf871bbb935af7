"""The report of ``kvloom replay --html``: one self-contained file, which needs no network to look at."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from kvloom import __version__
from kvloom.config import format_size
from kvloom.errors import MissingExtraError
from kvloom.manager.stats import Stats
from kvloom.replay.runs import RunReport, by_trace, duration

_STYLE = """
:root { color-scheme: light; }
* { box-sizing: border-box; }
body { margin: 0; background: #f5f6f8; color: #1d2433; font: 15px/1.5 system-ui, "Segoe UI", Roboto, sans-serif; }
main { max-width: 1180px; margin: 0 auto; padding: 32px 24px 64px; }
h1 { font-size: 26px; margin: 0 0 4px; } h2 { font-size: 20px; margin: 44px 0 4px; } h3 { font-size: 15px; margin: 0; }
p { margin: 4px 0; color: #56607a; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(170px, 1fr)); gap: 14px; margin: 18px 0; }
.card, .chart { background: #fff; border: 1px solid #e3e6ee; border-radius: 10px; padding: 14px 18px; }
.card, .chart { min-width: 0; overflow: hidden; }
.card b { display: block; font-size: 25px; line-height: 1.3; } .card span { color: #56607a; font-size: 13px; }
.charts { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 14px; }
.charts .wide { grid-column: 1 / -1; }
.chart p { font-size: 13px; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; font-size: 14px; }
th, td { text-align: right; padding: 6px 10px; border-bottom: 1px solid #e9ecf2; white-space: nowrap; }
th { color: #56607a; font-weight: 600; } .text { text-align: left; }
.tables { display: grid; gap: 14px; margin-top: 14px; }
@media (max-width: 860px) { .charts { grid-template-columns: 1fr; } }
"""
_RULE = "A block counts as a hit only if all blocks before it hit."


def require_plotly() -> None:
    """Raise MissingExtraError, which names the extra, when plotly is not installed."""
    try:
        import plotly  # noqa: F401
    except ImportError:
        raise MissingExtraError(
            "the HTML report needs plotly, which is not installed; run: pip install 'kvloom[report]'"
        ) from None


def html_report(reports: Sequence[RunReport]) -> str:
    """All runs as one HTML page: headline numbers, charts and tables, trace by trace.

    Raises MissingExtraError when plotly is not installed.
    """
    traces = by_trace(reports)
    names = [of_trace[0].trace.name for of_trace in traces]
    sections = [_section(of_trace) for of_trace in traces]
    first = reports[0]
    what = "prompts only" if first.cache_only else "prompts and answers"
    return page(names, f"Trace replay: {first.spec.name}", f"{what}. {_RULE}", sections)


def page(names: Sequence[str], heading: str, what: str, sections: Sequence[str]) -> str:
    """A whole page; raises MissingExtraError when plotly is not installed."""
    require_plotly()
    from plotly.offline import get_plotlyjs

    return "\n".join(
        [
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>kvloom replay: {escape(', '.join(names))}</title>",
            f"<style>{_STYLE}</style><script>{get_plotlyjs()}</script></head><body><main>",
            f"<h1>{escape(heading)}</h1>",
            f"<p>kvloom {__version__}; the manager that serves requests, without a model; {what}</p>",
            *sections,
            "</main></body></html>",
        ]
    )


def _section(reports: list[RunReport]) -> str:
    from kvloom.replay import charts
    from kvloom.replay.tier_charts import tier_charts, tier_tables

    trace = reports[0].trace
    best = max(reports, key=lambda report: report.block_hit_rate)
    hours = float(trace.arrivals[-1]) / 3600
    span = f"{hours:.1f} h" if hours >= 1 else f"{hours * 60:.0f} min"
    size = f"{int(trace.inputs.sum()):,} prompt tokens and {int(trace.outputs.sum()):,} answer tokens"
    parts = [
        f"<h2>{escape(trace.name)}</h2>",
        f"<p>{len(trace):,} requests over {span}; {size}; {trace.unique:,} unique blocks of {trace.block} tokens.</p>",
        _cards(best),
        '<div class="charts">',
    ]
    parts += [
        chart("Hit rate by size of the device tier", "", charts.by_size(reports), wide=False),
        chart(
            "Why lookups ended where they did",
            "What kept the hit from the next boundary that its tokens would have allowed.",
            charts.reasons([(charts.label(r, reports), r.outcome.ended, len(r.trace)) for r in reports]),
            wide=False,
        ),
        chart(
            "Hit rate over the trace",
            "Share of prompt blocks reused, over a sliding window of requests.",
            charts.over_time(reports),
            wide=True,
        ),
        chart(
            "Bytes kept, by kind", f"Committed objects; {_label(best)}.", charts.fill(best.outcome.samples), wide=False
        ),
        chart(
            "Prompt length and what of it was reused",
            f"One dot per request; {_label(best)}.",
            charts.lengths(best),
            wide=False,
        ),
    ]
    parts += tier_charts(reports)
    parts += ["</div>", '<div class="tables">', _runs_table(reports), *tier_tables(reports)]
    parts += [kinds_table([(r.short_label, r.policy, r.outcome.stats) for r in reports]), "</div>"]
    return "\n".join(parts)


def _label(report: RunReport) -> str:
    return escape(f"device {report.device_label}, {report.policy}")


def _cards(report: RunReport) -> str:
    saved = report.saved_seconds
    optimum = report.optimum_block_hit_rate
    cards = [
        (f"{report.block_hit_rate:.1%}", f"of prompt blocks reused ({_label(report)})"),
        (
            f"{report.block_hit_rate / optimum:.1%}" if optimum else "–",
            f"of what the offline optimum reaches, {optimum:.1%}",
        ),
        (f"{report.saved_tokens:,}", "prompt tokens that needed no prefill"),
        (duration(saved) if saved is not None else "–", _speed(report.prefill_speed)),
        (format_size(report.device_bytes), f"device tier, {report.device_blocks:,} blocks of the trace"),
    ]
    return cards_row(cards)


def cards_row(cards: Sequence[tuple[str, str]]) -> str:
    """Numbers, each with what it is (HTML)."""
    return (
        '<div class="cards">'
        + "".join(f'<div class="card"><b>{v}</b><span>{t}</span></div>' for v, t in cards)
        + "</div>"
    )


def _speed(speed: float | None) -> str:
    return (
        "of prefill saved (name a --prefill-speed)" if speed is None else f"of prefill saved at {speed:,.0f} tokens/s"
    )


def chart(title: str, note: str, figure: str, *, wide: bool) -> str:
    """A chart under its title and a note (HTML)."""
    css = "chart wide" if wide else "chart"
    return f'<div class="{css}"><h3>{title}</h3><p>{note}</p>{figure}</div>'


def table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]], text_columns: int) -> str:
    """A table; the first ``text_columns`` columns are aligned left."""

    def row(cells: Sequence[str], tag: str) -> str:
        return "".join(
            f'<{tag} class="text">{escape(c)}</{tag}>' if i < text_columns else f"<{tag}>{escape(c)}</{tag}>"
            for i, c in enumerate(cells)
        )

    body = "".join(f"<tr>{row(cells, 'td')}</tr>" for cells in rows)
    return (
        f'<div class="chart scroll"><h3>{title}</h3><table><thead><tr>{row(head, "th")}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _runs_table(reports: list[RunReport]) -> str:
    head = (
        "tiers",
        "policy",
        "device size",
        "block hits",
        "token hits",
        "optimum",
        "no limit",
        "passed through",
        "run",
    )
    rows = [
        (
            r.short_label,
            r.policy,
            format_size(r.device_bytes),
            f"{r.block_hit_rate:.2%}",
            f"{r.token_hit_rate:.2%}",
            f"{r.optimum_block_hit_rate:.2%}",
            f"{r.unlimited_block_hit_rate:.2%}",
            f"{r.outcome.passed_through:,}",
            f"{r.outcome.seconds:.1f} s",
        )
        for r in reports
    ]
    return table("Runs", head, rows, 2)


def kinds_table(runs: Sequence[tuple[str, str, Stats]]) -> str:
    """The counters of every kind in every run: device, policy, manager."""
    head = ("device", "policy", "kind", "hits", "misses", "evictions", "not kept for lack of room", "objects", "bytes")
    rows = [
        (
            device,
            policy,
            kind.name.lower(),
            *(f"{n:,}" for n in (s.hits, s.misses, s.evictions, s.unkept, s.objects)),
            format_size(s.bytes),
        )
        for device, policy, stats in runs
        for kind, s in sorted(stats.kinds.items())
    ]
    return table("Cache objects by kind", head, rows, 3)
