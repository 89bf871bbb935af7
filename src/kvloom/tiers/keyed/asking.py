"""Asking a byte store: several keys at a time where that is wanted, and failures as values."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial

from kvloom.tiers.keyed.stores import ByteStore, Closes, Failure, T, asked

Answer = bytes | bytearray | memoryview | None | Failure


class Asking:
    """Thread-safe.

    Args:
        store: the byte store.
        name: of its tier.
        at_once: keys that are asked for at a time, each in a thread of its own; with 1 in that of the caller.
    """

    def __init__(self, store: ByteStore, name: str, at_once: int) -> None:
        self._store, self.at_once = store, at_once
        self._lock, self._closed = threading.Lock(), False
        self._pool = ThreadPoolExecutor(at_once, f"kvloom-{name}") if at_once > 1 else None

    def get(self, keys: Sequence[str]) -> list[Answer]:
        """What is there, in order; ``at_once`` at most."""
        return self._each([partial(asked, "read", partial(self._store.get, key)) for key in keys])

    def put(self, items: Sequence[tuple[str, memoryview]]) -> str:
        """Write bytes under keys, ``at_once`` at most; why that failed, else ``""``."""
        done = self._each([partial(asked, "write", partial(self._store.put, key, data)) for key, data in items])
        return next((each.reason for each in done if each is not None), "")

    def delete(self, key: str) -> str:
        """Why that failed, else ``""``."""
        done = asked("delete", partial(self._store.delete, key))
        return "" if done is None else done.reason

    def close(self, *, store: bool) -> None:
        """Nothing is asked at once any more; ``store``: the byte store is closed, too."""
        with self._lock:
            self._closed = True
        if self._pool is not None:
            self._pool.shutdown(wait=False)
        if store and isinstance(self._store, Closes):
            asked("close", self._store.close)

    def _each(self, calls: Sequence[Callable[[], T]]) -> list[T]:
        futures: list[Future[T]] = []
        if self._pool is not None and len(calls) > 1:
            with self._lock:  # the pool ends after this says closed
                futures = [] if self._closed else [self._pool.submit(call) for call in calls]
        try:
            return [future.result() for future in futures] if futures else [call() for call in calls]
        finally:  # also when interrupted: a put that ended late would leave what nobody deletes
            for future in futures:
                future.cancel()
            wait(futures)
