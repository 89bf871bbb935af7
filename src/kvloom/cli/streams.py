"""Standard output and standard error: they never fail for an encoding, and fail in one way when nobody reads them."""

from __future__ import annotations

import codecs
import errno
import functools
import io
import json
import logging
import os
import sys
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from rich.console import Console

UNWRITABLE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF})
"""What a write fails with when the output has no room or is no output."""

_SPELT = {"×": "x", "…": "...", "–": "-", "—": "-", "µ": "u", "≤": "<=", "≥": ">=", "→": "->", "’": "'", "·": "."}
_HANDLER = "kvloom.spell"
_NO_TERMINAL_WIDTH = 100_000


def prepare() -> None:
    """Make both streams usable: closed ones go nowhere, and characters that an encoding lacks are spelt out."""
    codecs.register_error(_HANDLER, _spell)
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: PTH123, SIM115
        elif isinstance(stream, io.TextIOWrapper) and stream.errors in ("strict", "backslashreplace"):
            stream.reconfigure(errors=_HANDLER)
    ours = logging.getLogger("kvloom")
    if not any(isinstance(handler, _Notes) for handler in ours.handlers):
        ours.addHandler(_Notes(logging.WARNING))


class _Notes(logging.Handler):
    """What the library logs, as notes on stderr."""

    def emit(self, record: logging.LogRecord) -> None:
        say(f"kvloom: note: {self.format(record)}")


def _spell(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(_SPELT.get(c, "?") for c in error.object[error.start : error.end]), error.end


def emit(text: str) -> None:
    """One text and a line end on stdout, written through.  Raises OSError when that is not possible."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def emit_json(value: Any) -> None:
    """``value`` as JSON on stdout; what its encoding lacks is escaped, so that nothing is lost."""
    text = json.dumps(value, indent=2, ensure_ascii=False)
    try:
        text.encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        text = json.dumps(value, indent=2)
    emit(text)


def screen(*, soft_wrap: bool = False) -> Console:
    """A console on stdout.  Where that is no terminal (and COLUMNS is not set), nothing is wrapped or cut.

    ``soft_wrap`` leaves the wrapping to the terminal.
    """
    wide = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    return _console_class()(highlight=False, width=_NO_TERMINAL_WIDTH if wide else None, soft_wrap=soft_wrap)


@functools.cache
def progress() -> Console:
    """The one console on stderr, so that lines and live displays do not disturb each other."""
    return _console_class()(stderr=True, highlight=False)


def say(line: str) -> None:
    """One plain line on stderr."""
    progress().print(line, markup=False, soft_wrap=True)


@functools.cache
def _console_class() -> type[Console]:
    from rich.console import Console

    class Output(Console):
        """Leaves it to the command to end when the reader is gone."""

        def on_broken_pipe(self) -> NoReturn:
            self.quiet = True
            raise BrokenPipeError

    return Output


def drop_output() -> None:
    """Send what is left to nowhere, or the interpreter would complain once more when it ends."""
    null = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            try:
                os.dup2(null, stream.fileno())
            except (OSError, ValueError):  # not a file at all
                continue
    os.close(null)
