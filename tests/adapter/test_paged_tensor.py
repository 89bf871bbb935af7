"""Paged tensors read back exactly what was written, for any slots, lengths and memory layout of the new rows."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from kvloom.adapters.transformers.block_table import BlockTable  # noqa: E402
from kvloom.adapters.transformers.host_tensor import HostPagedTensor  # noqa: E402
from kvloom.adapters.transformers.paged_tensor import PagedTensor  # noqa: E402
from kvloom.adapters.transformers.scratch import SMALLEST, Scratch  # noqa: E402
from kvloom.config import Device  # noqa: E402
from kvloom.errors import SequenceError  # noqa: E402
from kvloom.manager import Manager  # noqa: E402
from kvloom.spec.model_spec import GroupSpec, ModelSpec, TensorSpec  # noqa: E402
from kvloom.types import Int32Array, Kind  # noqa: E402


class Slots:
    """A sequence whose blocks lie where the test wants them."""

    def __init__(self, slots: list[int], width: int | None = None) -> None:
        self.first, self.last = 0, 0
        self._table = np.array(slots[: width or len(slots)], dtype=np.int32)

    def block_table(self, group: int) -> Int32Array:
        return self._table

    def first_block(self, group: int) -> int:
        return self.first

    def num_blocks(self, group: int) -> int:
        return self.last

    def published_blocks(self, group: int) -> int:
        return 0

    def live_slot(self, group: int) -> int:
        raise NotImplementedError


def build(
    lead: tuple[int, ...], tail: tuple[int, ...], entries: int, slots: list[int], host: bool
) -> tuple[PagedTensor, Slots]:
    tensors = (
        TensorSpec("keys", (*lead, *tail), "float32", entry_axis=len(lead)),
        TensorSpec("values", (3, 5), "float32", entry_axis=1),
    )
    group = GroupSpec("full", Kind.COMPRESSED, (0, 1), tensors, block_tokens=entries)
    spec = ModelSpec("toy", (group,), entries, entries)
    geometry = Manager(spec, [Device(64 * group.slot_bytes)]).geometry
    sequence = Slots(slots)
    table = BlockTable(sequence, 0, group, geometry)
    base = torch.zeros(geometry.arena_bytes // 4)
    made = HostPagedTensor(table, base, 1, tensors[0], Scratch()) if host else PagedTensor(table, base, 1, tensors[0])
    return made, sequence


@given(
    lead=st.sampled_from([(), (1,), (2,), (2, 3)]),
    tail=st.sampled_from([(4,), (7,), (2, 4)]),
    entries=st.sampled_from([1, 4, 16]),
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=8),
    transposed=st.booleans(),
    host=st.booleans(),
    seed=st.integers(0, 1000),
)
@settings(max_examples=150, deadline=None)
def test_what_is_written_is_read(
    lead: tuple[int, ...],
    tail: tuple[int, ...],
    entries: int,
    sizes: list[int],
    transposed: bool,
    host: bool,
    seed: int,
) -> None:
    rng = np.random.default_rng(seed)
    sizes = [min(s, 4 * entries) for s in sizes]
    slots = rng.permutation(48)[: -(-sum(sizes) // entries)].tolist()
    paged, sequence = build(lead, tail, entries, slots, host)
    axis = len(lead) + 1
    reference = torch.zeros(1, *lead, 0, *tail)
    for size in sizes:
        start = reference.shape[axis]
        sequence.last = -(-(start + size) // entries)
        paged.table.refresh()
        rows = torch.randn(1, *lead, size, *tail)
        if transposed:
            rows = rows.transpose(1, axis).contiguous().transpose(1, axis)
        reference = torch.cat([reference, rows], axis)
        begin = int(rng.integers(0, start + 1))
        dead = int(rng.integers(0, 3))
        got = paged.extend(start, rows, begin, dead)
        expected = reference.narrow(axis, begin, start + size - begin)
        assert got.is_contiguous()
        assert torch.equal(got.narrow(axis, dead, got.shape[axis] - dead), expected)
        assert not got.narrow(axis, 0, dead).any()
        assert torch.equal(paged.gather(0, start + size), reference)


LAYOUTS = [
    list(range(40)),
    list(range(40))[::-1],
    [*range(0, 40, 2), *range(1, 40, 2)],
    [39, 38, *range(38)],
    [7, 3, 20, *range(21, 40), *range(8, 20), 0, 1, 2, 4, 5, 6],
]


@pytest.mark.parametrize("slots", LAYOUTS)
def test_large_reads_run_by_run(slots: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvloom.adapters.transformers.host_tensor.PARALLEL_BYTES", 1024)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    paged, sequence = build((2,), (8,), 16, slots, host=True)
    rows = torch.randn(1, 2, 600, 8)
    sequence.last = 38
    paged.table.refresh()
    paged.write(0, rows[:, :, :590])
    got = paged.extend(590, rows[:, :, 590:], 5)
    assert torch.equal(got, rows[:, :, 5:])


def test_windows_forget_and_blocks_move() -> None:
    paged, sequence = build((2,), (8,), 4, list(range(8)), host=True)
    rows = torch.randn(1, 2, 48, 8)
    for start in range(0, 48, 4):  # a ring of 8 slots: block 8 is slot 0 again
        sequence.first, sequence.last = max(0, start // 4 - 6), start // 4 + 1
        paged.table.refresh()
        paged.write(start, rows[:, :, start : start + 4])
    assert torch.equal(paged.gather(40, 48), rows[:, :, 40:])
    with pytest.raises(SequenceError, match="not all in the blocks"):
        paged.gather(0, 8)
    # A rollback gives blocks back; the same numbers come again in other slots.
    sequence.last = 9
    paged.table.refresh()
    sequence._table[:] = sequence._table[::-1].copy()
    sequence.last = 12
    sequence.first = 9
    paged.table.refresh()
    paged.write(44, rows[:, :, :4])
    assert torch.equal(paged.block(11)[0], rows[0, :, :4])


def test_rows_that_do_not_fit_the_slots_are_refused() -> None:
    paged, sequence = build((2,), (8,), 4, list(range(8)), host=True)
    sequence.last = 1
    paged.table.refresh()
    for rows in (torch.zeros(1, 3, 1, 8), torch.zeros(1, 2, 1, 9), torch.zeros(1, 2, 1, 8).bfloat16()):
        with pytest.raises(SequenceError, match="attach again"):
            paged.write(0, rows)


def test_scratch_is_reused_only_when_nothing_refers_to_it() -> None:
    scratch = Scratch()
    count = SMALLEST // 4
    first = scratch.take((count,), torch.float32, count, SMALLEST)
    second = scratch.take((2, count // 2), torch.float32, count, SMALLEST)
    assert first.data_ptr() != second.data_ptr()
    assert second.is_contiguous()
    assert second.data_ptr() % 4096 == 0
    view, address = first[5:], first.data_ptr()
    del first
    assert scratch.take((count,), torch.float32, count, SMALLEST).data_ptr() != address  # the view keeps it
    del view
    addresses = {scratch.take((count,), torch.float32, count, SMALLEST).data_ptr() for _ in range(4)}
    assert len(addresses) == 1
    assert scratch.n_bytes <= 3 * (SMALLEST + SMALLEST // 4)
