"""The example of docs/tiers.md behind an engine: what one engine computed, the next one finds (D11)."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.adapter.shop import SHAPE  # noqa: E402
from tests.tiers.keyed.stores import example  # noqa: E402

from kvloom.adapters.transformers import attach  # noqa: E402
from kvloom.engine.answers import Answer, answer, cold_chunked, prefill_chunks  # noqa: E402

COUNT = 4


@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_next", "deepseek_v4"])
@pytest.mark.parametrize("host", [None, 1 << 20])
def test_two_engines_over_the_example_answer_the_same(lab: Any, fast_path: Path, family: str, host: int | None) -> None:
    ids = lab.ids(6 * 32 + 11)[0].tolist()
    model = lab.model(family)
    cold = cold_chunked(model, ids, prefill_chunks(len(ids), SHAPE["segment"]), count=COUNT)

    def ask() -> tuple[int, Answer, int]:
        tier = example()["FilesTier"](fast_path / "kv", 64 << 20)
        options = {**SHAPE, **({} if host is None else {"host": host})}
        with attach(model, **options, tiers=[tier]) as engine:
            with engine.open(ids) as session:
                found = answer(session, count=COUNT, started=time.perf_counter())
                reused = session.reused
            engine.cold.flush()
            stats = engine.cold.stats
            assert (dict(stats.failed), dict(stats.not_stored)) == ({}, {})
        return reused, found, sum(stats.bytes_loaded.values())

    reused, found, loaded = ask()
    assert (reused, loaded) == (0, 0)
    assert found.same_as(cold)
    files = set((fast_path / "kv").iterdir())
    assert any(path.name.startswith("u") for path in files)
    reused, found, loaded = ask()
    assert reused == len(ids) - 1, "the end of the prompt, out of the directory"
    assert found.same_as(cold)
    assert loaded > 0
    assert files <= set((fast_path / "kv").iterdir())
