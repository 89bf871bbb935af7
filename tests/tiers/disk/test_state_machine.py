"""Everything at random against a plain model: two handles on one store, restarts and losses of the index."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import ClassVar

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from tests.tiers.disk.conftest import MEMORY
from tests.tiers.disk.world import LAYOUT, MIB, SEGMENT, World, hit, tokens_of, wrong_bytes

from kvloom.testing.model import Plain
from kvloom.tiers.disk import DiskStore, Unit
from kvloom.types import Grade

WORLD = World((400, 700, 90))
ROOTS = (b"a" * 32, b"b" * 32)
LAYOUTS = (LAYOUT, b"o" * 32)


class Machine(RuleBasedStateMachine):
    @initialize()
    def begin(self) -> None:
        self.base = Path(tempfile.mkdtemp(prefix="kvloom-test-", dir=MEMORY if MEMORY.is_dir() else None))
        self.stores = [DiskStore.open(self.base / "s", 256 * MIB, threads=1) for _ in range(2)]
        self.plain = Plain()

    def teardown(self) -> None:
        for store in getattr(self, "stores", []):
            store.close()
        if hasattr(self, "base"):
            shutil.rmtree(self.base)

    def unit(self, prompt: int, segments: int, ragged: int, root: int, layout: int, have: int, grade: int) -> Unit:
        tokens = tokens_of(prompt, 5)[: segments * SEGMENT]
        tokens = tokens[: len(tokens) - ragged]
        world = World(WORLD.sizes, layout=LAYOUTS[layout])
        return world.unit(tokens, root=ROOTS[root], have=min(have, segments - 1), grade=Grade(grade))

    unit_parts: ClassVar = {
        "prompt": st.integers(0, 2),
        "segments": st.integers(1, 5),
        "ragged": st.sampled_from([0, 0, 0, 3]),
        "root": st.integers(0, 1),
        "layout": st.sampled_from([0, 0, 0, 1]),
        "have": st.integers(0, 4),
        "grade": st.integers(0, 2),
    }

    @rule(which=st.integers(0, 1), **unit_parts)
    def publish(self, which: int, **parts: int) -> None:
        unit = self.unit(**parts)
        assert self.stores[which].publish(unit).outcome is self.plain.publish(unit)

    @rule(which=st.integers(0, 1), **unit_parts)
    def look(self, which: int, **parts: int) -> None:
        unit = self.unit(**parts)
        store = self.stores[which]
        found = store.lookup(unit.layout, unit.digests)
        names = [row.tobytes() for row in unit.digests]
        assert found.boundary.tolist() == [(unit.layout, name) in self.plain.units for name in names]
        there = {
            (unit.layout, digest.tobytes(), int(entry["group"]), int(entry["column"])): int(entry["grade"])
            for digest, entry in zip(found.places.digests, found.places.entries, strict=True)
        }
        assert there == {
            key: grade for key, grade in self.plain.objects.items() if key[0] == unit.layout and key[1] in names
        }
        assert wrong_bytes(store, found.places) == 0
        if found.boundary[-1]:
            assert hit(store, WORLD, unit)

    @rule(which=st.integers(0, 1), layout=st.sampled_from([None, 0, 0, 1]), root=st.integers(0, 1))
    def clear(self, which: int, layout: int | None, root: int) -> None:
        name = None if layout is None else LAYOUTS[layout]
        assert self.stores[which].clear(name, None if layout is None else ROOTS[root]) == self.plain.clear(
            name, ROOTS[root]
        )
        if layout is None:
            self.recover()

    def recover(self) -> None:
        """A handle whose extent was taken away says so once; here both say it now."""
        for store in self.stores:
            store.lookup(LAYOUT, World().unit(tokens_of(0, 1)).digests)
            store._writes.worked()

    @rule(which=st.integers(0, 1))
    def gc(self, which: int) -> None:
        self.stores[which].gc()
        self.plain.sweep()

    @rule(which=st.integers(0, 1))
    def restart(self, which: int) -> None:
        self.stores[which].close()
        self.stores[which] = DiskStore.open(self.base / "s", threads=1)

    @rule()
    def lose_the_index(self) -> None:
        for store in self.stores:
            store.gc()  # what was replaced or dropped is off the disk then, and does not come back
            store._index.run(lambda index: index.checkpoint())
        self.plain.sweep()
        (index,) = (self.base / "s").glob("index-*.sqlite")
        index.write_bytes(b"nonsense" * 512)
        for store in self.stores:
            store.close()
        self.stores = [DiskStore.open(self.base / "s", threads=1) for _ in range(2)]

    @rule(which=st.integers(0, 1))
    def carry(self, which: int) -> None:
        """Export, clear, import: the same again."""
        self.plain.sweep()
        path = self.base / "archive"
        path.unlink(missing_ok=True)
        store = self.stores[which]
        assert store.export_archive(path).units == len(self.plain.units)
        store.clear()
        self.recover()
        assert sum(store.import_archive(path).values()) == len(self.plain.units)

    @invariant()
    def in_order(self) -> None:
        if hasattr(self, "stores"):
            checked = self.stores[0].verify()
            assert checked.ok, checked
            contents = self.stores[0].contents()
            assert (contents.units, contents.objects) == (len(self.plain.units), len(self.plain.objects))
            assert contents.on_disk <= contents.in_use


TestStore = Machine.TestCase
TestStore.settings = settings(
    max_examples=25, stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck)
)
