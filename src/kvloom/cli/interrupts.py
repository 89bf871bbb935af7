"""Ctrl-C ends a command at once, wherever it is: importing, compiling or computing.

A KeyboardInterrupt out of the blue is lost or turned into something else by parts of the large libraries that are
imported here, and there is little to put away: no command leaves a file half written that is read later (recordings
are written line by line, stores survive anything).  What is to be removed is named by ``cleaning``.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from sys import UnraisableHookArgs

EXIT_INTERRUPTED = 130
_left: list[Callable[[], object]] = []
_SHOW_CURSOR = b"\r\x1b[2K\x1b[?25h"  # a progress display hides it


def install() -> None:
    """Take over SIGINT, unless it is ignored (as in a background shell) or somebody else's."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, quit_now)
        sys.unraisablehook = _unraisable


@contextlib.contextmanager
def cleaning(action: Callable[[], object]) -> Iterator[None]:
    """``action`` at the end, and also when Ctrl-C ends the command before."""
    _left.append(action)
    try:
        yield
    finally:
        _left.remove(action)
        action()


def quit_now(_signal: int = 0, _frame: FrameType | None = None) -> NoReturn:
    """End the process with one line and exit code 130."""
    with contextlib.suppress(OSError):
        clear = _SHOW_CURSOR if os.isatty(2) and os.environ.get("TERM", "dumb") != "dumb" else b""
        os.write(2, clear + b"kvloom: error: interrupted\n")
    for action in reversed(_left):
        with contextlib.suppress(OSError):
            action()
    os._exit(EXIT_INTERRUPTED)


def _unraisable(unraisable: UnraisableHookArgs) -> None:
    """An interrupt that came before the handler did, within a destructor or callback."""
    if isinstance(unraisable.exc_value, KeyboardInterrupt):
        quit_now()
    sys.__unraisablehook__(unraisable)
