"""Windows are rings: one block table entry serves one logical block after the other, at a stable address."""

from __future__ import annotations

import numpy as np
import pytest
from tests.core import specs
from tests.core.specs import chunks, full, window
from tests.core.workshop import engine, prompt_of

from kvloom.core.page_table import WIDTH, allocate_rows
from kvloom.spec.model_spec import ModelSpec

RINGS = (
    ModelSpec("window 1", (full(4), window(1, 4)), 4, 4),
    ModelSpec("window 5", (full(4), window(5, 2)), 4, 8),
    ModelSpec("window 40", (full(4), window(40, 4)), 4, 4),
    ModelSpec("a window larger than everything", (full(4), window(1000, 4)), 4, 4),
    ModelSpec("window only", (window(6, 2),), 4, 4),
    ModelSpec("chunks of 6, segments of 4", (full(4), chunks(6, 2)), 4, 4),
    specs.CHUNKS_ONLY,
)


@pytest.mark.parametrize("spec", RINGS, ids=lambda s: s.name)
def test_a_window_holds_what_it_needs_and_lets_the_rest_go(spec: ModelSpec) -> None:
    e = engine(spec, 160)
    s = e.open(prompt_of(70))
    for count in (1, 2, 1, 4, 4, 8, 3, 1, 16, 5, 1, 1, 7):
        e.step(s, prompt_of(70)[s.length : s.length + count])
        for g, group in enumerate(e.groups):
            held = list(range(s.first_block(g), s.num_blocks(g)))
            assert held == group.needed(s.length)
            table = s.block_table(g)
            filled = {block % len(table): int(table[block % len(table)]) for block in held}
            assert len(filled) == len(held), "two blocks share an entry"
            assert len(set(filled.values())) == len(held), "two blocks share a slot"
            assert all(0 <= slot < e.manager.geometry.num_slots[g] for slot in filled.values())
        s.check()
    e.manager.check_integrity()


def test_a_ring_wraps_many_times_around() -> None:
    """Thirty times the width of the table, on an arena that holds only little more than the window."""
    spec = ModelSpec("window only", (window(6, 2),), 4, 4)
    e = engine(spec, 16)
    s = e.open([1, 2])
    table, width = s.block_table(0), len(s.block_table(0))
    assert width <= 8
    address = table.__array_interface__["data"]
    for token in range(30 * 2 * width):
        e.step(s, [token % 50])
    assert s.first_block(0) > 25 * width
    assert s.block_table(0).__array_interface__["data"] == address
    e.manager.check_integrity()
    child, plan = s.fork()
    e.finish(plan)
    for token in range(4 * width):
        e.step(s, [token % 50])
        e.step(child, [token % 49])
    e.manager.check_integrity()
    s.close()
    child.close()
    assert e.manager.in_use() == 0


def test_addresses_never_change_and_rows_do_not_overlap() -> None:
    e = engine(specs.V4, 200, max_sequences=4)
    running = [e.open(prompt_of(20, v)) for v in range(4)]
    views = [[s.block_table(g) for g in range(6)] for s in running]
    for s in running:
        e.prefill(s, prompt_of(20, running.index(s)))
    for s, tables in zip(running, views, strict=True):
        for g in range(6):
            assert np.shares_memory(s.block_table(g), tables[g])
            assert s.block_table(g).tolist() == tables[g].tolist()
    flat = [t for tables in views for t in tables]
    assert not any(np.shares_memory(one, two) for i, one in enumerate(flat) for two in flat[:i])
    row = running[0].row
    running[0].close()
    assert not e.manager.rows.span[row].any(), "nothing of a closed row means anything"
    again = e.open(prompt_of(20, 9))
    assert again.row == row
    assert all(np.shares_memory(again.block_table(g), views[0][g]) for g in range(6))


def test_tables_are_bounded_by_the_model_or_by_the_arena() -> None:
    short = ModelSpec("short", (full(4), window(6, 2)), 4, 4, max_positions=10)
    for spec, widths in ((short, [3, 5]), (RINGS[1], None)):
        m = engine(spec, 200).manager
        rows = allocate_rows(spec, m.geometry, 2)
        assert rows.shape[:, WIDTH].tolist() == (widths or m.geometry.num_slots.tolist())


def test_a_window_of_one_block_less_than_the_prompt_at_every_alignment() -> None:
    for size in range(1, 14):
        for cut in range(1, 26):
            spec = ModelSpec("w", (full(4, 1024), window(size, 2, 1024)), 4, 4)
            e = engine(spec, 96, max_nodes=20)
            e.request(prompt_of(cut + 1))
            s = e.open([*prompt_of(cut + 1), 9])
            assert s.reused == cut
            e.step(s, [3, 4, 5])
            s.close()
