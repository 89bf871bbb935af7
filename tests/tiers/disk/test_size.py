"""The short form of the million tokens of ``size``."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.tiers.disk.size import SEGMENT, SPEC, run


@pytest.mark.parametrize("chunk", [4096, 1024])
def test_a_long_prefix_of_real_object_sizes(tmp_path: Path, chunk: int) -> None:
    done = run(tmp_path, 4096, chunk)
    kinds = done["restore"]["kinds"]
    assert set(kinds) == {group.kind.name.lower() for group in SPEC.groups}
    assert kinds["indexer"]["objects"] == 4096 // SEGMENT
    assert done["restore"]["bytes"] <= done["store"]["payload_bytes"] <= done["du_bytes"]
