"""Where stores of tests lie."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

MEMORY = Path("/dev/shm")


@pytest.fixture
def fast_path(tmp_path: Path) -> Iterator[Path]:
    """A directory in memory where there is such a thing: for tests of many stores, to which a sync means nothing."""
    if not MEMORY.is_dir():
        yield tmp_path
        return
    made = Path(tempfile.mkdtemp(prefix="kvloom-test-", dir=MEMORY))
    yield made
    shutil.rmtree(made)
