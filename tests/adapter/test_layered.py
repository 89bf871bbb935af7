"""A restore that is used layer by layer while it is read: the same bits whatever fails, and nothing unverified."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.adapter.shop import COUNT, Shop  # noqa: E402
from tests.adapter.slow_tier import Hold, SlowTier, bytes_of, cut, layered  # noqa: E402, F401

from kvloom.adapters.transformers import Engine, layer_state  # noqa: E402
from kvloom.engine.answers import answer  # noqa: E402
from kvloom.errors import CapacityError, SequenceError  # noqa: E402
from kvloom.tiers.values import Result  # noqa: E402
from kvloom.transfer.options import Restoring  # noqa: E402
from kvloom.types import Grade  # noqa: E402

KINDS = (
    "gpt_oss", "gemma3", "llama4", "qwen3_next", "lfm2", "deepseek_v32", "deepseek_v4", "falcon_h1", "kimi_linear",
)  # fmt: skip
HIT, END = 6 * 32, 6 * 32 + 10
"""The last boundary, and the end, of what ``filled`` keeps."""
SOME = ("gpt_oss", "qwen3_next", "deepseek_v4")

pytestmark = pytest.mark.usefixtures("cut")


@pytest.fixture(autouse=True)
def _no_thread_hangs() -> Iterator[None]:
    before = threading.active_count()
    yield
    deadline = time.monotonic() + 20
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)


def filled(shop: Shop, family: str, count: int = 6 * 32 + 11) -> list[int]:
    """A prompt that another engine kept; prompts that go on differently behind its end hit there."""
    ids = shop.ids(count)
    engine, _ = layered(shop, family)
    with engine:
        assert shop.ask(engine, ids)[0] == 0
        assert engine.cold.stats.stores > 0
    return ids


def then(forward: Callable[..., Any], act: Callable[[], None]) -> Callable[..., Any]:
    """A forward that does something when it is over.  (A hook would make the model another one.)"""

    def both(*args: Any, **kwargs: Any) -> Any:
        out = forward(*args, **kwargs)
        act()
        return out

    return both


def check_books(engine: Engine) -> None:
    engine.cold.flush()
    engine.manager.check_integrity()
    assert engine.cold.arriving is None
    assert len(engine.manager.transfers) == 0
    assert engine.manager.in_use() == 0


def test_a_document_is_read_while_its_prefix_arrives(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """As ``kvloom run`` does it: nothing that it asks before it computes waits for the whole prefix."""
    from rich.console import Console

    from kvloom.cli.run import read_into_cache

    ids = filled(shop, "gpt_oss")
    document = (*ids[:END], *shop.ids(3 * 32, seed=5))
    engine, tier = layered(shop, "gpt_oss")
    with engine:
        hold = Hold(engine, tier)
        first, ran = engine.model.model.layers[0], []

        def go_on() -> None:
            ran.append(time.monotonic())
            hold.let.set()

        with monkeypatch.context() as patch:
            patch.setattr(first, "forward", then(first.forward, go_on))
            read = read_into_cache(engine, document, Grade.FAITHFUL, Console(quiet=True), explain=True)
        assert hold.held.is_set()
        assert ran[0] < max(ended for _, ended, _ in engine.cold.timeline.reads)
        assert engine.cold.stats.layered == 1
        assert read["reused_tokens"] == read["explanation"]["boundary"] == END
        assert read["restored_bytes"] == sum(engine.cold.stats.bytes_loaded.values()) > 0
        check_books(engine)


@pytest.mark.parametrize("family", KINDS)
def test_the_first_layer_computes_while_the_last_is_not_read(
    shop: Shop, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What comes after the first layers is held back until the first layer has run."""
    ids = filled(shop, family)
    for floor in (Grade.CANONICAL, Grade.FAITHFUL):
        engine, tier = layered(shop, family)
        with engine:
            hold = Hold(engine, tier)
            first, ran = engine.model.model.layers[0], []

            def go_on(hold: Hold = hold, ran: list[float] = ran) -> None:
                ran.append(time.monotonic())
                hold.let.set()

            with monkeypatch.context() as patch, engine.open(ids, floor=floor) as session:
                patch.setattr(first, "forward", then(first.forward, go_on))
                assert engine.cold.arriving is not None
                assert not hold.let.is_set()
                if floor is Grade.CANONICAL:
                    session.prefill()
                else:  # only the last token is left, and the last blocks are copies
                    logits = session.step(len(ids))[0, -1]
                assert session.reused == (HIT if floor is Grade.CANONICAL else len(ids) - 1)
                assert engine.cold.stats.layered == 1
                assert hold.held.is_set()
                if floor is Grade.CANONICAL:
                    logits = answer(session, count=COUNT, started=time.perf_counter()).first_logits
            assert torch.equal(logits, shop.cold(engine, ids).first_logits)
            assert not engine.cold.stats.failed
            line = engine.cold.timeline
            assert line.begun <= line.opened <= min(asked for *_, asked, _ in line.needed)
            assert ran[0] < max(ended for _, ended, _ in line.reads)
            check_books(engine)


@pytest.mark.parametrize("family", SOME)
@pytest.mark.parametrize("how", [Result.INTEGRITY, Result.IO_ERROR, Result.MISSING])
def test_c6_whatever_does_not_arrive_is_not_read(shop: Shop, family: str, how: Result) -> None:
    """The first record of each read in turn: the answer is that of a cold run, and nobody sees an error."""
    ids = filled(shop, family)
    engine, tier = layered(shop, family)
    with engine:
        assert shop.ask(engine, ids, floor=Grade.CANONICAL)[0] == HIT
        reads = tier.reads
    assert reads > 2
    for number in range(reads):
        engine, tier = layered(shop, family)
        with engine:
            tier.spoil[number] = how
            reused, found = shop.ask(engine, ids, floor=Grade.CANONICAL)
            assert found.same_as(shop.cold(engine, ids))
            assert reused <= HIT
            assert engine.cold.stats.failed[how.name.lower()] >= 1
            check_books(engine)
            assert shop.ask(engine, ids, floor=Grade.CANONICAL)[1].same_as(shop.cold(engine, ids))


@pytest.mark.parametrize("family", SOME)
def test_a_session_that_is_used_directly_waits(shop: Shop, family: str) -> None:
    """Its length is never one that shrinks later."""
    ids = filled(shop, family)
    for spoil in (None, 2):
        engine, tier = layered(shop, family)
        prompt = [*ids, 7, 8, 9, 10 + (spoil or 0)]
        with engine:
            if spoil is not None:
                tier.spoil_from = spoil
            with engine.open(prompt) as session:
                assert engine.cold.arriving is not None
                seen = session.cache.get_seq_length()
                assert engine.cold.arriving is None
                assert (seen == END) is (spoil is None)
                assert (session.length, session.reused) == (seen, seen)
                out = engine.model.generate(
                    torch.tensor([prompt]), past_key_values=session.cache, max_new_tokens=COUNT, do_sample=False
                )
            assert tuple(out[0, len(prompt) :].tolist()) == shop.cold(engine, prompt).tokens
            check_books(engine)


@pytest.mark.parametrize("family", SOME)
@pytest.mark.parametrize("what", ["state", "fork", "length", "checkpoint", "second", "ranges"])
@pytest.mark.parametrize("spoil", [None, 2])
def test_everything_but_its_own_forward_waits(shop: Shop, family: str, what: str, spoil: int | None) -> None:
    ids = filled(shop, family)
    prompt = [*ids, 7, 8, 9, 10]
    engine, tier = layered(shop, family)
    with engine:
        if spoil is not None:
            tier.spoil[spoil] = Result.INTEGRITY
        hold = Hold(engine, tier)
        session = engine.open(prompt)
        assert engine.cold.arriving is not None
        timer = threading.Timer(0.05, hold.let.set)
        timer.start()
        if what == "state":
            assert all(layer_state(layer) is not None for layer in session.cache.layers)
        elif what == "fork":
            with session.fork(prompt) as child:
                got = answer(child, count=COUNT, started=time.perf_counter())
                assert got.tokens == shop.cold(engine, prompt).tokens
        elif what == "second":
            with engine.open(prompt) as other:
                assert engine.cold.arriving is None or spoil is not None
                got = answer(other, count=COUNT, started=time.perf_counter())
                assert got.tokens == shop.cold(engine, prompt).tokens
        elif what == "length":
            assert session.length <= END
        elif what == "ranges":
            assert session.ranges()
        else:
            session.checkpoint()
        assert hold.let.is_set(), "it did not wait"
        got = answer(session, count=COUNT, started=time.perf_counter())
        assert got.tokens == shop.cold(engine, prompt).tokens
        session.close()
        timer.join()
        check_books(engine)


@pytest.mark.parametrize("family", SOME)
def test_late_in_the_middle_of_a_forward(shop: Shop, family: str) -> None:
    """The deadline passes while a layer waits: the session computes; what lands later lands in nobody's slot."""
    ids = filled(shop, family)
    prompt = [*ids, 7, 8, 9, 10]
    engine, tier = layered(shop, family, chosen={"load_deadline_s": 0.4})
    with engine:
        hold = Hold(engine, tier)
        with engine.open(prompt) as session:
            assert engine.cold.arriving is not None
            found = answer(session, count=COUNT, started=time.perf_counter())
            assert found.same_as(shop.cold(engine, prompt))
            assert session.reused < END
            assert engine.cold.stats.late == 1
            assert len(engine.manager.transfers) >= 1, "the slots stay held while something may write there"
            engine.manager.check_integrity()
            hold.let.set()
        engine.cold.flush()
        check_books(engine)
        tier.before = lambda _number, _places: None
        assert shop.ask(engine, prompt)[1].tokens == found.tokens


@pytest.mark.parametrize("family", SOME)
def test_c2_a_request_is_gone_while_its_blocks_are_read(shop: Shop, family: str) -> None:
    """Others take all the room there is; what lands late lands in nobody's slot."""
    ids = filled(shop, family)
    engine, tier = layered(shop, family, device="900KiB" if family != "qwen3_next" else "2MiB")
    with engine:
        hold = Hold(engine, tier)
        session = engine.open([*ids, 7, 8, 9, 10])
        assert engine.cold.arriving is not None
        assert hold.held.wait(20)
        plan = engine.cold.arriving.load.plan
        late = set(zip(plan.group.tolist(), plan.slot.tolist(), strict=True))
        begun = time.monotonic()
        session.close()
        assert time.monotonic() - begun < 10
        assert session.closed
        engine.manager.check_integrity()
        others, before = [], []
        for seed in range(40, 60):
            try:
                others.append(engine.open(shop.ids(100, seed=seed)))
                others[-1].prefill()
            except CapacityError:
                break
        assert others
        for other in others:
            for g, group in enumerate(engine.spec.groups):
                table = other.sequence.block_table(g)
                blocks = range(other.sequence.first_block(g), other.sequence.num_blocks(g))
                slots = [int(table[b % len(table)]) for b in blocks]
                assert not {(g, slot) for slot in slots} & late, group.name
                before.append((g, slots, bytes_of(engine, g, slots)))
        hold.let.set()
        engine.cold.flush()
        assert all(bytes_of(engine, g, slots) == was for g, slots, was in before)
        for other in others:
            other.close()
        check_books(engine)


@pytest.mark.parametrize("family", SOME)
@pytest.mark.parametrize("spoil", [None, 2])
def test_another_session_computes_the_same_tokens_meanwhile(shop: Shop, family: str, spoil: int | None) -> None:
    """Its commit would take over blocks that are still arriving; it waits, and reads nothing that did not come."""
    ids = shop.ids(6 * 32 + 11)
    engine, tier = layered(shop, family)
    with engine:
        other, third = engine.open(ids[:100]), engine.open([*ids[:32], *shop.ids(40, seed=9)])
        other.step(32)
        third.step(32)
        filled(shop, family)
        if spoil is not None:
            tier.spoil[spoil] = Result.INTEGRITY
        hold = Hold(engine, tier)
        session = engine.open([*ids, 7, 8, 9, 10])
        assert engine.cold.arriving is not None
        third.step(40)
        assert engine.cold.arriving is not None, "it completes no segment"
        timer = threading.Timer(0.05, hold.let.set)
        timer.start()
        other.step(64)
        assert engine.cold.arriving is None
        found = [answer(each, count=COUNT, started=time.perf_counter()) for each in (session, third, other)]
        for each, got in zip((session, third, other), found, strict=True):
            assert got.tokens == shop.cold(engine, each.tokens.tolist()).tokens
            each.close()
        timer.join()
        check_books(engine)


def test_an_engine_that_is_closed_meanwhile(shop: Shop) -> None:
    ids = filled(shop, "gpt_oss")
    engine, tier = layered(shop, "gpt_oss")
    hold = Hold(engine, tier)
    session = engine.open([*ids, 7, 8, 9])
    threading.Timer(0.2, hold.let.set).start()
    engine.close()
    with pytest.raises(SequenceError, match="closed"):
        session.prefill()
    session.close()
    engine.manager.check_integrity()
    assert engine.manager.in_use() == 0


def test_an_interrupt_while_a_layer_waits(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is half done: the session can go on."""
    ids = filled(shop, "gpt_oss")
    prompt = [*ids, 7, 8, 9]
    engine, tier = layered(shop, "gpt_oss")
    with engine:
        hold = Hold(engine, tier)
        with engine.open(prompt) as session:
            arrival = engine.cold.arriving
            wait = type(arrival)._wait_one

            def interrupted(self: object, *_: object) -> None:
                raise KeyboardInterrupt

            monkeypatch.setattr(type(arrival), "_wait_one", interrupted)
            with pytest.raises(KeyboardInterrupt):
                session.prefill()
            monkeypatch.setattr(type(arrival), "_wait_one", wait)
            hold.let.set()
            found = answer(session, count=COUNT, started=time.perf_counter())
            assert found.tokens == shop.cold(engine, prompt).tokens
            assert session.reused == END
        check_books(engine)


def test_auto_takes_small_restores_whole(shop: Shop) -> None:
    ids = filled(shop, "gpt_oss")
    choices = ((Restoring.AUTO, 0), (Restoring.WHOLE, 0), (Restoring.LAYERS, 1))
    for token, (restoring, expected) in enumerate(choices):
        engine, _ = layered(shop, "gpt_oss", chosen={"restoring": restoring})
        with engine:
            assert shop.ask(engine, [*ids, token, 6])[0] == END
            assert engine.cold.stats.layered == expected


@pytest.mark.parametrize("family", SOME)
@settings(max_examples=6, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**20))
def test_any_order_of_things(shop: Shop, family: str, seed: int) -> None:
    """Sessions on prompts that share prefixes, opened, computed, left and closed in any order while reads fail."""
    draw = random.Random(seed)
    base = shop.ids(6 * 32 + 11)
    prompts = [[*base[:end], *shop.ids(12, seed=end)] for end in (70, 128, 203)]
    colds: dict[int, tuple[int, ...]] = {}
    for _round in range(2):
        engine, tier = layered(
            shop, family, device=draw.choice(["1200KiB", "4MiB"]), chosen={"load_deadline_s": draw.choice([0.05, 30.0])}
        )
        with engine:
            for n in range(60):
                if draw.random() < 0.1:
                    tier.spoil[n] = draw.choice([Result.INTEGRITY, Result.IO_ERROR, Result.MISSING])
            tier.before = lambda _n, _places: time.sleep(draw.choice([0, 0, 0.002, 0.02]))
            running: list[tuple[int, object]] = []
            for _ in range(14):
                act = draw.randrange(5)
                try:
                    if act < 2 and len(running) < 3:
                        which = draw.randrange(len(prompts))
                        running.append((which, engine.open(prompts[which], floor=draw.choice(list(Grade)[1:]))))
                    elif not running:
                        continue
                    elif act == 2:
                        running.pop(draw.randrange(len(running)))[1].close()
                    elif act == 3:
                        draw.choice(running)[1].prefill()
                    else:
                        which, session = running.pop(draw.randrange(len(running)))
                        got = answer(session, count=COUNT, started=time.perf_counter())
                        if which not in colds:
                            colds[which] = shop.cold(engine, prompts[which]).tokens
                        assert got.tokens == colds[which]
                        session.close()
                except CapacityError:
                    pass
                engine.manager.check_integrity()
            for _, session in running:
                session.close()
            check_books(engine)


def test_the_tier_is_one(shop: Shop) -> None:
    tier = SlowTier(shop.store())
    assert (tier.name, tier.durable) == ("disk", True)
    tier.close()
