"""The report of ``kvloom replay --html`` on recordings: the page of ``html``, with what recordings have."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from itertools import groupby

from kvloom.config import format_size
from kvloom.replay.html import cards_row, chart, kinds_table, page, table
from kvloom.replay.rerun import Rerun
from kvloom.replay.runs import duration


def rerun_report(reports: Sequence[Rerun]) -> str:
    """All runs as one HTML page, recording by recording.  Raises MissingExtraError when plotly is not installed."""
    groups = [list(group) for _, group in groupby(reports, key=lambda report: id(report.recording))]
    names = [group[0].recording.name for group in groups]
    models = ", ".join(dict.fromkeys(group[0].recording.made.spec.name for group in groups))
    sections = [_section(group) for group in groups]
    return page(names, f"Recorded runs: {models}", "the calls of a run, made again.", sections)


def _section(reports: list[Rerun]) -> str:
    from kvloom.replay import charts

    first = reports[0]
    best = max(reports, key=lambda report: report.token_hit_rate)
    label = escape(f"{best.policy}, {best.device}")
    saved = best.saved_seconds
    made = first.recording.made
    what = f"{first.requests:,} requests with {first.prompt_tokens:,} prompt tokens, {len(first.recording):,} calls; "
    what += f"recorded under {escape(made.policy)} in {format_size(made.device)}."
    return "\n".join(
        [
            f"<h2>{escape(first.recording.name)}</h2>",
            f"<p>{what}</p>",
            cards_row(
                [
                    (f"{best.token_hit_rate:.1%}", f"of prompt tokens reused ({label})"),
                    (f"{best.reused:,}", "prompt tokens that needed no prefill"),
                    (duration(saved) if saved is not None else "–", "of prefill saved (with --prefill-speed)"),
                ]
            ),
            '<div class="charts">',
            chart(
                "Why lookups ended where they did",
                "What kept the hit from the next boundary that its tokens would have allowed.",
                charts.reasons([(f"{r.policy}, {r.device}", r.ended, r.requests) for r in reports]),
                wide=False,
            ),
            chart("Bytes kept, by kind", f"Committed objects; {label}.", charts.fill(best.samples), wide=False),
            '</div><div class="tables">',
            _runs_table(reports),
            kinds_table([(r.device, r.policy, r.stats) for r in reports]),
            "</div>",
        ]
    )


def _runs_table(reports: list[Rerun]) -> str:
    head = ("device", "policy", "beside the recording", "token hits", "refused", "calls left out", "run")
    rows = [
        (
            r.device,
            r.policy,
            r.verdict,
            f"{r.token_hit_rate:.2%}",
            f"{r.refused:,}",
            f"{r.left_out:,}",
            f"{r.seconds:.1f} s",
        )
        for r in reports
    ]
    return table("Runs", head, rows, 3)
