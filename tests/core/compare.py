"""The whole state of the core and of the reference as plain values, so that ``==`` compares everything."""

from __future__ import annotations

from itertools import chain
from typing import Any

import numpy as np
from tests.core.reference.arena import Slot
from tests.core.reference.core import PREFIX_KINDS
from tests.core.reference.index import Node
from tests.core.reference.manager import RefManager
from tests.core.reference.plans import Ticket
from tests.core.reference.policies import Cost, Counting, TwoQueues
from tests.core.reference.sequence import RefSequence

from kvloom.core.fields import (
    ANCHORS,
    AUX_HEAD,
    CLOCK,
    FIRST_CHECKPOINT,
    FIRST_CHILD,
    FOLDED,
    FREE_NODES,
    FREE_PAGES,
    GHOST_HEAD,
    GHOST_NEXT,
    GRADE,
    GRAVE_HEAD,
    IS_END,
    KEPT_HEAD,
    NEXT,
    NTOKENS,
    OWNER,
    OWNER_COL,
    PAGE_GROUP,
    PAGE_NEXT,
    PARENT,
    PART_HEAD,
    PINS,
    PRIORITY,
    QUEUE,
    QUEUE_SIZE,
    RESIDENT,
    REST_HEAD,
    SIBLING_NEXT,
    SLOT_BASE,
    SPENT,
    STATE,
    STEAL_HEAD,
    STEAL_NEXT,
    TICK,
    TRIAL,
    USES,
)
from kvloom.core.page_table import FIRST, LAST, SHARED
from kvloom.core.policies import HEAPS
from kvloom.errors import SequenceError
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
    base = a.group[:, SLOT_BASE].tolist()
    groups = range(len(base))
    slots = [
        (state, generation, pins, *((grade, owner, column if owner >= 0 else None) if state != FREE else ()))
        for (state, grade, pins, owner, column), generation in zip(
            a.slot[:, [STATE, GRADE, PINS, OWNER, OWNER_COL]].tolist(), a.generation.tolist(), strict=True
        )
    ]
    following = a.slot[:, NEXT].tolist()
    heads = (AUX_HEAD, KEPT_HEAD, REST_HEAD)
    auxiliary = [[(h, s) for h in heads for s in _chain(following, int(a.group[g, h]))] for g in groups]
    open_pages = [_chain(a.page[:, PAGE_NEXT], int(a.group[g, PART_HEAD])) for g in groups]
    emptiable = [_chain(a.page[:, STEAL_NEXT], int(a.group[g, STEAL_HEAD])) for g in groups]
    leaf_nodes = [n for q, row in enumerate(a.heap[:HEAPS]) for n in row[: int(a.policy[QUEUE_SIZE + q])].tolist()]
    leaves = [(int(a.node_stamp[n]), n) for n in leaf_nodes]
    return {
        "clock": int(a.scalars[CLOCK]),
        "slots": slots,
        "auxiliary": [[(heads.index(h), s - base[g], int(a.slot_stamp[s])) for h, s in auxiliary[g]] for g in groups],
        "leaves": sorted(leaves),
        "given up": [(s, int(a.slot_stamp[s])) for s in _chain(following, int(a.scalars[GRAVE_HEAD]))],
        "pages": a.page[:, PAGE_GROUP].tolist(),
        "free pages": a.free_pages[: int(a.scalars[FREE_PAGES])].tolist(),
        "open pages": open_pages,
        "emptiable": [[(p, int(a.page_stamp[p])) for p in listed] for listed in emptiable],
        "nodes": _fast_nodes(manager),
        "facts": _fast_facts(manager),
        "learned": _fast_learned(manager),
        "ghosts": _chain(a.node[:, GHOST_NEXT], int(a.scalars[GHOST_HEAD])),
        "free nodes": a.free_nodes[: int(a.scalars[FREE_NODES])].tolist(),
        "counters": a.counters.tolist(),
        "plans": sorted(manager.tickets._open),
        "ignored": manager.tickets.ignored,
        "running": len(manager.running()),
    }


def _fast_nodes(manager: Manager) -> dict[int, Any]:
    a = manager.arrays
    rows, trunk = a.node.tolist(), a.trunk.tolist()
    columns, tokens, stamps = a.columns.tolist(), a.tokens.tolist(), a.node_stamp.tolist()
    sibling = a.node[:, SIBLING_NEXT].tolist()
    return {
        n: (
            trunk[n][PARENT],
            tuple(tokens[n][: trunk[n][NTOKENS]]),
            row[RESIDENT],
            row[ANCHORS],
            stamps[n],
            columns[n],
            _chain(sibling, trunk[n][FIRST_CHILD]),
            _chain(sibling, row[FIRST_CHECKPOINT]),
        )
        for n, row in enumerate(rows)
        if trunk[n][NTOKENS] >= 0
    }


def _fast_facts(manager: Manager) -> dict[int, Any]:
    """What the policy knows of every node."""
    a = manager.arrays
    columns: list[int] = [] if manager.policy.name == "lru" else [FOLDED, IS_END, PRIORITY]
    columns += {"cost": [TICK, TRIAL], "s3-fifo": [QUEUE, SPENT]}.get(manager.policy.name, [])
    nodes = [n for n, count in enumerate(a.trunk[:, NTOKENS].tolist()) if count >= 0 and columns]
    since = a.order if manager.policy.name == "s3-fifo" else [0] * len(a.node)
    return {n: [int(a.node[n, USES]), int(since[n]), *a.heat[n, columns].tolist()] for n in nodes}


def _fast_learned(manager: Manager) -> Any:
    a = manager.arrays
    return a.trials.tolist() if manager.policy.name == "cost" else None


def _reference_facts(ref: RefManager) -> dict[int, Any]:
    def facts(node: Node) -> list[int]:
        known = [node.uses, node.since, node.folded, int(node.is_end), node.priority]
        if isinstance(ref.core.rules, Cost):
            known += [node.tick, -1 if node.trial is None else node.trial]
        return [*known, int(node.main), node.spent] if isinstance(ref.core.rules, TwoQueues) else known

    return {n.number: facts(n) for n in ref.core.index.all_nodes() if isinstance(ref.core.rules, Counting)}


def _reference_learned(ref: RefManager) -> Any:
    if not isinstance(ref.core.rules, Cost):
        return None
    r = ref.core.rules.reuse
    return [
        list(chain.from_iterable(rows)) for rows in zip(r.ended_reused, r.ended_expired, r.open, r.planned, strict=True)
    ]


def reference_state(ref: RefManager) -> State:
    """The same of the reference."""
    arena, index = ref.arena, ref.core.index
    base = np.concatenate([[0], np.cumsum([len(s) for s in arena.slots])]).tolist()
    column = {place: c for c, place in enumerate((g.index, i) for g in ref.core.groups for i in range(g.columns))}

    def slot_value(slot: Slot) -> tuple[Any, ...]:
        free = slot.state is ObjectState.FREE
        owner = (-1, None) if slot.owner is None else (slot.owner.number, column[slot.column])
        return int(slot.state), slot.generation, slot.holders, *(() if free else (int(slot.grade), *owner))

    def node_value(node: Node) -> tuple[Any, ...]:
        return (
            -1 if node.parent is None else node.parent.number,
            node.tokens,
            len(node.objects),
            node.anchors,
            node.stamp,
            [slot.index if isinstance(slot, Slot) else slot for slot in node.columns.values()],
            [n.number for n in node.children],
            [n.number for n in node.checkpoints],
        )

    return {
        "clock": arena.clock,
        "slots": [slot_value(slot) for slots in arena.slots for slot in slots],
        "auxiliary": [
            [(worth, s.index, s.released[0]) for worth in range(3) for s in arena.auxiliary(g, worth)]
            for g in range(len(arena.slots))
        ],
        "leaves": [(n.stamp, n.number) for n in index.leaves()],
        "given up": [(base[s.group] + s.index, when) for s, when in ref.core.graveyard],
        "pages": [-1 if page.group is None else page.group for page in arena.pages],
        "free pages": arena.free_pages,
        "open pages": arena.open_pages,
        "emptiable": [[(p, arena.pages[p].since) for p in listed] for listed in arena.emptiable],
        "nodes": {n.number: node_value(n) for n in sorted(index.all_nodes(), key=lambda n: n.number)},
        "facts": _reference_facts(ref),
        "learned": _reference_learned(ref),
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
        first, last, shared = (int(v) for v in rows.span[row, g, [FIRST, LAST, SHARED]])
        offset, width = (int(v) for v in rows.shape[g])
        table = rows.table[row, offset : offset + width].tolist()
        held = {block: table[block % width] for block in range(first, last)}
        tables.append((first, last, held, shared))
    return {
        "tables": tables,
        "tokens": _fast_tokens(sequence),
        "numbers": (sequence.reused, sequence.length, int(sequence.grade), sequence.node, sequence.restore.ticket),
        "flags": (sequence.broken, sequence.closed),
        "explanation": plain_explanation(sequence.explanation),
    }


def _fast_tokens(sequence: CachedSequence) -> list[int] | None:
    try:
        return sequence.tokens.tolist()
    except SequenceError:
        return None


def reference_sequence(ref: RefManager, sequence: RefSequence) -> State:
    """The same of the reference."""
    tables = []
    for group, held in zip(ref.core.groups, sequence.blocks, strict=True):
        end = 1 if group.snapshot else group.begun(sequence.length + sequence.pending)
        first = min(held, default=end)
        assert sorted(held) == list(range(first, end)), "a sequence holds a run of blocks up to its end"
        published = 0 if group.kind not in PREFIX_KINDS else sequence.committed * group.columns
        slots = {block: slot.index for block, slot in sorted(held.items())}
        tables.append((first, end, slots, published))
    return {
        "tables": tables,
        "tokens": None if sequence.forgetful else sequence.tokens[: sequence.length],
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
    """One line per part that differs; of lists and dictionaries the entries that do."""
    found = []
    for key in fast:
        one, other = fast[key], reference[key]
        if one == other:
            continue
        if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
            one, other = dict(enumerate(one)), dict(enumerate(other))
        if isinstance(one, dict):
            differing = [k for k in {**one, **other} if one.get(k) != other.get(k)]
            one, other = ({k: part.get(k) for k in differing} for part in (one, other))
        found.append(f"{key}:\n    core      {one}\n    reference {other}")
    return found
