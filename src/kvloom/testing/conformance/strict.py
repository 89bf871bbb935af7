"""A tier under test: every call is held against what ``docs/tiers.md`` promises of it, and says so when it fails."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from kvloom.errors import InputError
from kvloom.tiers.contract import Tier, Usage
from kvloom.tiers.values import OBJECT, Digests, Fill, Found, NewObject, Places, Published, ReadResult, Result, Unit
from kvloom.types import IntArray

T = TypeVar("T")
_CODES = [int(result) for result in Result]


class FillError(Exception):
    """Raised by payloads that fail."""


class Strict:
    """Another tier, whose calls may only do what is promised.  Thread-safe if that one is.

    Args:
        tier: the one under test, at ``inner`` afterwards.
        capacity: bytes that it was made with.
    """

    def __init__(self, tier: Tier, capacity: int) -> None:
        self.inner, self._capacity = tier, capacity

    @property
    def name(self) -> str:
        """That of the tier."""
        return self.inner.name

    @property
    def durable(self) -> bool:
        """That of the tier."""
        return self.inner.durable

    def lookup(self, layout: bytes, digests: Digests, *, root: bytes | None = None) -> Found:
        """See ``Tier.lookup``."""
        found = _call("lookup", lambda: self.inner.lookup(layout, digests, root=root))
        n, places = len(digests), found.places
        assert found.known.shape == found.boundary.shape == (n,), f"lookup: known and boundary are bool [{n}]"
        assert found.known.dtype == found.boundary.dtype == np.bool_, f"lookup: known and boundary are bool [{n}]"
        assert not (found.boundary & ~found.known).any(), "lookup: a node at which a unit ends is known"
        missing = set(OBJECT.names or ()) - set(places.entries.dtype.names or ())
        assert not missing, f"lookup: places.entries have the fields of OBJECT; these have no {sorted(missing)}"
        assert places.layout == layout, "lookup: the places are of the layout that was asked for"
        assert len(places.entries) == len(places.digests) == len(places.rows), "lookup: one digest and row per object"
        rows = places.rows
        assert ((rows >= 0) & (rows < n)).all(), "lookup: places.rows are rows of the digests that were asked for"
        assert (digests[rows] == places.digests).all(), "lookup: places.digests are those of their rows"
        assert found.known[rows].all(), "lookup: objects are only of nodes that are known"
        names = {(int(row), int(e["group"]), int(e["column"])) for row, e in zip(rows, places.entries, strict=True)}
        assert len(names) == len(rows), "lookup: there is one copy of every object"
        return found

    def read(
        self,
        places: Places,
        into: npt.NDArray[np.uint8],
        offsets: IntArray,
        stop: Callable[[], bool] = lambda: False,
    ) -> ReadResult:
        """See ``Tier.read``."""
        done = _call("read", lambda: self.inner.read(places, into, offsets, stop))
        assert done.results.shape == (len(places),), "read: one Result per object"
        assert np.isin(done.results, _CODES).all(), f"read: results are of Result, not {done.results.tolist()}"
        return done

    def publish(self, unit: Unit) -> Published:
        """See ``Tier.publish``."""
        done = _call("publish", lambda: self.inner.publish(unit))
        assert isinstance(done, Published), f"publish: returns a Published, not {type(done).__name__}"
        self.usage()
        return done

    def touch(self, layout: bytes, digest: bytes) -> None:
        """See ``Tier.touch``."""
        _call("touch", lambda: self.inner.touch(layout, digest))

    def clear(self, layout: bytes | None = None, root: bytes | None = None) -> int:
        """See ``Tier.clear``."""
        return _call("clear", lambda: self.inner.clear(layout, root))

    def usage(self) -> Usage:
        """See ``Tier.usage``."""
        usage = _call("usage", self.inner.usage)
        assert usage.capacity <= self._capacity, "usage: the capacity is at most what the tier was made with"
        assert 0 <= usage.bytes <= usage.capacity, (
            f"usage: never above the capacity, at any instant; {usage.bytes} of {usage.capacity} bytes are in use"
        )
        return usage

    def close(self) -> None:
        """See ``Tier.close``."""
        _call("close", self.inner.close)


def _call(name: str, call: Callable[[], T]) -> T:
    """What a call returns; the promise when it raises what it must not."""
    try:
        return call()
    except (InputError, FillError):  # for wrong arguments; what a payload raised
        raise
    except Exception as error:
        raise AssertionError(
            f"{name} raised {type(error).__name__}: {error}.  A tier never raises for what its medium does, a full one "
            "included: say NO_ROOM or UNAVAILABLE with a reason, IO_ERROR, or that nothing is found"
        ) from error


def failing(item: NewObject) -> NewObject:
    """The same object, with a payload that writes half of itself and raises FillError."""

    def write(room: memoryview) -> None:
        room[: len(room) // 2] = b"x" * (len(room) // 2)
        raise FillError

    return NewObject(item.node, item.group, item.column, item.grade, Fill(item.size, write))
