"""All arrays of the metadata core, in one record that the compiled functions take.

No object per block exists: a block is a row of ``slot``, a segment a row of ``node``, ``tokens`` and ``columns``.
See ``kvloom.core.fields`` for what the columns mean.
"""

from __future__ import annotations

from typing import Annotated

from kvloom.core.handle import ANY, Handled, float64, int32, int64
from kvloom.types import AnyArray


class Arrays(Handled):
    """Owned and mutated by the core only."""

    argument = "a"

    group: Annotated[AnyArray, int32(ANY, 32)]  # [G, 32]
    page: Annotated[AnyArray, int32(ANY, 8)]  # [P, 8]
    slot: Annotated[AnyArray, int32(ANY, 7)]  # [S, 7]
    generation: Annotated[AnyArray, int32(ANY)]  # [S]
    trunk: Annotated[AnyArray, int32(ANY, 4)]  # [N, 4]
    node: Annotated[AnyArray, int32(ANY, 12)]  # [N, 12]
    tokens: Annotated[AnyArray, int32(ANY, ANY)]  # [N, segment]
    columns: Annotated[AnyArray, int32(ANY, ANY)]  # [N, C] local slot, or why there is none
    table: Annotated[AnyArray, int32(ANY)]  # hash table of checkpoints and all children but the first, -1 = empty
    heap: Annotated[AnyArray, int32(ANY, ANY)]  # [heaps, N] binary heaps of evictable leaves
    order: Annotated[AnyArray, int64(ANY)]  # [N] place of a leaf in its queue, lowest first; may be ``node_stamp``
    heat: Annotated[AnyArray, int32(ANY, 8)]  # [N, 8]
    policy: Annotated[AnyArray, int64(ANY)]  # [96]
    trials: Annotated[AnyArray, int64(ANY, ANY)]  # [8, 473] see ``kvloom.core.reuse``
    scratch: Annotated[AnyArray, float64(ANY, ANY)]  # [31, 80] of the plan
    free_bits: Annotated[AnyArray, int64(ANY)]  # over the global slots: see ``kvloom.core.bitmap``
    free_pages: Annotated[AnyArray, int32(ANY)]  # [P] stack
    free_nodes: Annotated[AnyArray, int32(ANY)]  # [N] stack
    worth: Annotated[AnyArray, int32(ANY)]  # [S] list that an auxiliary object is in when released
    slot_stamp: Annotated[AnyArray, int64(ANY)]  # [S] clock of the last release of an auxiliary object
    node_stamp: Annotated[AnyArray, int64(ANY)]  # [N] clock of the last use of it or anything below
    reached: Annotated[AnyArray, int64(ANY)]  # [N] scratch: pass << 32 | anchors that can go
    page_stamp: Annotated[AnyArray, int64(ANY)]  # [P] clock at which the page could last be emptied
    counters: Annotated[AnyArray, int64(ANY, 6)]  # [G, 6]
    scalars: Annotated[AnyArray, int64(ANY)]  # [27]
