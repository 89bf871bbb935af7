"""File operations that fail, kill or are slow at a chosen moment, and SQLite statements that kill."""

from __future__ import annotations

import errno
import os
import signal
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from kvloom.tiers.disk import FileOps
from kvloom.tiers.disk import index as index_module
from kvloom.tiers.disk.format import PAGE


class CountingOps(FileOps):
    """Asks ``before`` with the number and name of every operation that changes something; it may raise or kill.

    A write asks in addition after its first page (``torn``); every operation asks again when it is done (``after``).
    """

    def __init__(self, before: Callable[[int, str], None] = lambda _n, _what: None) -> None:
        self.before = before
        self.number = 0
        self.names: list[str] = []

    def step(self, what: str) -> None:
        self.names.append(what)
        self.number += 1
        self.before(self.number - 1, what)

    def write(self, fd: int, data: memoryview, offset: int) -> None:
        self.step("write")
        if len(data) > PAGE:
            super().write(fd, data[:PAGE], offset)
            self.step("torn write")
            data, offset = data[PAGE:], offset + PAGE
        super().write(fd, data, offset)
        self.step("after write")

    def allocate(self, fd: int, offset: int, size: int) -> None:
        self.step("allocate")
        super().allocate(fd, offset, size)
        self.step("after allocate")

    def open(self, path: Path, flags: int, mode: int = 0o600) -> int:
        if not flags & os.O_CREAT or path.name == "lock":
            return super().open(path, flags, mode)
        self.step("open")
        fd = super().open(path, flags, mode)
        self.step("after open")
        return fd

    def sync_data(self, fd: int) -> None:
        self.step("sync_data")
        super().sync_data(fd)
        self.step("after sync_data")

    def sync_directory(self, path: Path) -> None:
        self.step("sync_directory")
        super().sync_directory(path)
        self.step("after sync_directory")

    def truncate(self, fd: int, size: int) -> None:
        self.step("truncate")
        super().truncate(fd, size)
        self.step("after truncate")

    def unlink(self, path: Path) -> None:
        self.step("unlink")
        super().unlink(path)
        self.step("after unlink")

    def replace(self, source: Path, target: Path) -> None:
        self.step("replace")
        super().replace(source, target)
        self.step("after replace")


class FailingOps(FileOps):
    """Operations named in ``failing`` raise the error there; ``read`` too."""

    def __init__(self) -> None:
        self.failing: dict[str, int] = {}

    def _maybe(self, what: str) -> None:
        number = self.failing.get(what)
        if number is not None:
            raise OSError(number, os.strerror(number))

    def open(self, path: Path, flags: int, mode: int = 0o600) -> int:
        if flags & os.O_CREAT and path.name != "lock":
            self._maybe("create")
        return super().open(path, flags, mode)

    def write(self, fd: int, data: memoryview, offset: int) -> None:
        self._maybe("write")
        super().write(fd, data, offset)

    def allocate(self, fd: int, offset: int, size: int) -> None:
        self._maybe("allocate")
        super().allocate(fd, offset, size)

    def read(self, fd: int, into: memoryview, offset: int) -> int:
        self._maybe("read")
        return super().read(fd, into, offset)

    def sync_data(self, fd: int) -> None:
        self._maybe("sync_data")
        super().sync_data(fd)

    def sync_directory(self, path: Path) -> None:
        self._maybe("sync_directory")
        super().sync_directory(path)

    def truncate(self, fd: int, size: int) -> None:
        self._maybe("truncate")
        super().truncate(fd, size)

    def unlink(self, path: Path) -> None:
        self._maybe("unlink")
        super().unlink(path)


ERRORS = {"ENOSPC": errno.ENOSPC, "EIO": errno.EIO, "EROFS": errno.EROFS}


@contextmanager
def statements(before: Callable[[str], None]) -> Iterator[None]:
    """Within, ``before`` is asked before and after every changing SQL statement of connections opened here."""
    words = ("BEGIN IMMEDIATE", "INSERT", "UPDATE", "DELETE", "COMMIT", "PRAGMA wal_checkpoint")

    class Connection(sqlite3.Connection):
        def execute(self, sql: str, *parameters: object) -> sqlite3.Cursor:  # type: ignore[override]
            if not sql.startswith(words):
                return super().execute(sql, *parameters)  # type: ignore[arg-type]
            what = sql.split(" ", 1)[0].lower()
            before(what)
            done = super().execute(sql, *parameters)  # type: ignore[arg-type]
            before(f"after {what}")
            return done

    real = sqlite3.connect

    def connect(*args: object, **kwargs: object) -> sqlite3.Connection:
        return real(*args, **{**kwargs, "factory": Connection})  # type: ignore[call-overload,no-any-return]

    index_module.sqlite3.connect = connect  # type: ignore[assignment]
    try:
        yield
    finally:
        index_module.sqlite3.connect = real


def kill_now() -> None:
    """End this process as a crash does."""
    os.kill(os.getpid(), signal.SIGKILL)
