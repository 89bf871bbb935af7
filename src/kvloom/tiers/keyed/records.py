"""The record of a unit: its chain, its tokens, and which objects it needs.  It is what makes the unit be there."""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
import xxhash

from kvloom.errors import FormatError, InputError
from kvloom.tiers.values import DIGEST, Need, Unit
from kvloom.types import IntArray

_HEAD = struct.Struct("<4sB3xIIIII32s32s")
_MAGIC, _VERSION = b"kvlu", 1
_CHECK = 16
_OBJECT = np.dtype([("node", "<u4"), ("group", "<u4"), ("column", "<u4"), ("serial", "<i8")])
_NEED, _TOKEN = 32, 4


@dataclass(frozen=True, slots=True)
class Record:
    """``unit`` without objects; ``wanted`` int64 ``[w, 4]``: (node, group, column, number) of all that it needs.

    The numbers are those of the payloads that were there when the unit was published; others may be there since.
    """

    unit: Unit
    wanted: IntArray

    @property
    def n_bytes(self) -> int:
        """How long it is."""
        unit = self.unit
        return record_bytes(len(unit.digests), len(unit.tokens), len(unit.needs), len(self.wanted))


def record_bytes(nodes: int, tokens: int, needs: int, objects: int) -> int:
    """How long a record is."""
    return _HEAD.size + _CHECK + DIGEST * nodes + _TOKEN * tokens + _NEED * needs + _OBJECT.itemsize * objects


def encode(key: str, unit: Unit, needs: IntArray, wanted: IntArray) -> memoryview:
    """``needs`` int64 ``[k, 4]`` (group, first node, first column, count)."""
    objects = np.empty(len(wanted), _OBJECT)
    for i, name in enumerate(_OBJECT.names or ()):
        objects[name] = wanted[:, i]
    counts = (len(unit.digests), len(unit.tokens), unit.segment, len(needs), len(wanted))
    parts = (
        _HEAD.pack(_MAGIC, _VERSION, *counts, unit.layout, unit.root),
        unit.digests.tobytes(),
        unit.tokens.astype("<i4").tobytes(),
        needs.astype("<i8").tobytes(),
        objects.tobytes(),
    )
    data = b"".join(parts)
    return memoryview(data + _checksum(key, data))


def decode(key: str, raw: bytes | bytearray | memoryview) -> Record | None:
    """What was recorded under ``key``; None when it is damaged.  Raises FormatError for that of a newer kvloom."""
    data = bytes(raw)
    if len(data) < _HEAD.size + _CHECK or data[:4] != _MAGIC:
        return None
    body = data[:-_CHECK]
    if _checksum(key, body) != data[-_CHECK:]:
        return None
    _, version, nodes, tokens, segment, needs, objects, layout, root = _HEAD.unpack_from(data)
    if version > _VERSION:
        raise FormatError(f"the unit {key!r} was recorded in format {version}; this kvloom reads {_VERSION}: update it")
    if record_bytes(nodes, tokens, needs, objects) != len(data):
        return None
    at = _HEAD.size
    digests = np.frombuffer(body, np.uint8, DIGEST * nodes, at).reshape(nodes, DIGEST)
    at += digests.nbytes
    text = np.frombuffer(body, "<i4", tokens, at).astype(np.int32)
    at += _TOKEN * tokens
    asks = np.frombuffer(body, "<i8", 4 * needs, at).reshape(needs, 4)
    about = np.frombuffer(body, _OBJECT, objects, at + asks.nbytes)
    wanted = np.stack([about[name].astype(np.int64) for name in _OBJECT.names or ()], axis=1)
    if len(wanted) and (int(wanted[:, 0].max()) >= nodes or int(wanted[:, :3].max()) >= 1 << 31):
        return None
    try:
        wants = [Need(group, first, count, column) for group, first, column, count in asks.tolist()]
        return Record(Unit(layout, root, digests, text, segment, (), wants), wanted)
    except InputError:
        return None


def _checksum(key: str, body: bytes) -> bytes:
    made = xxhash.xxh3_128(key.encode())
    made.update(body)
    return made.digest()
