"""The door: an object's bytes to a payload in some form, and back into a slot."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np

from kvloom.errors import InputError
from kvloom.kernels.fp8_form import decode_fp8, encode_fp8, fp8_bytes
from kvloom.kernels.headers import malformed
from kvloom.kernels.lossless import decode_lossless, encode_lossless
from kvloom.kernels.slots import SlotFormat
from kvloom.types import AnyArray, Grade, PayloadForm

Buffer: TypeAlias = AnyArray | bytes | bytearray | memoryview

_ALIGN = 8


def encode(form: PayloadForm, slot: Buffer, fmt: SlotFormat, out: Buffer | None = None) -> AnyArray | None:
    """The payload of the object in ``slot``, uint8 [n], or None: keep it raw.

    ``out``: where an FP8 payload is to be written, ``payload_bytes`` writable bytes; whoever quantises much saves the
    time that fresh memory takes.  After None its contents are undefined.

    None means that LOSSLESS would not be smaller, or that FP8 met an element that is not finite.  RAW gives the bytes
    of ``slot`` themselves, not a copy.

    Raises InputError when ``slot`` is not ``fmt.nbytes`` contiguous bytes or ``out`` does not fit, UnsupportedError
    when the group has no fp8 form.  Safe to call from several threads; the GIL is released for most of the work.
    """
    source = _bytes(slot, "slot")
    if len(source) != fmt.nbytes:
        raise InputError(f"a slot of group {fmt.group!r} has {fmt.nbytes} bytes, not {len(source)}")
    if out is not None and form is not PayloadForm.FP8:
        raise InputError(f"the size of a {form.name.lower()} payload is not known beforehand; leave out away")
    if form is PayloadForm.RAW:
        return source
    if form is PayloadForm.LOSSLESS:
        return encode_lossless(_usable(source), fmt)
    target = None if out is None else _bytes(out, "out")
    if target is not None and (len(target) != (size := fp8_bytes(fmt)) or not target.flags.writeable):
        raise InputError(f"an fp8 payload of group {fmt.group!r} is written into {size} writable bytes")
    return encode_fp8(_usable(source), fmt, target)


def decode(form: PayloadForm, payload: Buffer, into: Buffer, fmt: SlotFormat) -> None:
    """Write the object that ``payload`` holds into the slot ``into``: ``fmt.nbytes`` writable bytes, aligned to 8.

    Whatever the payload holds: either all of the slot is written, or an error is raised and nothing is.

    Raises FormatError when the payload is not one of this form and format, InputError for an ``into`` of another size,
    alignment or read-only, UnsupportedError when the group has no fp8 form.  Safe to call from several threads on
    different slots; the GIL is released for most of the work.
    """
    source, target = _bytes(payload, "payload"), _bytes(into, "into")
    if len(target) != fmt.nbytes:
        raise InputError(f"a slot of group {fmt.group!r} has {fmt.nbytes} bytes, not {len(target)}")
    if not target.flags.writeable or target.ctypes.data % _ALIGN:
        raise InputError(f"the slot to decode into must be writable and aligned to {_ALIGN} bytes")
    if form is PayloadForm.FP8:
        decode_fp8(_usable(source), target, fmt)
    elif form is PayloadForm.LOSSLESS:
        decode_lossless(_usable(source), target, fmt)
    elif len(source) != fmt.nbytes:
        raise malformed(form, fmt, f"it has {len(source)} bytes instead of {fmt.nbytes}")
    else:
        target[:] = source


def encoded_grade(form: PayloadForm, grade: Grade) -> Grade:
    """The grade of an object of ``grade`` after it was stored in ``form``."""
    return Grade.APPROXIMATE if form is PayloadForm.FP8 else grade


def payload_bytes(form: PayloadForm, fmt: SlotFormat) -> int | None:
    """Bytes of every payload of the form, or None where that depends on the object (LOSSLESS)."""
    if form is PayloadForm.FP8:
        return fp8_bytes(fmt)
    return fmt.nbytes if form is PayloadForm.RAW else None


def forms_of(fmt: SlotFormat) -> tuple[PayloadForm, ...]:
    """The forms that objects of the format may take."""
    return tuple(form for form in PayloadForm if form is not PayloadForm.FP8 or fmt.has_fp8)


def _bytes(buffer: Buffer, what: str) -> AnyArray:
    """A flat uint8 view."""
    try:
        view = np.frombuffer(buffer, np.uint8)
    except (ValueError, TypeError, BufferError):
        raise InputError(f"{what} must be contiguous bytes") from None
    return view


def _usable(source: AnyArray) -> AnyArray:
    """As compiled loops take it: writable and aligned; what is not is copied."""
    address, read_only = source.__array_interface__["data"]
    return source.copy() if read_only or address % _ALIGN else source
