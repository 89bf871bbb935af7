"""The disk store that a command is told to use."""

from __future__ import annotations

from pathlib import Path

from kvloom.tiers.disk import DiskStore

CAPACITY = 16 << 30
"""Bytes that a new store may take, unless it is told otherwise."""


def open_store(directory: Path, capacity: int | None = None) -> DiskStore:
    """Open the store in ``directory``, making it if there is none.

    ``capacity`` bytes become its cap; None leaves the cap of a store that has one, and gives a new one ``CAPACITY``.

    Raises StoreError for a directory that cannot be used, InputError for a cap that is too small.
    """
    return DiskStore.open(directory, capacity, capacity_of_new=CAPACITY)
