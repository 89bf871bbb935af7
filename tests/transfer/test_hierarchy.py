"""Host and disk behind a device: what a session left comes back, in whatever tier it is, and always the right bytes."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from tests.core.specs import FULL_WINDOW, V4
from tests.transfer.rude import Rude, held_back
from tests.transfer.world import SALTS, Tokens, World, draw

from kvloom.errors import CapacityError
from kvloom.tiers.contract import Tier
from kvloom.tiers.disk import DiskStore
from kvloom.tiers.host import HostStore
from kvloom.transfer.options import Admission, TransferOptions
from kvloom.types import Grade

MIB = 1 << 20
MakeWorld = Callable[..., World]


def disk(place: Path) -> DiskStore:
    return DiskStore.open(place, 64 * MIB)


def test_what_the_device_lost_comes_back_from_the_host(tmp_path: Path) -> None:
    host = HostStore(8 * MIB)
    world = World(FULL_WINDOW, 64 << 10, [host], TransferOptions(gpu_watermark=0.01))
    rng = random.Random(1)
    prompt, answer = draw(rng, 43), draw(rng, 7)
    assert world.serve(prompt, answer) == 0
    world.settled()
    world.manager.evict(1 << 30)
    longer = (*prompt, *answer[:-1], *draw(rng, 9))
    assert world.serve(longer) == len(prompt) + len(answer) - 1, "the exact end of the response"
    stats = world.cold.stats.tiers["host"]
    assert stats.loads == 1
    assert set(stats.bytes_loaded) == {"compressed", "window"}
    world.settled()
    world.cold.close()


def test_nothing_is_offloaded_below_the_watermark(tmp_path: Path) -> None:
    world = World(FULL_WINDOW, 1 * MIB, [HostStore(8 * MIB)], TransferOptions(gpu_watermark=0.5))
    rng = random.Random(2)
    world.serve(draw(rng, 43))
    world.settled()
    assert world.cold.stats.stores == 0
    while world.manager.fill() < 0.5:
        world.serve(draw(rng, 43))
    world.serve(draw(rng, 43))
    world.settled()
    assert world.cold.stats.stores > 0
    assert not world.cold.stats.not_stored


def test_a_new_process_goes_on_at_the_exact_end_of_a_response(tmp_path: Path) -> None:
    rng = random.Random(3)
    prompt, answer = draw(rng, 43), draw(rng, 7)
    first = World(FULL_WINDOW, 1 * MIB, [disk(tmp_path)])
    first.serve(prompt, answer)
    first.cold.close()
    second = World(FULL_WINDOW, 1 * MIB, [disk(tmp_path)])
    assert second.serve((*prompt, *answer[:-1], *draw(rng, 9))) == len(prompt) + len(answer) - 1
    second.cold.close()


@pytest.mark.parametrize("admission", list(Admission))
def test_what_is_used_once_goes_to_disk_when_it_is_told_to(tmp_path: Path, admission: Admission) -> None:
    options = TransferOptions(gpu_watermark=0.01, admission=admission)
    world = World(FULL_WINDOW, 1 * MIB, [HostStore(8 * MIB), disk(tmp_path)], options)
    rng = random.Random(4)
    prompt = draw(rng, 43)
    world.serve(prompt)
    world.settled()
    stored = world.cold.stats.tiers["disk"].stores
    assert (stored > 0) == (admission is Admission.ALWAYS)
    world.serve((*prompt, *draw(rng, 5)))
    world.settled()
    assert world.cold.stats.tiers["disk"].stores > stored, "used again"


def test_closing_brings_what_only_memory_has_to_disk(tmp_path: Path) -> None:
    rng = random.Random(5)
    offloaded, on_device = draw(rng, 43), draw(rng, 30)
    options = TransferOptions(gpu_watermark=0.01, admission=Admission.REUSED)
    world = World(FULL_WINDOW, 1 * MIB, [HostStore(8 * MIB), disk(tmp_path)], options)
    world.serve(offloaded)
    world.settled()
    world.cold.ground.options = TransferOptions(gpu_watermark=1.0, admission=Admission.REUSED)
    world.serve(on_device)
    assert world.cold.stats.tiers["disk"].stores == 0
    world.cold.close()
    again = World(FULL_WINDOW, 1 * MIB, [HostStore(8 * MIB), disk(tmp_path)], options)
    assert again.serve(offloaded) == len(offloaded) - 1
    assert again.serve(on_device) == len(on_device) - 1
    again.cold.close()


def test_a_full_host_moves_what_is_coldest_on_to_disk(tmp_path: Path) -> None:
    """With everything admitted and disk told of nothing but what the host lets go of."""
    rng = random.Random(6)
    prompts = [draw(rng, 43) for _ in range(40)]
    options = TransferOptions(gpu_watermark=0.01, admission=Admission.REUSED, host_mark=0.3)
    world = World(FULL_WINDOW, 1 * MIB, [HostStore(1 * MIB), disk(tmp_path)], options)
    for number, prompt in enumerate(prompts):
        world.serve(prompt)
        world.settled()
        if number % 2:
            continue  # used once
        world.manager.evict(1 << 30)
        assert world.serve(prompt) == len(prompt) - 1  # used again, so that it is worth writing
        world.settled()
    assert world.cold.links[1].writing.close(60)
    stored = disk(tmp_path)
    for number, prompt in enumerate(prompts):
        chain = world.manager.colder.chain(np.array(prompt[:-1], dtype=np.int32))
        found = stored.lookup(world.manager.layout, chain.digests)
        assert not (found.boundary[-1] and number % 2), "what was used once is not on disk"
    stored.close()
    world.cold.close()


def test_a_prefetched_prompt_is_there_when_it_is_opened() -> None:
    world = World(FULL_WINDOW, 64 << 10, [HostStore(8 * MIB)], TransferOptions(gpu_watermark=0.01, prefetch_window=1))
    rng = random.Random(7)
    prompt = draw(rng, 43)
    ids = np.array(prompt, dtype=np.int32)
    world.serve(prompt)
    world.settled()
    world.manager.evict(1 << 30)
    assert world.cold.prefetch(ids, b"", (), Grade.FAITHFUL)
    assert world.cold.prefetch(ids, b"", (), Grade.FAITHFUL), "twice is once"
    assert world.manager.in_use() > 0, "it holds its room"
    assert world.serve(prompt) == len(prompt) - 1
    assert (world.cold.stats.prefetched, world.cold.stats.prefetch_used) == (1, 1)
    world.settled()
    world.manager.evict(1 << 30)
    assert world.cold.prefetch(ids, b"", (), Grade.FAITHFUL)
    world.cold.forget_ahead(ids, b"", ())
    world.settled()
    assert world.manager.in_use() == 0
    world.cold.close()


def test_what_came_to_a_tier_after_the_prefetch_is_found_too() -> None:
    world = World(FULL_WINDOW, 256 << 10, [HostStore(8 * MIB)], TransferOptions(gpu_watermark=0.001))
    prompt = draw(random.Random(9), 60)
    ids = np.array(prompt, dtype=np.int32)
    world.serve(prompt[:30])
    world.settled()
    world.manager.evict(1 << 30)
    assert world.cold.prefetch(ids, b"", (), Grade.FAITHFUL)
    assert world.serve(prompt[:50]) < 49
    world.settled()
    world.manager.evict(1 << 30)
    assert world.serve(prompt) == 49
    assert world.cold.stats.prefetch_used == 1
    world.cold.close()


def test_an_earlier_end_is_not_brought_once_a_later_one_is_here() -> None:
    """Several turns end within one segment: the newest end is all that the next turn needs."""
    world = World(FULL_WINDOW, 256 << 10, [HostStore(8 * MIB)], TransferOptions(gpu_watermark=0.001))
    rng = random.Random(11)
    past, end = draw(rng, 33), 0
    for _ in range(2):
        answer = draw(rng, 2)
        world.serve(past, answer)
        end = len(past) + 1
        past = (*past, *answer[:-1], *draw(rng, 2))
    assert end // world.manager.spec.segment_tokens == 33 // world.manager.spec.segment_tokens
    world.settled()
    world.manager.evict(1 << 30)
    ids, before = np.array(past, dtype=np.int32), world.cold.stats.objects_loaded.total()
    assert world.cold.prefetch(ids, b"", (), Grade.FAITHFUL)
    brought = sum(brings for brings, _ in world.cold.ahead_of(ids, b"", ()).values())
    assert world.serve(past) == end
    assert world.cold.stats.objects_loaded.total() - before == brought > 0
    assert world.cold.ahead_of(ids, b"", ()) == {}
    world.settled()
    world.cold.close()


def test_what_was_fetched_ahead_makes_room_for_who_is_here() -> None:
    world = World(FULL_WINDOW, 64 << 10, [HostStore(8 * MIB)], TransferOptions(gpu_watermark=0.01))
    rng = random.Random(8)
    prompts = [draw(rng, 43) for _ in range(4)]
    for prompt in prompts:
        world.serve(prompt)
        world.settled()
    world.manager.evict(1 << 30)
    ahead = [world.cold.prefetch(np.array(p, dtype=np.int32), b"", (), Grade.FAITHFUL) for p in prompts]
    assert ahead[0]
    assert not all(ahead), "a prefetch takes only room that is there"
    assert world.serve(draw(rng, 60)) == 0
    world.settled()
    world.cold.close()


def test_an_end_on_its_way_to_a_tier_is_waited_for() -> None:
    """The device has dropped it meanwhile, and until its store ends no tier has it either."""
    slow, may = Rude(HostStore(8 * MIB)), threading.Event()
    world = World(FULL_WINDOW, 1 * MIB, [slow], TransferOptions(gpu_watermark=0.001))
    prompt, other = draw(random.Random(12), 43), draw(random.Random(14), 43)
    for _ in range(2):  # what is compiled on the way is, before anything is waited for
        world.serve(other)
        world.settled()
        world.manager.evict(1 << 30)
    slow.faults["publish"] = held_back(may)
    world.serve(prompt)
    world.manager.evict(1 << 30)
    ids = np.array(prompt, dtype=np.int32)
    assert world.manager.colder.survey(ids).reused == 0, "the device has dropped it"
    threading.Timer(0.2, may.set).start()
    assert world.serve(prompt) == len(prompt) - 1
    world.settled()
    world.cold.close()


def test_a_prefix_without_room_waits_for_slots_that_are_being_stored() -> None:
    """They are free in a moment, and computing the prefix would need as many."""
    slow, may = Rude(HostStore(8 * MIB)), threading.Event()
    world = World(FULL_WINDOW, 48 << 10, [slow], TransferOptions(gpu_watermark=0.001))
    rng = random.Random(13)
    stored, running = draw(rng, 43), draw(rng, 60)
    world.serve(stored)
    world.settled()
    world.manager.evict(1 << 30)
    slow.faults["publish"] = held_back(may)
    world.serve(running)
    ids = np.array(stored, dtype=np.int32)
    assert not world.cold.prefetch(ids, b"", (), Grade.FAITHFUL), "there is no room"
    threading.Timer(0.2, may.set).start()
    assert world.serve(stored) == len(stored) - 1
    world.settled()
    world.cold.close()


# -------------------------------------------------------------------- random lives


class Life:
    """Random requests of a few streams that share prefixes, in one or several processes on the same tiers."""

    def __init__(self, make: Callable[[], World], seed: int, longest: int) -> None:
        self.random, self.make, self.world, self.longest = random.Random(seed), make, make(), longest
        stem = draw(self.random, longest)
        self.streams: list[Tokens] = [stem]
        for _ in range(5):
            leave = self.random.randrange(1, longest)
            self.streams.append(stem[:leave] + draw(self.random, longest - leave))
        self.open: list[tuple[object, bytes]] = []
        self.reused = self.refused = 0

    def step(self) -> None:
        act = self.random.random()
        prompt = self.random.choice(self.streams)[: self.random.randrange(2, self.longest)]
        salt, floor = self.random.choice(SALTS), self.random.choice((Grade.CANONICAL, Grade.FAITHFUL, Grade.FAITHFUL))
        if act < 0.7:
            try:
                self.reused += self.world.serve(prompt, draw(self.random, self.random.randrange(4)), salt, floor)
            except CapacityError:
                self.refused += 1
        elif act < 0.8:
            self.world.cold.prefetch(np.array(prompt, dtype=np.int32), salt, (), floor)
        elif act < 0.84:
            self.world.cold.forget_ahead(np.array(prompt, dtype=np.int32), salt, ())
        elif act < 0.9:
            self.world.manager.evict(self.random.randrange(1 << 20))
        elif act < 0.93:
            self.world.manager.clear(salt)
        elif act < 0.96:
            self.world.settled()
        elif act < 0.98:
            self.world.cold.close()
            self.world = self.make()
        self.world.manager.check_integrity()

    def end(self) -> None:
        self.world.settled()
        self.world.cold.forget_all_ahead()
        self.world.settled()
        assert self.world.manager.in_use() == 0
        self.world.cold.close()


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("behind", ["host", "disk", "host and disk"])
def test_random_lives(tmp_path: Path, seed: int, behind: str) -> None:
    spec = (FULL_WINDOW, V4)[seed % 2]
    arena = random.Random(seed).choice([64 << 10, 128 << 10, 1 * MIB])

    def tiers() -> Sequence[Tier]:
        made: list[Tier] = []
        if "host" in behind:
            made.append(HostStore(512 << 10))
        if "disk" in behind:
            made.append(disk(tmp_path))
        return made

    options = TransferOptions(
        gpu_watermark=(0.1, 0.6)[seed % 2], admission=list(Admission)[seed // 2 % 2], host_mark=0.5, most_prefetches=3
    )
    life = Life(lambda: World(spec, arena, tiers(), options), seed, 4 * spec.segment_tokens + 5)
    for _ in range(150):
        life.step()
    assert life.reused > 0
    life.end()
