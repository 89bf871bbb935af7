"""``import kvloom`` and the command's help need neither torch nor transformers."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

import kvloom

HEAVY = (
    *("torch", "transformers", "numba", "llvmlite", "pydantic", "typer", "gguf", "tokenizers", "safetensors"),
    *("pandas", "plotly", "rich", "yaml"),
)
MOST_SECONDS = 0.5
MOST_HEAVIER = 5.0


def _loaded_after(code: str) -> set[str]:
    probe = f"{code}\nimport sys\nprint(*[m for m in {HEAVY!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True, timeout=120)
    return set(done.stdout.split())


def test_import_is_light() -> None:
    assert _loaded_after("import kvloom") == set()


def test_the_list_of_heavy_packages_names_what_is_here() -> None:
    assert sum(importlib.util.find_spec(name) is not None for name in HEAVY) >= 6


def _cpu_seconds(code: str) -> float:
    """CPU time of a fresh process that runs ``code``, which other programs on the machine hardly change."""
    process = subprocess.Popen([sys.executable, "-c", code])
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    return used.ru_utime + used.ru_stime


def test_import_takes_half_a_second_at_most() -> None:
    """The whole process, the interpreter included: best of five."""
    _cpu_seconds("import kvloom")  # writes its bytecode
    best = min(_cpu_seconds("import kvloom") for _ in range(5))
    assert best <= MOST_SECONDS
    bare = min(_cpu_seconds("pass") for _ in range(5))
    assert best <= MOST_HEAVIER * bare + 0.05  # whatever the machine


def test_every_public_name_loads_without_torch() -> None:
    loaded = _loaded_after("import kvloom\nfor name in kvloom.__all__: getattr(kvloom, name)")
    assert loaded.isdisjoint({"torch", "transformers", "gguf", "tokenizers"})


def test_public_names_are_one_list() -> None:
    assert sorted({*kvloom._HOME, "__version__"}) == sorted(kvloom.__all__) == dir(kvloom)
    with pytest.raises(AttributeError, match="no attribute 'Bicycle'"):
        _ = kvloom.Bicycle
