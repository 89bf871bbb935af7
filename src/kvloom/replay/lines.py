"""Lines of a file that somebody names: whatever it is, what cannot be read is a sentence with file, line and fix."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from kvloom.engine.files import refuse_device
from kvloom.errors import InputError

MOST_LINE = 64 << 20
_PACKED = ((b"\x1f\x8b", "gzip", "gunzip"), (b"\x28\xb5\x2f\xfd", "zstd", "unzstd"), (b"PK\x03\x04", "zip", "unzip"))
_BOM = b"\xef\xbb\xbf"
Fail = Callable[[str], NoReturn]
"""Raises InputError with the file and the line before what it is given."""
Lines = Iterator[tuple[int, str]]
"""Numbers and texts of the lines that are not blank."""

_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = _REPR.maxlong = 60


def shown(value: object) -> str:
    """``repr`` for a message, cut short."""
    return _REPR.repr(value)


def fail_at(path: Path, line: int) -> Fail:
    """What to call when something is wrong with a line."""

    def fail(what: str) -> NoReturn:
        raise InputError(f"{path}, line {line}: {what}")

    return fail


def read_lines(path: Path) -> Lines:
    """The lines of a UTF-8 file, one after the other, with their numbers; blank ones are left out.

    Raises InputError: unreadable, a directory or device, compressed, not UTF-8, or a line beyond 64 MiB.
    """
    try:
        refuse_device(path.stat(), str(path))
        with path.open("rb") as file:
            at = 0
            while raw := file.readline(MOST_LINE + 1):
                at += 1
                if len(raw) > MOST_LINE:
                    raise InputError(f"{path}, line {at}: longer than {MOST_LINE} bytes; a line is one request")
                text = _text(path, at, raw)
                if text.strip():
                    yield at, text
    except (OSError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise InputError(f"{path}: {reason}; name a trace file") from None


def _text(path: Path, line: int, raw: bytes) -> str:
    if line == 1:
        for magic, name, tool in _PACKED:
            if raw.startswith(magic):
                raise InputError(f"{path}, line 1: compressed with {name}, not text; unpack it first, with {tool}")
        raw = raw.removeprefix(_BOM)
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path}, line {line}: not UTF-8 text (byte {error.start} of the line); a trace is JSON lines or CSV: "
            "convert it to UTF-8, or name another file"
        ) from None


def json_object(text: str, fail: Fail, what: str) -> dict[str, Any]:
    """The object that a line of JSON is; ``what`` says what it should be, for messages."""
    try:
        row = json.loads(text)
    except RecursionError:
        fail(f"nested too deeply; {what}")
    except json.JSONDecodeError as error:
        fail(
            f"not a whole JSON object ({error.msg}, column {error.colno}); the line may be cut off: copy the file "
            "again, or delete the line"
        )
    except ValueError:  # of thousands of digits
        fail("a number is too large; correct it, or delete the line")
    if not isinstance(row, dict):
        fail(f"a JSON {type(row).__name__}, not an object; {what}")
    return row


def check_names(row: dict[str, Any], known: Sequence[str], needed: Iterable[str], what: str, fail: Fail) -> None:
    """Fail for a field that is not known, and for one that is needed and missing; ``what`` has them."""
    for name in row:
        if name not in known:
            fail(f"unknown field {shown(name)}; {what} has {', '.join(known)}")
    for name in needed:
        if name not in row:
            fail(f"the field {name!r} is missing; {what} has {', '.join(known)}")
