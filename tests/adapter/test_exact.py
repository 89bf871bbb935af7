"""Hits are bit-equal to cold runs, and every tensor a layer hands out is what transformers' own layer hands out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from transformers import DynamicCache  # noqa: E402

from kvloom.adapters.transformers import layer_state  # noqa: E402
from kvloom.adapters.transformers.device import TorchArena  # noqa: E402
from kvloom.adapters.transformers.forward import forward_chunk  # noqa: E402
from kvloom.testing.families import FAMILIES  # noqa: E402
from kvloom.types import Grade  # noqa: E402

DEEP = ("gpt_oss", "qwen3_next", "deepseek_v4")
METHODS = (
    "update",
    "update_indexer",
    "store_compression_weights",
    "update_compressor_states",
    "update_overlap_state",
    "update_conv_state",
    "update_recurrent_state",
    "get_mask_sizes",
)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", DEEP)
@pytest.mark.parametrize("tokens", [1, 2, 20, 33, 97, 6 * 32 + 11, 6 * 32 + 1])
def test_hit_equals_cold(lab: Any, family: str, dtype: str, tokens: int) -> None:
    engine, ids = lab.engine(family, dtype), lab.ids(tokens)
    cold = lab.cold(engine.model, ids)
    reused, first = lab.answer(engine, ids)
    assert reused == 0
    assert torch.equal(first, cold)
    reused, again = lab.answer(engine, ids)
    assert reused == tokens - 1
    assert torch.equal(again, cold)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_canonical_hit_below_another_question(lab: Any, family: str, dtype: str) -> None:
    engine = lab.engine(family, dtype, snapshot_interval=32)
    document = lab.ids(5 * 32)
    for seed in (1, 2):
        ids = torch.cat([document, lab.ids(13, seed)], dim=1)
        with engine.open(ids, floor=Grade.CANONICAL) as session:
            assert session.reused == (0 if seed == 1 else 5 * 32)
            assert session.grade is Grade.CANONICAL
            assert torch.equal(lab.last(session, ids), lab.cold(engine.model, ids))


def strides_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """Strides of the dimensions that have any effect."""
    return tuple(s for s, extent in zip(tensor.stride(), tensor.shape, strict=True) if extent > 1)


def record(cache: Any, log: list[Any]) -> None:
    """Let every layer of ``cache`` write down what its methods return."""

    def wrap(layer: Any, index: int, name: str, method: Callable[..., Any]) -> None:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            result = method(*args, **kwargs)
            parts = result if isinstance(result, tuple) else (result,)
            log.append((index, name, [p.clone() if isinstance(p, torch.Tensor) else p for p in parts],
                        [strides_of(p) for p in parts if isinstance(p, torch.Tensor)]))  # fmt: skip
            return result

        setattr(layer, name, wrapped)

    for index, layer in enumerate(cache.layers):
        for name in METHODS:
            method = getattr(layer, name, None)
            if method is not None:
                wrap(layer, index, name, method)


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_return_what_transformers_layers_return(lab: Any, family: str) -> None:
    engine = lab.engine(family)
    ids = lab.ids(200)
    cold, log_cold, log_warm = DynamicCache(config=engine.model.config), [], []
    record(cold, log_cold)
    with engine.open(ids) as session:
        record(session.cache, log_warm)
        at = 0
        for size in (32, 32, 5, 1, 1, 26, 31, 64, 1, 7):
            forward_chunk(engine.model, ids[:, at : at + size], cold, at)
            forward_chunk(engine.model, ids[:, at : at + size], session.cache, at)
            at += size
            assert session.cache.get_seq_length() == cold.get_seq_length() == at
            assert len(log_warm) == len(log_cold)
            for (i, name, warm, warm_strides), (j, other, expected, strides) in zip(log_warm, log_cold, strict=True):
                where = (family, at, size, i, name)
                assert (i, name) == (j, other), where
                assert warm_strides == strides, where
                chunked = getattr(session.cache.layers[i], "chunked", False) and name == "update"
                for a, b in zip(warm, expected, strict=True):
                    if not isinstance(b, torch.Tensor):
                        assert a == b, where
                        continue
                    assert (a.shape, a.dtype) == (b.shape, b.dtype), where
                    if chunked:  # rows of the chunk that ended are zeros: never attended to
                        live = a.flatten(0, 1).flatten(2).any(dim=2).any(dim=0)
                        assert bool(live[-size:].all())
                        a, b = a[:, :, live], b[:, :, live]
                    assert torch.equal(a, b), where
            log_cold.clear()
            log_warm.clear()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("at", [32, 75])
def test_restored_state_is_the_cold_state(lab: Any, family: str, at: int) -> None:
    engine = lab.engine(family)
    ids = lab.ids(at + 1)
    expected = lab.cold_cache(engine.model, ids)
    with engine.open(ids) as session:
        session.prefill()
    with engine.open(ids) as session:
        assert session.reused == at
        for index, (warm, cold) in enumerate(zip(session.cache.layers, expected.layers, strict=True)):
            got, want = layer_state(warm), layer_state(cold)
            assert got.keys() == want.keys(), (family, index)
            for name, tensor in want.items():
                assert (got[name].shape, got[name].dtype) == (tensor.shape, tensor.dtype), (family, index, name)
                if name.startswith(("conv", "recurrent")):  # the others are views of larger tensors in transformers
                    assert strides_of(got[name]) == strides_of(tensor), (family, index, name)
                if getattr(warm, "chunked", False):
                    dead = min(at, warm.sliding_window - 1) - at % warm.sliding_window
                    tensor, got[name] = (t[:, :, max(0, dead) :] for t in (tensor, got[name]))
                assert torch.equal(got[name], tensor), (family, index, name)


def test_fragmented_slots_change_nothing(lab: Any) -> None:
    engine = lab.engine("gpt_oss", device="600KiB")
    prompts = [lab.ids(170, seed) for seed in range(6)]
    for seed, ids in enumerate(prompts):  # each evicts parts of those before it
        lab.answer(engine, torch.cat([ids, lab.ids(3 + 5 * seed, 50 + seed)], dim=1))
    assert sum(k.evictions for k in engine.manager.stats().kinds.values()) > 0
    for ids in prompts:
        assert torch.equal(lab.answer(engine, ids)[1], lab.cold(engine.model, ids))
        engine.manager.check_integrity()


def test_two_sessions_in_turns(lab: Any) -> None:
    engine = lab.engine("deepseek_v4")
    a, b = lab.ids(120, 1), lab.ids(90, 2)
    with engine.open(a) as one, engine.open(b) as two:
        while one.length < 119 or two.length < 89:
            for session, end in ((one, 119), (two, 89)):
                if session.length < end:
                    session.step(end)
        assert torch.equal(lab.last(one, a), lab.cold(engine.model, a))
        assert torch.equal(lab.last(two, b), lab.cold(engine.model, b))


def test_gradients_do_not_reach_the_arena(lab: Any) -> None:
    engine, ids = lab.engine("qwen3_next"), lab.ids(40)
    with engine.open(ids) as session:
        out = engine.model(input_ids=ids[:, :32], past_key_values=session.cache)
        assert out.logits.requires_grad
        assert not engine.arena.base(torch.float32).requires_grad
        assert torch.equal(lab.last(session, ids), lab.cold(engine.model, ids))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", [*DEEP, "llama4", "deepseek_v32"])
def test_the_arena_of_accelerators_is_exact_too(
    lab: Any, family: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The implementation for CUDA, run on the CPU."""
    monkeypatch.setattr("kvloom.adapters.transformers.engine.make_arena", TorchArena)
    engine, ids = lab.engine(family, dtype), lab.ids(140)
    assert isinstance(engine.arena, TorchArena)
    cold = lab.cold(engine.model, ids)
    for reused in (0, 139):
        got, logits = lab.answer(engine, ids)
        assert got == reused
        assert torch.equal(logits, cold)
