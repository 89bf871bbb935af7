"""Tables at every width: nothing is cut, and nothing is wider than the terminal."""

from __future__ import annotations

from io import StringIO

import pytest
from rich.console import Console
from rich.text import Text

from kvloom.cli.spec import spec_table
from kvloom.cli.tables import Sheet
from kvloom.spec.presets import PRESETS, load_preset
from kvloom.spec.report import spec_report

QUESTION = "What does d.get(key) return if the key is not in the dictionary?"


def shown(what: object, width: int) -> str:
    console = Console(width=width, record=True, file=StringIO(), highlight=False)
    console.print(what)
    return console.export_text()


def answers() -> Sheet:
    sheet = Sheet("Times", ("question", "grade"), ("prompt", "reused", "cold"), prose={"question": 24}, spaced=True)
    sheet.add(Text(QUESTION), "canonical", "3,395", "3,328", "10.25")
    sheet.add("Why?", "miss", "3,384", "0", "8.00")
    return sheet


@pytest.mark.parametrize("width", [200, 80, 64, 40, 24])
def test_nothing_is_cut(width: int) -> None:
    text = shown(answers(), width)
    assert all(len(line) <= width for line in text.splitlines())
    assert "…" not in text
    for cell in ("canonical", "3,395", "3,328", "10.25", "miss", "3,384", "8.00"):
        assert cell in text
    words = text.split()
    assert all(word in words for word in QUESTION.split())


def test_a_table_as_long_as_it_fits() -> None:
    assert "───" in shown(answers(), 60)
    narrow = shown(answers(), 40)
    assert "───" not in narrow
    assert "grade canonical, prompt 3,395" in narrow


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_spec_fits_eighty_columns(name: str) -> None:
    report = spec_report(load_preset(name))
    for width in (80, 40):
        text = shown(spec_table(report), width)
        assert all(len(line) <= width for line in text.splitlines())
        assert "…" not in text
        assert all(group["name"] in text for group in report["groups"])
        assert "full attention is kind compressed with ratio 1" in " ".join(text.split())
    assert "bytes of full windows" in shown(spec_table(report), 80)
    assert "/page" in shown(spec_table(report), 80).split("KV cache groups")[1].splitlines()[1]
