"""A loss of power at any moment: what was published is there, and nothing wrong is read (D4).

Each class of syncs is left out in turn, and then the same check must fail: that is what shows that it would notice.
"""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest
from tests.tiers.disk.power import CLASSES, SAID, Event, leave, record
from tests.tiers.disk.scenarios import SMALL, units
from tests.tiers.disk.world import hit

from kvloom.tiers.disk import DiskStore

CODE = """
import os, sys
from pathlib import Path
from tests.tiers.disk.scenarios import SMALL, units
from kvloom.tiers.disk import DiskStore
made = units(SMALL, 6)
with DiskStore.open(sys.argv[1], 64 << 20, threads=1) as store:
    os.write(1, b"opened\\n")
    for i in range(3):
        assert store.publish(made[i]).stored
        os.write(1, f"{i}\\n".encode())
with DiskStore.open(sys.argv[1], threads=1) as store:
    for i in range(3, 6):
        assert store.publish(made[i]).stored
        os.write(1, f"{i}\\n".encode())
"""


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Event], str]:
    strace = shutil.which("strace")
    if strace is None:
        pytest.skip("strace is not installed: writes and syncs cannot be recorded")
    path = tmp_path_factory.mktemp("power")
    return record(CODE, path / "store", path / "log", strace), str(path / "store")


def lost(events: list[Event], until: int, keep: str, place: Path, root: str, rng: random.Random) -> list[str]:
    """What was there before the power went and is not after it: units, an index; raises when anything wrong is read."""
    made = units(SMALL, 6)
    said = [event.path for event in events[:until] if event.what == SAID]
    shutil.rmtree(place, ignore_errors=True)
    leave(events, until, keep, place, root, rng)
    with DiskStore.open(place, 64 << 20, threads=1) as store:
        there = [hit(store, SMALL, unit) for unit in made]
        made_anew = store.rebuilt is not None and store.rebuilt.extents > 0
    faults = [number for number in said if number != "opened" and not there[int(number)]]
    return [*faults, "index"] if made_anew and said else faults


def test_d4_power_may_go_at_any_moment(recorded: tuple[list[Event], str], fast_path: Path) -> None:
    events, root = recorded
    rng, states = random.Random(0), 0
    for until in range(len(events) + 1):
        keeps = ["none", "some"] if until % 3 else ["none", "all", "some", *(f"not {name}" for name in CLASSES)]
        for keep in keeps:
            assert lost(events, until, keep, fast_path / "s", root, rng) == [], (until, keep)
            states += 1
    assert states > 200


def sync_classes(events: list[Event], root: str) -> dict[str, list[int]]:
    """Syncs by what they are of."""
    found: dict[str, list[int]] = {}
    for i, event in enumerate(events):
        if event.what == "sync":
            name = "/" + str(Path(event.path).relative_to(root)) if event.path != root else "directory"
            kind = next((end for end in CLASSES if end in name and (end != ".sqlite" or "-wal" not in name)), name)
            found.setdefault(kind, []).append(i)
    return found


@pytest.mark.parametrize("kind", [".extent", "-wal", "/extents", "KVLOOM", "directory"])
def test_d4_every_class_of_syncs_is_needed(recorded: tuple[list[Event], str], fast_path: Path, kind: str) -> None:
    events, root = recorded
    out = set(sync_classes(events, root)[kind])
    without = [event for i, event in enumerate(events) if i not in out]
    rng = random.Random(1)
    ends = [i + 1 for i, event in enumerate(without) if event.what == SAID]
    assert any(
        lost(without, until, keep, fast_path / "s", root, rng)
        for until in ends
        for keep in ("none", "some", *(f"not {name}" for name in CLASSES))
    )


@pytest.mark.parametrize("kind", [".extent", "-wal"])
def test_d4_every_single_sync_before_a_publication_is_needed(
    recorded: tuple[list[Event], str], fast_path: Path, kind: str
) -> None:
    events, root = recorded
    rng, tried = random.Random(2), 0
    for end, event in enumerate(events):
        if event.what != SAID or event.path == "opened":
            continue
        last = max(i for i in range(end) if events[i].what == "sync" and events[i].path.endswith(kind))
        without = events[:last] + events[last + 1 : end + 1]
        assert event.path in lost(without, len(without), f"not {kind}", fast_path / "s", root, rng)
        tried += 1
    assert tried == 6
