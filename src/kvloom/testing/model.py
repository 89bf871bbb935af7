"""What a tier holds, in plain dictionaries, and a state machine that does the same to a tier and to these."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvloom.testing.units import LAYOUT, SEGMENT, World, hit, tokens_of, wrong_bytes
from kvloom.tiers.contract import Tier
from kvloom.tiers.values import Outcome, Unit
from kvloom.types import Grade

WORLD = World((400, 5000, 90))
ROOTS = (b"a" * 32, b"b" * 32)
LAYOUTS = (LAYOUT, b"o" * 32)
Key = tuple[bytes, bytes, int, int]


class Plain:
    """Objects by (layout, node, group, column), units by (layout, node).  Never full."""

    def __init__(self) -> None:
        self.objects: dict[Key, int] = {}
        self.units: dict[tuple[bytes, bytes], set[Key]] = {}
        self.roots: dict[tuple[bytes, bytes], bytes] = {}

    def publish(self, unit: Unit) -> Outcome:
        """What a publication comes to."""
        names = [row.tobytes() for row in unit.digests]
        brought = {(unit.layout, names[o.node], o.group, o.column): int(o.grade) for o in unit.objects}
        needed = set()
        for need in unit.needs:
            begin = need.first_node, need.first_column
            for key in {*self.objects, *brought}:
                at = names.index(key[1]) if key[0] == unit.layout and key[1] in names else -1
                if at >= 0 and key[2] == need.group and (at, key[3]) >= begin:
                    needed.add(key)
        if len(needed) < sum(need.count for need in unit.needs):
            return Outcome.INCOMPLETE
        fresh = {key: grade for key, grade in brought.items() if self.objects.get(key, -1) < grade}
        end = unit.layout, names[-1]
        if not fresh and end in self.units:
            return Outcome.KNOWN
        self.objects |= fresh
        self.units[end] = needed
        self.roots[end] = unit.root
        return Outcome.PUBLISHED

    def clear(self, layout: bytes | None, root: bytes) -> int:
        """How many units go."""
        gone = [key for key in self.units if layout is None or (key[0] == layout and self.roots[key] == root)]
        for key in gone:
            del self.units[key]
        self.sweep()
        return len(gone)

    def sweep(self) -> None:
        """Only what some unit needs."""
        needed: set[Key] = set().union(*self.units.values())
        self.objects = {key: grade for key, grade in self.objects.items() if key in needed}


class _Machine(RuleBasedStateMachine):
    make: ClassVar[Callable[[], Tier]]
    again: ClassVar[Callable[[Tier], Tier]]

    @initialize()
    def begin(self) -> None:
        self.tier = type(self).make()
        self.plain = Plain()

    def teardown(self) -> None:
        if hasattr(self, "tier"):
            self.tier.close()

    def unit(self, prompt: int, segments: int, ragged: int, root: int, layout: int, have: int, grade: int) -> Unit:
        tokens = tokens_of(prompt, 5)[: segments * SEGMENT]
        tokens = tokens[: len(tokens) - ragged]
        world = World(WORLD.sizes, layout=LAYOUTS[layout])
        return world.unit(tokens, root=ROOTS[root], have=min(have, segments - 1), grade=Grade(grade))

    parts: ClassVar[dict[str, Any]] = {
        "prompt": st.integers(0, 2),
        "segments": st.integers(1, 5),
        "ragged": st.sampled_from([0, 0, 0, 3]),
        "root": st.integers(0, 1),
        "layout": st.sampled_from([0, 0, 0, 1]),
        "have": st.integers(0, 4),
        "grade": st.integers(0, 2),
    }

    @rule(**parts)
    def publish(self, **parts: int) -> None:
        unit = self.unit(**parts)
        assert self.tier.publish(unit).outcome is self.plain.publish(unit), "publish: not as in the plain model"

    @rule(**parts)
    def look(self, **parts: int) -> None:
        unit = self.unit(**parts)
        found = self.tier.lookup(unit.layout, unit.digests)
        names = [row.tobytes() for row in unit.digests]
        ends = [(unit.layout, name) in self.plain.units for name in names]
        assert found.boundary.tolist() == ends, "lookup: boundary is where units end"
        there = {
            (unit.layout, digest.tobytes(), int(entry["group"]), int(entry["column"])): int(entry["grade"])
            for digest, entry in zip(found.places.digests, found.places.entries, strict=True)
        }
        assert there == {
            key: grade for key, grade in self.plain.objects.items() if key[0] == unit.layout and key[1] in names
        }, "lookup: all objects of all known nodes, at the best grade that was published"
        assert wrong_bytes(self.tier, found.places) == 0
        if found.boundary[-1]:
            assert hit(self.tier, WORLD, unit)

    @rule(layout=st.sampled_from([None, 0, 0, 1]), root=st.integers(0, 1))
    def clear(self, layout: int | None, root: int) -> None:
        name = None if layout is None else LAYOUTS[layout]
        gone = self.tier.clear(name, None if layout is None else ROOTS[root])
        assert gone == self.plain.clear(name, ROOTS[root])

    @rule(**parts)
    def touch(self, **parts: int) -> None:
        unit = self.unit(**parts)
        self.tier.touch(unit.layout, unit.digests[-1].tobytes())

    @rule()
    def restart(self) -> None:
        self.tier = type(self).again(self.tier)

    @invariant()
    def counted(self) -> None:
        if hasattr(self, "tier"):
            usage = self.tier.usage()
            expected = len(self.plain.units), len(self.plain.objects)
            assert (usage.units, usage.objects) == expected, "usage: counts units and objects"


def machine(make: Callable[[], Tier], again: Callable[[Tier], Tier]) -> type[RuleBasedStateMachine]:
    """A state machine over tiers that ``make`` gives, and ``again`` closes and opens again where that loses nothing."""
    return type("TierMachine", (_Machine,), {"make": staticmethod(make), "again": staticmethod(again)})
