"""All arrays of the host tier: its memory in pages, and the books about what lies in them.

An object is a row of ``obj``, a node of a chain a row of ``node``; there is no Python object for either.  Pages belong
to one object at a time, as runs that are linked to each other, so an object fits whenever enough pages are free,
wherever they are.  The tokens of a node, and the needs of the unit that ends there, lie in pages of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import numpy as np
import numpy.typing as npt

from kvloom.core.bitmap import level_words
from kvloom.core.fields import BIT_BASE, BIT_LEVELS, SCALARS
from kvloom.core.handle import ANY, Handled, float64, int32, int64
from kvloom.errors import InputError
from kvloom.types import AnyArray

PAGE = 4096
MINIMUM = 256 << 10
"""Bytes of the smallest host tier."""
MOST_PAGES = 1 << 30

# obj: int32 [O, 12]
(
    OBJ_NODE,
    GROUP,
    COLUMN,
    FORM,
    GRADE,
    LENGTH,
    RUN,  # first page of the first run
    NEXT,  # next object of the node, or next free row
    REFS,  # units that need it, one that is being published among them
    PINS,  # reads and copies under way
    GENERATION,  # changes whenever other bytes become the row's
    STATE,
) = range(12)

UNUSED, RESERVED, HELD, DYING = range(4)
"""Free row; being written; found; gone, but still being read."""

# obj64: int64 [O, 3]
BORN, CHECK = 0, 1  # publication that brought it; 128 bits of checksum

# node: int32 [N, 12]
(
    LAYOUT,
    PARENT,  # -1 for a root, which is a node of depth -1
    DEPTH,
    ANCHORS,  # children and publications under way
    FIRST,  # first object
    BLOB,  # first page of tokens and needs
    TOKENS,
    NEEDS,
    PLACE,  # in the heap of units, -1 where no unit ends
    CHILD,  # newest child
    YOUNGER,  # sibling
    OLDER,  # sibling, or next free row
) = range(12)

# node64: int64 [N, 6]
DIGEST_AT, SUM, SERIAL = 0, 4, 5  # four words of digest, checksum of tokens and needs, publication

# heat: float64 [N, 3]
HEAT, AT, KEY = range(3)  # access counter as it was at a moment of the clock; what the order goes by

# scalars: int64 [40]; the bitmap's are where the core has them
(
    MEMORY,  # address
    PAGES,
    FREE,  # pages
    FREE_OBJECT,  # first row of the list
    OBJECTS,
    TOP_OBJECT,  # rows that were ever used
    FREE_NODE,
    NODES,
    TOP_NODE,
    UNITS,
    FOUND,  # objects that are held
) = range(SCALARS, SCALARS + 11)


class Arrays(Handled):
    """Owned and changed by the store only, under its lock, but for the pages of objects that are reserved or pinned."""

    argument = "a"

    obj: Annotated[AnyArray, int32(ANY, 12)]
    obj64: Annotated[AnyArray, int64(ANY, 3)]
    node: Annotated[AnyArray, int32(ANY, 12)]
    node64: Annotated[AnyArray, int64(ANY, 6)]
    heat: Annotated[AnyArray, float64(ANY, 3)]
    heap: Annotated[AnyArray, int32(ANY)]
    run: Annotated[AnyArray, int32(ANY, 2)]  # at the first page of a run: its pages, and where the next run begins
    free_bits: Annotated[AnyArray, int64(ANY)]
    scalars: Annotated[AnyArray, int64(40)]


_OBJECT_BYTES, _NODE_BYTES, _PAGE_BYTES = 12 * 4 + 3 * 8, 12 * 4 + 6 * 8 + 3 * 8 + 4, 8
TABLE_SLACK, SLOT_BYTES = 1.3, 24
"""Places of the table of digests per node, so that it never grows; bytes of each."""


def rows_for(pages: int, object_bytes: int) -> tuple[int, int]:
    """How many objects and nodes so many pages may hold."""
    objects = min(pages, -(-pages * PAGE // object_bytes) + 64)
    return objects, min(objects, pages // 2) + 64


def overhead(pages: int, object_bytes: int) -> int:
    """Bytes of all books, rounded up."""
    objects, nodes = rows_for(pages, object_bytes)
    table = int((int(nodes * TABLE_SLACK) / 0.95 + 16) * (SLOT_BYTES + 8)) + 4096 * 4
    bits = 8 * sum(level_words(pages))
    return objects * _OBJECT_BYTES + nodes * _NODE_BYTES + pages * _PAGE_BYTES + bits + table


def pages_within(capacity: int, object_bytes: int) -> int:
    """The most pages that fit into ``capacity`` together with their books."""
    low, high = 0, min(capacity // PAGE, MOST_PAGES)
    while low < high:
        middle = (low + high + 1) // 2
        if middle * PAGE + overhead(middle, object_bytes) <= capacity:
            low = middle
        else:
            high = middle - 1
    return low


def make(memory: npt.NDArray[np.uint8], pages: int, object_bytes: int) -> Arrays:
    """Empty books for ``memory``; raises InputError for memory that is not as it was asked for."""
    if memory.dtype != np.uint8 or memory.shape != (pages * PAGE,) or not memory.flags.c_contiguous:
        raise InputError(f"a host tier needs uint8 memory [{pages * PAGE}], not {memory.dtype} {memory.shape}")
    if not memory.flags.writeable or memory.ctypes.data % PAGE:
        raise InputError(f"the memory of a host tier has to be writable and to begin at a multiple of {PAGE}")
    objects, nodes = rows_for(pages, object_bytes)
    words = level_words(pages)
    made = Arrays(
        obj=np.zeros((objects, 12), np.int32),
        obj64=np.zeros((objects, 3), np.int64),
        node=np.zeros((nodes, 12), np.int32),
        node64=np.zeros((nodes, 6), np.int64),
        heat=np.zeros((nodes, 3), np.float64),
        heap=np.zeros(nodes, np.int32),
        run=np.zeros((pages, 2), np.int32),
        free_bits=np.zeros(sum(words), np.int64),
        scalars=np.zeros(40, np.int64),
    )
    scalars = made.scalars
    scalars[BIT_LEVELS] = len(words)
    scalars[BIT_BASE : BIT_BASE + len(words)] = np.cumsum([0, *words[:-1]])
    scalars[MEMORY], scalars[PAGES], scalars[FREE] = memory.ctypes.data, pages, pages
    scalars[FREE_OBJECT] = scalars[FREE_NODE] = -1
    return made


def table_entries(nodes: int) -> int:
    """Entries that the table of digests is made for."""
    return max(16, int(nodes * TABLE_SLACK))


Memory = Callable[[int], npt.NDArray[np.uint8]]
"""Makes uint8 memory ``[n]``, page-aligned."""
