"""Where verified objects go: to a function, or to places in one buffer."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from kvloom.tiers.disk.format import checksum
from kvloom.types import IntArray

if TYPE_CHECKING:
    from kvloom.tiers.hashing.many import Parts

Bytes = npt.NDArray[np.uint8]
Deliver = Callable[[int, Bytes], None]
"""Called from several threads with an object's number and its verified payload, which is only valid meanwhile."""


class Stream(Protocol):
    """Takes the payload of one object part by part, from one thread at a time."""

    def add(self, part: Bytes) -> None:
        """The next bytes: whole pages, but for the last part, which is a page at least."""

    def end(self, check: bytes) -> bool:
        """Whether all bytes together have this checksum; if not, nothing of them is left where they were put."""


@dataclass(frozen=True, slots=True)
class Arrived:
    """Objects that lie in one buffer: numbers, where payloads begin, lengths (int64 ``[n]``); checksums ``[n, 16]``."""

    data: Bytes
    numbers: IntArray
    starts: IntArray
    lengths: IntArray
    checks: Bytes

    def whole(self) -> list[bool]:
        """Whether each payload has its checksum."""
        # Slices of a memoryview cost half of those of an array, and a thread that checks has others beside it.
        view, checks = self.data.data, self.checks.tobytes()
        where = zip(itertools.count(0, 16), self.starts.tolist(), self.lengths.tolist(), strict=False)
        return [checksum(view[start : start + length]) == checks[at : at + 16] for at, start, length in where]


class Sink(Protocol):
    """Thread-safe."""

    def take(self, arrived: Arrived) -> Sequence[bool] | npt.NDArray[np.bool_]:
        """Deliver those objects whose payloads have their checksums, and say which have."""

    def stream(self, number: int, length: int) -> Stream | None:
        """For an object that is too large for one read; None: the sink wants it whole."""


class Handing:
    """Hands every verified object, whole, to a function."""

    def __init__(self, deliver: Deliver) -> None:
        self._deliver = deliver

    def take(self, arrived: Arrived) -> Sequence[bool]:  # noqa: D102
        good = arrived.whole()
        where = zip(arrived.numbers.tolist(), arrived.starts.tolist(), arrived.lengths.tolist(), strict=True)
        for number, start, length in itertools.compress(where, good):
            self._deliver(number, arrived.data[start : start + length])
        return good

    def stream(self, number: int, length: int) -> Stream | None:  # noqa: D102
        return None


class Copying:
    """Copies objects into a buffer at ``starts``; where one turns out to be damaged, zeros are left.

    One compiled pass over the bytes copies and checks them.
    """

    def __init__(self, into: Bytes, starts: IntArray) -> None:
        # Only here: who stores, or has objects handed over, needs no compiler.
        from kvloom.tiers.hashing import many

        self._into, self._starts, self._many = into, starts, many

    def take(self, arrived: Arrived) -> npt.NDArray[np.bool_]:  # noqa: D102
        to = self._starts[arrived.numbers]
        made = self._many.digests(arrived.data, arrived.starts, arrived.lengths, to + self._into.ctypes.data)
        good: npt.NDArray[np.bool_] = (made == arrived.checks).all(axis=1)
        for i in np.flatnonzero(~good).tolist():
            self._into[to[i] : to[i] + arrived.lengths[i]] = 0
        return good

    def stream(self, number: int, length: int) -> _Copy:  # noqa: D102
        start = int(self._starts[number])
        return _Copy(self._into[start : start + length], self._many.Parts(length, self._into.ctypes.data + start))


class _Copy:
    def __init__(self, into: Bytes, parts: Parts) -> None:
        self._into, self._parts = into, parts

    def add(self, part: Bytes) -> None:
        self._parts.add(part)

    def end(self, check: bytes) -> bool:
        good = bool(check) and self._parts.digest() == check
        if not good:
            self._into[:] = 0
        return good


class Renumbered:
    """A sink for some of the objects of another one: object i here is object ``numbers[i]`` there."""

    def __init__(self, sink: Sink, numbers: IntArray) -> None:
        self._sink, self._numbers = sink, numbers

    def take(self, arrived: Arrived) -> Sequence[bool] | npt.NDArray[np.bool_]:  # noqa: D102
        return self._sink.take(replace(arrived, numbers=self._numbers[arrived.numbers]))

    def stream(self, number: int, length: int) -> Stream | None:  # noqa: D102
        return self._sink.stream(int(self._numbers[number]), length)
