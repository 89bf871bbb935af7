"""The present index of a store: opened, exchanged when another process made a new one, made anew when it is damaged."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from kvloom.tiers.disk.directory import Directory, MarkerDamagedError
from kvloom.tiers.disk.index import Index, IndexCorruptError, meta

T = TypeVar("T")


class OpenIndex:
    """Runs work on the present index.  Thread-safe.

    Args:
        rebuild: fills a new, empty index from what is on the disk.
        exchanged: called after another index came into use.
    """

    def __init__(self, directory: Directory, rebuild: Callable[[Index], None], exchanged: Callable[[], None]) -> None:
        self._directory, self._rebuild, self._exchanged = directory, rebuild, exchanged
        self._lock = threading.Lock()
        self._index: Index | None = None
        self._version: tuple[int, int] | None = None
        self.rebuilds = 0
        """Times that this handle found the index damaged and made a new one."""

    def run(self, work: Callable[[Index], T]) -> T:
        """``work`` on the present index; once more on a new one when the index turns out to be damaged.

        Raises OSError for trouble with the disk, FormatError for a store that a newer kvloom took over.
        """
        for last in (False, True):
            version = self._version
            try:
                with self._directory.guard(exclusive=False):
                    return work(self._present())
            except (IndexCorruptError, MarkerDamagedError):
                if last:
                    raise
                self._replace(version)
        raise AssertionError

    def _present(self) -> Index:
        with self._lock:
            version = self._directory.version()
            if self._index is None or version != self._version:
                marker = self._directory.marker()
                if marker is None:
                    raise MarkerDamagedError("the marker is gone")
                fresh = self._index is None
                if self._index is not None:
                    self._index.close()
                    self._index = None
                self._index = Index(self._directory.path / marker.index)
                self._version = marker.version
                if not fresh:
                    self._exchanged()
            elif not self._index.path.exists():
                # Somebody was about to make a new one and did not get to it; what is open here belongs to nobody.
                raise IndexCorruptError(f"{self._index.path} is gone")
            return self._index

    def _replace(self, seen: tuple[int, int] | None) -> None:
        """A new index, unless somebody else made one since ``seen``."""
        with self._directory.guard(exclusive=True):
            try:
                marker = self._directory.marker()
            except MarkerDamagedError:
                marker = None
            if marker is not None and seen is not None and marker.version != seen:
                return
            self._make()
            self.rebuilds += 1

    def renew(self, empty: Callable[[], object]) -> int:
        """``empty`` the store and begin anew; returns how many units there were, as far as that is known."""
        try:
            with self._directory.guard(exclusive=False):
                units = self._present().units()
        except (IndexCorruptError, MarkerDamagedError):
            units = 0
        with self._directory.guard(exclusive=True):
            # The index first: whoever is killed in between leaves whole units or none, and nothing that points nowhere.
            self._directory.remove_indexes()
            empty()
            self._make()
        return units

    def create(self) -> None:
        """The first index of a store, unless there is one."""
        with self._directory.guard(exclusive=True):
            try:
                if self._directory.marker() is None:
                    self._make()
            except MarkerDamagedError:
                self._make()
                self.rebuilds += 1

    def _make(self) -> None:
        # First, so that there are never two of them below the cap; a marker that names none is a damaged index.
        self._directory.remove_indexes()
        path = self._directory.new_index()
        index = Index(path)
        try:
            self._rebuild(index)
            with index.read() as db:
                cap = meta(db, "capacity")
        finally:
            index.close()
        self._directory.use(path, cap)

    def name(self) -> str:
        """Names the present index, so that numbers of one are not taken for numbers of another."""
        return "" if self._index is None else self._index.path.name

    def close(self) -> None:
        """Close it."""
        with self._lock:
            if self._index is not None:
                self._index.close()
                self._index = None
