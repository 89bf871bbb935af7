"""One integer seed -> a random life of a manager with a colder tier behind it, every plan compared with plain Python.

The colder tier is a dictionary: (salt, tokens up to the end of a row) -> {(group, column): grade}.  What its objects
contain follows from the tokens, so a toy engine finds out when a load puts something into a wrong slot, and a store
when it takes something from one.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
from tests.core.cold_rules import Presence, Rules, Tokens, array, stored_objects
from tests.core.toy_engine import Entry, ToyEngine
from tests.core.workshop import cut_statically
from tests.core.worlds import World

from kvloom.config import Device
from kvloom.core.fields import CARRIED, COL_BASE, GRADE, NTOKENS, OWNER, PARENT, PINS, SLOT_BASE, STATE
from kvloom.core.geometry import fits
from kvloom.core.lifecycle import COMMITTED, LOADING, QUARANTINED
from kvloom.core.policies import resumable
from kvloom.errors import CapacityError
from kvloom.manager import CachedSequence, Manager
from kvloom.plan import StoredObjects, TransferPlan
from kvloom.types import Grade

SALTS = (b"", b"tenant")
GARBAGE: Entry = (-1, int(Grade.CANONICAL))


@dataclass
class Load:
    """A load in progress."""

    plan: TransferPlan
    tokens: Tokens
    salt: bytes
    floor: Grade
    arriving: bool = False


@dataclass
class Store:
    """A store in progress."""

    plan: TransferPlan
    tokens: Tokens
    salt: bytes


@dataclass
class Seen:
    """What happened, so that tests can see that something did."""

    loads: int = 0
    full: int = 0
    partial: int = 0
    nothing: int = 0
    stores: int = 0
    deeper: int = 0
    refused: int = 0
    arriving: int = 0
    broken: int = 0


class ColdLife:
    """A manager, a toy engine and a dictionary for a colder tier."""

    def __init__(self, world: World, seed: int, policy: str = "cost") -> None:
        self.world, self.random = world, random.Random(seed)
        with cut_statically() if world.split else nullcontext():
            self.manager = Manager(
                world.spec,
                [Device(world.arena)],
                max_sequences=world.max_sequences,
                max_nodes=world.max_nodes,
                policy=policy,
            )
        self.engine = ToyEngine(self.manager)
        self.rules = Rules(self.manager)
        self.stored: dict[bytes, Presence] = {salt: {} for salt in SALTS}
        self.running: list[tuple[CachedSequence, bytes]] = []
        self.loads: list[Load] = []
        self.stores: list[Store] = []
        self.ended: list[TransferPlan] = []
        self.nodes: dict[Tokens, int] = {}
        self.last = ((1, 1), SALTS[0])
        self.seen = Seen()
        segment = world.spec.segment_tokens
        most = min(7 * segment, (world.spec.max_positions or 10**6) - 2)
        self.longest = next(n for n in range(most, 0, -1) if fits(world.spec, self.manager.geometry, n))
        self.streams = [self._draw(self.longest + 4)]
        for _ in range(4):
            leave = self.random.randrange(1, self.longest)
            self.streams.append(self.streams[0][:leave] + self._draw(self.longest + 4 - leave))

    def _draw(self, count: int) -> Tokens:
        return tuple(self.random.randrange(20) for _ in range(count))

    def prompt(self) -> Tokens:
        """Of a few streams that share prefixes; often with an end that others had."""
        segment = self.world.spec.segment_tokens
        length = self.random.choice(
            [self.random.randint(2, self.longest + 2), self.random.randint(0, self.longest // segment) * segment + 2]
            + [x for x in (segment + 1, 2 * segment + 3, 3 * segment + 2) if x <= self.longest]
        )
        return self.random.choice(self.streams)[:length]

    # ---------------------------------------------------------------- what is there

    def on_device(self, salt: bytes) -> Presence:
        """Every object of a namespace on the device, from the raw arrays."""
        a = self.manager.arrays
        namespace = self.manager.namespaces.find(salt, ())
        found: Presence = {}
        self.nodes = {}
        if namespace is None:
            return found
        tokens: dict[int, Tokens | None] = {-1: None, namespace.root: ()}

        def of(n: int) -> Tokens | None:
            if n not in tokens:
                above = of(int(a.trunk[n, PARENT]))
                tokens[n] = None if above is None else (*above, *a.tokens[n, : a.trunk[n, NTOKENS]].tolist())
            return tokens[n]

        for n in np.flatnonzero(a.trunk[:, NTOKENS] > 0).tolist():
            mine = of(n)
            if mine is None:
                continue
            found[mine] = {}
            self.nodes[mine] = n
            for group in self.rules.groups:
                for column in range(group.columns):
                    local = int(a.columns[n, a.group[group.index, COL_BASE] + column])
                    s = int(a.group[group.index, SLOT_BASE]) + local
                    if local >= 0 and a.slot[s, STATE] == COMMITTED:
                        found[mine][(group.index, column)] = int(a.slot[s, GRADE])
        return found

    def known(self, device: Presence, tokens: Tokens) -> list[int]:
        """Positions that the device's index can name: whole segments on a path, and checkpoints with objects."""
        segment, depth = self.world.spec.segment_tokens, 0
        while (depth + 1) * segment <= len(tokens) and tokens[: (depth + 1) * segment] in device:
            depth += 1
        positions = [k * segment for k in range(1, depth + 1)]
        return positions + [
            p for p in range(1, len(tokens) + 1) if p % segment and p // segment <= depth and device.get(tokens[:p])
        ]

    def of_chain(self, salt: bytes, tokens: Tokens) -> StoredObjects:
        """What is stored of a chain, in any order."""
        items = [
            (row, group, column, grade)
            for row, end in enumerate(self.rules.rows(tokens))
            for (group, column), grade in self.stored[salt].get(tokens[:end], {}).items()
        ]
        self.random.shuffle(items)
        return stored_objects(items)

    # ---------------------------------------------------------------- steps

    def run(self, steps: int) -> None:
        """Take ``steps`` random steps; the books are checked after each."""
        menu: list[tuple[Callable[[], Any], int]] = [
            (self.stock, 8),
            (self.load, 14),
            (self.finish_load, 6),
            (self.arrive, 4),
            (self.open, 8),
            (self.go_on, 14),
            (self.store, 8),
            (self.finish_store, 6),
            (self.close, 7),
            (self.forget, 3),
            (self.late_end, 2),
        ]
        acts, weights = zip(*menu, strict=True)
        for _ in range(steps):
            self.random.choices(acts, weights)[0]()
            self.check()

    def check(self) -> None:
        """The books, and that nothing is held but by what is open."""
        manager = self.manager
        manager.check_integrity()
        self.engine.check_grades()
        assert len(manager.transfers) == len(self.loads) + len(self.stores)
        a = manager.arrays
        loading = int((a.slot[:, STATE] == LOADING).sum())
        assert loading == sum(len(load.plan) for load in self.loads if not load.arriving)
        stats = manager.stats()
        assert stats.used <= stats.arena <= stats.cap

    def stock(self) -> None:
        """Something more is in the colder tier: all that a boundary needs, or pieces."""
        prompt, salt = self.prompt(), self.random.choice(SALTS)
        tokens, self.last = prompt[:-1], (prompt, salt)
        position = self.random.choice(self.rules.rows(tokens))
        density = self.random.choice([1.0, 1.0, 0.95, 0.6])
        grade = self.random.choice([Grade.CANONICAL, Grade.CANONICAL, Grade.FAITHFUL, Grade.APPROXIMATE])
        for row, group, column in self.rules.needed(position):
            if self.random.random() < density:
                there = self.stored[salt].setdefault(tokens[: self.rules.row_end(row, position)], {})
                there[(group, column)] = max(int(grade), there.get((group, column), -1))

    def load(self) -> None:
        """Plan a load; the plan must be what the presence sets say."""
        prompt, salt = self.last if self.random.random() < 0.5 else (self.prompt(), self.random.choice(SALTS))
        floor = self.random.choice([Grade.CANONICAL, Grade.FAITHFUL, Grade.FAITHFUL, Grade.APPROXIMATE])
        tokens, stored, device = prompt[:-1], self.stored[salt], self.on_device(salt)
        unkept = self.manager.transfers.unkept
        try:
            plan = self.manager.colder.plan_load(array(tokens), self.of_chain(salt, tokens), salt=salt, floor=floor)
        except CapacityError:
            assert salt not in {ns.salt for ns in self.manager.namespaces}
            return
        reused = self.rules.best(tokens, floor, self.known(device, tokens), device)
        position = self.rules.best(tokens, floor, self.rules.rows(tokens), device, stored)
        wanted = {
            (*place, self.rules.grade(stored, tokens, position, place))
            for place in self.rules.needed(position)
            if self.rules.grade(device, tokens, position, place) < floor
        }
        if plan is None:
            if position > reused and wanted and fits(self.world.spec, self.manager.geometry, len(prompt)):
                assert self.manager.transfers.unkept == unkept + 1
                self.seen.refused += 1
            return
        assert (plan.position, position > reused) == (position, True)
        items = list(zip(*(x.tolist() for x in (plan.row, plan.group, plan.column, plan.grade)), strict=True))
        assert len(items) == len(set(items))
        assert set(items) == wanted
        self._check_needs(plan, position)
        self._check_slots(plan, LOADING)
        self.loads.append(Load(plan, tokens, salt, floor))
        self.seen.loads += 1
        if self.random.random() < 0.6:
            self.finish_load()

    def _check_needs(self, plan: TransferPlan, position: int) -> None:
        named = []
        for group, row, column, count in plan.needs.tolist():
            columns = self.rules.groups[group].columns
            first = row * columns + column
            named += [(b // columns, group, b % columns) for b in range(first, first + count)]
        assert sorted(named) == sorted(self.rules.needed(position))

    def _check_slots(self, plan: TransferPlan, state: int) -> None:
        a = self.manager.arrays
        slots = a.group[plan.group, SLOT_BASE] + plan.slot
        assert len(set(slots.tolist())) == len(slots)
        assert (a.slot[slots, STATE] == state).all()
        assert (a.slot[slots, PINS] > 0).all()

    def finish_load(self) -> None:
        """A load ends: well, in part, or not at all.  After a full one the prompt resumes there."""
        if not self.loads:
            return
        load = self.loads.pop(self.random.randrange(len(self.loads)))
        if load.arriving:
            self._finish_arriving(load)
            return
        plan, tokens, salt = load.plan, load.tokens, load.salt
        self._check_slots(plan, LOADING)
        odds = self.random.choice([1.0, 1.0, 1.0, 0.8, 0.3, 0.0])
        good = np.array([self.random.random() < odds for _ in range(len(plan))], dtype=np.bool_)
        device = self.on_device(salt)
        places = list(zip(*(x.tolist() for x in (plan.row, plan.group, plan.column)), strict=True))
        for place, slot, grade, arrived in zip(places, plan.slot.tolist(), plan.grade.tolist(), good, strict=True):
            content = self.rules.content(tokens, plan.position, place, grade)
            self.engine.arena.slots[(place[1], slot)] = content if arrived else [GARBAGE] * len(content)
        self.manager.colder.finish_load(plan, good)
        self.ended = [*self.ended[-3:], plan]
        self.manager.check_integrity()
        after = self.on_device(salt)
        for place, grade, arrived in zip(places, plan.grade.tolist(), good, strict=True):
            before = self.rules.grade(device, tokens, plan.position, place)
            now = self.rules.grade(after, tokens, plan.position, place)
            assert now == (max(before, grade) if arrived else before)
        for known, n in self.nodes.items():
            assert resumable(self.manager.arrays, n) == self.rules.resumable(known, len(known), 0, after)
        self.seen.full += bool(good.all())
        self.seen.partial += bool(good.any() and not good.all())
        self.seen.nothing += not good.any()
        self._open((*tokens, 1), salt, load.floor, at_least=self._still(load, after) if good.all() else 0)

    def arrive(self) -> None:
        """The objects of a load are published while it goes on; its prompt resumes there at once."""
        waiting = [load for load in self.loads if not load.arriving]
        if not waiting:
            return
        load = self.random.choice(waiting)
        plan, tokens, salt = load.plan, load.tokens, load.salt
        device = self.on_device(salt)
        for place, slot, grade in self._items(plan):
            self.engine.arena.slots[(place[1], slot)] = self.rules.content(tokens, plan.position, place, grade)
        ignored = self.manager.transfers.ignored
        self.manager.colder.begin_arriving(plan)
        load.arriving = True
        self.manager.check_integrity()
        after = self.on_device(salt)
        for place, _, grade in self._items(plan):
            before = self.rules.grade(device, tokens, plan.position, place)
            assert self.rules.grade(after, tokens, plan.position, place) == max(before, grade)
        assert self.manager.transfers.ignored == ignored
        if self.random.random() < 0.2:
            self.manager.colder.begin_arriving(plan)
            assert self.manager.transfers.ignored == ignored + 1
        self.seen.arriving += 1
        self._open((*tokens, 1), salt, load.floor, at_least=self._still(load, after))

    def _items(self, plan: TransferPlan) -> list[tuple[tuple[int, int, int], int, int]]:
        """((row, group, column), slot, grade) of every object."""
        places = zip(*(x.tolist() for x in (plan.row, plan.group, plan.column)), strict=True)
        return list(zip(places, plan.slot.tolist(), plan.grade.tolist(), strict=True))

    def _finish_arriving(self, load: Load) -> None:
        """What did not come is quarantined slot by slot, and so is who reads it; everything else stays as it is."""
        plan, tokens, salt = load.plan, load.tokens, load.salt
        a = self.manager.arrays
        slots = a.group[plan.group, SLOT_BASE] + plan.slot
        assert (a.slot[slots, PINS] > 0).all(), "a slot that a late write may reach was given away"
        odds = self.random.choice([1.0, 1.0, 0.8, 0.3, 0.0])
        good = np.array([self.random.random() < odds for _ in range(len(plan))], dtype=np.bool_)
        device, owned = self.on_device(salt), a.slot[slots, OWNER] >= 0
        bad = {(place[1], slot) for (place, slot, _), here in zip(self._items(plan), good, strict=True) if not here}
        readers = {id(sequence) for sequence, _ in self.running if sequence.broken or self._reads(sequence) & bad}
        if self.random.random() < 0.5:  # the end comes later than what it was
            self.manager.colder.withdraw(plan, good)
            self.manager.check_integrity()
            assert (a.slot[slots, PINS] > 0).all(), "a slot that a late write may reach was given away"
            assert (a.slot[slots[~good], STATE] == QUARANTINED).all()
        for group, slot in bad:
            self.engine.arena.slots[(group, slot)] = [GARBAGE] * len(self.engine.arena.slots[(group, slot)])
        self.manager.colder.finish_load(plan, good)
        self.ended = [*self.ended[-3:], plan]
        self.manager.check_integrity()
        after = self.on_device(salt)
        for (place, _, _), here, mine in zip(self._items(plan), good, owned, strict=True):
            before = self.rules.grade(device, tokens, plan.position, place)
            now = self.rules.grade(after, tokens, plan.position, place)
            assert now == (before if here or not mine else -1)
        assert {id(sequence) for sequence, _ in self.running if sequence.broken} == readers
        self.seen.broken += len(readers)
        for pair in [pair for pair in self.running if pair[0].broken]:
            pair[0].close()
            self.running.remove(pair)

    def _reads(self, sequence: CachedSequence) -> set[tuple[int, int]]:
        found = set()
        for g in range(len(self.rules.groups)):
            table = sequence.block_table(g)
            blocks = range(sequence.first_block(g), sequence.num_blocks(g))
            found |= {(g, int(table[b % len(table)])) for b in blocks}
        return found

    def _still(self, load: Load, device: Presence) -> int:
        """The position of a load that arrived, unless what it built on was cleared or dropped meanwhile."""
        at = load.plan.position
        return at if self.rules.resumable(load.tokens, at, load.floor, device) else 0

    def open(self) -> None:
        """A request."""
        self._open(self.prompt(), self.random.choice(SALTS), self.random.choice(list(Grade)), 0)

    def _open(self, prompt: Tokens, salt: bytes, floor: Grade, at_least: int) -> None:
        device, tokens = self.on_device(salt), prompt[:-1]
        best = self.rules.best(tokens, floor, self.known(device, tokens), device)
        alone = not self.running and not self.loads and not self.stores
        try:
            sequence = self.engine.open(prompt, salt=salt, floor=floor)
        except CapacityError as refused:
            if alone and not refused.never_fits:
                raise
            return
        assert sequence.reused == best
        assert best >= at_least
        self.seen.deeper += best > at_least > 0
        if sequence.reused:
            assert sequence.grade >= floor
        if len(self.running) < self.world.max_sequences - 1 and self.random.random() < 0.6:
            self.running.append((sequence, salt))
        else:
            sequence.close()

    def go_on(self) -> None:
        """A sequence computes something; the toy engine checks everything that it reads."""
        if not self.running:
            return
        sequence, _ = self.random.choice(self.running)
        segment = self.world.spec.segment_tokens
        count = self.random.choice([1, 2, segment - sequence.length % segment, segment - sequence.length % segment])
        if sequence.length + count > self.longest:
            return
        known = [s for s in self.streams if s[: sequence.length] == tuple(sequence.tokens.tolist())]
        more = self.random.choice(known)[sequence.length :][:count] if known else self._draw(count)
        try:
            self.engine.step(sequence, more, self.random.choice([Grade.CANONICAL, Grade.CANONICAL, Grade.FAITHFUL]))
        except CapacityError:
            return
        if self.random.random() < 0.4:
            self.engine.finish(sequence.checkpoint())

    def store(self) -> None:
        """Plan to store the end of a sequence: exactly what its boundary needs and the tier has not as good."""
        if not self.running:
            return
        sequence, salt = self.random.choice(self.running)
        tokens = tuple(sequence.tokens.tolist())
        if not tokens:
            return
        floor = self.random.choice(list(Grade))
        stored, device = self.stored[salt], self.on_device(salt)
        plan = self.manager.colder.plan_offload(array(tokens), self.of_chain(salt, tokens), salt=salt, floor=floor)
        position = self.rules.best(tokens, floor, self.rules.rows(tokens), device, stored)
        lacking = {
            (*place, grade)
            for place in self.rules.needed(position)
            if (grade := self.rules.grade(device, tokens, position, place)) >= floor
            and grade > self.rules.grade(stored, tokens, position, place)
        }
        if plan is None:
            assert not lacking
            return
        assert plan.position == position
        items = list(zip(*(x.tolist() for x in (plan.row, plan.group, plan.column, plan.grade)), strict=True))
        assert len(items) == len(set(items))
        assert set(items) == lacking
        self._check_needs(plan, position)
        self._check_slots(plan, COMMITTED)
        self.stores.append(Store(plan, tokens, salt))
        self.seen.stores += 1
        if self.random.random() < 0.5:
            self.finish_store()

    def finish_store(self) -> None:
        """A store ends; until then its slots held what they held when it was planned."""
        if not self.stores:
            return
        store = self.stores.pop(self.random.randrange(len(self.stores)))
        plan, tokens = store.plan, store.tokens
        for row, g, column, grade, slot in zip(
            *(x.tolist() for x in (plan.row, plan.group, plan.column, plan.grade, plan.slot)), strict=True
        ):
            want = self.rules.content(tokens, plan.position, (row, g, column), grade)
            have = self.engine.arena.read(g, slot)
            first = 0
            if not self.rules.groups[g].snapshot:
                block = row * self.rules.groups[g].columns + column
                first = self.engine._first_entry(self.rules.groups[g], plan.position) - block * len(want)
            for wanted, had in list(zip(want, have, strict=True))[max(0, first) :]:
                if wanted is not None:
                    assert had is not None
                    assert had[0] == wanted[0]
                    assert had[1] >= wanted[1], "a store calls something better than it was made"
            end = tokens[: self.rules.row_end(row, plan.position)]
            self.stored[store.salt].setdefault(end, {})[(g, column)] = grade
        self.manager.colder.finish_store(plan)
        self.ended = [*self.ended[-3:], plan]

    def close(self) -> None:
        """A sequence ends."""
        if self.running:
            self.running.pop(self.random.randrange(len(self.running)))[0].close()

    def forget(self) -> None:
        """Objects go: evicted, cleared, dropped."""
        what = self.random.randrange(4)
        if what < 2:
            self.manager.evict(self.random.choice([1, 4096, 20_000]))
        elif what == 2:
            self.manager.clear(self.random.choice([None, *SALTS]))
        else:
            group = self.random.choice(self.world.spec.groups)
            bad = self.random.random() < 0.3
            self.manager.drop(group.name, self.random.choice([None, 0, group.block_tokens]), quarantine=bad)
            for pair in [pair for pair in self.running if pair[0].broken]:
                pair[0].close()
                self.running.remove(pair)

    def late_end(self) -> None:
        """An end of a transfer that ended before is counted and does nothing (C5)."""
        if self.ended:
            plan, ignored = self.random.choice(self.ended), self.manager.transfers.ignored
            held = self.manager.arrays.slot[:, PINS].sum()
            self.manager.colder.finish_load(plan, np.ones(len(plan), dtype=np.bool_))
            self.manager.colder.finish_store(plan)
            self.manager.colder.begin_arriving(plan)
            self.manager.colder.withdraw(plan, np.zeros(len(plan), dtype=np.bool_))
            assert self.manager.transfers.ignored == ignored + 4
            assert self.manager.arrays.slot[:, PINS].sum() == held

    def end(self) -> None:
        """Everybody goes, and nothing is left behind."""
        for sequence, _ in self.running:
            sequence.close()
        for load in self.loads:
            self.manager.colder.finish_load(load.plan, np.zeros(len(load.plan), dtype=np.bool_))
        for store in self.stores:
            self.manager.colder.finish_store(store.plan)
        self.running, self.loads, self.stores = [], [], []
        self.check()
        assert self.manager.in_use() == 0
        assert self.manager.arrays.scalars[CARRIED] == 0
        assert not self.manager.arrays.slot[:, PINS].any()
        self.manager.clear()
        self.check()
        assert self.manager.stats().used == 0
