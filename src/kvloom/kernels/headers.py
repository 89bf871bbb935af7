"""The first 32 bytes of an encoded payload, and refusing what is not one (``docs/format.md``)."""

from __future__ import annotations

import struct

from kvloom.errors import FormatError
from kvloom.kernels.slots import SlotFormat
from kvloom.types import AnyArray, PayloadForm

HEADER = struct.Struct("<4sBBHIIQII")
VERSION = 1
_MAGIC = b"KVFM"


def write_header(into: AnyArray, form: PayloadForm, fmt: SlotFormat, *, block: int, elements: int, parts: int) -> None:
    """Write the header: ``parts`` is what follows it, counted (runs or planes)."""
    HEADER.pack_into(into.data, 0, _MAGIC, VERSION, form, block, fmt.nbytes, len(fmt.runs), elements, parts, 0)


def check_header(
    payload: AnyArray, form: PayloadForm, fmt: SlotFormat, *, block: int, elements: int, parts: int
) -> None:
    """FormatError unless ``payload`` begins with the header that ``write_header`` writes for these arguments."""
    if len(payload) < HEADER.size:
        raise malformed(form, fmt, f"it has {len(payload)} bytes, fewer than its header's {HEADER.size}")
    magic, version, *found = HEADER.unpack_from(payload.data)
    if magic != _MAGIC:
        raise malformed(form, fmt, "it does not begin like an encoded payload")
    if version != VERSION:
        raise malformed(form, fmt, f"its codec version is {version}, this kvloom reads {VERSION}")
    names = ("form", "block", "slot bytes", "runs", "elements", "parts", "reserved")
    expected = (int(form), block, fmt.nbytes, len(fmt.runs), elements, parts, 0)
    for name, is_, should in zip(names, found, expected, strict=True):
        if is_ != should:
            raise malformed(form, fmt, f"its {name} is {is_} where this group has {should}")


def malformed(form: PayloadForm, fmt: SlotFormat, why: str) -> FormatError:
    """The error for a payload that cannot be decoded."""
    return FormatError(
        f"a payload of group {fmt.group!r} is not what its form {form.name.lower()} should be: {why}; treat it as lost"
    )
