"""The words every layer shares: kinds, grades, life-cycle states, forms and miss reasons.

All of them are closed enumerations.  The integer values are stored in the arrays of the metadata
core, so they are part of the in-memory layout and must not be renumbered.
"""

from __future__ import annotations

import enum
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

IntArray: TypeAlias = npt.NDArray[np.int64]
Int32Array: TypeAlias = npt.NDArray[np.int32]
AnyArray: TypeAlias = npt.NDArray[Any]


class Kind(enum.IntEnum):
    """The kind of cached state a KV cache group holds."""

    COMPRESSED = 0
    TAIL = 1
    WINDOW = 2
    INDEXER = 3
    DISK_PREFIX = 4
    RECURRENT = 5


class Grade(enum.IntEnum):
    """How the state was made; larger is better.  A hit has the worst grade of what it used.

    ``str`` and f-strings give the word: ``canonical``, ``faithful``, ``approximate``.
    """

    APPROXIMATE = 0
    FAITHFUL = 1
    CANONICAL = 2

    def __str__(self) -> str:
        return self.name.lower()

    def __format__(self, spec: str) -> str:
        return format(str(self), spec)  # an IntEnum would format as its number


class PayloadForm(enum.IntEnum):
    """How the bytes of an object in a colder tier are to be read (``docs/format.md``)."""

    RAW = 0
    LOSSLESS = 1
    FP8 = 2


class ObjectState(enum.IntEnum):
    """Life-cycle state of one copy (an object in one tier)."""

    FREE = 0
    ALLOCATED = 1
    READY = 2
    COMMITTED = 3
    COLD = 4
    STORING = 5
    LOADING = 6
    EVICTED = 7
    QUARANTINED = 8


class Form(enum.StrEnum):
    """The present form of a token range in one KV cache group."""

    ABSENT = "absent"
    UNCOMPRESSED = "uncompressed"
    COMPRESSED = "compressed"
    COLD = "cold"
    OFFLOADED = "offloaded"


class Reason(enum.StrEnum):
    """Why a hit did not reach further.  The list is closed."""

    EMPTY = "empty"
    """Nothing at all is cached under this salt and these extra keys."""
    TOKENS = "tokens"
    """No cached prefix continues with these tokens."""
    LAST_TOKEN = "last_token"
    """The last token of a prompt is always recomputed: the hit is as long as it can be."""
    NOT_KEPT = "not_kept"
    """The state at this position was never kept (snapshot interval, window far behind, no room)."""
    EVICTED = "evicted"
    """The object was dropped to make room."""
    CLEARED = "cleared"
    """The object was dropped by request (clear, or left out in a verification run)."""
    QUARANTINED = "quarantined"
    """The object failed a check and can never be read again."""
    GRADE = "grade"
    """The object exists, but its grade is below the floor of this request."""
    STALE = "stale"
    """The object's generation changed between lookup and use."""
    ABI = "abi"
    """The object was made with another layout, dtype, model or kernel."""


NO_SLOT = -1
"""Column value: an object was never kept here.  The values below say why one is gone."""
SLOT_EVICTED = -2
SLOT_CLEARED = -3
SLOT_QUARANTINED = -4

REASON_OF_COLUMN = {
    NO_SLOT: Reason.NOT_KEPT,
    SLOT_EVICTED: Reason.EVICTED,
    SLOT_CLEARED: Reason.CLEARED,
    SLOT_QUARANTINED: Reason.QUARANTINED,
}

DTYPE_BYTES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int64": 8,
    "int32": 4,
    "uint8": 1,
    "bool": 1,
}
"""Bytes of one element of every dtype that state tensors may have."""
