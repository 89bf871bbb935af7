"""The fp8 payload: for each run of a slot its scales and codes, or its bytes where nothing is converted."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from kvloom.errors import UnsupportedError
from kvloom.kernels.fp8 import DEQUANTISE, QUANTISE, SCALE_BYTES, plausible
from kvloom.kernels.headers import HEADER, check_header, malformed, write_header
from kvloom.kernels.reference import WORDS
from kvloom.kernels.slots import BLOCK, PADDING, Run, SlotFormat
from kvloom.types import AnyArray, PayloadForm

_FORM = PayloadForm.FP8


def fp8_bytes(fmt: SlotFormat) -> int:
    """Bytes of the payload of every object of the format; UnsupportedError where the form does not exist."""
    if not fmt.has_fp8:
        raise UnsupportedError(
            f"group {fmt.group!r} has no fp8 form: it keeps snapshots, or nothing that is bfloat16, float16 or "
            "float32; keep it raw or lossless"
        )
    return HEADER.size + fmt.fp8_bytes


def _pieces(payload: AnyArray, fmt: SlotFormat) -> Iterator[tuple[Run, AnyArray, AnyArray]]:
    """Each run with its scales and codes; with no scales and its bytes where it is not converted."""
    at = HEADER.size
    for run in fmt.runs:
        scales = run.blocks if run.converts else 0
        end = at + run.fp8_bytes
        yield run, payload[at : at + scales], payload[at + scales : end]
        at = end


def encode_fp8(slot: AnyArray, fmt: SlotFormat, out: AnyArray | None = None) -> AnyArray | None:
    """The payload of ``slot`` (uint8, aligned), in ``out`` if given; None when a converted element is not finite."""
    payload = np.empty(fp8_bytes(fmt), np.uint8) if out is None else out
    write_header(payload, _FORM, fmt, block=BLOCK, elements=fmt.converted, parts=len(fmt.runs))
    for run, scales, codes in _pieces(payload, fmt):
        source = slot[run.offset : run.offset + run.nbytes]
        if run.converts:
            if not QUANTISE[run.dtype](source.view(WORDS[run.dtype]), codes, scales):
                return None
        else:
            codes[:] = source[: len(codes)]
    return payload


def decode_fp8(payload: AnyArray, into: AnyArray, fmt: SlotFormat) -> None:
    """Write the slot that ``payload`` stands for, its padding as zeros; FormatError leaves ``into`` as it was."""
    size = fp8_bytes(fmt)
    check_header(payload, _FORM, fmt, block=BLOCK, elements=fmt.converted, parts=len(fmt.runs))
    if len(payload) != size:
        raise malformed(_FORM, fmt, f"it has {len(payload)} bytes instead of {size}")
    for run, scales, codes in _pieces(payload, fmt):
        if run.converts and not plausible(codes, scales, *SCALE_BYTES[run.dtype]):
            raise malformed(_FORM, fmt, "it holds codes that are not numbers, or scales that no object has")
    for run, scales, codes in _pieces(payload, fmt):
        target = into[run.offset : run.offset + run.nbytes]
        if run.converts:
            DEQUANTISE[run.dtype](codes, scales, target.view(WORDS[run.dtype]))
        elif run.dtype == PADDING:
            target[:] = 0
        else:
            target[:] = codes
