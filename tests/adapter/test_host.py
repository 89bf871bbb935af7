"""Host memory between the device and a disk: every kind comes back from it, and a hit is what it is from the device."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.adapter.shop import SHAPE, Shop  # noqa: E402
from tests.adapter.test_store import KINDS, kinds_of  # noqa: E402

from kvloom.adapters.transformers import attach  # noqa: E402
from kvloom.errors import ConfigError, InputError, UnsupportedError  # noqa: E402
from kvloom.testing.faults import FaultyTier, Plan  # noqa: E402
from kvloom.tiers.host import HostStore  # noqa: E402
from kvloom.tiers.values import Result  # noqa: E402
from kvloom.transfer.options import TransferOptions  # noqa: E402
from kvloom.types import Grade  # noqa: E402

SOON = TransferOptions(gpu_watermark=0.001)


@pytest.mark.parametrize("family", KINDS)
def test_every_kind_comes_back_from_host_memory(shop: Shop, family: str) -> None:
    ids = shop.ids()
    with attach(shop.lab.model(family), **SHAPE, host="32MiB", transfers=SOON) as engine:
        reused, found = shop.ask(engine, ids)
        assert reused == 0
        loaded: set[str] = set()
        for floor, expected in ((Grade.CANONICAL, 6 * 32), (Grade.FAITHFUL, len(ids) - 1)):
            engine.manager.evict(engine.manager.cap)
            assert engine.manager.stats().used == 0
            reused, found = shop.ask(engine, ids, floor=floor)
            assert reused == expected
            assert found.same_as(shop.cold(engine, ids)), f"a {floor} hit from host memory"
            loaded |= {kind for kind, size in engine.cold.stats.bytes_loaded.items() if size}
        assert loaded == kinds_of(engine)
        longer = [*ids, *found.tokens[:-1], 7, 8, 9]
        engine.manager.evict(engine.manager.cap)
        reused, found = shop.ask(engine, longer)
        assert reused == len(longer) - 3
        assert found.tokens == shop.cold(engine, longer).tokens


@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_next", "deepseek_v4"])
def test_a_hit_of_pieces_from_device_host_and_disk(shop: Shop, family: str) -> None:
    """The disk knows the first prompt, the host the second one, the device what is left of both."""
    ids = shop.ids()
    with shop.engine(family) as engine:
        shop.ask(engine, ids[:100])
    with shop.engine(family, host="32MiB", transfers=SOON) as engine:
        shop.ask(engine, ids, floor=Grade.CANONICAL)  # what follows a faithful end is faithful
        for group in engine.spec.groups:
            engine.manager.drop(group.name, 0)
        engine.manager.evict(engine.manager.cap // 2)
        reused, found = shop.ask(engine, ids, floor=Grade.CANONICAL)
        assert reused == 6 * 32
        assert found.same_as(shop.cold(engine, ids))
        assert engine.cold.stats.tiers["host"].stores > 0


@pytest.mark.parametrize("result", [Result.IO_ERROR, Result.INTEGRITY, Result.MISSING])
def test_c6_an_object_that_does_not_arrive_is_computed(shop: Shop, result: Result) -> None:
    ids = shop.ids()
    host = FaultyTier(HostStore(32 << 20), Plan(objects={3: result}))
    with attach(shop.lab.model("gpt_oss"), **SHAPE, tiers=[host], transfers=SOON) as engine:
        shop.ask(engine, ids)
        engine.manager.evict(engine.manager.cap)
        reused, found = shop.ask(engine, ids)
        assert found.same_as(shop.cold(engine, ids))
        # What the tier says it is rid of is looked for again at once; a device that cannot read now may read later.
        assert (reused < len(ids) - 1) == (result is Result.IO_ERROR)
        assert sum(engine.cold.stats.failed.values()) > 0
        engine.manager.evict(engine.manager.cap)
        reused, found = shop.ask(engine, ids)
        assert (reused, found.same_as(shop.cold(engine, ids))) == (len(ids) - 1, True), "only once"


def test_d10_a_tier_that_hangs_costs_a_deadline_and_no_more(shop: Shop) -> None:
    ids = shop.ids()
    host = FaultyTier(HostStore(32 << 20), Plan(hang_reads=frozenset({0})))
    options = TransferOptions(gpu_watermark=0.001, load_deadline_s=0.3)
    with attach(shop.lab.model("gpt_oss"), **SHAPE, tiers=[host], transfers=options) as engine:
        shop.ask(engine, ids)
        engine.manager.evict(engine.manager.cap)
        with engine.open(ids) as session:
            assert session.reused == 0
            logits = shop.lab.last(session, torch.tensor([ids]))
        assert torch.equal(logits[0], shop.cold(engine, ids).first_logits)
        assert engine.cold.stats.late == 1
        host.release()
        assert engine.cold.flush(30)
        engine.manager.check_integrity()
        assert engine.manager.in_use() == 0


def test_d13_another_salt_finds_nothing_in_any_tier(shop: Shop) -> None:
    ids = shop.ids()
    with shop.engine("gpt_oss", host="32MiB", transfers=SOON) as engine:
        shop.ask(engine, ids, salt=b"one")
        for salt, expected in ((b"two", 0), (b"", 0), (b"one", len(ids) - 1)):
            engine.manager.evict(engine.manager.cap)
            reused, _ = shop.ask(engine, ids, salt=salt)
            assert reused == expected


def test_what_is_no_tier_is_refused(shop: Shop) -> None:
    model = shop.lab.model("gpt_oss")
    with pytest.raises(ConfigError, match="size"):
        attach(model, **SHAPE, host="much")
    with pytest.raises(InputError, match="too small"):
        attach(model, **SHAPE, host=1000)
    with pytest.raises(UnsupportedError, match="recorded"):
        attach(model, **SHAPE, host="1MiB", watch=lambda _event: None)
