"""The order in which leaves go, by policy: what the core knows of policies besides ``kvloom.eviction``.

A *keyed* policy gives every leaf one number when it becomes a leaf; the lowest goes first, in a tie the node with
the lowest id.  S3-FIFO keeps two queues of leaves, ``cost`` one for each class and looks at both ends of each.
"""

from __future__ import annotations

import enum
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from kvloom.core._jit import inlined, jit
from kvloom.core.arrays import Arrays
from kvloom.core.fields import (
    BROKEN,
    COL_BASE,
    COLUMNS,
    DEPTH,
    IS_END,
    KEY_ADDRESS,
    NTOKENS,
    PARENT,
    PRIORITY,
    QUEUE,
    RULE,
    RULE_SNAPSHOT,
    RULE_WINDOW,
    RULES,
    SPENT,
    SPINE,
    USES,
)
from kvloom.core.rules import block_of, blocks_at, first_block_needed, snapshot_needed


class Order(enum.IntEnum):
    """How a policy orders leaves."""

    STAMP = 0
    USES = 1
    PRIORITY = 2
    FIFO = 3
    CLASSES = 4
    KEY = 5


BY_STAMP = int(Order.STAMP)
BY_USES = int(Order.USES)
BY_PRIORITY = int(Order.PRIORITY)
BY_FIFO = int(Order.FIFO)
BY_CLASSES = int(Order.CLASSES)
CLASSES = 8
STRANDED = CLASSES
"""Queue of the leaves that no request can resume from; after those of the classes."""
HEAPS = CLASSES + 1
"""Heaps with the lowest order at the top; those with the highest come after them."""
ROWS = {Order.FIFO: 2, Order.CLASSES: HEAPS + CLASSES}
"""Heaps of leaves; one for the others."""
KEY_SHIFT = 40
"""Built-in keys are a number below 2**20 above the stamp."""
MOST_USES = (1 << 20) - 1
MOST_FREQUENCY = 3


def _call_key(_typing: Any, address: Any, uses: Any, stamp: Any, priority: Any, depth: Any) -> Any:
    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        word = ir.IntType(64)
        function = builder.inttoptr(args[0], ir.FunctionType(word, [word] * 4).as_pointer())
        return builder.call(function, args[1:])

    return types.int64(*[types.int64] * 5), generate


call_key = intrinsic(_call_key)
"""Call the compiled key function at an address: uses, stamp, priority, depth, all int64."""


@inlined
def use_class(uses: int) -> int:
    """0 to 3 for 1, 2, 3 or 4, and 5 or more uses."""
    return 0 if uses < 2 else 1 if uses < 3 else 2 if uses < 5 else 3


@inlined
def frequency(a: Arrays, n: int) -> int:
    """Uses that the node has not spent yet, at most three; for S3-FIFO."""
    return max(0, min(MOST_FREQUENCY, a.node[n, USES] - a.heat[n, SPENT]))


@inlined
def _has_prefix(a: Arrays, g: int, n: int, position: int) -> bool:
    """Whether ``n``, at whose end is ``position``, has its blocks of prefix group ``g``, and so have all above it.

    Eviction takes leaves only, so those above need a look only after blocks were forgotten in other ways.
    """
    segment = a.tokens.shape[1]
    if a.trunk[n, NTOKENS] < segment:
        first = block_of(a, g, position - position % segment)
        for block in range(first, blocks_at(a, g, position)):
            if a.columns[n, a.group[g, COL_BASE] + block - first] < 0:
                return False
    elif a.trunk[n, SPINE] < 0:
        return False
    if a.scalars[BROKEN] == 1:
        m = a.trunk[n, PARENT]
        while a.trunk[m, NTOKENS] > 0:
            if a.trunk[m, SPINE] < 0:
                return False
            m = a.trunk[m, PARENT]
    return True


@jit
def resumable(a: Arrays, n: int) -> bool:
    """Whether everything is there that resuming at the end of ``n`` needs."""
    segment = a.tokens.shape[1]
    whole = a.trunk[n, NTOKENS] == segment
    position = a.node[n, DEPTH] * segment + (0 if whole else a.trunk[n, NTOKENS])
    for g in range(a.group.shape[0]):
        if a.group[g, RULE] == RULE_SNAPSHOT:
            if snapshot_needed(a, g, position) and a.columns[n, a.group[g, COL_BASE]] < 0:
                return False
        elif a.group[g, RULE] == RULE_WINDOW:
            m = n
            begin = block_of(a, g, position - 1 - (position - 1) % segment)
            for block in range(blocks_at(a, g, position) - 1, first_block_needed(a, g, position) - 1, -1):
                if block < begin:
                    m = a.trunk[m, PARENT]
                    begin -= a.group[g, COLUMNS]
                if a.columns[m, a.group[g, COL_BASE] + block - begin] < 0:
                    return False
        elif not _has_prefix(a, g, n, position):
            return False
    return True


@inlined
def rank(a: Arrays, n: int) -> int:
    """Note the place of leaf ``n`` in the order of the policy; returns its queue."""
    rule = a.policy[RULES]
    if rule == BY_STAMP:
        return 0
    if rule == BY_CLASSES:
        q = 2 * use_class(a.node[n, USES]) + a.heat[n, IS_END] if resumable(a, n) else STRANDED
        a.heat[n, QUEUE] = q
        return q
    if rule == BY_FIFO:
        return a.heat[n, QUEUE]
    if rule == BY_USES:
        a.order[n] = (np.int64(min(a.node[n, USES], MOST_USES)) << KEY_SHIFT) | a.node_stamp[n]
    elif rule == BY_PRIORITY:
        a.order[n] = (np.int64(a.heat[n, PRIORITY]) << KEY_SHIFT) | a.node_stamp[n]
    else:
        a.order[n] = call_key(
            a.policy[KEY_ADDRESS],
            np.int64(a.node[n, USES]),
            a.node_stamp[n],
            np.int64(a.heat[n, PRIORITY]),
            np.int64(a.node[n, DEPTH]),
        )
    return 0
