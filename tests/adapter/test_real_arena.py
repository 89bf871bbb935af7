"""The arenas are real: all state lies in them, and what lies in them is what the model reads."""

from __future__ import annotations

from typing import Any

import pytest

psutil = pytest.importorskip("psutil")
torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from transformers import DynamicCache  # noqa: E402

from kvloom.adapters.transformers.forward import forward_chunk  # noqa: E402
from kvloom.adapters.transformers.state import arena_views  # noqa: E402
from kvloom.spec.model_spec import GroupSpec  # noqa: E402
from kvloom.testing.families import FAMILIES  # noqa: E402

AT = 75  # off every ratio, so that tails hold rows


def continuation(session: Any, ids: torch.Tensor) -> torch.Tensor:
    """Logits of the tokens from the boundary on, one by one: pending rows show only when their entry is complete."""
    steps = range(session.length, ids.shape[1])
    return torch.cat([forward_chunk(session.model, ids[:, p : p + 1], session.cache, p)[0] for p in steps])


@pytest.mark.parametrize("family", FAMILIES)
def test_every_tensor_lies_in_the_arena(lab: Any, family: str) -> None:
    engine, ids = lab.engine(family), lab.ids(AT + 1)
    with engine.open(ids) as session:
        session.prefill()
        start = engine.arena.bytes.data_ptr()
        end = start + engine.arena.bytes.numel()
        seen = set()
        for group, layer, name, view in arena_views(
            engine.spec, engine.manager.geometry, engine.arena, session.sequence
        ):
            assert start <= view.data_ptr()
            assert view.untyped_storage().data_ptr() == start
            last = sum((n - 1) * s for n, s in zip(view.shape, view.stride(), strict=True))
            assert view.data_ptr() + (last + 1) * view.element_size() <= end
            assert view.data_ptr() % 64 == 0
            seen.add((group, layer, name))
        assert seen == {(g.name, layer, t.name) for g in engine.spec.groups for layer in g.layers for t in g.tensors}
        for layer in session.cache.layers:
            for value in vars(layer).values():
                for tensor in value.values() if isinstance(value, dict) else [value]:
                    if isinstance(tensor, torch.Tensor) and tensor.numel() > 1:
                        assert start <= tensor.data_ptr() < end


def alter(engine: Any, session: Any, index: int, group: GroupSpec) -> int:
    """Turn every payload byte of the live slots of a group into others; how many slots."""
    sequence, geometry = session.sequence, engine.manager.geometry
    if group.is_snapshot:
        slots = [sequence.live_slot(index)]
    else:
        table = sequence.block_table(index)
        slots = [int(table[i % len(table)]) for i in range(sequence.first_block(index), sequence.num_blocks(index))]
    for slot in slots:
        at = geometry.slot_offset(index, slot)
        noise = torch.randn(group.slot_bytes // 4, generator=torch.Generator().manual_seed(slot))
        engine.arena.bytes[at : at + group.slot_bytes] = noise.view(torch.uint8)
    return len(slots)


@pytest.mark.parametrize("family", FAMILIES)
def test_altering_restored_slots_changes_the_logits(lab: Any, family: str) -> None:
    engine, ids = lab.engine(family), lab.ids(AT + 21)
    names = [group.name for group in engine.spec.groups]
    for index, group in enumerate(engine.spec.groups):
        engine.manager.clear()
        with engine.open(ids[:, : AT + 1]) as session:
            session.prefill()
            expected = continuation(session, ids)
        with engine.open(ids[:, : AT + 1]) as session:
            assert session.reused == AT
            assert alter(engine, session, index, group) > 0
            assert not torch.equal(continuation(session, ids), expected), (family, names[index])


@pytest.mark.parametrize("family", ["gpt_oss", "deepseek_v4", "qwen3_next"])
def test_a_long_run_takes_no_more_than_cap_scratch_and_activations(lab: Any, family: str) -> None:
    cap = 6 << 20
    engine = lab.engine(family, device=cap, block_size=128, segment=128, max_sequences=4)
    ids = lab.ids(4000)
    forward_chunk(engine.model, ids[:, :128], DynamicCache(config=engine.model.config), 0)
    lab.answer(engine, ids[:, :140], salt=b"warm")
    process = psutil.Process()
    before = peak = process.memory_info().rss
    with engine.open(ids) as session:
        while session.length < 3999:
            session.step(3999)
            peak = max(peak, process.memory_info().rss)
    longest = 4000 * 2 * 16 * 4  # keys of one full layer
    assert engine.scratch_bytes <= 4 * longest
    scores = 4 * 128 * 4000 * 4  # attention of one chunk, in float32
    assert peak - before <= cap + engine.scratch_bytes + 6 * scores
