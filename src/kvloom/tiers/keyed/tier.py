"""``KeyedTier``: a whole tier over a byte store."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

import numpy as np
import numpy.typing as npt

from kvloom.errors import InputError, StoreError
from kvloom.tiers.contract import Usage
from kvloom.tiers.keyed.asking import Asking
from kvloom.tiers.keyed.garbage import Garbage
from kvloom.tiers.keyed.opening import load
from kvloom.tiers.keyed.records import encode
from kvloom.tiers.keyed.sealed import Sealed, unit_key
from kvloom.tiers.keyed.stores import ByteStore, Failure, Lists
from kvloom.tiers.ledger import PLACE, Draft, Ledger, Node, Order
from kvloom.tiers.values import (
    Digests,
    Fill,
    Found,
    Outcome,
    Places,
    Published,
    ReadResult,
    Result,
    Unit,
    no_places,
)
from kvloom.types import AnyArray, IntArray

MOST_AT_ONCE = 256
PATIENCE_S = 5.0
"""How long ``close`` waits for a publication that is under way."""
_MOST_FAILURES = 3
"""Deletions that may fail in a row before the rest waits for another time."""
_CLOSED = "the tier is closed"


class KeyedTier:
    """Prefix units in a byte store: see ``Tier`` and ``HandsOn``, all of whose promises it keeps.  Thread-safe.

    No lock is held while the byte store is asked but the one of publications, which happen one after the other: a store
    that hangs holds up that read or these publications, and nothing else.

    Args:
        store: where the bytes lie; nobody else writes there.
        capacity: bytes that may lie there, headers, records and what waits to be deleted among them.
        name: a short word for reports.
        durable: whether what lies there outlives the process, and is found again.
        at_once: keys that one call asks for or writes at a time, each in a thread of its own.

    Raises InputError for arguments that are none, StoreError when a durable store does not say what it holds,
    FormatError when that was written by a newer kvloom.
    """

    def __init__(self, store: ByteStore, capacity: int, *, name: str, durable: bool = False, at_once: int = 1) -> None:
        if capacity < 1 or not name or not 1 <= at_once <= MOST_AT_ONCE:
            raise InputError(f"a keyed tier takes a capacity above 0, a name, and 1 to {MOST_AT_ONCE} keys at once")
        self._capacity, self._name, self._durable = capacity, name, durable
        self._asking = Asking(store, name, at_once)
        self._lock, self._publishing = threading.Lock(), threading.Lock()
        self._garbage = Garbage(recorded=durable)
        self._ledger = self._new_ledger()
        self._closed, self._clears, self._writing = False, 0, 0
        if durable:
            if not isinstance(store, Lists):
                raise InputError(f"a durable tier needs keys() of its byte store; {type(store).__name__} has none")
            load(store, self._ledger, self._garbage)
            self._sweep()

    def _new_ledger(self) -> Ledger:
        return Ledger(self._garbage, self._capacity, order=Order.HEAT, keeps_tokens=True)

    @property
    def name(self) -> str:
        """See ``Tier.name``."""
        return self._name

    @property
    def durable(self) -> bool:
        """See ``Tier.durable``."""
        return self._durable

    # ---------------------------------------------------------------- the contract

    def lookup(self, layout: bytes, digests: Digests, *, root: bytes | None = None) -> Found:
        """See ``Tier.lookup``; asks nothing of the byte store."""
        with self._lock:
            if not self._closed:
                return self._ledger.find(layout, digests, root)
        nothing = np.zeros(len(digests), np.bool_)
        return Found(nothing, nothing.copy(), no_places(layout, PLACE))

    def read(
        self,
        places: Places,
        into: npt.NDArray[np.uint8],
        offsets: IntArray,
        stop: Callable[[], bool] = lambda: False,
    ) -> ReadResult:
        """See ``Tier.read``.

        ``stop`` is asked before every object, or every ``at_once`` of them.  What the byte store raised for is
        ``IO_ERROR``, what it does not have any more ``MISSING``.  Raises InputError when an object would not lie within
        ``into``.
        """
        ends = offsets + places.entries["length"].astype(np.int64)
        if len(offsets) != len(places) or (len(ends) and (int(offsets.min()) < 0 or int(ends.max()) > len(into))):
            raise InputError("the objects do not fit at the offsets that they are to be read to")
        if into.dtype != np.uint8 or into.ndim != 1 or not into.flags.c_contiguous or not into.flags.writeable:
            raise InputError("objects are read into contiguous, writable uint8 memory of one dimension")
        results = np.full(len(places), Result.STOPPED, np.uint8)
        with self._lock:
            there = self._ledger.there(places) & (not self._closed)
        results[~there] = Result.MISSING
        left, arrived, reason = np.flatnonzero(there).tolist(), 0, ""
        at_once = self._asking.at_once
        for begin in range(0, len(left), at_once):
            if stop():
                break
            some = left[begin : begin + at_once]
            items = [Sealed.of_row(places.layout, places.digests[i].tobytes(), places.entries[i]) for i in some]
            for i, item, data in zip(some, items, self._asking.get([item.key for item in items]), strict=True):
                if isinstance(data, Failure):
                    results[i], reason = Result.IO_ERROR, data.reason
                    continue
                body = None if data is None else item.open(data)
                if body is None:
                    results[i] = self._lost(item, int(places.entries["row"][i]), gone=data is None)
                else:
                    at = int(offsets[i])
                    into[at : at + item.length] = np.frombuffer(body, np.uint8)
                    results[i], arrived = Result.OK, arrived + item.size
        return ReadResult(results, arrived, len(left), reason)

    def publish(self, unit: Unit) -> Published:
        """See ``Tier.publish``; one unit after the other.  Raises only what a ``Fill`` raises."""
        with self._publishing:
            if self._closed:
                return Published(Outcome.UNAVAILABLE, reason=_CLOSED)
            self._sweep()
            with self._lock:
                clears = self._clears
                draft = self._ledger.begin(unit)
            if isinstance(draft, Published):
                return draft
            put: dict[str, int] = {}
            failed = True
            try:
                reason = self._make_room() or self._put_all(draft, put)
                with self._lock:
                    reason = reason or self._overtaken(clears)
                    self._writing = 0
                    if reason:
                        return Published(Outcome.UNAVAILABLE, reason=reason)
                    failed = False
                    done = self._ledger.commit(draft)
                    if not done.stored:
                        self._garbage.add(put)
                    return Published(done.outcome, done.objects, sum(put.values()) if done.stored else 0)
            finally:
                if failed:  # also when a payload raises, or somebody interrupts
                    with self._lock:
                        self._writing = 0
                        self._ledger.abandon(draft)
                        self._garbage.add(put)
                self._sweep()

    def _overtaken(self, clears: int) -> str:
        """Why a publication that began after so many ``clear`` must not end, else ``""``."""
        if self._closed:
            return _CLOSED
        return "" if clears == self._clears else "the tier was cleared while the unit was written"

    def touch(self, layout: bytes, digest: bytes) -> None:
        """See ``Tier.touch``."""
        with self._lock:
            node = self._ledger.unit_at(layout, digest)
            if node is not None:
                self._ledger.use(node)

    def clear(self, layout: bytes | None = None, root: bytes | None = None) -> int:
        """See ``Tier.clear``.  A publication that is under way ends with ``UNAVAILABLE``."""
        with self._lock:
            self._clears += 1
            gone = self._ledger.units_of(layout, root)
            for node in gone:
                self._ledger.drop_unit(node)
        self._sweep()
        return len(gone)

    def usage(self) -> Usage:
        """See ``Tier.usage``."""
        with self._lock:
            ledger = self._ledger
            in_use = ledger.in_use + self._writing + self._garbage.bytes
            return Usage(in_use, self._capacity, ledger.objects, ledger.units)

    def close(self) -> None:
        """See ``Tier.close``.

        A publication that is under way ends first, if it does so within ``PATIENCE_S`` seconds.  A tier that is not
        durable deletes all that it holds.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
        ended = self._publishing.acquire(timeout=PATIENCE_S)
        if ended:
            with self._lock:
                if not self._durable:
                    for node in self._ledger.units_of(None, None):
                        self._ledger.drop_unit(node)
            self._sweep()
            with self._lock:
                self._ledger = self._new_ledger()
            self._publishing.release()
        self._asking.close(store=ended)

    # ---------------------------------------------------------------- moving on

    def coldest(self, n_bytes: int) -> list[tuple[bytes, bytes]]:
        """See ``HandsOn.coldest``; takes time for what it returns."""
        with self._lock:
            return [(node.layout, node.digest) for node in self._ledger.coldest(n_bytes)]

    def hits(self, layout: bytes, digest: bytes) -> float:
        """See ``HandsOn.hits``."""
        with self._lock:
            node = self._ledger.unit_at(layout, digest)
            return 0.0 if node is None else self._ledger.hits(node)

    def unit(self, layout: bytes, digest: bytes) -> Unit | None:
        """See ``HandsOn.unit``.  Payloads are read when asked, and raise StoreError for what has gone since."""
        with self._lock:
            node = self._ledger.unit_at(layout, digest)
            if node is None:
                return None
            texts = [each.text for each in node.above() if each.text is not None]
            return self._ledger.unit(node, np.concatenate(texts), self._payload)

    def _payload(self, node: Node, number: int, row: AnyArray) -> Fill:
        item = Sealed.of_row(node.layout, node.digest, row)
        return Fill(item.length, partial(self._fill, item, number))

    def _fill(self, item: Sealed, row: int, into: memoryview) -> None:
        (data,) = self._asking.get([item.key])
        if isinstance(data, Failure):
            raise StoreError(f"tier {self._name!r} {data.reason}")
        body = None if data is None else item.open(data)
        if body is None:
            self._lost(item, row, gone=data is None)
            raise StoreError(f"an object in tier {self._name!r} is gone or not what was stored; it is not found again")
        into[:] = body

    # ---------------------------------------------------------------- asking the byte store

    def _lost(self, item: Sealed, row: int, *, gone: bool) -> Result:
        """An object is not what it was: neither it nor what needs it is found again."""
        with self._lock:
            there = self._ledger.quarantine(item.layout, item.digest, row, item.serial)
        return Result.INTEGRITY if there and not gone else Result.MISSING

    def _put_all(self, draft: Draft, put: dict[str, int]) -> str:
        """Write what is new, the record last; why it ended, else ``""``.  ``put``: what was begun, with its bytes."""
        unit, todo = draft.unit, list(zip(draft.fresh.tolist(), draft.serials.tolist(), strict=True))
        for begin in range(0, len(todo), self._asking.at_once):
            items = []
            for i, serial in todo[begin : begin + self._asking.at_once]:
                new = unit.objects[i]
                about = (new.group, new.column, int(new.form), int(new.grade), new.size, serial)
                item = Sealed(unit.layout, draft.names[new.node], *about)
                data = item.seal(new)
                put[item.key] = item.size
                items.append((item.key, data))
            failure = self._asking.put(items) or (_CLOSED if self._closed else "")
            if failure:
                return failure
        if self._durable:
            key = unit_key(unit.layout, draft.names[-1], draft.serial)
            put[key] = draft.record
            return self._asking.put([(key, encode(key, unit, draft.needs, draft.wanted))])
        return ""

    def _make_room(self) -> str:
        """Delete until what is reserved fits; why it does not, else ``""``."""
        deleted, failure = self._sweep()
        while True:
            with self._lock:
                more = self._ledger.reserved
                if self._ledger.in_use + more + self._garbage.bytes <= self._capacity:
                    self._writing = more
                    return ""
                # Where nothing can be deleted, nothing more is evicted for it in vain.
                if (failure and not deleted) or not self._ledger.evict():
                    return f"no room: {failure or 'others delete at present'}"
            deleted, failure = self._sweep()

    def _sweep(self) -> tuple[int, str]:
        """Delete what is not wanted any more; how many went, and why some of it is still there, else ``""``."""
        deleted, failure, failures, tried = 0, "", 0, set[str]()
        while failures < _MOST_FAILURES:
            with self._lock:
                key = self._garbage.first()
            if key is None or key in tried:
                break
            tried.add(key)
            reason = self._asking.delete(key)
            with self._lock:
                if reason:
                    failure, failures = reason, failures + 1
                    self._garbage.later(key)
                else:
                    deleted, failures = deleted + 1, 0
                    self._garbage.deleted(key)
        return deleted, failure

    # ---------------------------------------------------------------- for tests

    def check_integrity(self) -> None:
        """The books are consistent; AssertionError otherwise.  Looks at everything, while nothing is under way."""
        with self._lock:
            self._ledger.check_integrity()
