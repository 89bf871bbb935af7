"""The SQLite index of a store: what is where.  Every row that matters carries a checksum of its content.

A row with another checksum than it should have, or a file that SQLite finds malformed, raises ``IndexCorruptError``;
the store then makes a new index out of the extents.  Other trouble with the file is an OSError like that of any file.
"""

from __future__ import annotations

import contextlib
import errno
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path

import xxhash

from kvloom.errors import StoreError
from kvloom.tiers.disk.format import FORMAT

BUSY_SECONDS = 20.0
FREE_PAGES, MOST_SHRINKS = 32, 256

SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value INTEGER NOT NULL, sum INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE extents (id INTEGER PRIMARY KEY, state INTEGER NOT NULL, reserved INTEGER NOT NULL,
                      used INTEGER NOT NULL, sum INTEGER NOT NULL);
CREATE TABLE layouts (id INTEGER PRIMARY KEY, digest BLOB NOT NULL UNIQUE, sum INTEGER NOT NULL);
CREATE TABLE nodes (id INTEGER PRIMARY KEY, layout INTEGER NOT NULL, digest BLOB NOT NULL, parent BLOB NOT NULL,
                    depth INTEGER NOT NULL, tokens BLOB NOT NULL, objects BLOB NOT NULL, home INTEGER NOT NULL,
                    sum INTEGER NOT NULL, UNIQUE (layout, digest));
CREATE INDEX nodes_parent ON nodes (layout, parent);
CREATE TABLE boundaries (node INTEGER PRIMARY KEY, needs BLOB NOT NULL, touched INTEGER NOT NULL, hits INTEGER NOT NULL,
                         home INTEGER NOT NULL, sum INTEGER NOT NULL);
CREATE TABLE quarantine (extent INTEGER NOT NULL, offset INTEGER NOT NULL, reason TEXT NOT NULL, node BLOB NOT NULL,
                         grp INTEGER NOT NULL, col INTEGER NOT NULL, PRIMARY KEY (extent, offset)) WITHOUT ROWID;
"""

PARENT_INDEX = "nodes_parent"
"""Stores of earlier versions come without it."""
OPEN, SEALED, DYING = 0, 1, 2
"""States of an extent: it may grow, it does not, its file is about to go."""


class IndexCorruptError(StoreError):
    """The index holds something that was never put there."""


def row_sum(*parts: int | bytes) -> int:
    """A checksum over numbers and bytes, as SQLite's signed integers hold it."""
    row = list[bytes]()
    for part in parts:
        data = part.to_bytes(8, "little", signed=True) if isinstance(part, int) else part
        if not isinstance(data, bytes):
            raise IndexCorruptError(f"the index has {type(part).__name__} where it has numbers or bytes")
        row += len(data).to_bytes(8, "little"), data
    return xxhash.xxh3_64_intdigest(b"".join(row)) - (1 << 63)


@contextlib.contextmanager
def translated() -> Iterator[None]:
    """SQLite's errors as ours: corruption, or trouble with the file."""
    try:
        yield
    except sqlite3.ProgrammingError:
        raise  # a mistake of ours, no damage
    except UnicodeDecodeError as error:
        raise IndexCorruptError("the index is damaged: a name in it is no text") from error
    except sqlite3.Error as error:
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        if code in {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_FORMAT}:
            raise IndexCorruptError(f"the index is damaged: {error}") from error
        if code in {0, sqlite3.SQLITE_ERROR, sqlite3.SQLITE_MISMATCH, sqlite3.SQLITE_CONSTRAINT}:
            # A table, column or value that cannot be missing is: the schema page was damaged.
            raise IndexCorruptError(f"the index is not what it was made as: {error}") from error
        number = {sqlite3.SQLITE_FULL: errno.ENOSPC, sqlite3.SQLITE_READONLY: errno.EROFS}.get(code, errno.EIO)
        raise OSError(number, f"SQLite: {error}") from error


class Index:
    """One open index.  Thread-safe: one connection for reading and one for writing, each behind a lock."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.exists():
            raise IndexCorruptError(f"{path} is gone")
        with translated():
            self._reader, self._writer = self._connect(), self._connect()
        self._reading, self._writing = threading.RLock(), threading.RLock()

    def _connect(self) -> sqlite3.Connection:
        # mode=rw: an index that is gone must not come back empty without being noticed.
        uri = f"{self.path.absolute().as_uri()}?mode=rw"
        made = sqlite3.connect(uri, uri=True, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False)
        try:
            _settings(made)
            found = meta(made, "format")
        except BaseException:
            made.close()
            raise
        pages = log_pages(meta(made, "capacity"))
        made.execute(f"PRAGMA wal_autocheckpoint = {pages}")
        made.execute(f"PRAGMA journal_size_limit = {pages * 4096}")
        # A newer format is in the marker, which is looked at first.
        if found != FORMAT:
            made.close()
            raise IndexCorruptError(f"{self.path} says that it is of format {found}, and the marker says {FORMAT}")
        return made

    @staticmethod
    def create(path: Path) -> None:
        """Make an empty index; everything is on the medium afterwards but its name."""
        with translated(), contextlib.closing(sqlite3.connect(path, isolation_level=None)) as made:
            made.execute("PRAGMA auto_vacuum = INCREMENTAL")
            _settings(made)
            made.executescript(f"BEGIN; {SCHEMA} COMMIT;")
            set_meta(made, "format", FORMAT)
        path.chmod(0o600)

    def close(self) -> None:
        """Close both connections."""
        # In this order, as whoever writes may read as well.
        with self._writing, self._reading, contextlib.suppress(sqlite3.Error):
            self._reader.close()
            self._writer.close()

    @contextlib.contextmanager
    def read(self) -> Iterator[sqlite3.Connection]:
        """One consistent view."""
        with self._reading, translated():
            _undo(self._reader)
            try:
                self._reader.execute("BEGIN")
                yield self._reader
            finally:
                _undo(self._reader)

    @contextlib.contextmanager
    def write(self, *, lasting: bool = True) -> Iterator[sqlite3.Connection]:
        """One transaction, durable when it ends without an exception and undone otherwise.

        One that is not ``lasting`` is durable with the next one that is, of any process.
        """
        with self._writing, translated():
            _undo(self._writer)
            self._writer.execute(f"PRAGMA synchronous = {'FULL' if lasting else 'NORMAL'}")
            # An interrupt that comes while SQLite waits for its lock is raised when the transaction has begun already.
            try:
                self._writer.execute("BEGIN IMMEDIATE")
                yield self._writer
                self._writer.execute("COMMIT")
            except BaseException:
                _undo(self._writer)
                raise

    def version(self) -> tuple[str, int]:
        """Another one whenever anything was committed since, by whomever."""
        with self._reading, translated():
            return self.path.name, int(self._reader.execute("PRAGMA data_version").fetchone()[0])

    def shrink(self) -> None:
        """Give back what the main file has free, a little at a time, so that the log stays small."""
        for _ in range(MOST_SHRINKS):
            with self._writing, translated():
                free, pages = (
                    int(self._writer.execute(f"PRAGMA {name}").fetchone()[0])
                    for name in ("freelist_count", "page_count")
                )
                if free <= max(pages // 4, FREE_PAGES):
                    return
                self._writer.execute(f"PRAGMA incremental_vacuum({FREE_PAGES})").fetchall()
            self.checkpoint()

    def checkpoint(self) -> None:
        """Move the log into the main file and cut it, as far as readers allow."""
        with self._writing, translated():
            self._writer.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    def units(self) -> int:
        """How many units there are."""
        with self.read() as db:
            return int(db.execute("SELECT count(*) FROM boundaries").fetchone()[0])

    def log_bytes(self) -> int:
        """Bytes of the log alone."""
        return _size(self.path.with_name(self.path.name + "-wal"))

    def bytes(self) -> int:
        """Bytes of the index and its log on disk, at this moment."""
        return sum(_size(self.path.with_name(self.path.name + end)) for end in ("", "-wal", "-shm"))


def _undo(db: sqlite3.Connection) -> None:
    """End a transaction, such as one that an interrupt left open: all others would wait for it."""
    if db.in_transaction:
        db.execute("ROLLBACK")


def has_parent_index(db: sqlite3.Connection) -> bool:
    """Whether children can be found by their parent without reading everything."""
    return db.execute("SELECT 1 FROM sqlite_master WHERE name = ?", (PARENT_INDEX,)).fetchone() is not None


def log_pages(cap: int) -> int:
    """Pages of the log before it is moved into the main file: more where the cap leaves room, as moving takes syncs."""
    return min(max(cap // (256 * 4096), 64), 4096)


def _settings(made: sqlite3.Connection) -> None:
    for pragma in (
        f"busy_timeout = {int(BUSY_SECONDS * 1000)}",
        "journal_mode = WAL",
        "synchronous = FULL",
        "trusted_schema = OFF",
        "cell_size_check = ON",
        "mmap_size = 0",
        "cache_size = -8192",
        "temp_store = MEMORY",
    ):
        made.execute(f"PRAGMA {pragma}")


def _size(path: Path) -> int:
    try:
        return path.stat().st_blocks * 512
    except FileNotFoundError:
        return 0


def meta(db: sqlite3.Connection, key: str) -> int:
    """A number of the store as a whole; 0 when it was never set."""
    row = db.execute("SELECT value, sum FROM meta WHERE key = ?", (key,)).fetchone()
    if row is not None and row_sum(key.encode(), row[0]) != row[1]:
        raise IndexCorruptError("a number of the index is damaged")
    return 0 if row is None else int(row[0])


def add_meta(db: sqlite3.Connection, key: str, more: int) -> None:
    """Add to such a number."""
    set_meta(db, key, meta(db, key) + more)


def set_meta(db: sqlite3.Connection, key: str, value: int) -> None:
    """Set such a number."""
    db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?, ?)", (key, value, row_sum(key.encode(), value)))
