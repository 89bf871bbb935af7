"""A disk store behind an engine: what a process kept, the next one resumes from (A6, D11, D12)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.adapter.shop import COUNT, Shop, flip  # noqa: E402

from kvloom.adapters.transformers import Engine  # noqa: E402
from kvloom.adapters.transformers.device import TorchArena  # noqa: E402
from kvloom.engine.answers import answer  # noqa: E402
from kvloom.errors import CapacityError, SequenceError  # noqa: E402
from kvloom.types import Grade  # noqa: E402

KINDS = (
    "gpt_oss", "gemma3", "llama4", "qwen3_next", "lfm2", "deepseek_v32", "deepseek_v4", "falcon_h1", "kimi_linear",
)  # fmt: skip


def kinds_of(engine: Engine) -> set[str]:
    return {group.kind.name.lower() for group in engine.spec.groups}


@pytest.mark.parametrize("family", KINDS)
def test_a6_d11_a_fresh_engine_goes_on_where_another_ended(shop: Shop, family: str) -> None:
    ids = shop.ids()
    assert shop.once(family, ids) == 0
    size = shop.size()
    with shop.engine(family) as engine:
        reused, found = shop.ask(engine, ids, floor=Grade.CANONICAL)
        assert reused == 6 * 32
        assert found.same_as(shop.cold(engine, ids)), "a canonical hit from disk"
        stats = engine.cold.stats
        assert (stats.loads, dict(stats.failed), dict(stats.not_stored)) == (1, {}, {})
        loaded = {kind for kind, count in stats.bytes_loaded.items() if count > 0}
    with shop.engine(family) as engine:
        reused, found = shop.ask(engine, ids)
        assert reused == len(ids) - 1
        assert found.same_as(shop.cold(engine, ids)), "the end of the prompt from disk"
        loaded |= {kind for kind, count in engine.cold.stats.bytes_loaded.items() if count > 0}
        assert loaded == kinds_of(engine)
        longer = [*ids, *found.tokens[:-1], 7, 8, 9]
        reused, found = shop.ask(engine, longer)
        assert reused == len(longer) - 3
        assert found.tokens == shop.cold(engine, longer).tokens, "the end of the response: faithful"
    assert shop.size() - size <= size // 2, "only what the longer prompt needed is new"
    grown = shop.size()
    for floor in (Grade.CANONICAL, Grade.FAITHFUL):
        with shop.engine(family) as engine:
            shop.ask(engine, ids, floor=floor)
            shop.ask(engine, longer, floor=floor)
    assert shop.size() == grown, "the same work again"


RESTART = """
import json, sys, time
import torch
from kvloom.adapters.transformers import attach
from kvloom.engine.answers import answer
from kvloom.testing.families import random_model, tiny_config
from kvloom.tiers.disk import DiskStore
torch.set_num_threads(1)
place, ids, found = sys.argv[1], json.loads(sys.argv[2]), []
for family in ("gpt_oss", "qwen3_next"):
    for floor in sys.argv[3:]:
        store, model = DiskStore.open(place, 64 << 20), random_model(tiny_config(family))
        with attach(model, device="4MiB", block_size=16, segment=32, store=store) as engine:
            with engine.open(ids, floor=floor, salt=b"tenant") as session:
                reply = answer(session, count=4, started=time.perf_counter())
                found.append([session.reused, reply.tokens, reply.first_logits.tolist()])
print(json.dumps(found))
"""


def test_a6_d12_a_process_goes_on_where_another_ended(shop: Shop) -> None:
    """Two families; the second process has another hash seed."""
    ids, found = shop.ids(), []
    for seed, floors in (("1", ["faithful"]), ("2", ["canonical", "faithful"])):
        command = [sys.executable, "-c", RESTART, str(shop.place), json.dumps(ids), *floors]
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, env=environment)
        assert done.returncode == 0, done.stderr
        found.append(json.loads(done.stdout))
    for cold, canonical, faithful in (
        (found[0][0], found[1][0], found[1][1]),
        (found[0][1], found[1][2], found[1][3]),
    ):
        assert cold[0] == 0
        assert 32 <= canonical[0] <= 192
        assert faithful[0] == len(ids) - 1
        assert cold[1:] == canonical[1:] == faithful[1:]


def test_a_load_while_the_arena_is_nearly_full(shop: Shop) -> None:
    """Other sessions hold most of the arena: what does not fit is not loaded, and the answer is the same."""
    ids = shop.ids()
    assert shop.once("gpt_oss", ids) == 0
    refused = 0
    for others in range(1, 6):
        with shop.engine("gpt_oss", device="500KiB") as engine:
            held = []
            for seed in range(others):
                try:
                    held.append(engine.open(shop.ids(70, seed=20 + seed)))
                    held[-1].prefill()
                except CapacityError:
                    break
            unkept = engine.manager.transfers.unkept
            try:
                with engine.open(ids) as session:
                    found = answer(session, count=COUNT, started=time.perf_counter())
                    assert session.reused in {0, len(ids) - 1}
                assert found.same_as(shop.cold(engine, ids))
            except CapacityError:
                refused += 1
            refused += engine.manager.transfers.unkept - unkept
            engine.cold.flush()
            engine.manager.check_integrity()
            assert len(engine.manager.transfers) == 0
            for session in held:
                session.close()
            engine.manager.check_integrity()
            assert engine.manager.in_use() == 0
    assert refused > 0


@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_next"])
def test_forks_and_generate_are_kept(shop: Shop, family: str) -> None:
    ids = shop.ids()
    with shop.engine(family) as engine, engine.open(ids) as session:
        out = engine.model.generate(
            torch.tensor([ids]), past_key_values=session.prefill(), max_new_tokens=6, do_sample=False
        )
        with session.fork() as child:
            engine.model(input_ids=torch.tensor([[5]]), past_key_values=child.cache)
            fork = child.sequence.tokens.tolist()
        response = session.sequence.tokens.tolist()
    assert out[0, : len(response)].tolist() == response
    for tokens in (response, fork):
        with shop.engine(family) as engine:
            more = [*tokens, 3]
            reused, found = shop.ask(engine, more)
            assert reused == len(tokens)
            assert found.tokens == shop.cold(engine, more).tokens


def test_an_engine_that_is_closed_before_its_sessions(shop: Shop) -> None:
    ids = shop.ids()
    engine = shop.engine("gpt_oss")
    done, open_ = engine.open(ids), engine.open(shop.ids(seed=1))
    done.prefill()
    open_.step(32)
    engine.close()
    with pytest.raises(SequenceError):
        open_.step(64)
    open_.close()
    done.close()
    engine.manager.check_integrity()
    assert engine.manager.in_use() == 0
    assert shop.once("gpt_oss", ids) == len(ids) - 1
    assert shop.once("gpt_oss", shop.ids(seed=1)) == 0


def test_dropped_sessions_are_closed_before_the_store(shop: Shop) -> None:
    engine = shop.engine("gpt_oss")
    session = engine.open(shop.ids())
    session.step(32)
    del session
    engine.close()
    assert engine.manager.in_use() == 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_next", "deepseek_v4"])
def test_the_arena_of_accelerators_loads_and_stores_the_same(
    shop: Shop, family: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The implementation for CUDA, run on the CPU: what one arena stored, the other loads."""
    ids = shop.ids()
    with monkeypatch.context() as patch:
        patch.setattr("kvloom.adapters.transformers.engine.make_arena", TorchArena)
        with shop.engine(family, dtype=dtype) as engine:
            assert isinstance(engine.arena, TorchArena)
            reused, found = shop.ask(engine, ids)
            assert (reused, found.same_as(shop.cold(engine, ids))) == (0, True)
        with shop.engine(family, dtype=dtype) as engine:
            reused, found = shop.ask(engine, ids)
            assert (reused, found.same_as(shop.cold(engine, ids))) == (len(ids) - 1, True)
        flip(shop.place, 7)
        with shop.engine(family, dtype=dtype) as engine:
            assert shop.ask(engine, ids)[1].same_as(shop.cold(engine, ids))
            assert engine.cold.stats.failed["integrity"] > 0
    assert shop.once(family, ids, engine={"dtype": dtype}) == len(ids) - 1


def test_every_piece_of_a_slot_is_moved(shop: Shop) -> None:
    """Both arenas read and write exactly the bytes of a slot."""
    with shop.engine("gpt_oss") as engine:
        draw = np.random.default_rng(0)
        for arena in (engine.arena, TorchArena(engine.manager.geometry, engine.spec, torch.device("cpu"))):
            offsets, lengths = np.array([256, 4096]), np.array([700, 3000])
            data = draw.integers(1, 255, 3700).astype(np.uint8)
            arena.bytes.zero_()
            arena.write_slots(offsets, lengths, data)
            into = bytearray(3000)
            arena.read_slot(4096, memoryview(into))
            assert bytes(into) == data[700:].tobytes()
            assert arena.bytes[256 : 256 + 700].numpy().tobytes() == data[:700].tobytes()
            assert int((arena.bytes != 0).sum()) == 3700
            arena.bytes.zero_()
