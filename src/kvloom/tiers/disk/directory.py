"""The directory of a store: whose it is, which index is the present one, and the lock that guards a change of it."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvloom.errors import FormatError, StoreError
from kvloom.tiers.disk.files import FileOps
from kvloom.tiers.disk.format import FORMAT, checksum
from kvloom.tiers.disk.index import Index

MARKER = "KVLOOM"
LOCK = "lock"
EXTENTS = "extents"
NEEDED = 256 << 10
"""Bytes on the disk without which not even an index can be opened."""
SUFFIX = ".extent"
_INDEX = re.compile(r"index-[0-9a-f]{16}\.sqlite")
_OURS = re.compile(rf"{MARKER}(\.[0-9a-f]{{16}})?|{LOCK}|{EXTENTS}|{_INDEX.pattern}(-wal|-shm|-journal)?")
# A newer format may go on as it likes after its number.
_MARKER = re.compile(
    rb"kvloom disk store\nformat (?P<format>[0-9]{1,9})\n"
    rb"(?:index (?P<index>index-[0-9a-f]{16}\.sqlite)\ncap (?P<cap>[0-9]{1,18})\n)?"
)
_EXTENT = re.compile(rf"[0-7][0-9a-f]{{15}}\{SUFFIX}")
GUARD_BYTE, SWEEP_BYTE, PUBLISH_BYTE = 0, 1, 2
"""Bytes of the lock file: for use of the index, for making room, for making a unit visible."""


class MarkerDamagedError(StoreError):
    """The marker is there and does not say what it should."""


@dataclass(frozen=True, slots=True)
class Marker:
    """What the marker says, and which file said it (inode and change time)."""

    index: str
    cap: int
    """The cap when this index was made, for the next one; 0: none yet."""
    version: tuple[int, int]


class Directory:
    """Paths and guard of one store.  Thread-safe.

    Raises StoreError for a directory that cannot be used, FormatError for a store of a newer format.
    """

    def __init__(self, path: Path, ops: FileOps, *, create: bool) -> None:
        self.path = Path(os.path.abspath(path))  # noqa: PTH100  (resolve() would follow the link that is looked for)
        self._ops = ops
        self._claim(create=create)
        self.extents = self.path / EXTENTS
        self.extents.mkdir(mode=0o700, exist_ok=True)

    def _claim(self, *, create: bool) -> None:
        if create:
            with contextlib.suppress(FileExistsError):
                self.path.mkdir(mode=0o700, parents=True)
        try:
            status = self.path.lstat()
        except FileNotFoundError:
            raise StoreError(f"store {self.path}: there is no such directory; name one that kvloom made") from None
        if stat.S_ISLNK(status.st_mode):
            raise StoreError(f"{self.path} is a symbolic link; name the directory that it leads to")
        if not stat.S_ISDIR(status.st_mode):
            raise StoreError(f"{self.path} is not a directory; name one for the store alone")
        if status.st_uid != os.geteuid():
            raise StoreError(f"{self.path} belongs to another user; use a directory of your own")
        names = [path.name for path in self.path.iterdir()]
        foreign = [name for name in names if not _OURS.fullmatch(name)]
        if foreign or (not create and not names):
            what = f"holds {foreign[0]!r}" if foreign else "is empty"
            way = "an empty directory, or a store" if create else "one that kvloom made"
            raise StoreError(f"{self.path} is not a kvloom store, it {what}; name {way}")
        for name in names:
            try:
                mode = (self.path / name).lstat().st_mode
            except FileNotFoundError:
                continue  # somebody makes or clears the store at this moment
            if not (stat.S_ISDIR(mode) if name == EXTENTS else stat.S_ISREG(mode)):
                raise StoreError(f"{self.path / name} is a link or special file; a store has none, remove it")
        # Asked after the names: whoever makes the store at this moment closes the directory before it puts anything in.
        if self.path.lstat().st_mode & 0o077:
            if names:
                raise StoreError(f"{self.path} can be entered by other users; run: chmod 700 {self.path}")
            self.path.chmod(0o700)

    def guard(self, *, exclusive: bool) -> contextlib.AbstractContextManager[None]:
        """Shared: the present index stays the present one meanwhile.  Exclusive: nobody uses any index."""
        return self.locked(GUARD_BYTE, exclusive=exclusive)

    @contextlib.contextmanager
    def locked(self, byte: int, *, exclusive: bool) -> Iterator[None]:
        """Hold one byte of the lock file, with others or alone; waits for it.  Not twice in one thread."""
        # Every holder opens the file anew: a lock belongs to the open file, and threads must exclude each other too.
        fd = self._ops.open(self.path / LOCK, os.O_RDWR | os.O_CREAT)
        try:
            self._ops.lock(fd, byte, exclusive=exclusive, wait=True)
            yield
        finally:
            self._ops.close(fd)

    def extent(self, number: int) -> Path:
        """Path of an extent: its number in hex, so no caller's text is ever part of a path."""
        return self.extents / f"{number:016x}{SUFFIX}"

    def extent_files(self) -> dict[int, Path]:
        """Every extent file by its number."""
        names = [path.name for path in self.extents.iterdir()]
        return {int(name[:16], 16): self.extents / name for name in names if _EXTENT.fullmatch(name)}

    def version(self) -> tuple[int, int]:
        """Of the marker: another one means another index."""
        try:
            status = (self.path / MARKER).stat()
        except FileNotFoundError:
            raise MarkerDamagedError(f"{self.path / MARKER} is gone") from None
        return status.st_ino, status.st_mtime_ns

    def marker(self) -> Marker | None:
        """The marker; None when there is none yet.  Raises MarkerDamagedError, FormatError when it is newer."""
        path = self.path / MARKER
        if not path.exists():
            return None
        version = self.version()
        with path.open("rb") as file:
            text = file.read(4096)
        body, _, check = text.rpartition(b"check ")
        if checksum(body).hex() != check.strip().decode("ascii", "replace"):
            raise MarkerDamagedError(f"{path} is damaged")
        found = _MARKER.match(body)
        if found is not None and int(found["format"]) > FORMAT:
            said = f"format {int(found['format'])}, this one reads {FORMAT}"
            raise FormatError(f"{self.path} was written by a newer kvloom ({said}); update kvloom")
        if found is None or found.end() != len(body) or found["index"] is None:
            raise MarkerDamagedError(f"{path} is damaged")
        return Marker(found["index"].decode("ascii"), int(found["cap"]), version)

    def known_cap(self) -> int | None:
        """The cap that the marker knows of."""
        with contextlib.suppress(MarkerDamagedError):
            marker = self.marker()
            return (marker.cap or None) if marker is not None else None
        return None

    def new_index(self) -> Path:
        """An empty index that nobody knows of yet; ``use`` makes it the present one."""
        path = self.path / f"index-{os.urandom(8).hex()}.sqlite"
        Index.create(path)
        return path

    def remove_indexes(self) -> None:
        """Remove every index, and markers that were never finished."""
        # A main file goes before its log: without the log it would be an index of long ago, or none that can be read.
        for name in sorted(path.name for path in self.path.iterdir()):
            if name not in {MARKER, LOCK, EXTENTS} and _OURS.fullmatch(name):
                with contextlib.suppress(FileNotFoundError):
                    self._ops.unlink(self.path / name)

    def use(self, index: Path, cap: int) -> None:
        """Make an index the present one, in one step that survives a loss of power."""
        body = f"kvloom disk store\nformat {FORMAT}\nindex {index.name}\ncap {cap}\n".encode("ascii")
        made = self.path / f"{MARKER}.{os.urandom(8).hex()}"
        fd = self._ops.open(made, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        try:
            os.write(fd, body + b"check " + checksum(body).hex().encode("ascii") + b"\n")
            self._ops.sync_data(fd)
        finally:
            self._ops.close(fd)
        # The names of the index and of the marker itself have to be there before anybody relies on them.
        self._ops.sync_directory(self.path)
        self._ops.replace(made, self.path / MARKER)
        self._ops.sync_directory(self.path)


def why_unusable(path: Path, error: OSError) -> str:
    """What an error of opening a store means, and what to do: SQLite calls a disk without room many names."""
    if error.errno in {errno.ENOSPC, errno.EDQUOT, errno.EIO}:
        place = Path(os.path.abspath(path))  # noqa: PTH100
        while not os.path.exists(place):  # noqa: PTH110  (the method raises where it may not look)
            place = place.parent
        status = os.statvfs(place)
        if status.f_bavail * status.f_frsize < NEEDED:
            return "its disk is full; free some room there, or name a directory on another disk"
    return f"{error.strerror or error}; name a directory on a disk that you may write to"
