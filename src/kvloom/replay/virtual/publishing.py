"""Taking a unit into a virtual tier: whole, or not at all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvloom.replay.virtual.books import End, Node, array_of, asked, needed
from kvloom.tiers.values import Outcome, Published, Unit
from kvloom.types import AnyArray, IntArray

if TYPE_CHECKING:
    from kvloom.replay.virtual.tier import VirtualTier

_LIMIT = 1 << 62


@dataclass(frozen=True, slots=True)
class _Draft:
    """A unit that is being published.

    Attributes:
        known: nodes of its chain that are there; ``rows`` and ``depth`` of all their objects.
        about: int64 ``[m, 6]`` (node, group, column, form, grade, length) of what it brings.
        held: int64 ``[m]``, the row of each that is there already, else -1.
        fresh: indices of what is new or better.
        needs: int64 ``[k, 4]``.
    """

    unit: Unit
    names: list[bytes]
    known: list[Node]
    rows: IntArray
    depth: IntArray
    about: IntArray
    held: IntArray
    fresh: IntArray
    needs: IntArray


class Publisher:
    """Of one tier."""

    def __init__(self, tier: VirtualTier) -> None:
        self._tier = tier

    def publish(self, unit: Unit) -> Published:
        """See ``VirtualTier.publish``."""
        tier, books = self._tier, self._tier.books
        nodes = books.known(unit.layout, unit.digests)
        known = [node for node in nodes if node is not None]
        root = books.roots.get((unit.layout, unit.root))
        above = [root, *known[:-1]]
        same = all(node.parent is parent for node, parent in zip(known, above, strict=False))
        if not same or any(node is None for node in nodes[: len(known)]):
            return Published(Outcome.UNAVAILABLE, reason="digests of this chain belong to another one here")
        draft = self._draft(unit, known)
        brought, column = draft.about, draft.about[:, 2]
        new = draft.held < 0
        there = books.rows[draft.rows]
        for need in draft.needs:
            count = int(asked(need, there["group"], draft.depth, there["column"]).sum())
            count += int((asked(need, brought[:, 1], brought[:, 0], column) & new).sum())
            if count < need[3]:
                return Published(Outcome.INCOMPLETE)
        end = nodes[-1]
        old = None if end is None else end.unit
        if end is not None and old is not None and not len(draft.fresh) and np.array_equal(old.needs, draft.needs):
            tier.use(end)
            return Published(Outcome.KNOWN)
        return self._enter(draft)

    def _draft(self, unit: Unit, known: list[Node]) -> _Draft:
        books, raw = self._tier.books, unit.digests.tobytes()
        rows, depth = books.gather(known)
        about = np.array(
            [(o.node, o.group, o.column, int(o.form), int(o.grade), o.size) for o in unit.objects], np.int64
        ).reshape(-1, 6)
        there = books.rows[rows]
        keys = _keys(depth, there["group"], there["column"])
        wanted = _keys(about[:, 0], about[:, 1], about[:, 2])
        held = np.full(len(about), -1, np.int64)
        if len(rows) and len(about):
            order = np.argsort(keys)
            at = np.minimum(np.searchsorted(keys[order], wanted), len(rows) - 1)
            found = keys[order][at] == wanted
            held[found] = rows[order][at[found]]
        better = books.rows["grade"][np.maximum(held, 0)] < about[:, 4]
        size = len(raw) // len(unit.digests)
        return _Draft(
            unit,
            [raw[at : at + size] for at in range(0, len(raw), size)],
            known,
            rows,
            depth,
            about,
            held,
            np.flatnonzero((held < 0) | better),
            array_of((n.group, n.first_node, min(n.first_column, _LIMIT), n.count) for n in unit.needs),
        )

    def _enter(self, draft: _Draft) -> Published:
        tier, books, unit = self._tier, self._tier.books, draft.unit
        last, known = len(draft.names) - 1, draft.known
        tokens = [unit.segment] * last + [len(unit.tokens) - last * unit.segment]
        sizes = tier.object_bytes(draft.about[draft.fresh, 5])
        first = min(len(known), last)
        node_bytes = [tier.node_bytes(tokens[i], len(draft.needs) if i == last else 0) for i in range(first, last + 1)]
        more = int(sizes.sum()) + sum(node_bytes)
        there = books.rows[draft.rows]
        mine = needed(draft.needs, there["group"], draft.depth, there["column"])
        base = int(tier.object_bytes(there["length"][mine]).sum()) + sum(node.n_bytes for node in known)
        if not self._make_room(draft, mine, base, more):
            return Published(Outcome.NO_ROOM)
        # Making room may have taken the last unit of this namespace, and its root with it.
        root = books.roots.get((unit.layout, unit.root))
        if root is None:
            root = books.roots[unit.layout, unit.root] = Node(unit.layout, unit.root, None, -1)
        chain = list(known)
        for i in range(len(known), last + 1):
            above = chain[-1] if chain else root
            chain.append(books.new_node(unit.layout, draft.names[i], above, tokens[i], node_bytes[i - first]))
            tier.in_use += node_bytes[i - first]
            tier.ever.add(draft.names[i])
        end = chain[-1]
        if len(known) == last + 1:
            tier.in_use += node_bytes[0] - end.n_bytes
            end.tokens, end.n_bytes = tokens[last], node_bytes[0]
        self._hold_objects(draft, chain)
        before = end.unit
        rows, depth = books.gather(chain)
        there = books.rows[rows]
        wanted = needed(draft.needs, there["group"], depth, there["column"])
        books.rows["refs"][rows[wanted]] += 1
        size = int(tier.object_bytes(there["length"][wanted]).sum())
        end.unit = End(draft.needs, rows[wanted].astype(np.int32), size)
        books.units += before is None
        end.uses = 0 if before is None else end.uses + 1
        tier.order.use(end, hit=before is not None)
        if before is not None:
            tier.drop_refs(before.rows, chain)
        self._let_go(draft, mine)
        self._drop_unneeded(draft, chain)
        written = -(-more // tier.medium.run) * tier.medium.run
        tier.written += written
        for group, length in draft.about[draft.fresh][:, [1, 5]].tolist():
            tier.payload[group] += length
        return Published(Outcome.PUBLISHED, len(draft.fresh), written)

    def _make_room(self, draft: _Draft, mine: AnyArray, base: int, more: int) -> bool:
        """Evict until ``more`` bytes fit beside what the unit builds on, which is held until ``_let_go``."""
        tier, books = self._tier, self._tier.books
        limit = int(tier.medium.full * tier.capacity)
        if base + more > limit:
            return False
        books.rows["refs"][draft.rows[mine]] += 1
        for node in draft.known[-1:]:
            node.anchors += 1
        if tier.in_use + more > limit:
            goal = max(int(tier.medium.goal * tier.capacity), base + more)
            while tier.in_use + more > goal and tier.evict():
                pass
        return True

    def _let_go(self, draft: _Draft, mine: AnyArray) -> None:
        self._tier.drop_refs(draft.rows[mine], draft.known)
        for node in draft.known[-1:]:
            node.anchors -= 1

    def _hold_objects(self, draft: _Draft, chain: list[Node]) -> None:
        """Enter what is new, and put what is better in the place of what is there."""
        tier, books = self._tier, self._tier.books
        fresh, held = draft.about[draft.fresh], draft.held[draft.fresh]
        # What the unit does not need of what is there may have gone when room was made.
        gone = held >= 0
        if gone.any():
            alive = np.isin(held, np.concatenate([node.rows for node in chain]))
            held = np.where(alive, held, -1)
        new = np.flatnonzero(held < 0)
        rows = held.copy()
        rows[new] = books.take(len(new))
        table = books.rows
        tier.in_use -= int(tier.object_bytes(table["length"][held[held >= 0]]).sum())
        for name, column in (("group", 1), ("column", 2), ("form", 3), ("grade", 4), ("length", 5)):
            table[name][rows] = fresh[:, column]
        table["generation"][rows] += 1
        table["refs"][rows[new]] = 0
        table["depth"][rows] = fresh[:, 0]
        tier.in_use += int(tier.object_bytes(fresh[:, 5]).sum())
        order = new[np.argsort(fresh[new, 0], kind="stable")]
        at, begin = np.unique(fresh[order, 0], return_index=True)
        for node, first, end in zip(at.tolist(), begin, [*begin[1:], len(order)], strict=False):
            chain[node].rows = np.concatenate([chain[node].rows, rows[order[first:end]]])

    def _drop_unneeded(self, draft: _Draft, chain: list[Node]) -> None:
        """What it brought and nobody needs."""
        tier, books = self._tier, self._tier.books
        rows, _ = books.gather(chain)
        gone = books.rows["refs"][rows] <= 0
        tier.in_use -= int(tier.object_bytes(books.rows["length"][rows[gone]]).sum())
        books.free(chain, rows[gone])


def _keys(node: AnyArray, group: AnyArray, column: AnyArray) -> IntArray:
    """One number for every object of a chain."""
    made: IntArray = (node.astype(np.int64) << 44) | (group.astype(np.int64) << 24) | column.astype(np.int64)
    return made
