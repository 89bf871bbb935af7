"""docs/cli.md names every option of every command, and exactly the keys that their JSON has."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from tests.replay.plain import CONVERSATION

from kvloom.cli.app import app
from kvloom.demo.result import DemoResult, KindRow, ModelShow, NewProcess, Row

PAGE = (Path(__file__).parents[2] / "docs" / "cli.md").read_text(encoding="utf-8")


def commands(group: Any, path: str = "kvloom") -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, f"{path} {name}")
        else:
            yield f"{path} {name}", command


COMMANDS = dict(commands(typer.main.get_command(app)))


def section(path: str) -> str:
    """What the page says about a command."""
    parts = re.split(r"^## `(.+)`$", PAGE, flags=re.MULTILINE)
    return next(
        text for title, text in zip(parts[1::2], parts[2::2], strict=True) if f"{title} ".startswith(f"{path} ")
    )


def rows(path: str, header: str) -> set[str]:
    """The code words in the first column of one of the command's tables."""
    found: set[str] = set()
    inside = False
    for line in section(path).splitlines():
        inside = line.startswith(f"| {header} |") or (inside and line.startswith("|"))
        if inside:
            found.update(re.findall(r"`([^`]+)`", re.split(r"(?<!\\)\|", line)[1]))
    return found


@pytest.mark.parametrize("path", COMMANDS)
def test_options(path: str) -> None:
    taken = {option for p in COMMANDS[path].params for option in p.opts if option.startswith("--")} - {"--help"}
    assert {text.split()[0] for text in rows(path, "option")} == taken


BENCHES = [path for path in COMMANDS if path.startswith("kvloom bench ")]


@pytest.mark.parametrize("path", BENCHES)
def test_what_is_measured_is_described(path: str) -> None:
    """docs/bench.md has a section for every benchmark, which names all of its options."""
    page = (Path(__file__).parents[2] / "docs" / "bench.md").read_text(encoding="utf-8")
    (text,) = [part for part in page.split("\n## `") if part.startswith(path)]
    taken = {option for p in COMMANDS[path].params for option in p.opts if option.startswith("--")} - {"--help"}
    assert set(re.findall(r"--[a-z][\w-]*", text)) == taken


def keys(path: str) -> set[str]:
    return rows(path, "key")


def printed(invoke: Any, *arguments: object) -> dict[str, Any]:
    done = invoke(*arguments, "--json")
    assert done.exit_code == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def test_keys_without_a_model(invoke) -> None:
    assert keys("kvloom spec") == set(printed(invoke, "spec", "qwen3-next-80b"))
    assert keys("kvloom replay") == set(
        printed(invoke, "replay", CONVERSATION, "--model", "llama-3.1-8b", "--device", "5%", "--cache-only")
    )
    assert keys("kvloom warmup") == set(printed(invoke, "warmup"))
    row = Row("question", "Why?", "So.", 9, 8, "canonical", 1.0, 1.0, 0.5, identical=True, generated=3)
    show = ModelShow("any", {}, (row,), {"window": KindRow(1, 2, 3, 4)})
    assert keys("kvloom demo") == set(DemoResult(show, NewProcess(), show).to_json())


def test_keys_with_a_model(invoke, model_dir: Path, document: Path) -> None:
    asked = ["--document", document, "--question", "Why?", "--device", "8MiB", "--max-new-tokens", "2"]
    assert keys("kvloom run") == set(printed(invoke, "run", "--model", model_dir, *asked))
    small = ["--block-size", "32", "--segment", "32"]
    assert keys("kvloom verify-model") == set(printed(invoke, "verify-model", model_dir, *small))


def test_keys_of_errors(invoke, model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bad usage, bad options and bad settings, of every command with --json."""
    trace = ["replay", CONVERSATION, "--model", "llama-3.1-8b", "--device"]
    bad = [
        ["spec", "gpt-os"],
        ["spec", "gpt-oss-20b", "--context", "many"],
        ["run", "--model", model_dir, "--document", "/nowhere", "--question", "?"],
        ["run", "--model", model_dir],
        [*trace, "0%"],
        [*trace, "5%", "--block", "0"],
        ["bench", "fragmentation", "--trace", "/nowhere"],
        ["verify-model", model_dir, "--block-size", "0"],
        ["verify-model", model_dir, "--seed", str(2**64)],
        ["verify-model", model_dir, "--device", "meta"],
        ["verify-model", model_dir, "--tokens", "many"],
    ]
    cases = [(arguments, None) for arguments in bad]
    cases += [(arguments, "lots") for arguments in (["spec", "gpt-oss-20b"], ["verify-model", model_dir])]
    for arguments, device in cases:
        if device is not None:
            monkeypatch.setenv("KVLOOM_DEVICE", device)
        done = invoke(*arguments, "--json")
        report = json.loads(done.stdout)
        assert done.exit_code == report["error"]["exit_code"] == 2, arguments
        assert set(report["error"]) == {"type", "message", "exit_code"}
        assert done.stderr.startswith(f"kvloom: error: {report['error']['message']}")
        assert done.stderr.count("\n") == 1
        if arguments[0] == "verify-model":
            assert set(report) == keys("kvloom verify-model") | {"error"}
            assert (report["verdict"], report["reason"]) == ("unsupported", report["error"]["message"])
        else:
            assert set(report) == {"error"}
        if device is not None:
            assert "environment variable KVLOOM_DEVICE: device = 'lots'" in done.stderr
