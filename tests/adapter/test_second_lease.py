"""A session whose prefix did not arrive begins again while that of another one is arriving: it waits for it."""

from __future__ import annotations

import threading
import time

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.adapter.shop import COUNT, Shop  # noqa: E402
from tests.adapter.slow_tier import Hold, cut, layered  # noqa: E402, F401

from kvloom.engine.answers import answer  # noqa: E402
from kvloom.manager.ways import Way  # noqa: E402
from kvloom.tiers.values import Result  # noqa: E402
from kvloom.types import Grade  # noqa: E402

pytestmark = pytest.mark.usefixtures("cut")


@pytest.mark.parametrize("replay", ["off", "auto"])
@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_next", "deepseek_v4"])
def test_c6_who_begins_again_waits_for_what_arrives_for_others(shop: Shop, family: str, replay: str) -> None:
    ids = shop.ids(6 * 32 + 11)
    shop.once(family, ids)
    engine, tier = layered(shop, family, replay=replay)
    with engine:
        if engine.recoverer is not None:
            engine.recoverer.forced = Way.RESTORE
        tier.spoil[2] = Result.IO_ERROR
        first = engine.open([*ids, 7, 8], floor=Grade.CANONICAL)
        assert engine.cold.arriving is not None
        assert engine.cold.arriving.load.wait_for(20)
        hold = Hold(engine, tier, layer=1)
        second = engine.open([*ids, 9], floor=Grade.CANONICAL)
        assert engine.cold.arriving is not None
        timer = threading.Timer(0.3, hold.let.set)
        timer.start()
        first.prefill()
        assert hold.let.is_set(), "it did not wait"
        for session in (first, second):
            found = answer(session, count=COUNT, started=time.perf_counter())
            assert found.same_as(shop.cold(engine, session.tokens.tolist()))
            session.close()
        timer.join()
        engine.cold.flush()
        engine.manager.check_integrity()
        assert engine.manager.in_use() == 0
