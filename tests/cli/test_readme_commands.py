"""Every command that the README shows runs, with small files in place of those that it names."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

pytest.importorskip("torch")

README = Path(__file__).parents[2] / "README.md"
COMMANDS = [
    line.removeprefix("$ ").partition("#")[0].strip()
    for _, text in re.findall(r"```(\w*)\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    for line in text.splitlines()
    if line.removeprefix("$ ").startswith("kvloom ")
]


def test_every_command_of_the_readme_runs(invoke, model_dir: Path, document: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    small = ["--device", "8MiB", "--block-size", "64", "--max-new-tokens", "2"]
    asked = ["run", "--model", model_dir, "--document", document, "--question", "Why?", *small]
    assert invoke(*asked, "--record", "run.jsonl").exit_code == 0
    assert {line.split()[1] for line in COMMANDS} >= {"spec", "run", "verify-model", "replay"}
    for line in COMMANDS:
        words = shlex.split(line)[1:]
        names = {"smollm2": model_dir, "dictionaries.txt": document, "DIR": model_dir}
        names["FILE"] = "run.jsonl" if words[0] == "replay" else document
        more = {"run": small, "verify-model": ["--block-size", "32", "--segment", "32"]}.get(words[0], [])
        done = invoke(*(names.get(word, word) for word in words), *more)
        assert done.exit_code == 0, f"{line}: {done.stderr}"
        assert done.stdout
