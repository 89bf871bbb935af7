"""State tensors in host memory: one compiled call appends the new rows and reads all rows back."""

from __future__ import annotations

import math

import torch

from kvloom.adapters.transformers.block_table import BlockTable
from kvloom.adapters.transformers.paged_tensor import PagedTensor
from kvloom.adapters.transformers.scratch import SMALLEST, Scratch
from kvloom.errors import SequenceError
from kvloom.spec.model_spec import TensorSpec
from kvloom.tiers.rows import extend_rows

PARALLEL_BYTES = 512 * 1024
"""From this size on whole blocks are copied by torch, which uses all of its threads."""
MANY_RUNS = 6
"""From this many runs of equally spaced slots on, torch copies block by block instead of run by run."""


class HostPagedTensor(PagedTensor):
    """A paged tensor on a CPU; see :class:`PagedTensor`."""

    def __init__(self, table: BlockTable, base: torch.Tensor, layer: int, tensor: TensorSpec, scratch: Scratch) -> None:
        super().__init__(table, base, layer, tensor)
        self._scratch = scratch
        axis = tensor.entry_axis or 0
        self._lead = math.prod(tensor.shape[:axis])
        self._row_bytes = math.prod(tensor.shape[axis:]) * self._item
        self._address = base.data_ptr() + self._offset
        self._run_views: dict[tuple[int, int], list[tuple[int, int, torch.Tensor]]] = {}
        self._version = 0

    def write(self, start: int, rows: torch.Tensor) -> None:
        """See :class:`PagedTensor`."""
        self._extend(start, self._checked(rows), start, 0, None)

    def gather(self, begin: int, end: int, dead: int = 0) -> torch.Tensor:
        """See :class:`PagedTensor`."""
        if begin >= end:
            return self._empty(dead).zero_()
        out = self._new(dead + end - begin)
        self._read(begin, end, dead, out, 0, 0, 0, 0)
        return out

    def extend(self, start: int, rows: torch.Tensor, begin: int, dead: int = 0) -> torch.Tensor:
        """See :class:`PagedTensor`."""
        count = rows.shape[self.dim]
        out = self._new(dead + start + count - begin)
        self._extend(start, self._checked(rows), begin, dead, out)
        return out

    def _new(self, rows: int) -> torch.Tensor:
        """Memory for ``rows`` rows."""
        shape = (*self._head, rows, *self._tail)
        n_bytes = rows * self._lead * self._row_bytes
        if n_bytes < SMALLEST:
            return self._base.new_empty(shape)
        return self._scratch.take(shape, self.dtype, n_bytes // self._item, n_bytes)

    def _extend(self, start: int, rows: torch.Tensor, begin: int, dead: int, out: torch.Tensor | None) -> None:
        strides = rows.stride()
        item, dim = self._item, self.dim
        if strides[-1] != 1 or len(self._tail) > 1 or dim > 2:
            rows = rows.contiguous()
            strides = rows.stride()
        lead = strides[dim - 1] * item if dim > 1 else 0
        self._read(begin, start, dead, out, rows.data_ptr(), lead, strides[dim] * item, rows.shape[dim])

    def _read(
        self, begin: int, start: int, dead: int, out: torch.Tensor | None, source: int, lead: int, row: int, count: int
    ) -> None:
        """Append ``count`` rows at ``start`` and read [begin, start + count) into ``out``."""
        table, size, end = self.table, self._entries, start + count
        if table.gate is not None:
            table.gate.wait(table.index, self._layer)
        if end > table.last * size or (begin if out is not None else start) < table.first * size:
            raise SequenceError(
                f"group {self.group.name!r}: entries [{begin}, {end}) are not all in the blocks that the sequence "
                f"holds, [{table.first}, {table.last}) of {size} entries"
            )
        skip = (0, 0)
        if (
            out is not None
            and (end - begin) * self._lead * self._row_bytes >= PARALLEL_BYTES
            and torch.get_num_threads() > 1
        ):
            # Only blocks that are complete already: the new rows are written by the call below.
            skip = (-(-begin // size), start // size)
            self._read_whole(out, dead + skip[0] * size - begin, *skip)
        extend_rows(
            table.offsets, table.first, size, self._lead, self._row_bytes, self._address,
            source, lead, row, count, start, 0 if out is None else out.data_ptr(), begin, dead, *skip,
        )  # fmt: skip

    def _read_whole(self, out: torch.Tensor, at: int, first: int, last: int) -> None:
        """Copy the whole blocks [first, last) to the rows of ``out`` that begin at ``at``."""
        size, dim = self._entries, self.dim
        if first >= last:
            return
        if len(self.table.runs(first, last)) >= MANY_RUNS:
            torch.cat([self.block(i) for i in range(first, last)], dim, out=out.narrow(dim, at, (last - first) * size))
            return
        for start, blocks, view in self._views_of_runs(first, last):
            out.narrow(dim, at + (start - first) * size, blocks * size).view(view.shape).copy_(view)

    def _views_of_runs(self, begin: int, end: int) -> list[tuple[int, int, torch.Tensor]]:
        """(first block, count, view ``[1, *lead, count, entries, *tail]``) for blocks [begin, end)."""
        table = self.table
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
