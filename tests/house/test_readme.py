"""What the README shows is what happens: its Python as it stands, and the shape of what its commands print."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("gguf")

import torch

from kvloom.demo import weights
from kvloom.errors import MissingExtraError

README = Path(__file__).parents[2] / "README.md"
TEXT = README.read_text(encoding="utf-8")
FENCES = re.findall(r"```(\w*)\n(.*?)```", TEXT, re.DOTALL)
NUMBER = re.compile(r"[\d,.]*\d")
SIZE = re.compile(r"# (?:B|[KMGT]iB)\b")
BY_KIND = re.compile(r" \((?:\w+ SIZE(?:, )?)+\)$")


@pytest.fixture(scope="module", autouse=True)
def _weights() -> None:
    try:
        weights.gguf_path()
    except MissingExtraError:
        pytest.skip("the demo's weights are not installed")


def test_the_python_in_the_readme(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = [text for kind, text in FENCES if kind == "python"]
    names: dict[str, object] = {}
    exec(compile(code, str(README), "exec"), names)
    shown = re.search(r"prints\n\n```\n(.*?)```", TEXT, re.DOTALL)
    assert shown is not None
    assert capsys.readouterr().out == shown.group(1)
    out, prompt = names["out"], names["prompt_ids"]
    assert isinstance(out, torch.Tensor)
    assert isinstance(prompt, torch.Tensor)
    assert out.shape[1] > prompt.shape[1]


def shape(line: str) -> str:
    """A line without its numbers, sizes and kinds."""
    return BY_KIND.sub("", SIZE.sub("SIZE", NUMBER.sub("#", line)))


def run(*arguments: str, folder: Path) -> str:
    command = [sys.executable, "-m", "kvloom", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_across_restarts(tmp_path: Path) -> None:
    """The command of the README twice, on a shorter document: the lines that it shows, but for figures and answers."""
    shown = [text for _, text in FENCES if "dictionaries.txt read in" in text]
    assert len(shown) == 2
    command = re.search(r"^\$ kvloom (run .*)$", shown[0], re.MULTILINE)
    assert command is not None
    (tmp_path / "dictionaries.txt").write_text("A dictionary maps keys to values. " * 60)
    for block in shown:
        lines = [line for line in block.splitlines() if line and not line.startswith("$")]
        printed = [line for line in run(*shlex.split(command.group(1)), folder=tmp_path).splitlines() if line]
        assert [shape(line) for line in printed[:2]] == [shape(line) for line in lines[:2]]
        at = next(n for n, line in enumerate(lines) if "tokens reused" in line)
        here = next(n for n, line in enumerate(printed) if "tokens reused" in line)
        assert [shape(line) for line in printed[here:-1]] == [shape(line) for line in lines[at:-1]]
        ways = "ways to the state of a prompt: "
        assert printed[-1].startswith(ways)
        assert lines[-1].startswith(ways)
