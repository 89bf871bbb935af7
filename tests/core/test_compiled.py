"""Compiled code is cached on disk; a cache made from other sources is never loaded."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import kvloom
from kvloom.core import (
    block_pool,
    child_table,
    eviction,
    graves,
    heat,
    hybrid_match,
    leaf_heap,
    objects,
    page_table,
    prefix_index,
    progress,
    reuse,
    room,
    rules,
    sweep,
    victim,
)

MODULES = (
    block_pool,
    child_table,
    eviction,
    graves,
    heat,
    hybrid_match,
    leaf_heap,
    objects,
    page_table,
    prefix_index,
    progress,
    reuse,
    room,
    rules,
    sweep,
    victim,
)


def stamp_of(package: Path) -> str:
    """The stamp that a copy of the package would give its caches."""
    code = "from kvloom.core._jit import _sources_stamp; print(_sources_stamp().hex())"
    environment = os.environ | {"PYTHONPATH": str(package.parent)}
    run = subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=package.parent, capture_output=True, text=True, check=True
    )
    return run.stdout.strip()


def test_the_stamp_covers_every_source_that_compiled_code_may_contain(tmp_path: Path) -> None:
    package = tmp_path / "kvloom"
    shutil.copytree(Path(kvloom.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    before = stamp_of(package)
    assert stamp_of(package) == before
    changed = {before}
    for name in ("core/block_pool.py", "types.py", "kinds/cache_state.py"):
        file = package / name
        file.write_text(file.read_text() + "\n# another line\n")
        changed.add(stamp_of(package))
    assert len(changed) == 4
    (package / "config.py").write_text((package / "config.py").read_text() + "\n# not compiled\n")
    assert stamp_of(package) in changed


def test_every_compiled_function_carries_the_stamp() -> None:
    functions = [f for module in MODULES for f in vars(module).values() if hasattr(f, "py_func")]
    assert len(functions) > 50
    stamps = {f._cache._cache_file._source_stamp[1] for f in functions}
    assert len(stamps) == 1
