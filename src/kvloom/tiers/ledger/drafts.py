"""Taking a unit into a ledger: whole, or not at all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvloom.tiers.ledger.nodes import End, Node, array_of, asked, needed
from kvloom.tiers.values import Outcome, Published, Unit
from kvloom.types import AnyArray, IntArray

if TYPE_CHECKING:
    from kvloom.tiers.ledger.units import Ledger

_LIMIT = 1 << 62


@dataclass(frozen=True, slots=True)
class Draft:
    """A unit that is being published.

    Attributes:
        known: nodes of its chain that are there.
        about: int64 ``[m, 6]`` (node, group, column, form, grade, length) of what it brings.
        held: int64 ``[m]``, the row of each that is there already, else -1.
        fresh: indices of what is new or better; ``serials`` numbers their payloads.
        needs: int64 ``[k, 4]``.
        kept: rows of what is there and needed, held until it ends; ``kept_serials`` as they were.
        wanted: int64 ``[w, 4]`` (node, group, column, number of its payload) of all objects that it asks for.
        node_bytes: of the nodes from ``len(known)`` on, or of the last one.
        record: bytes of the unit besides.
        more: bytes of all that is new.
        serial: number of this publication.
    """

    unit: Unit
    names: list[bytes]
    known: list[Node]
    about: IntArray
    held: IntArray
    fresh: IntArray
    serials: IntArray
    needs: IntArray
    kept: IntArray
    kept_serials: IntArray
    wanted: IntArray
    node_bytes: list[int]
    record: int
    more: int
    serial: int

    def tokens_of(self, i: int) -> int:
        """How many tokens node ``i`` has."""
        last = len(self.names) - 1
        return self.unit.segment if i < last else len(self.unit.tokens) - last * self.unit.segment


def begin(ledger: Ledger, unit: Unit) -> Draft | Published:
    """See ``Ledger.begin``."""
    nodes = ledger.known(unit.layout, unit.digests)
    known = [node for node in nodes if node is not None]
    above = [ledger.roots.get((unit.layout, unit.root)), *known[:-1]]
    same = all(node.parent is parent for node, parent in zip(known, above, strict=False))
    if not same or any(node is None for node in nodes[: len(known)]):
        return Published(Outcome.UNAVAILABLE, reason="digests of this chain belong to another one here")
    rows, depth = ledger.gather(known)
    there, needs = ledger.rows[rows], array_of(
        (n.group, n.first_node, min(n.first_column, _LIMIT), n.count) for n in unit.needs
    )  # fmt: skip
    about = np.array(
        [(o.node, o.group, o.column, int(o.form), int(o.grade), o.size) for o in unit.objects], np.int64
    ).reshape(-1, 6)
    held = _held(rows, _keys(depth, there["group"], there["column"]), _keys(*about[:, :3].T))
    node, group, column = about[held < 0, :3].T
    for need in needs:
        count = asked(need, there["group"], depth, there["column"]).sum() + asked(need, group, node, column).sum()
        if count < need[3]:
            return Published(Outcome.INCOMPLETE)
    fresh = np.flatnonzero((held < 0) | (ledger.rows["grade"][np.maximum(held, 0)] < about[:, 4]))
    end = nodes[-1]
    old = None if end is None else end.unit
    if end is not None and old is not None and not len(fresh) and np.array_equal(old.needs, needs):
        ledger.use(end)
        return Published(Outcome.KNOWN)
    mine, new = needed(needs, there["group"], depth, there["column"]), needed(needs, group, node, column)
    serials = ledger.number(len(fresh))
    better = _held(serials, held[fresh], rows[mine])
    kept_serials = there["serial"][mine]
    now = np.where(better >= 0, better, kept_serials)
    wanted = np.concatenate(
        [
            np.stack([depth[mine], there["group"][mine], there["column"][mine], now], axis=1),
            np.column_stack([about[held < 0, :3], serials[held[fresh] < 0]])[new],
        ]
    )
    accounts, n = ledger.accounts, len(nodes)
    tokens = [unit.segment] * (n - 1) + [len(unit.tokens) - (n - 1) * unit.segment]
    first = min(len(known), n - 1)
    node_bytes = [accounts.node_bytes(tokens[i], len(needs) if i == n - 1 else 0) for i in range(first, n)]
    record = accounts.unit_bytes(n, len(unit.tokens), len(needs), len(wanted))
    draft = Draft(
        unit,
        [digest.tobytes() for digest in unit.digests],
        known,
        about,
        held,
        fresh,
        serials,
        needs,
        rows[mine],
        kept_serials,
        wanted,
        node_bytes,
        record,
        int(accounts.object_bytes(about[fresh, 5]).sum()) + sum(node_bytes) + record,
        int(ledger.number(1)[0]),
    )
    base = int(accounts.object_bytes(there["length"][mine].astype(np.int64)).sum())
    base += sum(node.n_bytes for node in known)
    return draft if _make_room(ledger, draft, base) else Published(Outcome.NO_ROOM)


def _held(values: IntArray, keys: IntArray, wanted: IntArray) -> IntArray:
    """The value of each key that is there, else -1."""
    held = np.full(len(wanted), -1, np.int64)
    if len(keys) and len(wanted):
        order = np.argsort(keys)
        at = np.minimum(np.searchsorted(keys[order], wanted), len(keys) - 1)
        found = keys[order][at] == wanted
        held[found] = values[order][at[found]]
    return held


def _make_room(ledger: Ledger, draft: Draft, base: int) -> bool:
    """Evict until it fits beside what it builds on; False when it cannot, and then nothing has changed."""
    if base + draft.more > ledger.limit:
        return False
    ledger.rows["refs"][draft.kept] += 1
    for node in draft.known[-1:]:
        node.anchors += 1
    if ledger.in_use + draft.more > ledger.limit:
        goal = max(ledger.goal, base + draft.more)
        while ledger.in_use + draft.more > goal and ledger.evict():
            pass
    ledger.reserved += draft.more
    return True


def abandon(ledger: Ledger, draft: Draft) -> None:
    """See ``Ledger.abandon``."""
    _let_go(ledger, draft, draft.kept[ledger.rows["serial"][draft.kept] == draft.kept_serials])
    if draft.known:
        ledger.in_use -= ledger.prune(draft.known[-1])


def _let_go(ledger: Ledger, draft: Draft, kept: IntArray) -> None:
    ledger.reserved -= draft.more
    ledger.drop_refs(kept, draft.known)
    for node in draft.known[-1:]:
        node.anchors -= 1


def commit(ledger: Ledger, draft: Draft) -> Published:
    """See ``Ledger.commit``."""
    if (ledger.rows["serial"][draft.kept] != draft.kept_serials).any():
        abandon(ledger, draft)
        return Published(Outcome.INCOMPLETE)
    chain = _chain(ledger, draft)
    end = chain[-1]
    _hold_objects(ledger, draft, chain)
    before = end.unit
    rows, depth = ledger.gather(chain)
    there = ledger.rows[rows]
    wanted = needed(draft.needs, there["group"], depth, there["column"])
    ledger.rows["refs"][rows[wanted]] += 1
    size = int(ledger.accounts.object_bytes(there["length"][wanted].astype(np.int64)).sum())
    end.unit = End(draft.needs, rows[wanted].astype(np.int32), size, draft.record, draft.serial)
    ledger.in_use += draft.record
    ledger.units += before is None
    end.uses = 0 if before is None else end.uses + 1
    ledger.order.use(end, hit=before is not None)
    if before is not None:
        ledger.in_use -= before.record
        ledger.accounts.unit_gone(end, before)
        ledger.drop_refs(before.rows, chain)
    _let_go(ledger, draft, draft.kept)
    rows, _ = ledger.gather(chain)
    ledger.drop_objects(rows[ledger.rows["refs"][rows] <= 0], chain)  # what it brought and nobody needs
    return Published(Outcome.PUBLISHED, len(draft.fresh), draft.more)


def _chain(ledger: Ledger, draft: Draft) -> list[Node]:
    """The nodes of the unit; those that are new are entered."""
    unit, known = draft.unit, draft.known
    # Making room may have taken the last unit of this namespace, and its root with it.
    root = ledger.roots.get((unit.layout, unit.root))
    if root is None:
        root = ledger.roots[unit.layout, unit.root] = Node(unit.layout, unit.root, None, -1)
    chain = list(known)
    for i in range(len(known), len(draft.names)):
        above, size, count = chain[-1] if chain else root, draft.node_bytes[i - len(known)], draft.tokens_of(i)
        node = ledger.new_node(unit.layout, draft.names[i], above, count, size)
        if ledger.keeps_tokens:
            node.text = unit.tokens[i * unit.segment : i * unit.segment + count].copy()
        ledger.in_use += size
        chain.append(node)
    if len(known) == len(chain):
        end = chain[-1]
        ledger.in_use += draft.node_bytes[0] - end.n_bytes
        end.n_bytes = draft.node_bytes[0]
    return chain


def _hold_objects(ledger: Ledger, draft: Draft, chain: list[Node]) -> None:
    """Enter what is new, and put what is better in the place of what is there."""
    fresh, held, table = draft.about[draft.fresh], draft.held[draft.fresh], ledger.rows
    # What the unit does not need of what is there may have gone when room was made.
    if (held >= 0).any():
        held = np.where(np.isin(held, np.concatenate([node.rows for node in chain])), held, -1)
    new, rows = np.flatnonzero(held < 0), held.copy()
    ledger.payloads_gone(held[held >= 0], chain)
    rows[new] = ledger.take(len(new))
    table = ledger.rows  # it may have grown
    for name, column in (("group", 1), ("column", 2), ("form", 3), ("grade", 4), ("length", 5)):
        table[name][rows] = fresh[:, column]
    table["serial"][rows] = draft.serials
    table["refs"][rows[new]] = 0
    table["depth"][rows] = fresh[:, 0]
    ledger.in_use += int(ledger.accounts.object_bytes(fresh[:, 5]).sum())
    order = new[np.argsort(fresh[new, 0], kind="stable")]
    at, begins = np.unique(fresh[order, 0], return_index=True)
    for node, first, after in zip(at.tolist(), begins, [*begins[1:], len(order)], strict=False):
        chain[node].rows = np.concatenate([chain[node].rows, rows[order[first:after]]])


def _keys(node: AnyArray, group: AnyArray, column: AnyArray) -> IntArray:
    """One number for every object of a chain."""
    made: IntArray = (node.astype(np.int64) << 44) | (group.astype(np.int64) << 24) | column.astype(np.int64)
    return made
