"""Finding again what a byte store holds: units that are whole, and what is to be deleted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from kvloom.errors import StoreError
from kvloom.tiers.keyed.garbage import Garbage
from kvloom.tiers.keyed.records import Record, decode
from kvloom.tiers.keyed.sealed import HEADER, Listed, identity, object_of, serial_of_unit
from kvloom.tiers.keyed.stores import Failure, Lists, asked
from kvloom.tiers.ledger import Ledger
from kvloom.tiers.values import Fill, NewObject, Published

_UNREAD = 4096
"""What a record that cannot be told the length of is counted as."""


def load(store: Lists, ledger: Ledger, garbage: Garbage) -> None:
    """Enter all units of which everything is there, those published first first; the rest is garbage.

    Only records are read.  Raises StoreError when the store does not say what it has: nothing is deleted then.
    """
    objects: dict[str, list[Listed]] = {}
    records: dict[str, Record] = {}
    unread: dict[str, int] = {}
    keys = asked("list its keys", lambda: list(store.keys()))
    if isinstance(keys, Failure):
        raise StoreError(f"the byte store {keys.reason}; nothing was changed: try again, or use another one")
    for key in keys:
        about = object_of(key)
        if about is not None:
            objects.setdefault(about[0], []).append(about[1])
        elif serial_of_unit(key):
            data = asked(f"read {key!r}", partial(store.get, key))
            if isinstance(data, Failure):
                raise StoreError(f"the byte store {data.reason}; nothing was changed: try again, or use another one")
            record = None if data is None else decode(key, data)
            if record is None:
                unread[key] = _UNREAD if data is None else memoryview(data).nbytes
            else:
                records[key] = record
    there = [item for versions in objects.values() for item in versions]
    ledger.serial = max([*(item.serial for item in there), *map(_serial, (*records, *unread))], default=0)
    chosen = _chosen(objects, records.values())
    for key in sorted(records, key=_serial):
        if not _enter(ledger, records[key], _serial(key), chosen):
            unread[key] = records[key].n_bytes
    held = set(ledger.rows["serial"][ledger.rows["serial"] > 0].tolist())
    garbage.add({**unread, **{item.key: HEADER + item.length for item in there if item.serial not in held}})


def _serial(key: str) -> int:
    return serial_of_unit(key) or 0


def _chosen(objects: Mapping[str, Sequence[Listed]], records: Iterable[Record]) -> dict[str, Listed]:
    """One payload of every object.

    A record vouches for those that it names: they were all there before it was.  Of these the best one is taken.  Where
    it was replaced, and the unit that did so is gone, the oldest one is: a later one may be half of a payload.
    """
    vouched = {serial for record in records for serial in record.wanted[:, 3].tolist()}

    def worth(item: Listed) -> tuple[bool, int, int]:
        sure = item.serial in vouched
        return (True, item.grade, item.serial) if sure else (False, 0, -item.serial)

    return {name: max(versions, key=worth) for name, versions in objects.items()}


def _enter(ledger: Ledger, record: Record, serial: int, objects: Mapping[str, Listed]) -> bool:
    """Whether all of it is there, and it fits."""
    unit, made, serials = record.unit, [], []
    for node, group, column, _ in record.wanted.tolist():
        item = objects.get(identity(unit.layout, unit.digests[node].tobytes(), group, column))
        if item is None:
            return False
        made.append(NewObject(node, group, column, item.grade, Fill(item.length, _never), item.form))
        serials.append(item.serial)
    draft = ledger.begin(replace(unit, objects=made))
    if isinstance(draft, Published):
        return False
    draft = replace(draft, serials=np.array(serials, np.int64)[draft.fresh], serial=serial)
    return ledger.commit(draft).stored


def _never(_into: memoryview) -> None:
    raise AssertionError("what is stored already was asked for its bytes")
