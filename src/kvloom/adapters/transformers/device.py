"""The arena as torch sees it: one byte tensor on the model's device, typed bases over it, and plan execution."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from kvloom.adapters.transformers.scratch import Scratch
from kvloom.plan import ArenaGeometry, CopyPlan
from kvloom.spec.model_spec import ModelSpec
from kvloom.tiers.memory import HostArena, rows_from, steps
from kvloom.types import IntArray

_BYTES_STEP = 8  # the widest dtype; a base of every dtype covers the whole arena


class Arena(Protocol):
    """What the adapter needs of an arena, on any device.

    Attributes:
        bytes: uint8 ``[arena_bytes]``, the one storage that every cached tensor lies in.
        scratch: memory for what is read back; None where torch's own allocator keeps it (CUDA).
    """

    bytes: torch.Tensor
    scratch: Scratch | None

    def base(self, dtype: torch.dtype) -> torch.Tensor:
        """The arena as a flat tensor of ``dtype``."""

    def run(self, plan: CopyPlan) -> None:
        """Run the copies of a plan in order."""

    def host_memory(self) -> npt.NDArray[np.uint8] | None:
        """The arena itself where it is host memory; else None."""

    def settle(self) -> None:
        """Wait until all that was queued to change the arena is done."""

    def read_slot(self, offset: int, into: memoryview) -> None:
        """Copy ``len(into)`` bytes from ``offset`` to host memory."""

    def write_slots(self, offsets: IntArray, lengths: IntArray, data: npt.NDArray[np.uint8]) -> None:
        """Copy pieces of ``data`` (host memory) that lie one after the other to ``offsets``."""


class CpuArena:
    """A host arena shared with torch without a copy."""

    def __init__(self, geometry: ArenaGeometry, spec: ModelSpec) -> None:
        self._host = HostArena(geometry, spec)
        self.bytes = torch.from_numpy(self._host.buffer)
        self.scratch: Scratch | None = Scratch()
        self._bases: dict[torch.dtype, torch.Tensor] = {}

    def base(self, dtype: torch.dtype) -> torch.Tensor:
        """See :class:`Arena`."""
        return _base(self.bytes, self._bases, dtype)

    def run(self, plan: CopyPlan) -> None:
        """See :class:`Arena`."""
        self._host.run(plan)

    def host_memory(self) -> npt.NDArray[np.uint8] | None:
        """See :class:`Arena`."""
        return self._host.buffer

    def settle(self) -> None:
        """See :class:`Arena`."""

    def read_slot(self, offset: int, into: memoryview) -> None:
        """See :class:`Arena`."""
        np.frombuffer(into, dtype=np.uint8)[:] = self._host.buffer[offset : offset + len(into)]

    def write_slots(self, offsets: IntArray, lengths: IntArray, data: npt.NDArray[np.uint8]) -> None:
        """See :class:`Arena`."""
        write_pieces(self.bytes, offsets, lengths, data)


class TorchArena:
    """An arena in the memory of an accelerator; copies are queued on its current stream."""

    def __init__(self, geometry: ArenaGeometry, spec: ModelSpec, device: torch.device) -> None:
        self._geometry = geometry
        self._spec = spec
        self.scratch: Scratch | None = None
        self.bytes = torch.zeros(geometry.arena_bytes, dtype=torch.uint8, device=device)
        self._bases: dict[torch.dtype, torch.Tensor] = {}

    def base(self, dtype: torch.dtype) -> torch.Tensor:
        """See :class:`Arena`."""
        return _base(self.bytes, self._bases, dtype)

    def run(self, plan: CopyPlan) -> None:
        """See :class:`Arena`."""
        for group, src, dst, entries in steps(plan):
            target = self._slot(group, dst)
            if src < 0:
                target.zero_()
            else:
                target.copy_(self._slot(group, src))
            if entries >= 0:
                for region in rows_from(self._spec.groups[group], entries):
                    start = int(target.storage_offset()) + region.offset
                    self.bytes.as_strided(region.shape, region.strides, start).zero_()

    def host_memory(self) -> npt.NDArray[np.uint8] | None:
        """See :class:`Arena`."""
        return None

    def settle(self) -> None:
        """See :class:`Arena`."""
        if self.bytes.is_cuda:
            torch.cuda.current_stream(self.bytes.device).synchronize()

    def read_slot(self, offset: int, into: memoryview) -> None:
        """See :class:`Arena`."""
        torch.frombuffer(into, dtype=torch.uint8).copy_(self.bytes[offset : offset + len(into)])

    def write_slots(self, offsets: IntArray, lengths: IntArray, data: npt.NDArray[np.uint8]) -> None:
        """See :class:`Arena`."""
        write_pieces(self.bytes, offsets, lengths, data)

    def _slot(self, group: int, slot: int) -> torch.Tensor:
        at = self._geometry.slot_offset(group, slot)
        return self.bytes[at : at + self._spec.groups[group].slot_bytes]


def write_pieces(raw: torch.Tensor, offsets: IntArray, lengths: IntArray, data: npt.NDArray[np.uint8]) -> None:
    """Copy pieces of ``data`` that lie one after the other to ``offsets`` of ``raw``."""
    at = 0
    for offset, length in zip(offsets.tolist(), lengths.tolist(), strict=True):
        raw[offset : offset + length].copy_(torch.from_numpy(data[at : at + length]))
        at += length


def make_arena(geometry: ArenaGeometry, spec: ModelSpec, device: torch.device) -> Arena:
    """The arena for a model on ``device``."""
    return CpuArena(geometry, spec) if device.type == "cpu" else TorchArena(geometry, spec, device)


def _base(raw: torch.Tensor, known: dict[torch.dtype, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    base = known.get(dtype)
    if base is None:
        whole = raw.numel() // _BYTES_STEP * _BYTES_STEP
        base = known[dtype] = raw[:whole].view(dtype)
    return base
