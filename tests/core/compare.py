"""The whole state of the core and of the reference as plain values, so that ``==`` compares everything."""

from __future__ import annotations

from typing import Any

import numpy as np
from tests.core.reference.arena import Slot
from tests.core.reference.index import Node
from tests.core.reference.manager import RefManager
from tests.core.reference.plans import Ticket
from tests.core.reference.sequence import RefSequence

from kvloom.core.arrays import CLOCK, FREE_NODES, FREE_PAGES, GHOST_HEAD
from kvloom.manager import CachedSequence, Manager
from kvloom.plan import CopyPlan, Explanation
from kvloom.types import ObjectState

State = dict[str, Any]
FREE = int(ObjectState.FREE)


def _chain(links: Any, head: int) -> list[int]:
    """A linked list of the core as a Python list (at most as long as the links)."""
    found: list[int] = []
    while head >= 0 and len(found) <= len(links):
        found.append(head)
        head = int(links[head])
    return found


def fast_state(manager: Manager) -> State:
    """Everything the core knows."""
    a = manager.arrays
    base = a.slot_base.tolist()
    groups = range(len(base) - 1)
    live, grade = a.state.tolist(), a.grade.tolist()
    owner = a.owner.tolist()
    slots = list(
        zip(
            live,
            [g if s != FREE else None for g, s in zip(grade, live, strict=True)],
            a.generation.tolist(),
            a.pins.tolist(),
            owner,
            [c if o >= 0 else None for c, o in zip(a.owner_col.tolist(), owner, strict=True)],
            strict=True,
        )
    )
    following = a.next.tolist()
    lru = [_chain(following, int(a.lru_head[g])) for g in groups]
    open_pages = [_chain(a.page_next, int(a.part_head[g])) for g in groups]
    return {
        "clock": int(a.scalars[CLOCK]),
        "slots": slots,
        "lru": [[(s - base[g], int(a.stamp[s])) for s in lru[g]] for g in groups],
        "pages": a.page_group.tolist(),
        "free pages": a.free_pages[: int(a.scalars[FREE_PAGES])].tolist(),
        "open pages": open_pages,
        "free slots": {p: _chain(following, int(a.page_free[p])) for listed in open_pages for p in listed},
        "nodes": _fast_nodes(manager),
        "ghosts": _chain(a.ghost_next, int(a.scalars[GHOST_HEAD])),
        "free nodes": a.free_nodes[: int(a.scalars[FREE_NODES])].tolist(),
        "counters": a.counters.tolist(),
        "plans": sorted(manager.tickets._open),
        "ignored": manager.tickets.ignored,
        "running": len(manager.running()),
    }


def _fast_nodes(manager: Manager) -> dict[int, Any]:
    a = manager.arrays
    used = np.flatnonzero(a.ntokens >= 0).tolist()
    columns, tokens, ntokens = a.columns.tolist(), a.tokens.tolist(), a.ntokens.tolist()
    parent, weight, first_child = a.parent.tolist(), a.weight.tolist(), a.first_child.tolist()
    first_checkpoint, sibling = a.first_checkpoint.tolist(), a.sibling_next.tolist()
    return {
        n: (
            parent[n],
            tuple(tokens[n][: ntokens[n]]),
            weight[n],
            columns[n],
            _chain(sibling, first_child[n]),
            _chain(sibling, first_checkpoint[n]),
        )
        for n in used
    }


def reference_state(ref: RefManager) -> State:
    """The same of the reference."""
    arena, index = ref.arena, ref.core.index
    base = np.concatenate([[0], np.cumsum([len(s) for s in arena.slots])]).tolist()
    column = {place: c for c, place in enumerate((g.index, i) for g in ref.core.groups for i in range(g.columns))}

    def slot_value(slot: Slot) -> tuple[Any, ...]:
        free = slot.state is ObjectState.FREE
        owner = (-1, None) if slot.owner is None else (slot.owner.number, column[slot.column])
        return int(slot.state), None if free else int(slot.grade), slot.generation, slot.holders, *owner

    def node_value(node: Node) -> tuple[Any, ...]:
        return (
            -1 if node.parent is None else node.parent.number,
            node.tokens,
            node.weight,
            [slot.index if isinstance(slot, Slot) else slot for slot in node.columns.values()],
            [n.number for n in node.children],
            [n.number for n in node.checkpoints],
        )

    return {
        "clock": arena.clock,
        "slots": [slot_value(slot) for slots in arena.slots for slot in slots],
        "lru": [[(s.index, s.released[0]) for s in arena.evictable(g)] for g in range(len(arena.slots))],
        "pages": [-1 if g is None else g for g in arena.page_group],
        "free pages": arena.free_pages,
        "open pages": arena.open_pages,
        "free slots": {
            p: [base[s.group] + s.index for s in reversed(arena.page_free[p])]
            for pages in arena.open_pages
            for p in pages
        },
        "nodes": {n.number: node_value(n) for n in sorted(index.all_nodes(), key=lambda n: n.number)},
        "ghosts": [n.number for n in index.ghosts],
        "free nodes": index.free,
        "counters": arena.counters,
        "plans": sorted(ref.tickets),
        "ignored": ref.ignored,
        "running": len(ref.running),
    }


def fast_sequence(manager: Manager, sequence: CachedSequence) -> State:
    """What a running sequence shows."""
    row = sequence.row
    rows = manager.rows
    tables = []
    for g in range(len(manager.spec.groups)):
        first, last = int(rows.first[row, g]), int(rows.last[row, g])
        offset, width = int(rows.offset[g]), int(rows.width[g])
        table = rows.table[row, offset : offset + width].tolist()
        held = {block: table[block % width] for block in range(first, last)}
        tables.append((first, last, held, sum(s >= 0 for s in table)))
    return {
        "tables": tables,
        "tokens": sequence.tokens.tolist(),
        "numbers": (sequence.reused, sequence.length, int(sequence.grade), sequence.node, sequence.restore.ticket),
        "flags": (sequence.broken, sequence.closed),
        "explanation": plain_explanation(sequence.explanation),
    }


def reference_sequence(ref: RefManager, sequence: RefSequence) -> State:
    """The same of the reference."""
    tables = []
    for group, held in zip(ref.core.groups, sequence.blocks, strict=True):
        end = 1 if group.snapshot else group.begun(sequence.length + sequence.pending)
        first = min(held, default=end)
        assert sorted(held) == list(range(first, end)), "a sequence holds a run of blocks up to its end"
        tables.append((first, end, {block: slot.index for block, slot in sorted(held.items())}, len(held)))
    return {
        "tables": tables,
        "tokens": sequence.tokens[: sequence.length],
        "numbers": (
            sequence.reused,
            sequence.length,
            int(sequence.grade),
            sequence.node.number,
            sequence.restore,
        ),
        "flags": (sequence.broken, sequence.closed),
        "explanation": plain_explanation(sequence.explanation),
    }


def plain_explanation(explanation: Explanation | None) -> Any:
    """An explanation as nested tuples."""
    if explanation is None:
        return None
    limits = tuple((x.reason, x.position, x.tier, x.kind, x.group) for x in explanation.limits)
    grade = None if explanation.grade is None else int(explanation.grade)
    return explanation.boundary, grade, explanation.prompt_tokens, explanation.known_tokens, limits


def fast_plan(plan: CopyPlan) -> Any:
    """A plan as a number and a list of copies."""
    copies = list(zip(plan.group.tolist(), plan.src.tolist(), plan.dst.tolist(), plan.entries.tolist(), strict=True))
    return plan.ticket, copies


def reference_plan(ticket: Ticket | None) -> Any:
    """The same of the reference."""
    if ticket is None:
        return 0, []
    return ticket.number, [
        (c.group, -1 if c.src is None else c.src.index, c.dst.index, -1 if c.entries is None else c.entries)
        for c in ticket.copies
    ]


def differences(fast: State, reference: State) -> list[str]:
    """One line per part that differs."""
    return [
        f"{key}:\n    core      {fast[key]}\n    reference {reference[key]}"
        for key in fast
        if fast[key] != reference[key]
    ]
