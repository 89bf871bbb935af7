"""Writing a recording: a line per call, written through, so that an interrupted run leaves whole lines."""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from types import TracebackType
from typing import Self

from kvloom import __version__
from kvloom.errors import InputError
from kvloom.manager.events import Clear, Event, Made, Open, Tick
from kvloom.manager.stats import Stats
from kvloom.replay.codec import MOST_TICKS, End, Entry, to_line

_DIGEST = 16


def require_target(path: Path, *, force: bool) -> None:
    """Say at once what would keep a recording from being written to ``path``; creates nothing.

    Raises InputError.
    """
    try:
        there = path.stat()
    except FileNotFoundError:
        if not path.parent.is_dir() or not os.access(path.parent, os.W_OK | os.X_OK):
            raise InputError(f"--record {path}: cannot write there; name a file in a folder that is writable") from None
        return
    except (OSError, ValueError) as error:
        raise InputError(f"--record {path}: {_reason(error)}; name another file") from None
    if stat.S_ISDIR(there.st_mode):
        raise InputError(f"--record {path}: a directory; name a file")
    if stat.S_ISREG(there.st_mode) and not force:
        raise InputError(f"--record {path}: the file exists; name another one, or replace it with --force")
    if not os.access(path, os.W_OK):
        raise InputError(f"--record {path}: not writable; name another file")


class Recorder:
    """Writes what it is told of a manager to a file.  Call it ``Watch``: it is one.

    Salts and the values of extra keys are written as digests under a key that is drawn for this file and kept nowhere.
    Token ids are written as they are: whoever reads the file can read the prompts and answers.

    A write that fails (a full disk) does not disturb the manager: the recording ends with the line before, and
    ``require_written`` and ``end`` say why.
    """

    def __init__(self, path: Path, *, force: bool = False, secret: Callable[[int], bytes] = os.urandom) -> None:
        """Open ``path``; raises InputError.  Nothing is lost of a file that is there before the first line comes."""
        require_target(path, force=force)
        flags = os.O_WRONLY | os.O_CLOEXEC | os.O_NONBLOCK  # a pipe that nobody reads is an error, not a wait
        try:
            try:
                self._file = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o600)
                self._made = True
            except FileExistsError:
                self._file = os.open(path, flags)
                self._made = False
            self._regular = stat.S_ISREG(os.fstat(self._file).st_mode)
            os.set_blocking(self._file, True)
        except (OSError, ValueError) as error:
            raise InputError(f"--record {path}: {_reason(error)}; name a file that can be written") from None
        self.path = path
        self.lines = 0
        self._size = 0
        self._failed: OSError | None = None
        self._head: Made | None = None
        self._key = secret(hashlib.blake2b.MAX_KEY_SIZE)

    def __call__(self, event: Event) -> None:
        """Write one event.  Never raises."""
        if isinstance(event, Open):
            keys = tuple((name, self._digest(_typed(value))) for name, value in event.keys)
            event = replace(event, salt=self._salt(event.salt), keys=keys)
        elif isinstance(event, Clear) and event.salt is not None:
            event = replace(event, salt=self._salt(event.salt))
        elif isinstance(event, Tick):
            for begin in range(0, event.by, MOST_TICKS):
                self._write(Tick(min(MOST_TICKS, event.by - begin)))
            return
        self._write(event)

    def end(self, stats: Stats) -> None:
        """The run is over: write the manager's counters, which a replay compares its own with.

        Raises InputError when something could not be written.
        """
        kinds = {kind.name.lower(): asdict(counters) for kind, counters in sorted(stats.kinds.items())}
        self._write(End(kinds, stats.used, stats.nodes, stats.plans_open, stats.completions_ignored))
        self.require_written()

    def require_written(self) -> None:
        """Raise InputError when a line could not be written."""
        if self._failed is not None:
            raise InputError(
                f"record {self.path}: {_reason(self._failed)} after {self.lines} lines, so the rest of the run is not "
                "recorded; free some room, or name another file"
            )

    def close(self) -> None:
        """Close the file; remove it if nothing was written and it was made for this.  Closing twice is harmless."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
            if self._made and not self.lines:
                with contextlib.suppress(OSError):
                    self.path.unlink()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _salt(self, salt: bytes) -> bytes:
        return self._digest(salt) if salt else b""

    def _digest(self, value: bytes) -> bytes:
        return hashlib.blake2b(value, digest_size=_DIGEST, key=self._key).digest()

    def _write(self, entry: Entry) -> None:
        if isinstance(entry, Made):  # written with the first call, so that nothing is left of a run that has none
            self._head = entry
            return
        if self._head is not None:
            head, self._head = self._head, None
            self._write_line(to_line(head, __version__))
        self._write_line(to_line(entry, __version__))

    def _write_line(self, line: str) -> None:
        if self._failed is not None or self._file < 0:
            return
        raw = memoryview(line.encode() + b"\n")
        try:
            if not self.lines and self._regular:
                os.ftruncate(self._file, 0)
            written = 0
            while written < len(raw):
                written += os.write(self._file, raw[written:])
        except OSError as error:
            self._failed = error
            if self._regular:  # what is there of the line is no use
                with contextlib.suppress(OSError):
                    os.ftruncate(self._file, self._size)
            return
        self._size += len(raw)
        self.lines += 1


def _typed(value: str | bytes | int) -> bytes:
    """Values of different types differ."""
    if isinstance(value, bytes):
        return b"b" + value
    text = value if isinstance(value, str) else str(value)
    return (b"s" if isinstance(value, str) else b"i") + text.encode(errors="surrogatepass")


def _reason(error: OSError | ValueError) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
