"""All arrays of the metadata core, in one named tuple that the compiled functions take.

No object per block exists: a block is a row of ``slot``, a segment a row of ``node``, ``tokens`` and ``columns``.
See ``kvloom.core.fields`` for what the columns mean.
"""

from __future__ import annotations

from typing import NamedTuple

from kvloom.types import AnyArray


class Arrays(NamedTuple):
    """Owned and mutated by the core only."""

    group: AnyArray  # int32 [G, 32]
    page: AnyArray  # int32 [P, 8]
    slot: AnyArray  # int32 [S, 8]
    node: AnyArray  # int32 [N, 16]
    tokens: AnyArray  # int32 [N, segment]
    columns: AnyArray  # int32 [N, C] local slot, or a code that says why there is none
    table: AnyArray  # int32, open-addressing hash table of checkpoints and of all children but the first, -1 = empty
    heap: AnyArray  # int32 [heaps, N] binary heaps of evictable leaves
    order: AnyArray  # int64 [N] place of a leaf in its queue, lowest first; ``node_stamp`` itself where that decides
    heat: AnyArray  # int32 [N, 8]
    policy: AnyArray  # int64 [96]
    trials: AnyArray  # int64 [8, 473] see ``kvloom.core.reuse``
    scratch: AnyArray  # float64 [31, 80] of the plan
    free_bits: AnyArray  # int64, hierarchical bitmap over the global slots: see ``kvloom.core.bitmap``
    free_pages: AnyArray  # int32 [P] stack
    free_nodes: AnyArray  # int32 [N] stack
    worth: AnyArray  # int32 [S] which list an auxiliary object is in, or will be when released
    slot_stamp: AnyArray  # int64 [S] clock of the last release of an auxiliary object
    node_stamp: AnyArray  # int64 [N] clock of the last use of the node or of anything below it
    reached: AnyArray  # int64 [N] scratch: pass << 32 | anchors that can go
    page_stamp: AnyArray  # int64 [P] clock at which the page could last be emptied
    counters: AnyArray  # int64 [G, 6]
    scalars: AnyArray  # int64 [26]
