"""The lossless payload: planes of equal bytes of the elements, each compressed with zstd where that makes it smaller.

Sign and exponent of neighbouring elements are alike, mantissas are noise; apart from each other the former compress
and the latter cost no time.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import zstandard

from kvloom.kernels.headers import HEADER, check_header, malformed, write_header
from kvloom.kernels.planes import merge, split
from kvloom.kernels.slots import Run, SlotFormat
from kvloom.types import AnyArray, PayloadForm

LEVEL = 1
"""Of zstd.  Higher ones gain a percent or two on KV and take several times as long."""
_FORM = PayloadForm.LOSSLESS
_ENTRY = struct.Struct("<II")
_RAW, _ZSTD = 0, 1
_WORTH = 0.97
"""A plane that zstd leaves at more than this part of its size is kept as it is: reading it back is then a copy."""


@dataclass(frozen=True, slots=True)
class _Section:
    """All runs of elements of one width, which share planes.

    ``parts``: each run with where it begins in the planes, which have ``count`` bytes each.
    """

    width: int
    count: int
    parts: tuple[tuple[Run, int], ...]


@functools.lru_cache(maxsize=256)
def _sections(fmt: SlotFormat) -> tuple[_Section, ...]:
    sections = []
    for width in sorted({run.width for run in fmt.runs}):
        parts, at = [], 0
        for run in fmt.runs:
            if run.width == width:
                parts.append((run, at))
                at += run.count
        sections.append(_Section(width, at, tuple(parts)))
    return tuple(sections)


def _planes(fmt: SlotFormat) -> int:
    return sum(section.width for section in _sections(fmt))


def encode_lossless(slot: AnyArray, fmt: SlotFormat, level: int = LEVEL) -> AnyArray | None:
    """The payload of ``slot`` (uint8, aligned), or None when it would not be smaller than the slot."""
    count = _planes(fmt)
    table, pieces = bytearray(), []
    size = HEADER.size + count * _ENTRY.size
    compressor = zstandard.ZstdCompressor(level=level)
    for section in _sections(fmt):
        for plane in _split(slot, section):
            piece = _smaller(plane, compressor)
            table += _ENTRY.pack(_RAW if piece is plane else _ZSTD, len(piece))
            pieces.append(piece)
            size += len(piece)
            if size >= fmt.nbytes:
                return None
    head = np.zeros(HEADER.size, np.uint8)
    write_header(head, _FORM, fmt, block=0, elements=sum(s.count for s in _sections(fmt)), parts=count)
    return np.concatenate([head, np.frombuffer(table, np.uint8), *pieces])


def _smaller(plane: AnyArray, compressor: zstandard.ZstdCompressor) -> AnyArray:
    """The plane compressed, or itself where that is not worth it."""
    squeezed = compressor.compress(plane.data)
    return np.frombuffer(squeezed, np.uint8) if len(squeezed) <= _WORTH * len(plane) else plane


def _split(slot: AnyArray, section: _Section) -> list[AnyArray]:
    planes = list(np.empty((section.width, section.count), np.uint8))
    for run, at in section.parts:
        source = slot[run.offset : run.offset + run.nbytes]
        split(source, [plane[at : at + run.count] for plane in planes])
    return planes


def decode_lossless(payload: AnyArray, into: AnyArray, fmt: SlotFormat) -> None:
    """Write the slot that ``payload`` stands for; FormatError leaves ``into`` as it was.

    However the payload is made up, no more memory is taken than the slot has bytes.
    """
    elements = sum(section.count for section in _sections(fmt))
    check_header(payload, _FORM, fmt, block=0, elements=elements, parts=_planes(fmt))
    pieces = _pieces(payload, fmt)
    opened = [
        (section, [_opened(next(pieces), section, fmt) for _ in range(section.width)]) for section in _sections(fmt)
    ]
    for section, planes in opened:
        for run, at in section.parts:
            target = into[run.offset : run.offset + run.nbytes]
            merge([plane[at : at + run.count] for plane in planes], target)


def _pieces(payload: AnyArray, fmt: SlotFormat) -> Iterator[tuple[int, AnyArray]]:
    """How each plane is stored and its bytes, once it is certain that they fill the payload exactly."""
    count = _planes(fmt)
    at = HEADER.size + count * _ENTRY.size
    if len(payload) < at:
        raise malformed(_FORM, fmt, f"it has {len(payload)} bytes, fewer than its table needs")
    table = list(_ENTRY.iter_unpack(payload[HEADER.size : at].tobytes()))
    if at + sum(length for _, length in table) != len(payload):
        raise malformed(_FORM, fmt, "its table does not add up to its length")
    return _cut(payload, at, table)


def _cut(payload: AnyArray, at: int, table: list[tuple[int, int]]) -> Iterator[tuple[int, AnyArray]]:
    for method, length in table:
        yield method, payload[at : at + length]
        at += length


def _opened(stored: tuple[int, AnyArray], section: _Section, fmt: SlotFormat) -> AnyArray:
    """One plane: uint8 [count]."""
    method, piece = stored
    if method == _RAW:
        if len(piece) != section.count:
            raise malformed(_FORM, fmt, f"a plane has {len(piece)} bytes instead of {section.count}")
        piece.flags.writeable = False  # like what zstd opens: another type would be compiled apart
        return piece
    if method != _ZSTD:
        raise malformed(_FORM, fmt, f"a plane is stored in the unknown way {method}")
    try:
        size = zstandard.get_frame_parameters(piece.data).content_size
        if size != section.count:  # asked before it is opened: what it says is what zstd makes room for
            raise malformed(_FORM, fmt, f"a plane says that it opens to {size} bytes instead of {section.count}")
        plane = zstandard.ZstdDecompressor().decompress(piece.data, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise malformed(_FORM, fmt, f"a plane cannot be opened ({error})") from None
    if len(plane) != section.count:
        raise malformed(_FORM, fmt, f"a plane opens to {len(plane)} bytes instead of {section.count}")
    return np.frombuffer(plane, np.uint8)
