"""Host arena: one flat, page-aligned byte buffer that holds every slot, and the copies between slots.

The buffer is anonymous memory that the kernel hands out zeroed, page by page, on first touch; an
arena larger than what is used costs address space, not memory.  The arena decides nothing: it runs
the plans that the manager makes.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvloom.errors import InputError
from kvloom.plan import ArenaGeometry, CopyPlan
from kvloom.spec.model_spec import GroupSpec, ModelSpec
from kvloom.types import DTYPE_BYTES

PAGE = 4096


@dataclass(frozen=True, slots=True)
class Region:
    """A strided run of bytes inside a slot: ``shape`` and ``strides`` in bytes, ``offset`` from the slot's start."""

    offset: int
    shape: tuple[int, int, int]
    strides: tuple[int, int, int]


def rows_from(group: GroupSpec, entries: int) -> list[Region]:
    """Regions of a slot of ``group`` that hold entry ``entries`` and later, one per state tensor.

    The axes are (layer, everything before the entry axis, bytes of the rows).  Raises InputError for a
    snapshot group, whose slots have no entries.
    """
    if group.is_snapshot:
        raise InputError(f"group {group.name!r} holds snapshots; its slots have no entries to pad")
    regions = []
    for tensor, offset in zip(group.tensors, group.tensor_offsets, strict=True):
        axis = tensor.entry_axis or 0
        row_bytes = DTYPE_BYTES[tensor.dtype]
        for extent in tensor.shape[axis:]:
            row_bytes *= extent
        lead = 1
        for extent in tensor.shape[:axis]:
            lead *= extent
        missing = group.block_entries - entries
        if missing > 0:
            shape = (len(group.layers), lead, missing * row_bytes)
            strides = (group.layer_stride, group.block_entries * row_bytes, 1)
            regions.append(Region(offset + entries * row_bytes, shape, strides))
    return regions


def steps(plan: CopyPlan) -> Iterator[tuple[int, int, int, int]]:
    """The copies of a plan in order, as plain integers (group, source, destination, entries)."""
    return zip(plan.group.tolist(), plan.src.tolist(), plan.dst.tolist(), plan.entries.tolist(), strict=True)


class HostArena:
    """Every slot of one device tier, in host memory.

    Attributes:
        buffer: uint8 ``[arena_bytes]``, 4096-aligned, zero until first written.
    """

    def __init__(self, geometry: ArenaGeometry, spec: ModelSpec) -> None:
        self._geometry = geometry
        self._spec = spec
        # The mapping lives as long as an array or tensor refers to it.
        mapping = mmap.mmap(-1, -(-geometry.arena_bytes // PAGE) * PAGE)
        self.buffer: npt.NDArray[np.uint8] = np.frombuffer(mapping, dtype=np.uint8)[: geometry.arena_bytes]

    def slot(self, group: int, slot: int) -> npt.NDArray[np.uint8]:
        """The bytes of one slot, writable, without a copy."""
        at = self._geometry.slot_offset(group, slot)
        return self.buffer[at : at + self._spec.groups[group].slot_bytes]

    def run(self, plan: CopyPlan) -> None:
        """Run the copies, zero fills and zero paddings of ``plan`` in order."""
        for group, src, dst, entries in steps(plan):
            target = self.slot(group, dst)
            if src < 0:
                target.fill(0)
            else:
                np.copyto(target, self.slot(group, src))
            if entries >= 0:
                for region in rows_from(self._spec.groups[group], entries):
                    view = np.lib.stride_tricks.as_strided(target[region.offset :], region.shape, region.strides)
                    view.fill(0)
