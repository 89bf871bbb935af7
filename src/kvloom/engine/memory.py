"""What the machine has, so that what it cannot give is refused instead of tried."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from kvloom.config import exact_size, format_size
from kvloom.core.geometry import plan_geometry
from kvloom.errors import ConfigError, InputError

if TYPE_CHECKING:
    from torch import device as TorchDevice  # noqa: N812

    from kvloom.spec.model_spec import ModelSpec

_BOOKS_PER_SLOT = 64
_BOOKS_PER_SEGMENT = 300
"""About the bytes that a manager keeps for each."""


def physical_memory() -> int:
    """Bytes of memory of this machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def require_tier(size: int, device: TorchDevice) -> None:
    """ConfigError when a device tier of ``size`` bytes is more than all the memory of ``device``."""
    import torch

    there = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else physical_memory()
    if size > there:
        raise ConfigError(
            f"device: a tier of {exact_size(size)} is more than the {format_size(there)} that {device} has in all; "
            "use a smaller --device"
        )


def require_tables(spec: ModelSpec, size: int, nodes: int, sequences: int, where: str) -> None:
    """InputError when an index of ``nodes`` places and block tables of ``sequences`` rows would fill half the memory.

    ``where`` begins the message.
    """
    slots = int(plan_geometry(spec, size).num_slots.sum())
    needed = nodes * (_BOOKS_PER_SEGMENT + 4 * spec.segment_tokens) + sequences * slots * 4
    if needed > physical_memory() // 2:
        raise InputError(
            f"{where}: an index of {nodes} places and block tables of {sequences} sequences take about "
            f"{format_size(needed)}, and this machine has {format_size(physical_memory())} of memory; use a larger one"
        )


def require_books(spec: ModelSpec, size: int, asked: str) -> None:
    """ConfigError when what a manager notes about a tier of ``size`` bytes would fill half of this machine's memory.

    Raises CapacityError when the tier cannot hold even the smallest request.
    """
    slots = int(plan_geometry(spec, size).num_slots.sum())
    segment = sum(g.slot_bytes * (spec.segment_tokens // g.block_tokens) for g in spec.groups if not g.is_snapshot)
    needed = slots * _BOOKS_PER_SLOT + size // max(segment, 1) * _BOOKS_PER_SEGMENT
    if needed > physical_memory() // 2:
        raise ConfigError(
            f"--device {asked!r}: the books of {slots} slots take about {format_size(needed)}, and this machine has "
            f"{format_size(physical_memory())} of memory; use a smaller --device"
        )
