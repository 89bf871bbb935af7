"""Ctrl-C at a safe moment: while the books of the manager change, an interrupt waits until they are whole again."""

from __future__ import annotations

import functools
import inspect
import signal
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeVar

Result = TypeVar("Result")


_HOLDING: list[_Held] = []
"""Those of the main thread that hold SIGINT back now, the outermost first."""


def interrupted() -> bool:
    """Whether an interrupt has arrived that is held back; what waits in a ``whole`` method is to give up waiting."""
    main = threading.current_thread() is threading.main_thread()
    return main and any(each.received for each in _HOLDING)


class _Held:
    """Holds SIGINT back between enter and exit (only the main thread gets signals; elsewhere this does nothing)."""

    __slots__ = ("_previous", "received")

    def __enter__(self) -> None:
        self.received: list[int] = []  # not where it came: a frame would keep what the method made alive
        self._previous: Any = None
        if threading.current_thread() is threading.main_thread():
            previous = signal.getsignal(signal.SIGINT)
            if callable(previous):
                self._previous = previous
                signal.signal(signal.SIGINT, lambda number, _frame: self.received.append(number))
                _HOLDING.append(self)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._previous is not None:
            _HOLDING.remove(self)
            signal.signal(signal.SIGINT, self._previous)
            if self.received:
                self._previous(self.received[0], inspect.currentframe())


def whole(method: Callable[..., Result]) -> Callable[..., Result]:
    """Let ``method`` finish before an interrupt that arrives in it is delivered; for methods that take milliseconds."""

    @functools.wraps(method)
    def run(*args: Any, **options: Any) -> Result:
        with _Held():
            return method(*args, **options)

    return run
