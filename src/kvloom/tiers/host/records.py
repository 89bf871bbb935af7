"""Compiled steps: rows of objects.

What loses its last count is gone at once, but for its pages while somebody reads them.
"""

from __future__ import annotations

from typing import Any

from kvloom.tiers.host.arrays import (
    BORN,
    COLUMN,
    DIGEST_AT,
    DYING,
    FIRST,
    FORM,
    FOUND,
    FREE_OBJECT,
    GENERATION,
    GRADE,
    GROUP,
    HELD,
    LENGTH,
    NEXT,
    OBJ_NODE,
    OBJECTS,
    PINS,
    REFS,
    RESERVED,
    RUN,
    STATE,
    TOP_NODE,
    TOP_OBJECT,
    UNUSED,
)
from kvloom.tiers.host.pages import give_pages, jit, take_pages
from kvloom.types import AnyArray

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
def take_many(a: Any, pages: AnyArray, out: AnyArray) -> None:
    """``take_pages`` for every entry of ``pages``."""
    for i in range(len(pages)):
        out[i] = take_pages(a, pages[i])


@jit
def drop_all_unneeded(a: Any) -> None:
    """Drop everything that has no counts."""
    for x in range(a.scalars[TOP_OBJECT]):
        if a.obj[x, STATE] == HELD and a.obj[x, REFS] == 0:
            drop_object(a, x)


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
