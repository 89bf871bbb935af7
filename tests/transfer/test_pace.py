"""Pacing: beside a forward a transfer that nobody waits for takes its share and no more, and is hastened at once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from kvloom.errors import ConfigError
from kvloom.tiers.values import Fill, Need, NewObject, Unit
from kvloom.transfer.jobs import Job, Urgency
from kvloom.transfer.lanes import Lane
from kvloom.transfer.options import TransferOptions
from kvloom.transfer.pace import FORGOTTEN_S, LINGER_S, Pace, resting
from kvloom.types import Grade

MOST = dict.fromkeys(Urgency, 8)
SLOW = 0.001
"""A share with which a piece of some milliseconds is followed by seconds of rest."""
SOON = 2.0
Steps = Generator[None, None, int]
MakeLane = Callable[[Pace], Lane]


def burn(seconds: float) -> None:
    """Compute for so long."""
    ends = time.thread_time() + seconds
    while time.thread_time() < ends:
        pass


def burning(pieces: int, seconds: float = 0.004) -> Callable[[Job[int]], Steps]:
    """A job that computes; it returns how many pieces it did."""

    def work(job: Job[int]) -> Steps:
        for number in range(pieces):
            if number:
                yield
            if job.stopped():
                return number
            burn(seconds)
        return pieces

    return work


def until(there: Callable[[], bool], seconds: float = 20.0) -> bool:
    ends = time.monotonic() + seconds
    while not there() and time.monotonic() < ends:
        time.sleep(0.002)
    return there()


@pytest.fixture
def lane() -> Iterator[MakeLane]:
    made: list[Lane] = []

    def make(pace: Pace) -> Lane:
        made.append(Lane("kvloom-test", MOST, pace=pace))
        return made[-1]

    yield make
    assert all(each.close(20) for each in made)


def asleep(lane: Lane, pieces: int = 10, urgency: Urgency = Urgency.PREFETCH, within: float | None = None) -> Job[int]:
    """A job that rests after its first piece, for seconds."""
    job = lane.submit(urgency, burning(pieces), within)
    assert job is not None
    assert until(lambda: job.rests > 0)
    assert not job.done
    return job


def test_nothing_rests_while_no_forward_runs(lane: MakeLane) -> None:
    job = lane(Pace(SLOW)).submit(Urgency.STORE, burning(20))
    assert job is not None
    assert until(lambda: job.done, SOON)
    assert (job.rests, job.result()) == (0, 20)


def test_with_all_of_a_core_nothing_rests(lane: MakeLane) -> None:
    pace = Pace(1.0)
    with pace.forward():
        job = lane(pace).submit(Urgency.STORE, burning(20))
        assert job is not None
        assert until(lambda: job.done, SOON)
    assert job.rests == 0


@pytest.mark.parametrize("threads", [1, 6])
def test_beside_a_forward_all_threads_together_take_the_share(threads: int) -> None:
    pace, job = Pace(0.1), Job(Urgency.STORE, burning(1), None, time.monotonic, print, Pace())
    used, stop = [0.0] * threads, threading.Event()

    def work(number: int) -> None:
        while not stop.is_set():
            pace.rest(job)
            burn(0.002)
            used[number] += 0.002

    with pace.forward():
        begun = time.monotonic()
        with ThreadPoolExecutor(threads) as pool:
            running = [pool.submit(work, number) for number in range(threads)]
            time.sleep(1.0)
            share = sum(used) / (time.monotonic() - begun)
            stop.set()
            pace.end()
        for each in running:
            each.result()
    assert 0.02 < share < 0.15
    assert job.rests > 3


def test_waiting_for_a_disk_costs_nothing_of_the_share(lane: MakeLane) -> None:
    def work(_job: Job[int]) -> Steps:
        for _ in range(10):
            time.sleep(0.03)
            yield
        return 10

    pace = Pace(0.1)
    with pace.forward():
        begun = time.monotonic()
        job = lane(pace).submit(Urgency.STORE, work)
        assert job is not None
        assert until(lambda: job.done)
        assert time.monotonic() - begun < 0.9, "by the clock it would have rested for 2.7 seconds"


def test_whom_somebody_waits_for_is_hastened_at_once(lane: MakeLane) -> None:
    pace = Pace(SLOW)
    with pace.forward():
        job = asleep(lane(pace))
        begun = time.monotonic()
        assert job.wait(20)
        assert time.monotonic() - begun < SOON
        assert job.result() == 10


def test_what_lies_in_the_way_of_a_load_is_hastened_with_it(lane: MakeLane) -> None:
    pace = Pace(SLOW)
    made = lane(pace)
    with pace.forward():
        ahead = asleep(made)
        load = made.submit(Urgency.LOAD, burning(5), 60)
        assert load is not None
        begun = time.monotonic()
        assert load.wait(20)
        assert time.monotonic() - begun < SOON
        assert not ahead.done, "it is not what was waited for"


def test_once_nobody_waits_any_longer_it_rests_again(lane: MakeLane) -> None:
    pace = Pace(SLOW)
    with pace.forward():
        job = asleep(lane(pace), 10_000)
        assert not job.wait(0.1)
        rests = job.rests
        assert until(lambda: job.rests > rests, SOON)
        job.cancel()


def test_a_cancelled_one_ends_its_rest_at_once(lane: MakeLane) -> None:
    pace = Pace(SLOW)
    with pace.forward():
        job = asleep(lane(pace))
        job.cancel()
        assert until(lambda: job.done, SOON)  # looked at, not waited for
        assert job.result() < 10


@pytest.mark.parametrize("patience", [0.0, 20.0])
def test_closing_ends_a_rest_at_once(patience: float) -> None:
    pace = Pace(SLOW)
    lane = Lane("kvloom-test", MOST, pace=pace)
    with pace.forward():
        job = asleep(lane)
        begun = time.monotonic()
        assert lane.close(patience)
        assert time.monotonic() - begun < SOON
        assert job.done


def test_when_the_forward_has_ended_so_has_the_rest(lane: MakeLane) -> None:
    pace = Pace(SLOW)
    with pace.forward():
        job = asleep(lane(pace))
    begun = time.monotonic()
    assert until(lambda: job.done, SOON)
    assert time.monotonic() - begun < 10 * LINGER_S + 10 * 0.004 + 0.3


def test_between_two_steps_of_a_decode_there_is_no_burst(lane: MakeLane) -> None:
    pace, job = Pace(0.05), None
    made, ends = lane(pace), time.monotonic() + 1.0
    while time.monotonic() < ends:
        with pace.forward():
            job = job or made.submit(Urgency.STORE, burning(10_000, 0.002))
            time.sleep(0.02)
        time.sleep(LINGER_S / 5)
    assert job is not None
    job.cancel()
    assert until(lambda: job.done, SOON)
    assert job.result() < 50, "it had room for 500 pieces"


def test_what_the_forward_itself_reads_does_not_rest(lane: MakeLane) -> None:
    pace, go = Pace(SLOW), threading.Event()

    def work(job: Job[int]) -> Steps:
        assert go.wait(20)
        return (yield from burning(20)(job))

    job = lane(pace).submit(Urgency.LOAD, work, 60)
    assert job is not None
    pace.begin([job])
    go.set()
    assert until(lambda: job.done, SOON)
    assert job.rests == 0
    pace.end()


def test_half_of_its_time_is_for_its_own_speed(lane: MakeLane) -> None:
    pace = Pace(SLOW)
    with pace.forward():
        begun = time.monotonic()
        job = asleep(lane(pace), urgency=Urgency.LOAD, within=1.0)
        assert until(lambda: job.done)
        assert job.result() == 10, "it ended in time"
        assert 0.4 < time.monotonic() - begun < 1.0


def test_a_hastened_job_has_its_new_time_to_be_paced_in(lane: MakeLane) -> None:
    pace = Pace(SLOW)
    made = lane(pace)
    with pace.forward():
        job = asleep(made)
        made.hasten(job, Urgency.LOAD, 0.6)
        assert until(lambda: job.done, SOON)
        assert job.result() == 10


def test_a_forward_whose_end_was_not_told_is_forgotten() -> None:
    now = [100.0]
    pace = Pace(SLOW, clock=lambda: now[0], cpu=lambda: now[0])
    job: Job[int] = Job(Urgency.STORE, burning(1), None, time.monotonic, print, pace)
    pace.begin()
    assert pace.computing
    now[0] += FORGOTTEN_S
    assert not pace.computing
    for _ in range(3):
        now[0] += 1.0
        pace.rest(job)
    assert job.rests == 0


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_forward_that_raises_is_over(error: type[BaseException]) -> None:
    pace = Pace(SLOW)

    def forward() -> None:
        with pace.forward():
            assert pace.computing
            raise error

    with pytest.raises(error):
        forward()
    assert not pace.computing


def test_a_unit_rests_before_each_payload_and_stays_the_same() -> None:
    rests: list[int] = []

    def fill(into: memoryview) -> None:
        into[:] = b"f" * len(into)

    payloads = [b"bytes", bytearray(b"array"), memoryview(b"view!"), np.arange(3, dtype=np.float32), Fill(7, fill)]
    objects = [NewObject(0, 0, i, Grade.CANONICAL, payload) for i, payload in enumerate(payloads)]
    unit = Unit(bytes(32), bytes(32), np.zeros((1, 32), np.uint8), np.zeros(4, np.int32), 16, objects, [Need(0, 0, 5)])
    made = resting(unit, lambda: rests.append(1))
    assert [item.size for item in made.objects] == [5, 5, 5, 12, 7]
    written = []
    for item in made.objects:
        assert isinstance(item.payload, Fill)
        room = bytearray(item.size)
        item.payload.write(memoryview(room))
        written.append(bytes(room))
    assert written == [b"bytes", b"array", b"view!", np.arange(3, dtype=np.float32).tobytes(), b"f" * 7]
    assert len(rests) == 5


@pytest.mark.parametrize("share", [0.0, -1.0, 1.5, float("nan")])
def test_a_share_that_is_none_is_refused(share: float) -> None:
    with pytest.raises(ConfigError, match="pace"):
        TransferOptions(pace=share)
