"""Byte stores in memory: one that works, and one that does what media do; and the example of the docs."""

from __future__ import annotations

import functools
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[3] / "docs" / "tiers.md"


@functools.cache
def example() -> dict[str, Any]:
    """What the example of the docs defines, and its ``source``."""
    (code,) = re.findall(r"```python\n(# example tier\n.*?)```", DOCS.read_text(), re.DOTALL)
    names: dict[str, Any] = {"__name__": "example"}
    exec(compile(code, str(DOCS), "exec"), names)
    return {**names, "source": code}


class Dict:
    """Bytes in a dictionary."""

    def __init__(self) -> None:
        self.kept: dict[str, bytes] = {}

    def put(self, key: str, data: memoryview) -> None:
        assert key not in self.kept, "a key is written twice"
        self.kept[key] = bytes(data)

    def get(self, key: str) -> bytes | None:
        return self.kept.get(key)

    def delete(self, key: str) -> None:
        self.kept.pop(key, None)

    def keys(self) -> Iterable[str]:
        return list(self.kept)

    @property
    def bytes(self) -> int:
        return sum(map(len, self.kept.values()))


class MediumError(Exception):
    """Of a kind that the kit cannot know."""


class Killed(BaseException):
    """The process ended here."""


class Faulty(Dict):
    """``fault(what, number)`` says what happens to the nth call of ``put``, ``get`` or ``delete``:

    ``raise`` before anything happened, ``half`` of it is there and it raises, ``late`` all is there and it raises,
    ``cut`` half of it is there and nothing is said, ``lost`` nothing happened and nothing is said, ``other`` it answers
    with what another key has, ``flip`` a byte is wrong, ``hang`` until ``released``, ``kill`` half of it happened and
    the process ends: nothing works from then on.
    """

    def __init__(self, fault: Callable[[str, int], str | None] = lambda _what, _number: None) -> None:
        super().__init__()
        self.fault, self.calls = fault, Counter[str]()
        self.dead = False
        self.released, self.hanging = threading.Event(), threading.Event()
        self._lock = threading.Lock()

    def _fault(self, what: str) -> str | None:
        if self.dead:
            raise Killed
        with self._lock:
            self.calls[what] += 1
            number = self.calls[what] - 1
        fault = self.fault(what, number)
        if fault == "raise":
            raise MediumError(f"{what} {number}")
        if fault == "hang":
            self.hanging.set()
            assert self.released.wait(30)
        return fault

    def put(self, key: str, data: memoryview) -> None:
        fault, raw = self._fault("put"), bytes(data)
        if fault == "lost":
            return
        super().put(key, raw[: len(raw) // 2] if fault in {"half", "cut", "kill"} else raw)
        self._end(fault)

    def get(self, key: str) -> bytes | None:
        fault, raw = self._fault("get"), super().get(key)
        if raw is None or fault is None:
            return raw
        if fault == "other":
            return next((each for name, each in self.kept.items() if name != key and len(each) == len(raw)), b"")
        if fault == "flip":
            at = len(raw) * 2 // 3
            return raw[:at] + bytes([raw[at] ^ 4]) + raw[at + 1 :]
        return {"cut": raw[:-1], "lost": None}.get(fault, raw)

    def delete(self, key: str) -> None:
        fault = self._fault("delete")
        if fault == "lost":
            return
        super().delete(key)
        self._end(fault)

    def _end(self, fault: str | None) -> None:
        if fault == "kill":
            self.dead = True
            raise Killed
        if fault in {"half", "late"}:
            raise MediumError("it broke off")

    def keys(self) -> Iterable[str]:
        self._fault("keys")
        return super().keys()
