"""``kvloom demo``: progress while it runs, then tables or JSON."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from kvloom.cli import interrupts, streams
from kvloom.cli.tables import Sheet
from kvloom.cli.warmup import ensure_compiled
from kvloom.config import format_size

if TYPE_CHECKING:
    from kvloom.demo.result import DemoResult, KindRow, ModelShow, NewProcess, Row


def demo_command(*, as_json: bool) -> int:
    """Run the demo and print what it found; 0 when every warm answer was identical to its cold one, else 1."""
    from kvloom.demo import weights

    weights.require()

    from kvloom.demo.show import run_demo

    ensure_compiled()
    status = streams.progress()
    interactive = status.is_terminal
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
                streams.say(f"{done:4.0%}  {what}")

        try:
            directory = Path(tempfile.mkdtemp(prefix="kvloom-demo-"))
        except OSError:
            result = run_demo(say, None)
        else:
            with interrupts.cleaning(lambda: shutil.rmtree(directory, ignore_errors=True)):
                result = run_demo(say, directory)
    if as_json:
        streams.emit_json(result.to_json())
    else:
        streams.screen().print(demo_report(result))
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
        else Text("NOT identical: see what is marked NO.", "bold red")
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
        _again(result.again),
        Text(),
        _answers(result.tiny),
        Text(f"{result.tiny.facts['layers']}."),
        Text(),
        *(_kinds(show.name, show.kinds) for show in (result.real, result.tiny)),
        verdict,
    )


def _again(new: NewProcess) -> Text:
    if new.identical is None:
        return Text(f"No new process answered from disk: {new.problem}.", "yellow")
    return Text(
        f"A new process answered the first question with what was on disk: {new.reused_tokens:,} of "
        f"{new.prompt_tokens:,} tokens ({format_size(new.bytes_loaded)}) were read from there, and the first token "
        f"came after {new.ttft_s:.2f} s instead of {new.ttft_cold_s:.2f} s cold, and the answer was "
        f"{'identical' if new.identical else 'NOT identical'} to the cold one."
    )


def _answers(show: ModelShow) -> Sheet:
    """Times are seconds to the first token: one-shot generate, the same chunks cold, and kvloom."""
    sheet = Sheet(
        f"{show.name}: seconds to the first token",
        ("question", "grade"),
        ("prompt", "reused", "cold", "chunked", "warm", "same"),
        prose={"question": 24},
        spaced=True,
    )
    for row in show.rows:
        sheet.add(*_cells(row))
    return sheet


def _cells(row: Row) -> tuple[str | Text, ...]:
    asked = Text.assemble((f"{row.step}: ", "cyan"), (row.question, "bold"), "\n", " ".join(row.answer.split()))
    return (
        asked,
        row.grade or "miss",
        f"{row.prompt_tokens:,}",
        f"{row.reused_tokens:,}",
        f"{row.ttft_cold_oneshot_s:.2f}",
        f"{row.ttft_cold_s:.2f}",
        f"{row.ttft_warm_s:.2f}",
        Text("yes", "green") if row.identical else Text("NO", "bold red"),
    )


def _kinds(model: str, kinds: Mapping[str, KindRow]) -> Sheet:
    sheet = Sheet(f"Cache objects of {model}", ("kind",), ("hits", "misses", "evicted", "kept"))
    for kind, row in kinds.items():
        sheet.add(kind, f"{row.hits:,}", f"{row.misses:,}", f"{row.evictions:,}", format_size(row.bytes))
    return sheet
