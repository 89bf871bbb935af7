"""Compiled steps: rows of objects and nodes, and which unit needs which object.

A unit holds a count on every object that it needs and that was there when it was published.  What loses its last count
is gone at once, but for its pages while somebody reads them.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kvloom.tiers.host.arrays import (
    ANCHORS,
    AT,
    BLOB,
    BORN,
    CHILD,
    COLUMN,
    DEPTH,
    DIGEST_AT,
    DYING,
    FIRST,
    FORM,
    FOUND,
    FREE_NODE,
    FREE_OBJECT,
    GENERATION,
    GRADE,
    GROUP,
    HEAT,
    HELD,
    LAYOUT,
    LENGTH,
    NEEDS,
    NEXT,
    NODES,
    OBJ_NODE,
    OBJECTS,
    OLDER,
    PARENT,
    PINS,
    PLACE,
    REFS,
    RESERVED,
    RUN,
    SERIAL,
    STATE,
    SUM,
    TOKENS,
    TOP_NODE,
    TOP_OBJECT,
    UNUSED,
    YOUNGER,
)
from kvloom.tiers.host.pages import give_pages, jit, take_pages
from kvloom.types import AnyArray

_U: Any = np.uint64
INTEGRITY, MISSING = 1, 3
"""As in ``Result``."""


@jit
def new_object(a: Any, pages: int) -> int:
    """A reserved row with so many pages; the caller knows that both are free."""
    x = a.scalars[FREE_OBJECT]
    if x >= 0:
        a.scalars[FREE_OBJECT] = a.obj[x, NEXT]
    else:
        x = a.scalars[TOP_OBJECT]
        a.scalars[TOP_OBJECT] += 1
    a.scalars[OBJECTS] += 1
    a.obj[x, STATE], a.obj[x, REFS], a.obj[x, PINS], a.obj[x, NEXT], a.obj[x, OBJ_NODE] = RESERVED, 0, 0, -1, -1
    a.obj[x, RUN] = take_pages(a, pages)
    return x


@jit
def new_objects(a: Any, pages: AnyArray, out: AnyArray) -> None:
    """``new_object`` for every entry of ``pages``."""
    for i in range(len(pages)):
        out[i] = new_object(a, pages[i])


@jit
def free_object(a: Any, x: int) -> None:
    """Give the row and its pages back."""
    give_pages(a, a.obj[x, RUN])
    a.obj[x, STATE], a.obj[x, RUN] = UNUSED, -1
    a.obj[x, GENERATION] = (a.obj[x, GENERATION] + 1) & 0x7FFFFFFF
    a.obj[x, NEXT] = a.scalars[FREE_OBJECT]
    a.scalars[FREE_OBJECT] = x
    a.scalars[OBJECTS] -= 1


@jit
def let_go(a: Any, x: int) -> None:
    """A held object that no list has any more: free it now, or when the last read ends."""
    a.scalars[FOUND] -= 1
    if a.obj[x, PINS] > 0:
        a.obj[x, STATE] = DYING
    else:
        free_object(a, x)


@jit
def drop_object(a: Any, x: int) -> None:
    """Take a held object out of its node's list, and let it go."""
    node = a.obj[x, OBJ_NODE]
    if a.node[node, FIRST] == x:
        a.node[node, FIRST] = a.obj[x, NEXT]
    else:
        y = a.node[node, FIRST]
        while a.obj[y, NEXT] != x:
            y = a.obj[y, NEXT]
        a.obj[y, NEXT] = a.obj[x, NEXT]
    let_go(a, x)


@jit
def hold_object(a: Any, x: int, node: int, about: AnyArray, i: int, born: int) -> None:
    """Make a reserved object found: row ``i`` of ``about`` is (node, group, column, form, grade, length)."""
    a.obj[x, OBJ_NODE], a.obj[x, GROUP], a.obj[x, COLUMN] = node, about[i, 1], about[i, 2]
    a.obj[x, FORM], a.obj[x, GRADE], a.obj[x, LENGTH] = about[i, 3], about[i, 4], about[i, 5]
    a.obj[x, STATE], a.obj64[x, BORN] = HELD, born
    a.scalars[FOUND] += 1
    a.obj[x, NEXT] = a.node[node, FIRST]
    a.node[node, FIRST] = x


@jit
def find_object(a: Any, node: int, group: int, column: int) -> int:
    """The object of a node, or -1."""
    x = a.node[node, FIRST]
    while x >= 0 and (a.obj[x, GROUP] != group or a.obj[x, COLUMN] != column):
        x = a.obj[x, NEXT]
    return x


@jit
def find_objects(a: Any, chain: AnyArray, about: AnyArray, out: AnyArray) -> None:
    """For every row of ``about``, whose node is an index into ``chain``: the object that is held, or -1."""
    for i in range(len(about)):
        node = chain[about[i, 0]]
        out[i] = find_object(a, node, about[i, 1], about[i, 2]) if node >= 0 else -1


@jit
def hold_objects(a: Any, chain: AnyArray, about: AnyArray, rows: AnyArray, born: int) -> int:
    """Make reserved objects found; one that was there already gives its counts to the better one.  How many are new."""
    count = 0
    for i in range(len(rows)):
        node, x = chain[about[i, 0]], rows[i]
        old = find_object(a, node, about[i, 1], about[i, 2])
        if old >= 0 and a.obj[old, GRADE] >= about[i, 4]:
            free_object(a, x)
            continue
        hold_object(a, x, node, about, i, born)
        count += 1
        if old >= 0:
            a.obj[x, REFS], a.obj64[x, BORN] = a.obj[old, REFS], a.obj64[old, BORN]
            drop_object(a, old)
    return count


@jit
def drop_unneeded(a: Any, chain: AnyArray, about: AnyArray) -> None:
    """Of some objects, drop those that no unit needs."""
    for i in range(len(about)):
        node = chain[about[i, 0]]
        x = find_object(a, node, about[i, 1], about[i, 2]) if node >= 0 else -1
        if x >= 0 and a.obj[x, REFS] == 0:
            drop_object(a, x)


@jit
def _asks(needs: AnyArray, k: int, group: int, depth: int, column: int) -> bool:
    """Whether need ``k`` (group, first node, first column, count) asks for an object."""
    if needs[k, 0] != group:
        return False
    return depth > needs[k, 1] or (depth == needs[k, 1] and column >= needs[k, 2])


@jit
def _needed(needs: AnyArray, group: int, depth: int, column: int) -> bool:
    for k in range(len(needs)):
        if _asks(needs, k, group, depth, column):
            return True
    return False


@jit
def needs_object(a: Any, x: int, needs: AnyArray) -> bool:
    """Whether a unit at or below the node of an object needs it."""
    return _needed(needs, a.obj[x, GROUP], a.node[a.obj[x, OBJ_NODE], DEPTH], a.obj[x, COLUMN])


@jit
def tally(a: Any, end: int, needs: AnyArray, counts: AnyArray) -> int:
    """Add to ``counts`` what is held for every need of a unit at or below ``end``; returns pages of it all."""
    total = 0
    while end >= 0:
        x = a.node[end, FIRST]
        while x >= 0:
            depth, group, column = a.node[end, DEPTH], a.obj[x, GROUP], a.obj[x, COLUMN]
            for k in range(len(needs)):
                if _asks(needs, k, group, depth, column):
                    counts[k] += 1
            if _needed(needs, group, depth, column):
                total += (a.obj[x, LENGTH] + 4095) >> 12
            x = a.obj[x, NEXT]
        end = a.node[end, PARENT]
    return total


@jit
def tally_new(about: AnyArray, held: AnyArray, needs: AnyArray, counts: AnyArray) -> None:
    """Add what is not held yet."""
    for i in range(len(about)):
        for k in range(len(needs)):
            if held[i] < 0 and _asks(needs, k, about[i, 1], about[i, 0], about[i, 2]):
                counts[k] += 1


@jit
def add_refs(a: Any, end: int, needs: AnyArray, serial: int) -> None:
    """Count a unit on all that it needs and that was born no later than it."""
    while end >= 0:
        x = a.node[end, FIRST]
        while x >= 0:
            if a.obj64[x, BORN] <= serial and _needed(needs, a.obj[x, GROUP], a.node[end, DEPTH], a.obj[x, COLUMN]):
                a.obj[x, REFS] += 1
            x = a.obj[x, NEXT]
        end = a.node[end, PARENT]


@jit
def drop_refs(a: Any, end: int, needs: AnyArray, serial: int) -> None:
    """Take the counts of a unit back; what has none left is dropped."""
    while end >= 0:
        x = a.node[end, FIRST]
        while x >= 0:
            after = a.obj[x, NEXT]
            if a.obj64[x, BORN] <= serial and _needed(needs, a.obj[x, GROUP], a.node[end, DEPTH], a.obj[x, COLUMN]):
                a.obj[x, REFS] -= 1
                if a.obj[x, REFS] <= 0:
                    drop_object(a, x)
            x = after
        end = a.node[end, PARENT]


@jit
def would_free(a: Any, end: int, needs: AnyArray, serial: int, refs: AnyArray) -> int:
    """``drop_refs`` on a copy of all counts: pages that would be free."""
    total = 0
    while end >= 0:
        x = a.node[end, FIRST]
        while x >= 0:
            if a.obj64[x, BORN] <= serial and _needed(needs, a.obj[x, GROUP], a.node[end, DEPTH], a.obj[x, COLUMN]):
                refs[x] -= 1
                if refs[x] == 0:
                    total += (a.obj[x, LENGTH] + 4095) >> 12
            x = a.obj[x, NEXT]
        end = a.node[end, PARENT]
    return total


@jit
def reset_refs(a: Any) -> None:
    """No counts on anything."""
    for x in range(a.scalars[TOP_OBJECT]):
        if a.obj[x, STATE] == HELD:
            a.obj[x, REFS] = 0


@jit
def drop_all_unneeded(a: Any) -> None:
    """Drop everything that has no counts."""
    for x in range(a.scalars[TOP_OBJECT]):
        if a.obj[x, STATE] == HELD and a.obj[x, REFS] == 0:
            drop_object(a, x)


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
def list_objects(a: Any, nodes: AnyArray, out: AnyArray, limit: int) -> int:
    """Objects of nodes (-1: none) as (index into ``nodes``, row) in ``out``; how many there are, even beyond it."""
    count = 0
    for i in range(len(nodes)):
        x = a.node[nodes[i], FIRST] if nodes[i] >= 0 else -1
        while x >= 0:
            if count < limit:
                out[count, 0], out[count, 1] = i, x
            count += 1
            x = a.obj[x, NEXT]
    return count


@jit
def pin(a: Any, rows: AnyArray, about: AnyArray, digests: AnyArray, codes: AnyArray) -> None:
    """Pin objects that are still what was looked up: ``about`` is (generation, group, column, form, grade, length).

    ``codes`` gets 0, ``MISSING``, or ``INTEGRITY`` where the books say of a row what they said of no such object.
    """
    for i in range(len(rows)):
        x = rows[i]
        if x < 0 or x >= a.scalars[TOP_OBJECT] or a.obj[x, STATE] != HELD or a.obj[x, GENERATION] != about[i, 0]:
            codes[i] = MISSING
            continue
        same = a.obj[x, GROUP] == about[i, 1] and a.obj[x, COLUMN] == about[i, 2] and a.obj[x, FORM] == about[i, 3]
        same &= a.obj[x, GRADE] == about[i, 4] and a.obj[x, LENGTH] == about[i, 5]
        node = a.obj[x, OBJ_NODE]
        if 0 <= node < a.scalars[TOP_NODE]:
            for k in range(4):
                same &= a.node64[node, DIGEST_AT + k] == digests[i, k]
        else:
            same = False
        if not same:
            codes[i] = INTEGRITY
            continue
        a.obj[x, PINS] += 1
        codes[i] = 0


@jit
def unpin(a: Any, rows: AnyArray, codes: AnyArray) -> None:
    """End of a read: of those that were pinned, whose code is 0."""
    for i in range(len(rows)):
        x = rows[i]
        if codes[i] == 0:
            a.obj[x, PINS] -= 1
            if a.obj[x, PINS] == 0 and a.obj[x, STATE] == DYING:
                free_object(a, x)


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


@jit
def take_many(a: Any, pages: AnyArray, out: AnyArray) -> None:
    """``take_pages`` for every entry of ``pages``."""
    for i in range(len(pages)):
        out[i] = take_pages(a, pages[i])


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
def chain_above(a: Any, n: int, out: AnyArray) -> None:
    """Rows of the nodes from the first one of a chain to ``n``, whose depth is known to be that of the last one."""
    while n >= 0 and a.node[n, DEPTH] >= 0:
        out[a.node[n, DEPTH]] = n
        n = a.node[n, PARENT]
