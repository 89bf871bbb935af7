"""The second half of the demo: a tiny DeepSeek-V4, with every kind of state at work."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console

pytest.importorskip("torch")

from kvloom.cli.demo import demo_report
from kvloom.demo.result import DemoResult, KindRow, ModelShow, NewProcess, Row
from kvloom.demo.show import show_tiny
from kvloom.demo.steps import Steps


def test_tiny_deepseek_v4() -> None:
    show = show_tiny(Steps(lambda _what, _done: None, 100.0))
    assert show.identical
    assert set(show.kinds) == {"compressed", "tail", "window", "indexer"}
    assert all(kind.hits > 0 for kind in show.kinds.values())
    assert [row.grade for row in show.rows] == [None, "canonical", "canonical", "faithful"]
    assert DemoResult(show, NewProcess(), show).all_identical


def test_the_table_says_what_differs() -> None:
    row = Row(
        "question", "Why? [x]", "Because.\nSo.", 100, 64, "canonical", 2.0, 2.5, 0.1, identical=True, generated=32
    )
    facts = {
        "layers": "1 full",
        "device_cap_bytes": 2**20,
        "document_tokens": 90,
        "read_document_s": 1.0,
        "other_document_tokens": 80,
        "evictions_by_other_document": 3,
        "perplexity_tokens": 10,
        "perplexity_hybrid": 12.5,
        "perplexity_all_full": 11.5,
    }
    good = ModelShow("good", facts, (row,), {"window": KindRow(1, 2, 3, 4096)})
    bad = replace(good, rows=(replace(row, identical=False),))

    new = NewProcess("Why?", "So.", 100, 64, "canonical", 2**21, 2**20, 7.5, 0.3, identical=True)

    def shown(real: ModelShow, tiny: ModelShow, new: NewProcess = new) -> str:
        console = Console(width=400, record=True, file=StringIO())
        console.print(demo_report(DemoResult(real, new, tiny)))
        return console.export_text()

    text = shown(good, good)
    for words in (
        "Why? [x]",
        "Because. So.",
        "20 × faster",
        "25 × faster",
        "12.50",
        "11.50",
        "4.0 KiB",
        "identical to its",
        "64 of 100 tokens (1.0 MiB) were read from there",
        "0.30 s instead of 7.50 s cold, and the answer was identical",
    ):
        assert words in text
    assert "NOT identical" in shown(bad, good)
    assert "NOT identical" in shown(good, bad)
    assert "was NOT identical to the cold one" in shown(good, good, replace(new, identical=False))
    assert "NOT identical: see" in shown(good, good, replace(new, identical=False))
    text = shown(good, good, NewProcess(problem="the disk is full"))
    assert "No new process answered from disk: the disk is full." in text
    assert "NOT identical" not in text
