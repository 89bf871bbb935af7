"""Reading what a user names, without waiting or reading for ever: pipes, devices and huge files are told apart."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from kvloom.errors import InputError

MOST_BYTES = 64 << 20
"""Most bytes of a document or a settings file: some sixteen million tokens."""


def read_text(path: Path, what: str, *, error: type[InputError] = InputError) -> str:
    """The UTF-8 text of a file or pipe, without its byte order mark.

    Args:
        path: the file.
        what: what it is, which begins every message (``document``).
        error: raised when it cannot be read, is not UTF-8, is a device, or has more than 64 MiB.
    """
    try:
        # Not blocking: a pipe that nobody writes into is empty, instead of a wait for its writer.
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
            refuse_device(os.fstat(file.fileno()), f"{what} {path}", error)
            os.set_blocking(file.fileno(), True)
            raw = file.read(MOST_BYTES + 1)
    except OSError as reason:
        raise error(f"{what} {path}: {reason.strerror or reason}; name a text file that can be read") from None
    if len(raw) > MOST_BYTES:
        raise error(f"{what} {path}: more than {MOST_BYTES} bytes; use a smaller file")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as reason:
        raise error(f"{what} {path}: not UTF-8 text (byte {reason.start}); convert it to UTF-8 first") from None


def refuse_device(found: os.stat_result, where: str, error: type[InputError] = InputError) -> None:
    """``error`` when this is a device, which has no end to read to."""
    if stat.S_ISCHR(found.st_mode) or stat.S_ISBLK(found.st_mode):
        raise error(f"{where}: a device, not a file; name a file")


def require_file(path: str) -> None:
    """InputError when a config is looked for in a named pipe, which may have no writer, or in a device."""
    try:
        found = os.stat(path)  # noqa: PTH116 - the path may be a preset's name, and stays as it was written
    except (OSError, ValueError):
        return  # whoever reads it says more
    refuse_device(found, path)
    if stat.S_ISFIFO(found.st_mode) and not path.startswith(("/dev/fd/", "/proc/", "/dev/stdin")):
        raise InputError(f"{path}: a pipe, not a file; name a directory with a config.json, or such a file")
