"""An object as it is stored: its key, and a header that says whose bytes these are, under one checksum with them."""

from __future__ import annotations

import hashlib
import re
import struct
from dataclasses import dataclass

import numpy as np
import xxhash

from kvloom.tiers.values import DIGEST, MAX_PAYLOAD, Fill, NewObject
from kvloom.types import AnyArray, Grade, PayloadForm

_HEAD = struct.Struct("<4sBBBxIIIq32s32s20x")
_MAGIC, _VERSION = b"kvlo", 1
_CHECK = 16
HEADER = _HEAD.size + _CHECK
"""Bytes before every payload."""
ALIGNED = 256
_NAME = 32
_OBJECT = re.compile(r"o([0-9a-f]{32})([0-9a-f]{2})([0-9a-f]{2})([0-9a-f]{8})([0-9a-f]{16})")
_UNIT = re.compile(r"u([0-9a-f]{32})([0-9a-f]{16})")


@dataclass(frozen=True, slots=True)
class Sealed:
    """What is known of an object before its bytes are seen."""

    layout: bytes
    digest: bytes
    group: int
    column: int
    form: int
    grade: int
    length: int
    serial: int

    @classmethod
    def of_row(cls, layout: bytes, digest: bytes, row: AnyArray) -> Sealed:
        """``row`` has the fields of ``OBJECT``, and ``serial``."""
        names = ("group", "column", "form", "grade", "length", "serial")
        return cls(layout, digest, *(int(row[name]) for name in names))

    @property
    def key(self) -> str:
        """Where it lies; all of it but the identity can be read from it."""
        about = f"{self.form:02x}{self.grade:02x}{self.length:08x}{self.serial:016x}"
        return f"o{identity(self.layout, self.digest, self.group, self.column)}{about}"

    @property
    def size(self) -> int:
        """Bytes that are stored."""
        return HEADER + self.length

    def _head(self) -> bytes:
        fields = (self.form, self.grade, self.group, self.column, self.length, self.serial)
        return _HEAD.pack(_MAGIC, _VERSION, *fields, self.layout, self.digest)

    def seal(self, item: NewObject) -> memoryview:
        """Header and payload, the payload aligned.  Raises what a ``Fill`` raises."""
        room = np.empty(self.size + ALIGNED, np.uint8)
        at = (-room.ctypes.data - HEADER) % ALIGNED
        data = room[at : at + self.size]
        body = data[HEADER:]
        if isinstance(item.payload, Fill):
            item.payload.write(body.data)
        else:
            flat = item.payload
            flat = np.ascontiguousarray(flat) if isinstance(flat, np.ndarray) else flat
            body[:] = np.frombuffer(flat, np.uint8)
        head = self._head()
        data[:HEADER] = np.frombuffer(head + _checksum(head, body.data), np.uint8)
        return data.data.toreadonly()

    def open(self, data: bytes | bytearray | memoryview) -> memoryview | None:
        """The payload; None when these are other bytes."""
        view = memoryview(data).cast("B")
        head = self._head()
        if len(view) != self.size or view[: _HEAD.size] != head:
            return None
        body = view[HEADER:]
        return body if view[_HEAD.size : HEADER] == _checksum(head, body) else None


def _checksum(head: bytes, body: memoryview) -> bytes:
    made = xxhash.xxh3_128(head)
    made.update(body)
    return made.digest()


@dataclass(frozen=True, slots=True)
class Listed:
    """What the key of an object says."""

    key: str
    form: PayloadForm
    grade: Grade
    length: int
    serial: int


def identity(layout: bytes, digest: bytes, group: int, column: int) -> str:
    """Name of an object in its key, the same whatever its payload is."""
    return _short(layout + digest + struct.pack("<II", group, column))


def unit_key(layout: bytes, digest: bytes, serial: int) -> str:
    """Where a publication of a unit is recorded."""
    return f"u{_short(layout + digest)}{serial:016x}"


def _short(name: bytes) -> str:
    return hashlib.blake2b(name, digest_size=_NAME // 2).hexdigest()


def object_of(key: str) -> tuple[str, Listed] | None:
    """Identity and the rest of what the key of an object says; None for another key."""
    found = _OBJECT.fullmatch(key)
    if found is None:
        return None
    form, grade, length, serial = (int(part, 16) for part in found.groups()[1:])
    known = form in set(PayloadForm) and grade in set(Grade) and 1 <= length <= MAX_PAYLOAD and 0 < serial < 1 << 62
    return (found[1], Listed(key, PayloadForm(form), Grade(grade), length, serial)) if known else None


def serial_of_unit(key: str) -> int | None:
    """The number of the publication that a key is of; None for another key."""
    found = _UNIT.fullmatch(key)
    serial = int(found[2], 16) if found else 0
    return serial if 0 < serial < 1 << 62 else None


__all__ = ["DIGEST", "HEADER", "Listed", "Sealed", "identity", "object_of", "serial_of_unit", "unit_key"]
