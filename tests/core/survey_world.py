"""The lives of ``cold_world`` with two colder tiers that are surveyed, and with windows and tails that are computed."""

from __future__ import annotations

from dataclasses import dataclass

from tests.core.cold_rules import Presence, Tokens, array, stored_objects
from tests.core.cold_world import SALTS, ColdLife, Load
from tests.core.worlds import World

from kvloom.core.geometry import fits
from kvloom.core.lifecycle import LOADING
from kvloom.manager.surveys import Reach, Survey
from kvloom.plan import StoredObjects
from kvloom.types import Grade, Kind

PREFIX = (Kind.COMPRESSED, Kind.INDEXER)


@dataclass
class Surveyed:
    """What the surveys of a life came across."""

    restored: int = 0
    replayed: int = 0
    mixed: int = 0
    computed: int = 0
    refused: int = 0


class SurveyLife(ColdLife):
    """Before every load a survey; some loads are replays."""

    def __init__(self, world: World, seed: int, policy: str = "cost") -> None:
        super().__init__(world, seed, policy)
        self.surveyed = Surveyed()
        self.far: dict[bytes, Presence] = {salt: {} for salt in SALTS}

    def stock(self) -> None:
        """More in the nearer tier, and pieces of it in the one behind."""
        super().stock()
        for salt, there in self.stored.items():
            for end, objects in there.items():
                if self.random.random() < 0.3:
                    self.far[salt].setdefault(end, {}).update(
                        {place: grade for place, grade in objects.items() if self.random.random() < 0.8}
                    )
                if self.random.random() < 0.1:  # gone in the nearer one
                    for place in [place for place in objects if self.random.random() < 0.5]:
                        del objects[place]

    def load(self) -> None:
        """A survey, and what it says is done: loaded, or loaded and computed."""
        prompt, salt = self.last if self.random.random() < 0.5 else (self.prompt(), self.random.choice(SALTS))
        floor = self.random.choice([Grade.CANONICAL, Grade.FAITHFUL, Grade.FAITHFUL, Grade.APPROXIMATE])
        tokens, device = prompt[:-1], self.on_device(salt)
        tiers = [self.stored[salt], self.far[salt]]
        objects = [self._of(there, tokens) for there in tiers]
        found = self.manager.colder.survey(array(tokens), objects, salt=salt, floor=floor)
        self._check_survey(found, tokens, floor, device, tiers)
        if found.replayed and self.random.random() < 0.7:
            self._replay(self.random.choice(found.replayed), tokens, salt, floor, device, tiers)
        else:
            super().load()

    def _of(self, there: Presence, tokens: Tokens) -> StoredObjects:
        items = [
            (row, group, column, grade)
            for row, end in enumerate(self.rules.rows(tokens))
            for (group, column), grade in there.get(tokens[:end], {}).items()
        ]
        self.random.shuffle(items)
        return stored_objects(items)

    # ---------------------------------------------------------------- by enumeration

    def _prefix(self, position: int) -> list[tuple[int, int, int]]:
        return [place for place in self.rules.needed(position) if self.world.spec.groups[place[1]].kind in PREFIX]

    def _good(
        self, tokens: Tokens, position: int, places: list[tuple[int, int, int]], floor: int, *theres: Presence
    ) -> bool:
        return all(
            any(self.rules.grade(there, tokens, position, place) >= floor for there in theres) for place in places
        )

    def _keeps(self) -> bool:
        return any(group.kind in PREFIX for group in self.world.spec.groups)

    def _computed(self, tokens: Tokens, device: Presence) -> int:
        """How far the device's index knows the tokens by row ends."""
        ends = self.rules.rows(tokens)
        return max((end for end in ends if all(tokens[:e] in device for e in ends if e <= end)), default=0)

    def _check_survey(self, found: Survey, tokens: Tokens, floor: int, device: Presence, tiers: list[Presence]) -> None:
        reused = self.rules.best(tokens, floor, self.known(device, tokens), device)
        assert (found.tokens, found.reused) == (len(tokens), reused)
        restored, replayed = [], []
        for level in range(3):
            theres = [device, *tiers[:level]]
            whole = self.rules.best(tokens, floor, self.rules.rows(tokens), *theres)
            if whole > max([reused, *restored]):
                restored.append(whole)
            ends = self.rules.rows(tokens)
            deep = max((p for p in ends if self._good(tokens, p, self._prefix(p), floor, *theres)), default=0)
            lost = not self._good(tokens, deep, self.rules.needed(deep), floor, *theres)
            if deep > max([reused, *replayed]) and lost and (self._keeps() or self._computed(tokens, device) >= deep):
                replayed.append(deep)
        assert [reach.position for reach in found.restored] == restored
        assert [reach.position for reach in found.replayed] == replayed
        for reach in (*found.restored, *found.replayed):
            self._check_reach(reach, tokens, floor, device, tiers)
        self.surveyed.restored += bool(restored)
        self.surveyed.replayed += bool(replayed)
        self.surveyed.mixed += any(sum(reach.tier_bytes) > 0 for reach in found.replayed)

    def _check_reach(self, reach: Reach, tokens: Tokens, floor: int, device: Presence, tiers: list[Presence]) -> None:
        objects, missing, grades = [0, 0], set(), [int(Grade.CANONICAL)]
        n_bytes, kinds = [0, 0], dict[str, int]()
        for place in self.rules.needed(reach.position):
            group = self.world.spec.groups[place[1]]
            grade = self.rules.grade(device, tokens, reach.position, place)
            if grade < floor:
                stored = [self.rules.grade(t, tokens, reach.position, place) for t in tiers[: reach.tiers]]
                first = next((t for t, its in enumerate(stored) if its >= floor), None)
                if first is None:
                    missing.add(place[1])
                    continue
                grade = stored[first]
                objects[first] += 1
                n_bytes[first] += group.slot_bytes
                kinds[group.kind.name.lower()] = kinds.get(group.kind.name.lower(), 0) + group.slot_bytes
            if group.kind in PREFIX:
                grades.append(grade)
        assert (reach.tier_objects, reach.tier_bytes) == (tuple(objects), tuple(n_bytes))
        assert reach.kind_bytes == kinds
        assert (set(reach.missing), reach.grade) == (missing, min(grades))

    # ---------------------------------------------------------------- computing what is lost

    def _replay(
        self, reach: Reach, tokens: Tokens, salt: bytes, floor: Grade, device: Presence, tiers: list[Presence]
    ) -> None:
        head = tokens[: reach.position]
        items = list[tuple[int, int, int, int]]()
        for there in reversed(tiers[: reach.tiers]):
            for row, end in enumerate(self.rules.rows(head)):
                for (group, column), grade in there.get(head[:end], {}).items():
                    items.append((row, group, column, grade))
        items.sort(key=lambda item: item[3])
        grade = min(Grade.FAITHFUL, reach.grade)
        both = self.manager.colder.plan_replay(array(head), stored_objects(items), grade, salt=salt, floor=floor)
        if grade < floor:
            assert both is None
            return
        if both is None:
            needs_room = fits(self.world.spec, self.manager.geometry, len(head) + 1)
            self.surveyed.refused += needs_room
            return
        plan, made = both
        best = {item[:3]: item[3] for item in items}
        wanted = {
            (*place, best.get(place, -1) if best.get(place, -1) >= floor else int(grade))
            for place in self.rules.needed(len(head))
            if self.rules.grade(device, head, len(head), place) < floor
        }
        columns = (plan.row, plan.group, plan.column, plan.grade)
        got = list(zip(*(x.tolist() for x in columns), strict=True))
        assert (plan.position, len(got), set(got)) == (len(head), len(wanted), wanted)
        assert made.tolist() == [best.get(item[:3], -1) < floor for item in got]
        assert made.any()
        self._check_needs(plan, plan.position)
        self._check_slots(plan, LOADING)
        slots = self.manager.colder.prefix_slots(plan)
        arriving = {(g, s) for g, s in zip(plan.group.tolist(), plan.slot.tolist(), strict=True)}
        for group in self.rules.groups:
            if group.kind not in PREFIX:
                assert len(slots[group.index]) == 0
                continue
            needed = group.needed(plan.position)
            assert len(slots[group.index]) == len(needed)
            for block, slot in zip(needed, slots[group.index].tolist(), strict=True):
                if (group.index, slot) not in arriving:
                    place = (block // group.columns, group.index, block % group.columns)
                    content = self.rules.content(head, plan.position, place, int(Grade.FAITHFUL))
                    had = self.engine.arena.read(group.index, slot)
                    assert [e and e[0] for e in content] == [e and e[0] for e in had]
        arrive = [slot for slot, item in zip(plan.slot.tolist(), got, strict=True) if item[1] is not None]
        assert len(arrive) == len(set(zip(plan.group.tolist(), arrive, strict=True)))
        self.loads.append(Load(plan, head, salt, floor))
        self.seen.loads += 1
        self.surveyed.computed += 1
        if self.random.random() < 0.8:
            self.finish_load()


def surveyed(world: World, seed: int, policy: str, steps: int) -> SurveyLife:
    """A whole life."""
    life = SurveyLife(world, seed, policy)
    life.run(steps)
    life.end()
    return life
