"""Pacing on an engine: what marks a forward, whose loads rest beside it, and that nobody who waits is slowed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.adapter.shop import COUNT, SHAPE, Shop  # noqa: E402
from tests.adapter.slow_tier import Hold, SlowTier, cut, layered  # noqa: E402, F401

from kvloom.adapters.transformers import Engine, attach  # noqa: E402
from kvloom.engine.answers import answer  # noqa: E402
from kvloom.transfer.options import Restoring, TransferOptions  # noqa: E402

SLOW = 0.0001
"""A share with which a piece is followed by seconds of rest."""
SOON = 5.0
pytestmark = pytest.mark.usefixtures("cut")


@pytest.fixture
def engine(shop: Shop) -> Iterator[Engine]:
    with paced(shop) as made:
        yield made


def paced(shop: Shop, restoring: Restoring = Restoring.WHOLE) -> Engine:
    made, _ = layered(shop, "gpt_oss", chosen={"pace": SLOW, "restoring": restoring, "prefetch_window": 1})
    return made


def filled(shop: Shop, seed: int = 0) -> list[int]:
    """A prompt that another engine stored."""
    ids = shop.ids(seed=seed)
    with shop.engine("gpt_oss") as engine:
        assert shop.ask(engine, ids)[0] == 0
    return ids


def inside(model: Any, monkeypatch: pytest.MonkeyPatch, act: Callable[[], None]) -> None:
    """``act`` is called in every forward of the model, when its first layer has run."""
    first = model.model.layers[0]
    forward = first.forward

    def both(*args: Any, **kwargs: Any) -> Any:
        out = forward(*args, **kwargs)
        act()
        return out

    monkeypatch.setattr(first, "forward", both)


def until(there: Callable[[], bool], seconds: float = 20.0) -> bool:
    ends = time.monotonic() + seconds
    while not there() and time.monotonic() < ends:
        time.sleep(0.002)
    return there()


def test_forwards_are_marked_while_they_run(shop: Shop, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    inside(engine.model, monkeypatch, lambda: seen.append(engine.cold.pace.computing))
    assert not engine.cold.pace.computing
    with engine.open(shop.ids()) as session:
        session.prefill()
        assert not engine.cold.pace.computing
        engine.model.generate(torch.tensor([shop.ids()]), past_key_values=session.cache, max_new_tokens=3)
        assert not engine.cold.pace.computing
    assert len(seen) > 6
    assert all(seen)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_forward_that_raises_is_over(
    shop: Shop, engine: Engine, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    def fail() -> None:
        assert engine.cold.pace.computing
        raise error

    with engine.open(shop.ids()) as session:
        with monkeypatch.context() as patch:
            inside(engine.model, patch, fail)
            with pytest.raises(error):
                session.prefill()
            assert not engine.cold.pace.computing
        session.prefill()
        assert not engine.cold.pace.computing


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_direct_call_that_raises_is_over(
    shop: Shop, engine: Engine, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    """Of an interrupt no hook hears: it is over with the next call, or after a while."""

    def fail() -> None:
        raise error

    with engine.open(shop.ids()) as session:
        with monkeypatch.context() as patch:
            inside(engine.model, patch, fail)
            with pytest.raises(error):
                engine.model(input_ids=torch.tensor([shop.ids()[:16]]), past_key_values=session.cache)
        if error is KeyboardInterrupt:
            session.checkpoint()
        assert not engine.cold.pace.computing


def test_a_prefetch_rests_beside_a_forward_and_is_hastened_when_its_prompt_is_opened(
    shop: Shop, engine: Engine
) -> None:
    ids = filled(shop)
    engine.cold.pace.begin()  # and never ends
    assert engine.prefetch(ids)
    (load,) = engine.cold.ahead.loads
    assert until(lambda: all(job.rests for job in load.jobs))
    time.sleep(0.2)
    assert not load.done
    begun = time.monotonic()
    with engine.open(ids) as session:
        assert session.reused == len(ids) - 1
        assert time.monotonic() - begun < SOON
        assert engine.cold.stats.prefetch_used == 1
        logits = answer(session, count=COUNT, started=begun).first_logits
    assert torch.equal(logits, shop.cold(engine, ids).first_logits)
    tier = engine.cold.stats.tiers["disk"]
    assert tier.paced_seconds > 0.1
    assert tier.load_seconds < tier.paced_seconds
    assert engine.cold.links[0].forms.read.samples == 0 or engine.cold.links[0].forms.read.value > 1e6


def test_a_prefetch_that_is_given_up_ends_its_rest(shop: Shop, engine: Engine) -> None:
    ids = filled(shop)
    engine.cold.pace.begin()
    assert engine.prefetch(ids)
    (load,) = engine.cold.ahead.loads
    assert until(lambda: all(job.rests for job in load.jobs))
    engine.cancel_prefetch(ids)
    assert until(lambda: load.done, SOON)
    engine.cold.collect()
    assert engine.manager.in_use() == 0


def test_a_store_rests_beside_a_forward_and_closing_hastens_it(shop: Shop) -> None:
    engine = paced(shop)
    ids = shop.ids()
    with engine.open(ids) as session:
        session.prefill()
        engine.cold.flush()
        engine.cold.tiers[0].clear()
        engine.cold.pace.begin()
        engine.cold.keep(session.sequence, b"", engine.keys())
        jobs = engine.cold.keeping.jobs
        assert until(lambda: any(job.rests for job in jobs))
        time.sleep(0.2)
        assert not all(job.done for job in jobs)
    begun = time.monotonic()
    engine.close()
    assert time.monotonic() - begun < SOON
    assert all(job.done for job in jobs)
    assert shop.once("gpt_oss", ids) == len(ids) - 1


def test_a_forward_that_waits_for_its_own_layers_is_not_slowed(shop: Shop) -> None:
    ids = filled(shop)
    with paced(shop, Restoring.LAYERS) as engine:
        begun = time.monotonic()
        with engine.open(ids) as session:
            assert engine.cold.arriving is not None
            jobs = engine.cold.arriving.load.jobs
            logits = session.step(len(ids))[0, -1]
            assert time.monotonic() - begun < SOON
            assert session.reused == len(ids) - 1
            assert torch.equal(logits, shop.cold(engine, ids).first_logits)
        assert [job.rests for job in jobs] == [0]
        assert engine.cold.stats.tiers["disk"].paced_seconds == 0


def test_beside_the_forward_of_another_session_it_rests(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    ids, other = filled(shop), shop.ids(seed=1)
    engine, tier = layered(shop, "gpt_oss", chosen={"pace": SLOW, "load_deadline_s": 600.0})
    with engine, engine.open(other) as running:
        running.prefill()
        hold = Hold(engine, tier, layer=1)
        with engine.open(ids) as session:
            arrival = engine.cold.arriving
            assert arrival is not None
            (job,) = arrival.load.jobs
            assert hold.held.wait(20)

            def look() -> None:
                if not hold.let.is_set():
                    hold.let.set()
                    time.sleep(0.3)
                    assert job.rests > 0
                    assert not job.done

            with monkeypatch.context() as patch:
                inside(engine.model, patch, look)
                running.step(len(other))
            assert hold.let.is_set()
            begun = time.monotonic()
            logits = session.step(len(ids))[0, -1]
            assert time.monotonic() - begun < SOON
            assert torch.equal(logits, shop.cold(engine, ids).first_logits)


def test_an_arena_that_is_no_host_memory_is_not_paced(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvloom.adapters.transformers import device

    monkeypatch.setattr(device.CpuArena, "host_memory", lambda _self: None)
    tier = SlowTier(shop.store())
    with attach(shop.lab.model("gpt_oss"), **SHAPE, tiers=[tier], transfers=TransferOptions(pace=SLOW)) as engine:
        assert engine.cold.pace.share == 1
