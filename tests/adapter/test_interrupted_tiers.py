"""Ctrl-C while tiers are asked: it is heard at once, nothing leaks, and what still moves keeps its slots."""

from __future__ import annotations

import gc
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.adapter.shop import SHAPE, Shop  # noqa: E402
from tests.adapter.slow_tier import SlowTier, bytes_of, cut  # noqa: E402, F401

from kvloom.adapters.transformers import Engine, attach  # noqa: E402
from kvloom.manager.ways import Way  # noqa: E402
from kvloom.testing.faults import FaultyTier, Plan  # noqa: E402
from kvloom.transfer.options import Restoring, TransferOptions  # noqa: E402

DEADLINE = 20.0


@pytest.fixture(autouse=True)
def heard() -> Iterator[None]:
    """A shell may have started this process with the signal ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@contextmanager
def ctrl_c(when: Callable[[], bool]) -> Iterator[None]:
    """An interrupt arrives once ``when`` says so."""
    main = threading.main_thread().ident
    assert main is not None

    def strike() -> None:
        time.sleep(0.05)
        ends = time.monotonic() + DEADLINE
        while not when() and time.monotonic() < ends:
            time.sleep(0.005)
        signal.pthread_kill(main, signal.SIGINT)

    thread = threading.Thread(target=strike)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        yield
    thread.join()


def check_nothing_is_held(engine: Engine) -> None:
    gc.collect()
    engine.close_dropped()
    engine.cold.settle()
    engine.cold.forget_all_ahead()
    assert engine.cold.flush(20)
    engine.manager.check_integrity()
    assert len(engine.manager.running()) == 0
    assert (len(engine.manager.transfers), engine.manager.in_use()) == (0, 0)


def behind(shop: Shop, family: str, tier: Any, **options: Any) -> Engine:
    chosen = {"load_deadline_s": DEADLINE, **options.pop("chosen", {})}
    return attach(shop.lab.model(family), **SHAPE, tiers=[tier], transfers=TransferOptions(**chosen), **options)


@pytest.mark.parametrize("replay", ["off", "auto"])
def test_a_lease_that_an_interrupt_loses_is_given_back(shop: Shop, replay: str) -> None:
    """The interrupt waits until the sequence is leased, and then nobody has it."""
    ids = shop.ids()
    with shop.engine("gpt_oss", replay=replay) as engine:
        shop.ask(engine, ids)
        lease = engine.manager.open

        def interrupted(*args: Any, **names: Any) -> Any:
            sequence = lease(*args, **names)
            signal.raise_signal(signal.SIGINT)
            return sequence

        engine.manager.open = interrupted
        with pytest.raises(KeyboardInterrupt):
            engine.open(ids)
        engine.manager.open = lease
        check_nothing_is_held(engine)
        assert shop.ask(engine, ids)[0] == len(ids) - 1


@pytest.mark.usefixtures("cut")
@pytest.mark.parametrize("replay", ["off", "auto"])
@pytest.mark.parametrize("how", ["whole", "layers", "prefetched", "looked up"])
def test_d10_an_interrupt_does_not_wait_for_a_tier_that_hangs(shop: Shop, how: str, replay: str) -> None:
    ids = shop.ids()
    shop.once("gpt_oss", ids)
    store, door, asked = shop.store(), threading.Event(), threading.Event()
    tier = FaultyTier(store, Plan(hang_reads=frozenset(range(100))))
    restoring = Restoring.LAYERS if how == "layers" else Restoring.WHOLE
    with behind(shop, "gpt_oss", tier, replay=replay, chosen={"restoring": restoring}) as engine:
        if how == "prefetched":
            assert engine.prefetch(ids)
        if how == "looked up":

            def hangs(*args: Any, **names: Any) -> Any:
                asked.set()
                assert door.wait(60)
                return store.lookup(*args, **names)

            tier.lookup = hangs  # type: ignore[method-assign]
        begun = time.monotonic()
        with ctrl_c(lambda: asked.is_set() or (tier.hanging.is_set() and time.monotonic() > begun + 0.2)):
            engine.open(ids)
        assert time.monotonic() - begun < DEADLINE / 2
        tier.release()
        door.set()
        check_nothing_is_held(engine)
        tier.lookup = store.lookup  # type: ignore[method-assign]
        time.sleep(0.1)
        assert shop.ask(engine, ids)[0] == len(ids) - 1


@pytest.mark.parametrize("family", ["gpt_oss", "gemma3", "deepseek_v4"])
def test_c2_an_interrupt_while_a_replay_is_fed(shop: Shop, family: str) -> None:
    """What a replay goes on from is being read: its slots stay held until nothing can be written there any more."""
    whole = shop.ids(24 * 32 + 5)
    with shop.engine(family, replay="auto") as engine:
        shop.ask(engine, whole)
    fork = whole[: 17 * 32 + 9] + shop.ids(20, seed=5)
    store = shop.store()
    tier, door, reading = SlowTier(store), threading.Event(), threading.Event()

    def deaf(_number: int, _places: Any) -> None:
        reading.set()
        assert door.wait(60)

    with behind(shop, family, tier, replay="auto") as engine:
        engine.recoverer.forced = Way.EXACT_REPLAY
        tier.before = deaf
        with ctrl_c(reading.is_set):
            engine.open(fork)
        assert len(engine.manager.transfers) == 1, "something still writes to its slots"
        engine.manager.check_integrity()
        engine.recoverer.forced = Way.RECOMPUTE
        other = engine.open(shop.ids(200, seed=9))
        other.prefill()
        mine = [
            (
                g,
                [
                    int(table[b % len(table)])
                    for b in range(other.sequence.first_block(g), other.sequence.num_blocks(g))
                ],
            )
            for g, table in ((g, other.sequence.block_table(g)) for g in range(len(engine.spec.groups)))
        ]
        before = [bytes_of(engine, g, slots) for g, slots in mine]
        door.set()
        assert engine.cold.flush(20)
        assert [bytes_of(engine, g, slots) for g, slots in mine] == before
        other.close()
        check_nothing_is_held(engine)
        engine.recoverer.forced = None
        assert shop.ask(engine, fork)[1].same_as(shop.cold(engine, fork))


def test_closing_can_be_interrupted_and_done_again(shop: Shop) -> None:
    before = set(threading.enumerate())
    tier = FaultyTier(shop.store(), Plan(hang_publishes=frozenset(range(100))))
    engine = behind(shop, "gpt_oss", tier)
    with engine.open(shop.ids()) as session:
        session.prefill()
    with ctrl_c(tier.hanging.is_set):
        engine.close()
    tier.release()
    engine.close()
    assert engine.manager.in_use() == 0
    left = set(threading.enumerate()) - before
    assert not [t for t in left if t.name.startswith("kvloom-") and "disk" in t.name]
    shop.once("llama", shop.ids(seed=3))
    with shop.engine("gpt_oss") as again:
        assert shop.ask(again, shop.ids())[0] == len(shop.ids()) - 1, "it was stored nevertheless"


def test_weights_that_change_free_what_was_fetched_ahead(shop: Shop) -> None:
    """Nobody can open, or cancel, a prompt of the model as it was before."""
    ids = shop.ids()
    shop.once("gpt_oss", ids)
    with shop.engine("gpt_oss") as engine:
        assert engine.prefetch(ids)
        assert engine.manager.in_use() > 0
        engine.weights_changed()
        engine.cancel_prefetch(ids)
        check_nothing_is_held(engine)


@pytest.mark.usefixtures("cut")
@pytest.mark.parametrize("first", [0, 2])
def test_d10_the_planner_does_not_wait_for_layers_that_do_not_come(shop: Shop, first: int) -> None:
    """A disk that stops at once costs a part of what computing takes; one that stops later no more than that again."""
    ids = shop.ids(24 * 32 + 5)
    shop.once("gpt_oss", ids)
    tier = FaultyTier(shop.store(), Plan(hang_reads=frozenset(range(first, 100))))
    chosen = {"restoring": Restoring.LAYERS, "load_deadline_s": 60.0}
    with behind(shop, "gpt_oss", tier, replay="auto", chosen=chosen) as engine:
        shop.ask(engine, shop.ids(20 * 32, seed=8))  # so that computing has been measured
        engine.recoverer.recovery.loaded(0, 1 << 20, 1e-4)  # and the disk was fast
        begun = time.monotonic()
        with engine.open(ids) as session:
            session.prefill()
            assert session.reused == 0
        assert engine.recoverer.recovery.stats.chosen["restore"] >= 1
        assert time.monotonic() - begun < 30
        tier.release()
        check_nothing_is_held(engine)


def test_a_prompt_of_one_token_is_no_part_of_what_arrives(shop: Shop) -> None:
    """Another session waits for its prefix; this one has none, and closing it changes nothing for the other."""
    ids = shop.ids()
    shop.once("gpt_oss", ids)
    for replay in ("off", "auto"):
        with behind(shop, "gpt_oss", shop.store(), replay=replay, chosen={"restoring": Restoring.LAYERS}) as engine:
            session = engine.open([*ids, 5])
            engine.open([7]).close()
            assert session.reused >= 6 * 32
            session.close()
            check_nothing_is_held(engine)
