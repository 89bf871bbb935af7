"""The planner on a real engine: what it loads, what it makes again, what it learns, and that answers stay the same."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.adapter.shop import COUNT, SHAPE, Shop, flip  # noqa: E402
from tests.adapter.slow_tier import SlowTier  # noqa: E402

from kvloom.adapters.transformers import Engine, attach  # noqa: E402
from kvloom.adapters.transformers.recovering import NOTHING, joined  # noqa: E402
from kvloom.bench.recovery import SlowReads  # noqa: E402
from kvloom.engine.answers import answer  # noqa: E402
from kvloom.manager.ways import Way  # noqa: E402
from kvloom.plan import StoredObjects  # noqa: E402
from kvloom.tiers.disk import DiskStore  # noqa: E402
from kvloom.tiers.values import Published, Unit  # noqa: E402
from kvloom.types import Grade, Kind  # noqa: E402

ROOM_FOR_ONE = "320KiB"
"""A device that holds a prompt of ten segments, and not another one beside it."""


def planned(shop: Shop, family: str, **options: Any) -> Engine:
    engine: Engine = shop.engine(family, replay="auto", device="16MiB", **options)
    assert engine.recoverer is not None
    return engine


def chosen(engine: Engine) -> dict[str, int]:
    assert engine.recoverer is not None
    return dict(engine.recoverer.recovery.stats.chosen)


@pytest.mark.parametrize("family", ["gpt_oss", "llama4", "deepseek_v4", "qwen3_next", "deepseek_v32"])
def test_what_another_engine_stored_is_restored(shop: Shop, family: str) -> None:
    ids = shop.ids()
    with planned(shop, family) as engine:
        assert shop.ask(engine, ids)[1].same_as(shop.cold(engine, ids))
        assert chosen(engine) == {"recompute": 1}
    with planned(shop, family) as engine:
        reused, found = shop.ask(engine, ids)
        assert reused == len(ids) - 1
        assert found.same_as(shop.cold(engine, ids))
        assert chosen(engine) == {"restore": 1}
        pair = engine.recoverer.recovery.to_json()["choices"][-1]
        assert pair["actual_s"] > 0.0
        assert engine.recoverer.recovery.to_json()["tiers"]["disk"]["observations"] == 1
    with planned(shop, family) as engine:
        reused, found = shop.ask(engine, ids, floor=Grade.CANONICAL)
        assert reused == 6 * 32
        assert found.same_as(shop.cold(engine, ids))


@pytest.mark.parametrize("family", ["gpt_oss", "gemma3", "llama4", "deepseek_v4"])
def test_a_prompt_that_leaves_a_stored_one_half_way_is_restored_and_replayed(shop: Shop, family: str) -> None:
    """Windows are stored where the longer prompt ended; where the other one leaves it, only compressed state is."""
    whole = shop.ids(24 * 32 + 5)
    with planned(shop, family) as engine:
        shop.ask(engine, whole)
    fork = whole[: 17 * 32 + 9] + shop.ids(20, seed=5)
    with planned(shop, family) as engine:
        reused, found = shop.ask(engine, fork)
        assert reused == 17 * 32
        assert found.same_as(shop.cold(engine, fork))
        assert chosen(engine) == {"exact_replay": 1}
        stats = engine.recoverer.recovery.stats
        assert 0 < stats.replayed_tokens < 9 * 32
        assert engine.recoverer.recovery.to_json()["choices"][-1]["options"][-1]["load_bytes"] > 0
        reused, found = shop.ask(engine, fork)
        assert (reused, stats.replays) == (len(fork) - 1, 1)
        assert found.same_as(shop.cold(engine, fork))


def test_on_the_device_too(shop: Shop) -> None:
    """The same within one engine without a store, once the windows inside the longer prompt are gone."""
    whole = shop.ids(24 * 32 + 5)
    engine: Engine = shop.lab.engine("gpt_oss", replay="auto", device="16MiB")
    shop.ask(engine, whole)
    engine.manager.drop(Kind.WINDOW)
    fork = whole[: 17 * 32 + 9] + shop.ids(20, seed=5)
    reused, found = shop.ask(engine, fork)
    assert reused == 17 * 32
    assert found.same_as(shop.cold(engine, fork))


@pytest.mark.parametrize("every", [1, 5])
def test_damage_is_never_an_answer(shop: Shop, every: int) -> None:
    ids = shop.ids(12 * 32 + 7)
    with planned(shop, "gpt_oss") as engine:
        shop.ask(engine, ids)
    assert flip(shop.place, every) > 0
    with planned(shop, "gpt_oss") as engine:
        for _ in range(3):
            assert shop.ask(engine, ids)[1].same_as(shop.cold(engine, ids))


def test_a_disk_that_hardly_moves_costs_a_tenth(shop: Shop) -> None:
    """A load that does not come is given up, and the prompt computed; the tier is known to be slow afterwards."""
    ids, ops = shop.ids(40 * 32 + 5), SlowReads()

    def store() -> DiskStore:
        return DiskStore.open(shop.place, 64 << 20, ops=ops)

    with planned(shop, "gpt_oss", store=store()) as engine:
        shop.ask(engine, ids)
    with planned(shop, "gpt_oss", store=store()) as engine:
        recoverer = engine.recoverer
        shop.ask(engine, shop.ids(30 * 32, seed=8))  # so that computing has been measured
        recoverer.recovery.loaded(0, 1 << 20, 1e-3)  # and the disk was fast
        ops.speed = 1e5
        began = time.perf_counter()
        reused, found = shop.ask(engine, ids)
        assert time.perf_counter() - began < 6.0, "all of it would take longer"
        assert found.same_as(shop.cold(engine, ids))
        assert reused < len(ids) - 1
        assert recoverer.recovery.stats.given_up == 1
        ops.speed = None


def test_a_disk_that_does_not_say_what_it_has_costs_a_tenth(shop: Shop) -> None:
    """Nothing was ever loaded; what computing takes is known, and a question is worth a tenth of it."""
    ids, let = shop.ids(20 * 32 + 5), threading.Event()
    with planned(shop, "gpt_oss", store=shop.store()) as engine:
        shop.ask(engine, ids)
    tier = SlowTier(shop.store())
    lookup = tier.lookup

    def hang(*args: Any, **names: Any) -> Any:
        let.wait(60.0)
        return lookup(*args, **names)

    tier.lookup = hang
    let.set()
    options = {**SHAPE, "device": "16MiB"}
    with attach(shop.lab.model("gpt_oss", "float32"), **options, tiers=[tier], replay="auto") as engine:
        shop.ask(engine, shop.ids(20 * 32, seed=8))
        let.clear()
        began = time.perf_counter()
        try:
            with engine.open(ids) as session:
                found, reused = answer(session, count=COUNT, started=began), session.reused
            seconds = time.perf_counter() - began
        finally:
            let.set()
        assert engine.cold.flush(), "what is stored behind it asks that disk, too"
        assert found.same_as(shop.cold(engine, ids))
        assert reused == 0
        assert engine.cold.links[0].stats.unanswered > 0
        assert seconds < 10.0, "it waited as long as a load may take"


def test_a_way_that_is_forced(shop: Shop) -> None:
    ids = shop.ids(20 * 32 + 1)
    with planned(shop, "gpt_oss") as engine:
        shop.ask(engine, ids)
        for way, reused in ((Way.RECOMPUTE, 0), (Way.RESTORE, 640), (Way.EXACT_REPLAY, 640), (Way.BOUNDED_REPLAY, 0)):
            engine.manager.drop(Kind.WINDOW)
            engine.recoverer.forced = way
            with engine.open(ids) as session:
                assert session.reused == reused, way


@pytest.mark.parametrize("replay", ["off", "auto"])
def test_a_longer_end_of_another_answer_does_not_hide_this_one(shop: Shop, replay: str) -> None:
    """Two turns that end within one segment, the longer one with other tokens."""
    ids = shop.ids()
    assert shop.once("gpt_oss", ids) == 0
    other = [*ids[:-1], 7, 8, 9, 10]
    with shop.engine("gpt_oss") as engine:
        assert shop.ask(engine, other)[0] == len(ids) - 1
    asked = [*ids[:-1], *shop.ids(40, seed=5)]
    with shop.engine("gpt_oss", replay=replay, device="16MiB") as engine:
        if engine.recoverer is not None:
            engine.recoverer.forced = Way.RESTORE
        reused, found = shop.ask(engine, asked)
        assert reused == len(ids) - 1
        assert found.tokens == shop.cold(engine, asked).tokens


@pytest.mark.parametrize("replay", ["off", "auto"])
def test_a_prefix_without_room_waits_for_slots_that_are_being_stored(shop: Shop, replay: str) -> None:
    first, second = shop.ids(10 * 32), shop.ids(10 * 32, seed=5)
    with shop.engine("gpt_oss") as engine:
        shop.ask(engine, first)
    tier, may = SlowTier(shop.store()), threading.Event()
    publish = tier.publish

    def held_back(unit: Unit) -> Published:
        assert may.wait(60)
        return publish(unit)

    tier.publish = held_back
    model = shop.lab.model("gpt_oss", "float32")
    with attach(model, **{**SHAPE, "device": ROOM_FOR_ONE}, tiers=[tier], replay=replay) as engine:
        with engine.open(second) as session:
            answer(session, count=COUNT, started=time.perf_counter())
        assert engine.cold is not None
        assert engine.cold.waiting, "its slots are held"
        if engine.recoverer is not None:
            engine.recoverer.forced = Way.RESTORE  # computing may be faster for a model as small as this
        threading.Timer(0.2, may.set).start()
        reused, found = shop.ask(engine, first)
        assert reused == len(first) - 1
        assert found.same_as(shop.cold(engine, first))


def test_what_several_tiers_have_together() -> None:
    def one(*items: tuple[int, int, int, int]) -> StoredObjects:
        return StoredObjects(*np.array(items, dtype=np.int32).reshape(-1, 4).T.copy())

    both = joined([one((0, 0, 0, 2), (1, 0, 0, 1)), one((0, 0, 0, 1), (2, 1, 0, 2), (3, 0, 0, 2))], 3)
    last = dict(zip(zip(both.row.tolist(), both.group.tolist(), strict=True), both.grade.tolist(), strict=True))
    assert last == {(0, 0): 2, (1, 0): 1, (2, 1): 2}
    assert joined([], 3) is NOTHING
