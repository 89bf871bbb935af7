"""Compiled steps: nodes of chains, and what names them and their objects."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvloom.tiers.host.arrays import (
    ANCHORS,
    AT,
    BLOB,
    CHILD,
    DEPTH,
    DIGEST_AT,
    FIRST,
    FREE_NODE,
    HEAT,
    LAYOUT,
    NEEDS,
    NODES,
    OLDER,
    PARENT,
    PLACE,
    SERIAL,
    SUM,
    TOKENS,
    TOP_NODE,
    YOUNGER,
)
from kvloom.tiers.host.pages import give_pages, jit
from kvloom.types import AnyArray

_U: Any = np.uint64


@jit
def new_node(a: Any, layout: int, parent: int, depth: int, digest: AnyArray, i: int) -> int:
    """A node below ``parent`` (-1: a root) with digest ``digest[i]``; the caller knows that a row is free."""
    n = a.scalars[FREE_NODE]
    if n >= 0:
        a.scalars[FREE_NODE] = a.node[n, OLDER]
    else:
        n = a.scalars[TOP_NODE]
        a.scalars[TOP_NODE] += 1
    a.scalars[NODES] += 1
    a.node[n, LAYOUT], a.node[n, PARENT], a.node[n, DEPTH], a.node[n, ANCHORS] = layout, parent, depth, 0
    a.node[n, FIRST], a.node[n, BLOB], a.node[n, TOKENS], a.node[n, NEEDS] = -1, -1, 0, 0
    a.node[n, PLACE], a.node[n, CHILD], a.node[n, YOUNGER], a.node[n, OLDER] = -1, -1, -1, -1
    for k in range(4):
        a.node64[n, DIGEST_AT + k] = digest[i, k]
    a.node64[n, SUM], a.node64[n, SERIAL] = 0, 0
    a.heat[n, HEAT], a.heat[n, AT] = 0.0, 0.0
    if parent >= 0:
        a.node[parent, ANCHORS] += 1
        old = a.node[parent, CHILD]
        a.node[n, OLDER] = old
        if old >= 0:
            a.node[old, YOUNGER] = n
        a.node[parent, CHILD] = n
    return n


@jit
def new_chain(
    a: Any, layout: int, parent: int, digests: AnyArray, blobs: AnyArray, about: AnyArray, out: AnyArray
) -> None:
    """Nodes below ``parent`` one after the other: ``about`` is (tokens, checksum) of each; ``out`` gets the rows."""
    for i in range(len(blobs)):
        parent = new_node(a, layout, parent, a.node[parent, DEPTH] + 1, digests, i)
        a.node[parent, BLOB], a.node[parent, TOKENS], a.node64[parent, SUM] = blobs[i], about[i, 0], about[i, 1]
        out[i] = parent


@jit
def prune(a: Any, n: int, out: AnyArray) -> int:
    """Free a node, and those above it, as far as nothing holds them: ``out`` gets (layout, depth, digest, parent)."""
    count = 0
    while n >= 0 and count < len(out):
        if a.node[n, PLACE] >= 0 or a.node[n, ANCHORS] > 0 or a.node[n, FIRST] >= 0:
            break
        out[count, 0], out[count, 1] = a.node[n, LAYOUT], a.node[n, DEPTH]
        for k in range(4):
            out[count, 2 + k] = a.node64[n, DIGEST_AT + k]
        parent, younger, older = a.node[n, PARENT], a.node[n, YOUNGER], a.node[n, OLDER]
        out[count, 6] = parent
        if older >= 0:
            a.node[older, YOUNGER] = younger
        if younger >= 0:
            a.node[younger, OLDER] = older
        elif parent >= 0:
            a.node[parent, CHILD] = older
        if parent >= 0:
            a.node[parent, ANCHORS] -= 1
        give_pages(a, a.node[n, BLOB])
        a.node[n, LAYOUT], a.node[n, DEPTH], a.node[n, BLOB] = -1, -2, -1
        a.node[n, OLDER] = a.scalars[FREE_NODE]
        a.scalars[FREE_NODE] = n
        a.scalars[NODES] -= 1
        count += 1
        n = parent
    return count


@jit
def resolve(a: Any, layout: int, digests: AnyArray, first: int, places: AnyArray) -> int:
    """``places`` (of 128-bit keys) become -1 where the node there is another one; how many were.

    ``first``: -1 where the digests are roots, else 0.
    """
    others = 0
    for i in range(len(places)):
        n = places[i]
        if n < 0:
            continue
        same = a.node[n, LAYOUT] == layout and (a.node[n, DEPTH] < 0) == (first < 0)
        for k in range(4):
            same &= a.node64[n, DIGEST_AT + k] == digests[i, k]
        if not same:
            places[i] = -1
            others += 1
    return others


@jit
def chain_above(a: Any, n: int, out: AnyArray) -> None:
    """Rows of the nodes from the first one of a chain to ``n``, whose depth is known to be that of the last one."""
    while n >= 0 and a.node[n, DEPTH] >= 0:
        out[a.node[n, DEPTH]] = n
        n = a.node[n, PARENT]


@jit
def tails(a: Any, parent: int, below: int, out: AnyArray) -> int:
    """Distinct token counts less than ``below`` of units that end at children of a node, newest first; how many."""
    count = 0
    n = a.node[parent, CHILD]
    while n >= 0 and count < len(out):
        tokens = a.node[n, TOKENS]
        if a.node[n, PLACE] >= 0 and tokens < below:
            known = False
            for k in range(count):
                known |= out[k] == tokens
            if not known:
                out[count] = tokens
                count += 1
        n = a.node[n, OLDER]
    return count


@jit
def mix(digests: AnyArray, layout: AnyArray, out: AnyArray) -> None:
    """Keys of 128 bits (uint64 ``[n, 2]``) that depend on all of a digest and a layout (uint64 ``[n, 4]``, ``[4]``)."""
    start = _U(0x9E3779B97F4A7C15)
    for k in range(4):
        start = _U((start ^ layout[k]) * _U(0xBF58476D1CE4E5B9))
        start = _U(start ^ (start >> _U(31)))
    for i in range(len(digests)):
        h = start
        low = _U(~start)
        for k in range(4):
            h = _U((h ^ digests[i, k]) * _U(0x94D049BB133111EB))
            h = _U(h ^ (h >> _U(29)))
            low = _U((low + digests[i, k]) * _U(0xD6E8FEB86659FD93))
            low = _U((low ^ (low >> _U(32))) + h)
        out[i, 0], out[i, 1] = h, low


@jit
def seeds(layout: AnyArray, digests: AnyArray, about: AnyArray, out: AnyArray) -> None:
    """What the checksum of an object starts from: everything that says which object it is.

    ``about``: int64 (…, group, column, form, grade, length); digests uint64 ``[n, 4]``, layout ``[4]``; out uint64.
    """
    for i in range(len(about)):
        h = _U(layout[0] ^ layout[1] ^ layout[2] ^ layout[3])
        for k in range(4):
            h = _U((h ^ digests[i, k]) * _U(0x9E3779B97F4A7C15))
            h = _U(h ^ (h >> _U(29)))
        for k in range(1, 6):
            h = _U((h ^ _U(about[i, k])) * _U(0xBF58476D1CE4E5B9))
            h = _U(h ^ (h >> _U(32)))
        out[i] = h
