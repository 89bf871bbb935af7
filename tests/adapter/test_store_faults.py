"""What the disk does never changes an answer, and is counted (C6, D5, D7)."""

from __future__ import annotations

import errno
import os
import shutil
import sqlite3
import threading
import time

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.adapter.shop import SHAPE, Shop, flip  # noqa: E402
from tests.tiers.disk.faults import FailingOps, statements  # noqa: E402

from kvloom.adapters.transformers import Engine, attach  # noqa: E402
from kvloom.errors import InputError  # noqa: E402
from kvloom.testing.families import random_model, tiny_config  # noqa: E402
from kvloom.tiers.disk import DiskStore  # noqa: E402


@pytest.mark.parametrize("every", [1, 7])
@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_next", "deepseek_v4"])
def test_d5_damaged_extents_are_misses(shop: Shop, family: str, every: int) -> None:
    ids = shop.ids()
    assert shop.once(family, ids) == 0
    assert flip(shop.place, every) > 0
    with shop.engine(family) as engine:
        reused, found = shop.ask(engine, ids)
        assert found.same_as(shop.cold(engine, ids))
        assert reused < len(ids) - 1
        failed = engine.cold.stats.failed
        assert failed["integrity"] > 0
        assert set(failed) == {"integrity"}
        assert engine.cold.tiers[0].activity().quarantined >= failed["integrity"]
    assert shop.once(family, ids) == len(ids) - 1, "what was computed again was stored again"


def test_c6_d5_one_damaged_object_costs_one_boundary(shop: Shop) -> None:
    """The snapshot of the end is damaged: the boundary before it still serves."""
    ids = shop.ids()
    assert shop.once("qwen3_next", ids) == 0
    with shop.engine("qwen3_next") as engine:
        chain = engine.manager.colder.chain(np.array(ids[:-1], dtype=np.int32), extra_keys=keys_of(engine))
        places = engine.cold.tiers[0].lookup(engine.manager.layout, chain.digests).places
        snapshot = next(g for g, group in enumerate(engine.spec.groups) if group.is_snapshot)
        last = places.take((places.rows == len(chain.digests) - 1) & (places.entries["group"] == snapshot))
        assert len(last) == 1
        entry = last.entries[0]
        path = shop.place / "extents" / f"{int(entry['extent']):016x}.extent"
        with path.open("r+b") as file:
            file.seek(int(entry["offset"]) + 256 + 100)
            byte = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte[0] ^ 1]))
        reused, found = shop.ask(engine, ids)
        assert reused == 6 * 32
        assert found.same_as(shop.cold(engine, ids))
        assert dict(engine.cold.stats.failed) == {"integrity": 1}


def keys_of(engine: Engine) -> tuple[tuple[str, str], ...]:
    return (("kvloom.abi", engine._abi(engine.seen())),)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EROFS])
def test_d7_a_disk_that_takes_nothing(shop: Shop, number: int) -> None:
    ids = shop.ids()
    with shop.engine("gpt_oss") as engine:
        shop.ops.failing = dict.fromkeys(("create", "write", "sync_data", "sync_directory"), number)
        reused, found = shop.ask(engine, ids)
        assert (reused, found.same_as(shop.cold(engine, ids))) == (0, True)
        assert engine.cold.stats.stores == 0
        assert engine.cold.stats.not_stored["unavailable"] > 0
        shop.ops.failing.clear()
        shop.now += 100
        assert shop.ask(engine, shop.ids(seed=1))[0] == 0
        assert engine.cold.stats.stores > 0, "it came back by itself"
    assert shop.once("gpt_oss", shop.ids(seed=1)) == len(ids) - 1


def test_d7_a_disk_that_cannot_be_read(shop: Shop) -> None:
    ids = shop.ids()
    assert shop.once("gpt_oss", ids) == 0
    with shop.engine("gpt_oss") as engine:
        shop.ops.failing = {"read": errno.EIO}
        reused, found = shop.ask(engine, ids)
        assert (reused, found.same_as(shop.cold(engine, ids))) == (0, True)
        assert engine.cold.stats.failed["io_error"] > 0
        shop.ops.failing.clear()
        engine.manager.clear()
        assert shop.ask(engine, ids)[0] == len(ids) - 1, "one passing error costs one miss"


def test_d7_a_full_store_makes_room(shop: Shop) -> None:
    """Many prompts through a store that holds a few."""
    cap, model = 8 << 20, random_model(tiny_config("llama", num_key_value_heads=4, head_dim=64))
    with shop.engine("llama", model=model, store=DiskStore.open(shop.place, cap)) as engine:
        for seed in range(10):
            with engine.open(shop.ids(seed=seed)) as session:
                assert session.reused == 0
                session.prefill()
            engine.cold.flush()
            assert shop.size() <= cap
        assert sum(engine.cold.stats.bytes_stored.values()) > cap
        engine.manager.check_integrity()
    again = {"model": model, "store": DiskStore.open(shop.place)}
    assert shop.once("llama", shop.ids(seed=9), engine=again) == len(shop.ids()) - 1


def test_d7_the_directory_is_deleted_under_a_running_engine(shop: Shop) -> None:
    ids = shop.ids()
    with shop.engine("gpt_oss") as engine:
        assert shop.ask(engine, ids)[0] == 0
        engine.manager.clear()
        shutil.rmtree(shop.place)
        for seed in (0, 1, 0):
            engine.manager.clear()
            shop.now += 100
            _, found = shop.ask(engine, shop.ids(seed=seed))
            assert found.same_as(shop.cold(engine, shop.ids(seed=seed)))


def test_d7_a_directory_that_becomes_read_only(shop: Shop) -> None:
    """What is there is still found; nothing new is kept, and that is counted."""
    ids = shop.ids()
    assert shop.once("gpt_oss", ids) == 0
    armed = False

    def refuse(what: str) -> None:
        if armed and not what.startswith("after"):
            raise sqlite3.OperationalError("attempt to write a readonly database")

    with statements(refuse), shop.engine("gpt_oss") as engine:
        armed = True
        shop.ops.failing = dict.fromkeys(("create", "write", "sync_data", "sync_directory", "unlink"), errno.EROFS)
        for seed, reused in ((0, len(ids) - 1), (1, 0)):
            got, found = shop.ask(engine, shop.ids(seed=seed))
            assert (got, found.same_as(shop.cold(engine, shop.ids(seed=seed)))) == (reused, True)
        assert engine.cold.stats.stores == 0
        assert engine.cold.stats.not_stored["unavailable"] > 0


def test_a_store_that_was_closed_is_a_miss(shop: Shop) -> None:
    """Two engines were given one store, and the first one closed it."""
    store, ids = shop.store(), shop.ids()
    first, second = shop.engine("gpt_oss", store=store), shop.engine("gpt_oss", store=store)
    assert shop.ask(first, ids)[0] == 0
    assert shop.ask(second, ids)[0] == len(ids) - 1
    first.close()
    for seed in (0, 1):
        second.manager.clear()
        _, found = shop.ask(second, shop.ids(seed=seed))
        assert found.same_as(shop.cold(second, shop.ids(seed=seed)))
    second.close()
    second.close()


def test_what_is_no_store_is_refused(shop: Shop) -> None:
    with pytest.raises(InputError, match="DiskStore"):
        attach(shop.lab.model("gpt_oss"), store=str(shop.place), **SHAPE)  # type: ignore[arg-type]


class Waiting(FailingOps):
    """A disk that takes nothing while the door is shut."""

    def __init__(self) -> None:
        super().__init__()
        self.door = threading.Event()

    def write(self, fd: int, data: memoryview, offset: int) -> None:
        assert self.door.wait(60)
        super().write(fd, data, offset)


def test_c3_a_slow_disk_stops_nobody_and_stores_the_right_bytes(shop: Shop) -> None:
    """Requests go on, and everything is evicted, cleared and dropped, while what is to be stored waits."""
    shop.ops = ops = Waiting()
    with shop.engine("qwen3_next") as engine:
        for seed in range(6):
            with engine.open(shop.ids(seed=seed)) as session:
                logits = shop.lab.last(session, torch.tensor([shop.ids(seed=seed)]))
            assert torch.equal(logits[0], shop.cold(engine, shop.ids(seed=seed)).first_logits)
            engine.manager.evict(1 << 30)
            engine.manager.clear()
            for group in engine.spec.groups:
                engine.manager.drop(group.name)
            engine.manager.check_integrity()
        stats = engine.cold.stats
        assert (stats.stores, engine.cold.waiting) == (0, True)
        assert stats.not_stored["busy"] > 0
        ops.door.set()
        engine.cold.flush()
        assert (len(engine.manager.transfers), engine.manager.in_use()) == (0, 0)
        engine.manager.check_integrity()
        kept = stats.stores
    assert kept > 0
    shop.ops = FailingOps()
    reused = [shop.once("qwen3_next", shop.ids(seed=seed)) for seed in range(6)]
    assert reused[0] == len(shop.ids()) - 1
    assert reused[-1] == 0


def test_room_that_waits_for_the_disk_comes_back(shop: Shop) -> None:
    """The arena is full of what is being stored: a request waits for the disk rather than being refused."""
    shop.ops = ops = Waiting()
    with shop.engine("gpt_oss", device="500KiB") as engine:
        timer = threading.Timer(0.5, ops.door.set)
        timer.start()
        for seed in range(4):
            with engine.open(shop.ids(seed=seed)) as session:
                logits = shop.lab.last(session, torch.tensor([shop.ids(seed=seed)]))
            assert torch.equal(logits[0], shop.cold(engine, shop.ids(seed=seed)).first_logits)
            engine.manager.check_integrity()
        timer.join()
    assert shop.once("gpt_oss", shop.ids(seed=0)) == len(shop.ids()) - 1


def test_d10_a_disk_that_hangs_is_not_waited_for(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """Closing gives up after a while; requests were answered."""
    monkeypatch.setattr("kvloom.transfer.hierarchy.Hierarchy.close.__defaults__", (0.3,))
    shop.ops = ops = Waiting()
    engine = shop.engine("gpt_oss")
    ids = shop.ids()
    with engine.open(ids) as session:
        logits = shop.lab.last(session, torch.tensor([ids]))
    assert torch.equal(logits[0], shop.cold(engine, ids).first_logits)
    cold = engine.cold
    began = time.monotonic()
    engine.close()
    assert time.monotonic() - began < 10
    assert cold.waiting
    ops.door.set()
    assert cold.flush(30)
    assert engine.manager.in_use() == 0
    assert cold.stats.stores + cold.stats.not_stored["hung"] > 0
    cold.tiers[0].close()
