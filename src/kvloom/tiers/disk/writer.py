"""The one writer of a handle: it appends runs to its extent, takes a new extent when one is full, and gives it up."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from kvloom.tiers.disk.directory import Directory
from kvloom.tiers.disk.extents import OpenExtent, begin_extent, create_extent, put_extent, seal_extent
from kvloom.tiers.disk.files import FileOps
from kvloom.tiers.disk.format import PAGE
from kvloom.tiers.disk.index import Index
from kvloom.tiers.disk.runs import Run, Staging
from kvloom.tiers.disk.space import EXTENT_EXTRA, Cap, fits
from kvloom.types import AnyArray


class NoRoomError(Exception):
    """The run does not fit under the cap at present."""


class Writer:
    """Not thread-safe but for ``disown``: its owner holds a lock."""

    def __init__(self, directory: Directory, ops: FileOps) -> None:
        self._directory, self._ops = directory, ops
        self._staging = Staging(ops)
        self.extent: OpenExtent | None = None
        self._disowned: OpenExtent | None = None
        self.bytes_written = 0

    def has(self, size: int) -> bool:
        """Whether the present extent takes ``size`` bytes more."""
        return self.usable and self.extent is not None and self.extent.left >= size

    def disown(self) -> None:
        """The index was made anew: the present extent gets no more.

        Any thread may say so, also while the owner writes there.  Only the owner closes the file: what else is opened
        meanwhile would get its number, and what is still being written.
        """
        self._disowned = self.extent

    @property
    def usable(self) -> bool:
        """Whether what is written to the present extent can be published: it is not disowned, and nobody removed it."""
        extent = self.extent
        return extent is not None and extent is not self._disowned and self._ops.linked(extent.fd)

    def claim(self, index: Index, cap: Cap, size: int, *, headroom: int) -> None:
        """Have an extent with ``size`` bytes left, and beside it ``headroom`` under the cap.

        Raises NoRoomError when the cap forbids it, OSError.
        """
        if self.extent is self._disowned:
            self.forget()
        if self.has(size):
            return
        self.release(index)
        made = create_extent(self._directory, self._ops, 0)
        try:
            # It need not last: if it is lost with the power, so is all that followed, and nobody knows the extent.
            with index.write(lasting=False) as db:
                for reserved in (max(cap.extent, size + PAGE), size + PAGE):
                    if fits(db, index, cap, reserved + EXTENT_EXTRA + headroom):
                        made.reserved = reserved
                        put_extent(db, made.row())
                        break
            if not made.reserved:
                raise NoRoomError
        except BaseException:
            with contextlib.suppress(OSError):
                self._ops.unlink(self._directory.extent(made.id))
            self._ops.close(made.fd)
            raise
        # From here on the file is in the index: if its first page fails, release() gives it back.
        self.extent = made
        begin_extent(self._ops, made, cap.bytes)

    def append(self, run: Run, meanwhile: Callable[[AnyArray], None] = lambda _places: None) -> AnyArray:
        """Write a run into the claimed extent and sync it; returns its ``PLACE[objects]``.  Raises OSError.

        ``meanwhile`` gets the places while the last bytes are on their way.
        """
        extent = self.extent
        assert extent is not None
        assert extent.left >= run.size
        start, extent.end = extent.end, extent.end + run.size
        self._ops.allocate(extent.fd, start, run.size)
        places = self._staging.write(run, extent.fd, extent.id, start, meanwhile)
        self._ops.sync_data(extent.fd)
        if not extent.named:
            self._ops.sync_directory(self._directory.extents)
            extent.named = True
        self.bytes_written += run.size
        return places

    def release(self, index: Index, *, failed: bool = False) -> None:
        """Give the extent up: it stays as long as what is published, and gives back what it did not use.

        ``failed``: writing did, and perhaps a commit.
        """
        extent, self.extent = self.extent, None
        if extent is not None:
            try:
                seal_extent(index, self._ops, extent.fd, extent.id, lasting=failed)
            finally:
                self._ops.close(extent.fd)

    def forget(self) -> None:
        """Give the extent up without an index."""
        if self.extent is not None:
            self._ops.close(self.extent.fd)
            self.extent = None

    def close(self) -> None:
        """End the threads."""
        self.forget()
        self._staging.close()
