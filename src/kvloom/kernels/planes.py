"""Byte-splitting: plane k holds byte k, in memory order, of every element; and back."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvloom.kernels._jit import compiled
from kvloom.types import AnyArray


@compiled
def _split_2(words: AnyArray, a: AnyArray, b: AnyArray) -> None:
    for i in range(len(words)):
        a[i] = np.uint8(words[i])
        b[i] = np.uint8(words[i] >> np.uint16(8))


@compiled
def _merge_2(a: AnyArray, b: AnyArray, words: AnyArray) -> None:
    for i in range(len(words)):
        words[i] = np.uint16(a[i]) | (np.uint16(b[i]) << np.uint16(8))


@compiled
def _split_4(words: AnyArray, a: AnyArray, b: AnyArray, c: AnyArray, d: AnyArray) -> None:
    for i in range(len(words)):
        a[i] = np.uint8(words[i])
        b[i] = np.uint8(words[i] >> np.uint32(8))
        c[i] = np.uint8(words[i] >> np.uint32(16))
        d[i] = np.uint8(words[i] >> np.uint32(24))


@compiled
def _merge_4(a: AnyArray, b: AnyArray, c: AnyArray, d: AnyArray, words: AnyArray) -> None:
    for i in range(len(words)):
        low = np.uint32(a[i]) | (np.uint32(b[i]) << np.uint32(8))
        words[i] = np.uint32(low | (np.uint32(c[i]) << np.uint32(16)) | (np.uint32(d[i]) << np.uint32(24)))


def split(source: AnyArray, planes: Sequence[AnyArray]) -> None:
    """``source`` uint8 [w n], aligned to w, little-endian; ``planes``: w arrays of uint8 [n]."""
    if len(planes) == 2:
        _split_2(source.view(np.uint16), *planes)
    elif len(planes) == 4:
        _split_4(source.view(np.uint32), *planes)
    else:
        for plane, column in zip(planes, source.reshape(-1, len(planes)).T, strict=True):
            plane[:] = column


def merge(planes: Sequence[AnyArray], out: AnyArray) -> None:
    """The inverse of ``split``: ``out`` uint8 [w n], aligned to w."""
    if len(planes) == 2:
        _merge_2(planes[0], planes[1], out.view(np.uint16))
    elif len(planes) == 4:
        _merge_4(planes[0], planes[1], planes[2], planes[3], out.view(np.uint32))
    else:
        for plane, column in zip(planes, out.reshape(-1, len(planes)).T, strict=True):
            column[:] = plane
