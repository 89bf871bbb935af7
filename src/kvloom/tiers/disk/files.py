"""Everything that the store does to files goes through one ``FileOps``, so that tests can make any of it fail.

Locks are Linux' open-file-description locks: they belong to the open file, so they end with the process however that
ends, and two handles of one process exclude each other like two processes do.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvloom.tiers.disk.format import PAGE

HUGE = 2 << 20
"""Bytes of a huge page."""
DIRECT: int = getattr(os, "O_DIRECT", 0)
PIN_BYTE = 1 << 61
"""Byte of an extent file that readers lock together while they read."""
WRITER_BYTE = PIN_BYTE + 1
"""Byte of an extent file that its writer locks alone while it may grow."""


def aligned(size: int) -> npt.NDArray[np.uint8]:
    """A page-aligned buffer, zero, as direct I/O wants it; a large one lies in huge pages where the system has them.

    With huge pages a transfer is a few large requests to the device; with pages of 4 KiB it is hundreds of small ones,
    which was measured to cost up to two thirds of the throughput.
    """
    if size < HUGE:
        return np.frombuffer(mmap.mmap(-1, size), np.uint8)
    memory = mmap.mmap(-1, size + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = np.frombuffer(memory, np.uint8)
    start = -whole.ctypes.data % HUGE
    return whole[start : start + size]


def _find_allocate() -> Callable[[int, int, int, int], int] | None:
    """Linux' own call: that of os would write zeros where the file system cannot allocate."""
    try:
        call = ctypes.CDLL(None, use_errno=True).fallocate64
    except (OSError, AttributeError):
        return None
    call.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    return call


_allocate = _find_allocate()


class FileOps:
    """The operating system, as it is.  Every method may raise OSError; thread-safe."""

    def open(self, path: Path, flags: int, mode: int = 0o600) -> int:
        """A descriptor that no child process inherits and that follows no symbolic link; direct where possible."""
        flags |= os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            return os.open(path, flags, mode)
        except OSError as error:
            # Some file systems (tmpfs, overlays of them) have no direct I/O.
            if error.errno != errno.EINVAL or not flags & DIRECT:
                raise
            return os.open(path, flags & ~DIRECT & ~os.O_EXCL, mode)

    def close(self, fd: int) -> None:
        """Close a descriptor, and so drop its locks."""
        os.close(fd)

    def write(self, fd: int, data: memoryview, offset: int) -> None:
        """All of ``data``, whole pages from a page-aligned address to a page-aligned offset."""
        done = 0
        while done < len(data):
            # After a short write go on from a page boundary, or direct I/O refuses.
            count = os.pwrite(fd, data[done:], offset + done)
            whole = count if done + count == len(data) else count // PAGE * PAGE
            if whole == 0:
                raise OSError(errno.EIO, "the device takes no whole page")
            done += whole

    def allocate(self, fd: int, offset: int, size: int) -> None:
        """Have the blocks of a part of a file together before they are written, where the file system can do that.

        The file is as long afterwards; what was not written reads as zero.
        """
        if _allocate is not None and _allocate(fd, 0, offset, size):
            number = ctypes.get_errno()
            if number not in {errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}:
                raise OSError(number, os.strerror(number))

    def read(self, fd: int, into: memoryview, offset: int) -> int:
        """Fill ``into`` from page-aligned ``offset``; fewer bytes only at the end of the file."""
        done = 0
        while done < len(into):
            count = os.preadv(fd, [into[done:]], offset + done)
            done += count
            if count == 0 or done % PAGE:
                break
        return done

    def sync_data(self, fd: int) -> None:
        """What was written to a file is on the medium, and so is its length."""
        os.fdatasync(fd)

    def sync_directory(self, path: Path) -> None:
        """Names that were made or removed in a directory are on the medium."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def truncate(self, fd: int, size: int) -> None:
        """Cut a file."""
        os.ftruncate(fd, size)

    def unlink(self, path: Path) -> None:
        """Remove a name."""
        path.unlink()

    def replace(self, source: Path, target: Path) -> None:
        """Rename over whatever is there."""
        source.replace(target)

    def linked(self, fd: int) -> bool:
        """Whether the file still has a name."""
        return os.fstat(fd).st_nlink > 0

    def drop_cached(self, fd: int) -> None:
        """Nothing of the file needs to stay in the page cache."""
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def lock(self, fd: int, byte: int, *, exclusive: bool, wait: bool = False) -> bool:
        """Take a lock on one byte of a file; False when somebody else has it and ``wait`` is not set."""
        kind = fcntl.F_WRLCK if exclusive else fcntl.F_RDLCK
        command = fcntl.F_OFD_SETLKW if wait else fcntl.F_OFD_SETLK
        try:
            fcntl.fcntl(fd, command, struct.pack("hhqqi4x", kind, os.SEEK_SET, byte, 1, 0))
        except OSError as error:
            if error.errno in {errno.EAGAIN, errno.EACCES}:
                return False
            raise
        return True

    def unlock(self, fd: int, byte: int) -> None:
        """Give a lock back."""
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, struct.pack("hhqqi4x", fcntl.F_UNLCK, os.SEEK_SET, byte, 1, 0))
