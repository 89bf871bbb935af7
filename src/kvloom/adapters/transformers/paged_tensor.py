"""State tensors of a sequence over its slots, read and written in blocks.

A layer writes new rows straight into the sequence's blocks and reads its whole state back as one fresh,
contiguous tensor, so that attention sees exactly the shape and strides that transformers' own layer gives.
Views are made once per block and kept: a decode step makes none.
"""

from __future__ import annotations

import torch

from kvloom.adapters.transformers.block_table import BlockTable
from kvloom.errors import SequenceError
from kvloom.spec.model_spec import GroupSpec, TensorSpec

FEW_BLOCKS = 4
"""Up to this many blocks are read by one ``torch.cat``; more are read run by run."""
MANY_RUNS = 6
"""From this many runs of equally spaced slots on, whole blocks are read by one ``torch.cat``."""


class PagedTensor:
    """One state tensor of one layer of one sequence, spread over blocks: ``[1, *lead, entries, *tail]``.

    Attributes:
        dim: the entry axis, batch axis included.
        dtype: of the tensor.
        group: the KV cache group it belongs to.
    """

    def __init__(self, table: BlockTable, base: torch.Tensor, layer: int, tensor: TensorSpec) -> None:
        axis = tensor.entry_axis or 0
        group = table.group
        position = next(i for i, t in enumerate(group.tensors) if t.name == tensor.name)
        self.dim = axis + 1
        self.dtype = base.dtype
        self.group = group
        self._table = table
        self._base = base
        self._item = base.element_size()
        self._entries = table.entries
        self._offset = layer * group.layer_stride + group.tensor_offsets[position]
        self._shape = (1, *tensor.shape[:axis], table.entries, *tensor.shape[axis:])
        self._strides = contiguous_strides(self._shape)
        self._blocks: dict[int, torch.Tensor] = {}
        self._run_views: dict[tuple[int, int], list[tuple[int, int, torch.Tensor]]] = {}
        self._epoch = self._version = 0

    def write(self, start: int, rows: torch.Tensor) -> None:
        """Store ``rows`` (``[1, *lead, q, *tail]``) as the entries [start, start + q)."""
        if rows.dtype is not self.dtype:
            raise SequenceError(f"the model makes {rows.dtype} state now, not {self.dtype} as before; attach again")
        dim, size = self.dim, self._entries
        rows = rows.detach()
        count = rows.shape[dim]
        block, row = divmod(start, size)
        if row + count <= size:
            self.block(block).narrow(dim, row, count).copy_(rows)
            return
        at = 0
        if row:
            at = size - row
            self.block(block).narrow(dim, row, at).copy_(rows.narrow(dim, 0, at))
            block += 1
        whole = (count - at) // size
        for first, blocks, view in self._views_of_runs(block, block + whole):
            view.copy_(rows.narrow(dim, at + (first - block) * size, blocks * size).view(view.shape))
        at += whole * size
        if at < count:
            self.block(block + whole).narrow(dim, 0, count - at).copy_(rows.narrow(dim, at, count - at))

    def gather(self, begin: int, end: int, dead: int = 0) -> torch.Tensor:
        """The entries [begin, end) in a fresh contiguous tensor, behind ``dead`` rows of zeros."""
        size, dim = self._entries, self.dim
        if begin >= end:
            return self._empty(dead).zero_()
        first, from_row = divmod(begin, size)
        last, to_row = divmod(end, size)  # block `last` is read up to `to_row`, which may be 0
        if last - first < FEW_BLOCKS:
            pieces = [self._empty(dead).zero_()] if dead else []
            return torch.cat(self._pieces(pieces, first, from_row, last, to_row), dim)
        out = self._empty(dead + end - begin)
        at = dead
        if dead:
            out.narrow(dim, 0, dead).zero_()
        if from_row:
            out.narrow(dim, at, size - from_row).copy_(self.block(first).narrow(dim, from_row, size - from_row))
            at += size - from_row
            first += 1
        self._read_whole(out, at, first, last)
        if to_row:
            at += (last - first) * size
            out.narrow(dim, at, to_row).copy_(self.block(last).narrow(dim, 0, to_row))
        return out

    def block(self, block: int) -> torch.Tensor:
        """The view of one block, ``[1, *lead, entries per block, *tail]``, in the arena."""
        table = self._table
        if self._epoch != table.epoch:
            self._blocks.clear()
            self._epoch = table.epoch
        view = self._blocks.get(block)
        if view is None:
            if len(self._blocks) > 2 * (table.last - table.first) + 8:
                self._blocks = {i: v for i, v in self._blocks.items() if i >= table.first}
            at = (table.offset(block) + self._offset) // self._item
            view = self._blocks[block] = self._base.as_strided(self._shape, self._strides, at)
        return view

    def _pieces(
        self, pieces: list[torch.Tensor], first: int, from_row: int, last: int, to_row: int
    ) -> list[torch.Tensor]:
        size, dim = self._entries, self.dim
        if first == last:
            pieces.append(self.block(first).narrow(dim, from_row, to_row - from_row))
            return pieces
        if from_row:
            pieces.append(self.block(first).narrow(dim, from_row, size - from_row))
            first += 1
        pieces += [self.block(i) for i in range(first, last)]
        if to_row:
            pieces.append(self.block(last).narrow(dim, 0, to_row))
        return pieces

    def _read_whole(self, out: torch.Tensor, at: int, first: int, last: int) -> None:
        """Copy the whole blocks [first, last) to the rows of ``out`` that begin at ``at``."""
        size, dim = self._entries, self.dim
        runs = self._table.runs(first, last)
        if len(runs) >= MANY_RUNS:
            target = out.narrow(dim, at, (last - first) * size)
            torch.cat([self.block(i) for i in range(first, last)], dim, out=target)
            return
        for start, blocks, view in self._views_of_runs(first, last):
            out.narrow(dim, at + (start - first) * size, blocks * size).view(view.shape).copy_(view)

    def _views_of_runs(self, begin: int, end: int) -> list[tuple[int, int, torch.Tensor]]:
        """(first block, count, view ``[1, *lead, count, entries, *tail]``) for blocks [begin, end)."""
        table = self._table
        if self._version != table.version:
            self._run_views.clear()
            self._version = table.version
        found = self._run_views.get((begin, end))
        if found is None:
            dim, item = self.dim, self._item
            found = []
            for first, count, offset, stride in table.runs(begin, end):
                shape = (*self._shape[:dim], count, *self._shape[dim:])
                strides = (*self._strides[:dim], stride // item, *self._strides[dim:])
                found.append((first, count, self._base.as_strided(shape, strides, (offset + self._offset) // item)))
            self._run_views[begin, end] = found
        return found

    def _empty(self, rows: int) -> torch.Tensor:
        dim = self.dim
        return self._base.new_empty((*self._shape[:dim], rows, *self._shape[dim + 1 :]))


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a C-contiguous tensor, in elements."""
    strides, at = [], 1
    for extent in reversed(shape):
        strides.append(at)
        at *= extent
    return tuple(reversed(strides))


def snapshot_view(
    base: torch.Tensor, slot_offset: int, group: GroupSpec, layer: int, tensor: TensorSpec
) -> torch.Tensor:
    """The view ``[1, *shape]`` of one tensor of one layer in a snapshot slot, in the memory order of its spec.

    Args:
        base: the arena in the tensor's dtype.
        slot_offset: byte offset of the slot.
        group: the snapshot group.
        layer: position of the layer within the group.
        tensor: one of the group's tensors.
    """
    position = next(i for i, t in enumerate(group.tensors) if t.name == tensor.name)
    order = tensor.order or tuple(range(len(tensor.shape)))
    strides = [0] * len(tensor.shape)
    at = 1
    for axis in reversed(order):
        strides[axis] = at
        at *= tensor.shape[axis]
    offset = slot_offset + layer * group.layer_stride + group.tensor_offsets[position]
    return base.as_strided((1, *tensor.shape), (at, *strides), offset // base.element_size())
