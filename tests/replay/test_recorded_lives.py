"""Random lives of a manager, written down and lived again: the same, down to every array; and under other settings."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.core import differential
from tests.core.workshop import cut_statically
from tests.core.worlds import WORLDS, World

from kvloom.config import Device
from kvloom.errors import CapacityError, InputError, UnsupportedError
from kvloom.eviction import POLICIES
from kvloom.manager import CachedSequence, Manager
from kvloom.manager.books import Books
from kvloom.manager.colder import ColderTiers
from kvloom.manager.single import Single
from kvloom.manager.watched import UntoldTiers, WatchedManager, WatchedSequence
from kvloom.plan import StoredObjects
from kvloom.replay.codec import MARK
from kvloom.replay.readers import read_input, read_trace
from kvloom.replay.recorder import Recorder
from kvloom.replay.recording import Recording
from kvloom.replay.rerun import rerun
from kvloom.replay.same import SamePlayer
from kvloom.replay.whatif import WhatIfPlayer

TOLD = {"open", "complete", "abandon", "batch", "step", "finish", "evict", "clear", "drop"}
TOLD_OF_SEQUENCES = {"append", "commit", "rollback", "checkpoint", "fork", "close"}
REFUSED = {
    *("plan_load", "plan_replay", "finish_load", "begin_arriving", "withdraw"),
    *("plan_offload", "plan_units", "finish_store"),
}
"""What a watched manager does not do about colder tiers."""
ONLY_LOOK_AT_COLDER = {"chain", "may_take_over", "survey", "prefix_slots", "explain_load"}
ONLY_LOOK = {
    "fill",
    "unkept",
    "peak_bytes",
    "tier_needed",
    "in_use",
    "stats",
    "check_integrity",
    "running",
    "enter",
    "now",
}
ONLY_LOOK_OF_SEQUENCES = {
    *("block_table", "first_block", "num_blocks", "live_slot", "ranges", "published_blocks", "belongs_to"),
    *("require_usable", "check"),
}
WITHIN = {"namespace", "start", "tick", "release_slots"}
"""What the manager's own parts call."""
WITHIN_SEQUENCES = {"plan_abandoned", "distrust", "publish_stepped"}


class Life(differential.Life):
    """One that is not compared with the reference after every step: another test does that."""

    def _compare(self) -> None:
        """Nothing."""


def lived(world: World, seed: int, policy: str, path: Path, steps: int, monkeypatch: pytest.MonkeyPatch) -> Life:
    with Recorder(path, force=True) as recorder:
        monkeypatch.setattr(differential, "Manager", partial(WatchedManager, watch=recorder))
        life = Life(world, seed, policy)
        for step in range(steps):
            life.step()
            if step % 20 == 7:
                refused(life.fast)
        recorder.end(life.fast.stats())
    return life


def refused(manager: Manager) -> None:
    """Calls that are refused for their arguments: some of them move the clock."""
    calls: list[Callable[[], Any]] = [
        lambda: manager.open([-1]),
        lambda: manager.open([2**31]),
        lambda: manager.open([]),
        lambda: manager.open([1], priority=-1),
        lambda: manager.clear("salt"),  # type: ignore[arg-type]
        lambda: manager.drop("nothing"),
    ]
    for call in calls:
        with pytest.raises(InputError):
            call()


def read(path: Path) -> Recording:
    found = read_input(path)
    assert isinstance(found, Recording)
    return found


def another(recording: Recording, policy: str = "", device: int = 0) -> Manager:
    made = recording.made
    options = {} if device else {"max_nodes": made.max_nodes}
    tier, sequences = Device(device or made.device), made.max_sequences
    return Manager(made.spec, [tier], policy=policy or made.policy, max_sequences=sequences, **options)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("world", WORLDS, ids=lambda world: world.name)
def test_lived_again(world: World, policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "life.jsonl"
    with cut_statically() if world.split else nullcontext():
        life = lived(world, 7, policy, path, 150, monkeypatch)
        recording = read(path)
        player = SamePlayer(recording, another(recording))
        player.play()
        assert recording.end is not None
        player.compare_end(recording.end, player.manager.stats())
        player.manager.check_integrity()
        for name, lived_through in life.fast.arrays.items():
            assert np.array_equal(getattr(player.manager.arrays, name), lived_through), name
        report = rerun(recording)
        assert (report.same, report.difference) == (True, None)
        assert report.stats == life.fast.stats()
        assert set(recording.calls()) >= {"Open", "Append", "Commit", "Complete", "Close"}


@pytest.mark.parametrize("world", WORLDS, ids=lambda world: world.name)
def test_under_other_settings(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing breaks, and the books stay right."""
    path = tmp_path / "life.jsonl"
    lived(world, 11, "lru", path, 150, monkeypatch)
    recording = read(path)
    for policy in POLICIES:
        for size in (world.arena * 4, world.arena, world.arena * 2 // 3):
            try:
                player = WhatIfPlayer(recording, another(recording, policy, size))
            except CapacityError:  # not even for the smallest request
                continue
            player.play()
            player.manager.check_integrity()
            assert player.requests == len(recording.opened())
            assert player.requests >= sum(player.ended.values())


def test_every_public_call_is_told_or_only_looks() -> None:
    """A new method of the manager must be written down, too, or be named here as one that changes nothing."""

    def public(cls: type) -> set[str]:
        return {name for name, value in vars(cls).items() if not name.startswith("_") and callable(getattr(cls, name))}

    assert Manager.__mro__ == (Manager, Books, Single, object)
    of_manager = public(Manager) | public(Books) | public(Single)
    assert of_manager - {"sequence_type", "batch_type", "colder_type"} == TOLD | ONLY_LOOK | WITHIN
    assert vars(WatchedManager).keys() >= TOLD
    assert public(ColderTiers) == REFUSED | ONLY_LOOK_AT_COLDER
    assert vars(UntoldTiers).keys() >= REFUSED
    assert type(WatchedManager(WORLDS[0].spec, [Device("1MiB")], watch=lambda _: None).colder) is UntoldTiers
    of_sequences = public(CachedSequence)
    assert of_sequences == TOLD_OF_SEQUENCES | ONLY_LOOK_OF_SEQUENCES | WITHIN_SEQUENCES
    assert vars(WatchedSequence).keys() >= TOLD_OF_SEQUENCES


def test_what_goes_to_a_store_is_refused(tmp_path: Path) -> None:
    """It changes what later calls find, and what the store held could not be replayed."""
    nothing = StoredObjects(*(np.empty(0, np.int32) for _ in range(4)))
    with Recorder(tmp_path / "life") as recorder:
        manager = WatchedManager(WORLDS[0].spec, [Device("1MiB")], watch=recorder)
        plain = Manager(WORLDS[0].spec, [Device("1MiB")])
        for calls, answer in (
            (lambda m: m.colder.plan_load(np.array([1, 2, 3], np.int32), nothing), None),
            (lambda m: m.colder.plan_offload(np.array([1, 2, 3], np.int32), nothing), None),
            (lambda m: m.colder.plan_units(np.array([1, 2, 3], np.int32), nothing), ()),
        ):
            assert calls(plain) == answer
            with pytest.raises(UnsupportedError, match="cannot be recorded"):
                calls(manager)
        ends = [("finish_load", (None, None)), ("begin_arriving", (None,)), ("withdraw", (None, None))]
        for name, arguments in (*ends, ("finish_store", (None,))):
            with pytest.raises(UnsupportedError, match="cannot be recorded"):
                getattr(manager.colder, name)(*arguments)


def test_salts_and_keys_are_not_written_down(tmp_path: Path) -> None:
    spec = WORLDS[0].spec
    texts = []
    for name in ("a", "b"):
        with Recorder(tmp_path / name) as recorder:
            manager = WatchedManager(spec, [Device("1MiB")], watch=recorder)
            for salt in (b"tenant-7", b"", b"tenant-7", b"tenant-8"):
                for value in ("adapter-9", b"adapter-9", 779911):
                    manager.open([1, 2, 3], salt=salt, extra_keys=(("lora", value),)).close()
            manager.clear(b"tenant-7")
            recorder.end(manager.stats())
        assert rerun(read(tmp_path / name)).same
        texts.append((tmp_path / name).read_text())
    for secret in ("tenant", b"tenant".hex(), "adapter", b"adapter".hex(), "779911"):
        assert all(secret not in text for text in texts)
    opened = [read(tmp_path / name).opened() for name in ("a", "b")]
    assert len({(event.salt, event.keys) for event in opened[0]}) == 9
    assert not {event.keys for event in opened[0]} & {event.keys for event in opened[1]}  # another key for every file


def test_a_recording_is_not_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text(f'{{"{MARK}": 1')
    with pytest.raises(InputError, match="line 1: not a whole JSON object"):
        read_trace(path)
