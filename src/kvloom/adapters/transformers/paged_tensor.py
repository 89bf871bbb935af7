"""State tensors of a sequence over its slots, read and written in blocks, on any device.

A layer writes new rows straight into the sequence's blocks and reads its whole state back as one fresh,
contiguous tensor, so that attention sees exactly the shape and strides that transformers' own layer gives.
Views are made once per block and kept: a decode step makes none.
"""

from __future__ import annotations

import torch

from kvloom.adapters.transformers.block_table import BlockTable
from kvloom.errors import SequenceError
from kvloom.spec.model_spec import GroupSpec, TensorSpec


class PagedTensor:
    """One state tensor of one layer of one sequence, spread over blocks: ``[1, *lead, entries, *tail]``.

    Attributes:
        dim: the entry axis, batch axis included.
        dtype: of the tensor.
        group: the KV cache group it belongs to.
        table: its blocks.
    """

    def __init__(self, table: BlockTable, base: torch.Tensor, layer: int, tensor: TensorSpec) -> None:
        axis = tensor.entry_axis or 0
        self.dim = axis + 1
        self.dtype = base.dtype
        self.group = table.group
        self.table = table
        self._base = base
        self._item = base.element_size()
        self._entries = table.entries
        self._layer = layer
        self._offset = part_offset(table.group, layer, tensor)
        self._shape = (1, *tensor.shape[:axis], table.entries, *tensor.shape[axis:])
        self._strides = contiguous_strides(self._shape)
        self._head, self._tail = self._shape[: self.dim], self._shape[self.dim + 1 :]
        self._device = base.device.type
        self._blocks: dict[int, torch.Tensor] = {}
        self._epoch = 0

    def write(self, start: int, rows: torch.Tensor) -> None:
        """Store ``rows`` (``[1, *lead, q, *tail]``) as the entries [start, start + q)."""
        rows = self._checked(rows)
        dim, size, count = self.dim, self._entries, rows.shape[self.dim]
        at = 0
        while at < count:
            block, row = divmod(start + at, size)
            step = min(size - row, count - at)
            self.block(block).narrow(dim, row, step).copy_(rows.narrow(dim, at, step))
            at += step

    def gather(self, begin: int, end: int, dead: int = 0) -> torch.Tensor:
        """The entries [begin, end) in a fresh contiguous tensor, behind ``dead`` rows of zeros."""
        dim, size = self.dim, self._entries
        pieces = [self._empty(dead).zero_()] if dead or begin >= end else []
        at = begin
        while at < end:
            block, row = divmod(at, size)
            step = min(size - row, end - at)
            view = self.block(block)
            pieces.append(view if step == size else view.narrow(dim, row, step))
            at += step
        return torch.cat(pieces, dim)

    def extend(self, start: int, rows: torch.Tensor, begin: int, dead: int = 0) -> torch.Tensor:
        """``write`` the rows, then ``gather`` from ``begin`` to their end."""
        self.write(start, rows)
        return self.gather(begin, start + rows.shape[self.dim], dead)

    def block(self, block: int) -> torch.Tensor:
        """The view of one block, ``[1, *lead, entries per block, *tail]``, in the arena."""
        table = self.table
        if table.gate is not None:
            table.gate.wait(table.index, self._layer)
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

    def _checked(self, rows: torch.Tensor) -> torch.Tensor:
        """The rows without their autograd history; SequenceError when they are not what the slots are made for."""
        shape, dim = rows.shape, self.dim
        if rows.dtype is not self.dtype or shape[:dim] != self._head or shape[dim + 1 :] != self._tail:
            expected = [*self._head, "n", *self._tail]
            raise SequenceError(
                f"group {self.group.name!r}: the model makes {rows.dtype} state of shape {list(shape)} now, not "
                f"{self.dtype} {expected} as before; attach again"
            )
        if rows.device.type != self._device:
            raise SequenceError(f"the model makes state on {rows.device} now, not on {self._device}; attach again")
        return rows.detach()

    def _empty(self, rows: int) -> torch.Tensor:
        return self._base.new_empty((*self._head, rows, *self._tail))


def part_offset(group: GroupSpec, layer: int, tensor: TensorSpec) -> int:
    """Byte offset within a slot of ``tensor`` of the ``layer``-th layer of the group."""
    position = next(i for i, t in enumerate(group.tensors) if t.name == tensor.name)
    return layer * group.layer_stride + group.tensor_offsets[position]


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
    strides = [0] * len(tensor.shape)
    at = 1
    for axis in reversed(tensor.order or tuple(range(len(tensor.shape)))):
        strides[axis] = at
        at *= tensor.shape[axis]
    offset = (slot_offset + part_offset(group, layer, tensor)) // base.element_size()
    return base.as_strided((1, *tensor.shape), (at, *strides), offset)
