"""Exit codes, one-line errors, help and versions; no model is run here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from kvloom import __version__
from kvloom.cli.failures import guarded, missing_extra
from kvloom.errors import InputError, MissingExtraError
from kvloom.spec.presets import PRESETS


def outcome(error: BaseException) -> int:
    def command() -> int:
        raise error

    with pytest.raises(typer.Exit) as caught:
        guarded(command)()
    return caught.value.exit_code


def test_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    assert outcome(InputError("bad\n  input [here]")) == 2
    assert capsys.readouterr().err == "kvloom: error: bad input [here]\n"
    assert outcome(MissingExtraError("run: pip install 'kvloom[demo]'")) == 2
    assert capsys.readouterr().err == "kvloom: error: run: pip install 'kvloom[demo]'\n"
    assert outcome(KeyboardInterrupt()) == 130
    assert capsys.readouterr().err == "kvloom: error: interrupted\n"
    assert outcome(ZeroDivisionError("oops")) == 70
    shown = capsys.readouterr().err
    assert "Traceback" in shown
    assert "internal error in kvloom: ZeroDivisionError: oops" in shown


def test_only_a_missing_optional_package_names_an_extra() -> None:
    assert "pip install 'kvloom[transformers]'" in str(missing_extra(ModuleNotFoundError("x", name="torch.nn")))
    assert "pip install 'kvloom[demo]'" in str(missing_extra(ModuleNotFoundError("x", name="gguf")))
    assert missing_extra(ModuleNotFoundError("x", name="kvloom.nonsense")) is None
    assert missing_extra(ImportError("cannot import name", name="torch")) is None


def test_version_and_help(invoke) -> None:
    assert invoke("--version").stdout == f"kvloom {__version__}\n"
    for command in ("spec", "run", "verify-model", "demo"):
        assert command in invoke("--help").stdout
        shown = invoke(command, "--help")
        assert shown.exit_code == 0
        assert "--json" in shown.stdout
    for option in ("--model", "--document", "--question", "--device", "--floor", "--explain"):
        assert option in invoke("run", "--help").stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nonsense"], "no such command 'nonsense'; see kvloom --help"),
        (["run"], "missing option"),
        (["spec"], "missing argument"),
        (["spec", "mistral-7b", "--context", "many"], "'--context'"),
        (["spec", "mistral-7b", "--contxt", "1"], "no such option: --contxt"),
        (["run", "--model"], "'--model' requires an argument"),
        (["bench", "speed"], "see kvloom bench --help"),
        (["run", "--max-new-tokens", "0"], "--max-new-tokens"),
    ],
)
def test_usage_errors_are_one_line(invoke, arguments: list[str], words: str) -> None:
    done = invoke(*arguments)
    assert done.exit_code == 2
    assert done.stdout == ""
    assert done.stderr.startswith("kvloom: error: ")
    assert words.lower() in done.stderr.lower()
    assert done.stderr.count("\n") == 1


def test_without_a_command_there_is_help(invoke) -> None:
    for arguments in ([], ["bench"]):
        done = invoke(*arguments)
        assert (done.exit_code, done.stdout) == (2, "")
        assert "Commands:" in done.stderr


def test_spec_json(invoke) -> None:
    done = invoke("spec", "deepseek-v4-flash", "--json")
    report = json.loads(done.stdout)
    assert done.exit_code == 0
    assert report["global_bytes_per_token"] == 3850.25
    assert report["window_bytes"] == 3_214_336
    assert report["exact_replay_tokens"] == 5504
    assert report["lcm_tokens"] == 128
    assert set(report["kinds"]) == {"compressed", "indexer", "window", "tail"}


def test_spec_table(invoke) -> None:
    done = invoke("spec", "gpt-oss-20b", "--context", "4096")
    assert done.exit_code == 0
    assert "at 4,096 tokens" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["gpt-os"], "did you mean gpt-oss-20b or gpt-oss-120b?"),
        (["missing/config.json"], "no such file"),
        (["mistral-7b", "--block-size", "0"], "--block-size 0: "),
        (["mistral-7b", "--context", "0"], "context"),
        (["mistral-7b", "--context", "9" * 30], "context: at most 1073741824 tokens"),
        (["mistral-7b", "--block-size", "9" * 30], "--block-size 999"),
        (["mistral-7b", "--segment", str(128 * 10**30)], "segment"),
        (["/dev/zero"], "a device"),
    ],
)
def test_spec_errors_are_one_line(invoke, arguments: list[str], words: str) -> None:
    done = invoke("spec", *arguments)
    assert done.exit_code == 2
    assert words in done.stderr
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""


def test_spec_needs_no_torch(tmp_path: Path) -> None:
    """With torch and transformers made unimportable, spec works and run names the extra."""
    for name in ("torch", "transformers"):
        (tmp_path / f"{name}.py").write_text(f'raise ModuleNotFoundError("none here", name="{name}")')
    (tmp_path / "document.txt").write_text("Some words.")

    def kvloom(*arguments: str) -> subprocess.CompletedProcess[str]:
        code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from kvloom.cli import main; main(sys.argv[1:])"
        return subprocess.run(
            [sys.executable, "-c", code, *arguments], check=False, capture_output=True, text=True, timeout=120
        )

    done = kvloom("spec", "gpt-oss-120b", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["model"] == "gpt-oss-120b"
    asked = ["run", "--model", str(tmp_path), "--document", str(tmp_path / "document.txt"), "--question", "Why?"]
    for arguments, extra in [(asked, "transformers"), (["demo"], "transformers")]:
        done = kvloom(*arguments)
        assert done.returncode == 2
        assert f"pip install 'kvloom[{extra}]'" in done.stderr
        assert done.stderr.count("\n") == 1


def test_presets_are_listed(invoke) -> None:
    done = invoke("spec", "--list")
    assert done.exit_code == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines] == list(PRESETS)
    assert "12 full and 12 sliding layers (128)" in lines[list(PRESETS).index("gpt-oss-20b")]
