"""``kvloom demo``: progress while it runs, then tables or JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from kvloom.config import format_size

if TYPE_CHECKING:
    from kvloom.demo.result import DemoResult, KindRow, ModelShow, Row


def demo_command(*, as_json: bool, interactive: bool) -> int:
    """Run the demo and print what it found; 0 when every warm answer was identical to its cold one, else 1."""
    from kvloom.demo import weights

    weights.require()

    from kvloom.demo.show import run_demo

    status = Console(stderr=True, highlight=False)
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=status, transient=True, disable=not interactive) as progress:
        task = progress.add_task("starting", total=1.0)
        said: set[str] = set()

        def say(what: str, done: float) -> None:
            progress.update(task, description=escape(what), completed=done)
            if not interactive and not as_json and what not in said:
                said.add(what)
                status.print(f"{done:4.0%}  {what}", markup=False)

        result = run_demo(say)
    if as_json:
        print(json.dumps(result.to_json(), indent=2, ensure_ascii=False))  # noqa: T201
    else:
        Console(highlight=False).print(demo_report(result))
    return 0 if result.all_identical else 1


def demo_report(result: DemoResult) -> RenderableType:
    """The result as tables and sentences for a terminal."""
    real = result.real.facts
    oneshot, chunked = result.speedups()
    verdict = (
        Text(
            "Every warm answer was identical to its cold answer: all tokens, and the first logits bit for bit.", "green"
        )
        if result.all_identical
        else Text("NOT identical: see the last column.", "bold red")
    )
    return Group(
        _answers(result.real),
        Text(
            f"{real['layers']}; device cap {format_size(real['device_cap_bytes'])}; first document "
            f"{real['document_tokens']:,} tokens, computed once in {real['read_document_s']:.1f} s; the second one "
            f"({real['other_document_tokens']:,} tokens) evicted {real['evictions_by_other_document']} objects."
        ),
        Text(
            f"Perplexity on {real['perplexity_tokens']:,} held-out tokens: {real['perplexity_hybrid']:.2f} in this "
            f"hybrid layout, {real['perplexity_all_full']:.2f} with full attention in every layer."
        ),
        Text(
            f"Median time to first token of the hits: {oneshot:.0f} × faster than transformers' one-shot generate, "
            f"{chunked:.0f} × faster than the same chunks cold."
        ),
        Text(),
        _answers(result.tiny),
        Text(f"{result.tiny.facts['layers']}."),
        Text(),
        _kinds({show.name: show.kinds for show in (result.real, result.tiny)}),
        Text(),
        verdict,
    )


def _answers(show: ModelShow) -> Table:
    table = Table(title=show.name, title_justify="left", title_style="bold", show_lines=True)
    table.add_column("step", no_wrap=True)
    table.add_column("question and answer", ratio=1)
    for name in ("prompt", "reused", "grade", "cold", "chunked", "warm", "identical"):
        table.add_column(name, justify="right" if name not in ("grade", "identical") else "left", no_wrap=True)
    for row in show.rows:
        table.add_row(*_cells(row))
    return table


def _cells(row: Row) -> tuple[str | Text, ...]:
    answer = Text(row.question, "bold").append("\n").append(" ".join(row.answer.split()), "not bold")
    return (
        row.step,
        answer,
        f"{row.prompt_tokens:,}",
        f"{row.reused_tokens:,}",
        row.grade or "miss",
        f"{row.ttft_cold_oneshot_s:.2f} s",
        f"{row.ttft_cold_s:.2f} s",
        f"{row.ttft_warm_s:.2f} s",
        Text("yes", "green") if row.identical else Text("NO", "bold red"),
    )


def _kinds(models: Mapping[str, Mapping[str, KindRow]]) -> Table:
    table = Table(title="Cache objects by kind", title_justify="left", title_style="bold")
    table.add_column("model")
    table.add_column("kind")
    for name in ("hits", "misses", "evictions", "kept"):
        table.add_column(name, justify="right")
    for model, kinds in models.items():
        for kind, row in kinds.items():
            table.add_row(model, kind, f"{row.hits:,}", f"{row.misses:,}", f"{row.evictions:,}", format_size(row.bytes))
        table.add_section()
    return table
