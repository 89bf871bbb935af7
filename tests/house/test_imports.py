"""``import kvloom`` and the command's help need neither torch nor transformers."""

from __future__ import annotations

import subprocess
import sys

import pytest

import kvloom

HEAVY = ("torch", "transformers", "numba", "pydantic", "typer", "gguf", "tokenizers")


def _loaded_after(code: str) -> set[str]:
    probe = f"{code}\nimport sys\nprint(*[m for m in {HEAVY!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True, timeout=120)
    return set(done.stdout.split())


def test_import_is_light() -> None:
    assert _loaded_after("import kvloom") == set()


def test_every_public_name_loads_without_torch() -> None:
    loaded = _loaded_after("import kvloom\nfor name in kvloom.__all__: getattr(kvloom, name)")
    assert loaded.isdisjoint({"torch", "transformers", "gguf", "tokenizers"})


def test_public_names_are_one_list() -> None:
    assert sorted({*kvloom._HOME, "__version__"}) == sorted(kvloom.__all__) == dir(kvloom)
    with pytest.raises(AttributeError, match="no attribute 'Bicycle'"):
        _ = kvloom.Bicycle
