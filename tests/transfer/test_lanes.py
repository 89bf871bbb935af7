"""Lanes: what is more urgent goes first, queues are bounded, what is cancelled or late stops, and hangs stay apart."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Generator, Iterator

import pytest

from kvloom.transfer.jobs import Job, State, Urgency
from kvloom.transfer.lanes import Lane

MOST = {Urgency.LOAD: 4, Urgency.PREFETCH: 2, Urgency.STORE: 2, Urgency.DEMOTE: 1}


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def lane(clock: Clock) -> Iterator[Lane]:
    made = Lane("kvloom-test", MOST, clock)
    yield made
    clock.now += 1000
    assert made.close(0) or made.hung


Steps = Generator[None, None, str]


class Door:
    """A job that says when it has begun and ends when the door is opened."""

    def __init__(self) -> None:
        self.begun, self.open = threading.Event(), threading.Event()

    def __call__(self, _job: Job[str]) -> Steps:
        yield from ()
        self.begun.set()
        assert self.open.wait(30)
        return "through"


def saying(log: list[str], word: str, pieces: int = 1) -> Callable[[Job[str]], Steps]:
    def work(job: Job[str]) -> Steps:
        for i in range(pieces):
            if i:
                yield
            if job.stopped():
                return "stopped"
            log.append(word)
        return word

    return work


def shut(lane: Lane) -> Door:
    """Occupy the lane until the door opens."""
    door = Door()
    job = lane.submit(Urgency.LOAD, door)
    assert job is not None
    assert door.begun.wait(30)
    return door


def test_the_most_urgent_goes_first_and_equals_in_order(lane: Lane) -> None:
    log: list[str] = []
    door = shut(lane)
    words = [(Urgency.DEMOTE, "d"), (Urgency.STORE, "s1"), (Urgency.PREFETCH, "p"), (Urgency.STORE, "s2")]
    words += [(Urgency.LOAD, "l1"), (Urgency.LOAD, "l2")]
    jobs = [lane.submit(urgency, saying(log, word)) for urgency, word in words]
    door.open.set()
    assert all(job is not None and job.wait(30) for job in jobs)
    assert log == ["l1", "l2", "p", "s1", "s2", "d"]
    assert [job.result() for job in jobs if job is not None] == [word for _, word in words]


def test_a_job_gives_way_between_its_pieces(lane: Lane) -> None:
    log: list[str] = []
    begun, goes_on = threading.Event(), threading.Event()

    def slow(_job: Job[str]) -> Steps:
        log.append("piece 1")
        begun.set()
        assert goes_on.wait(30)
        yield
        log.append("piece 2")
        return "slow"

    first = lane.submit(Urgency.PREFETCH, slow)
    assert begun.wait(30)
    second = lane.submit(Urgency.LOAD, saying(log, "load"))
    goes_on.set()
    assert first is not None
    assert second is not None
    assert first.wait(30)
    assert second.wait(30)
    assert log == ["piece 1", "load", "piece 2"]


def test_queues_are_bounded_each_by_its_urgency(lane: Lane) -> None:
    log: list[str] = []
    door = shut(lane)
    taken = [lane.submit(Urgency.STORE, saying(log, "s")) for _ in range(4)]
    assert [job is not None for job in taken] == [True, True, False, False]
    assert lane.submit(Urgency.LOAD, saying(log, "l")) is not None
    door.open.set()
    assert all(job.wait(30) for job in taken if job is not None)
    again = lane.submit(Urgency.STORE, saying(log, "s"))
    assert again is not None
    assert again.wait(30)


def test_what_is_cancelled_before_it_began_does_nothing(lane: Lane) -> None:
    log: list[str] = []
    door = shut(lane)
    job = lane.submit(Urgency.STORE, saying(log, "never"))
    assert job is not None
    job.cancel()
    door.open.set()
    assert job.wait(30)
    assert (job.state, job.result(), log) == (State.DROPPED, None, [])


def test_d10_what_is_late_stops_between_two_pieces(lane: Lane, clock: Clock) -> None:
    log: list[str] = []

    def work(job: Job[str]) -> Steps:
        for _ in range(100):
            if job.stopped():
                return "late"
            log.append("piece")
            clock.now += 1
            yield
        return "all"

    job = lane.submit(Urgency.LOAD, work, within=4.5)
    assert job is not None
    assert job.wait(30)
    assert (job.result(), len(log)) == ("late", 5)


def test_a_prefetch_that_a_request_waits_for_becomes_a_load(lane: Lane) -> None:
    log: list[str] = []
    door = shut(lane)
    ahead = lane.submit(Urgency.PREFETCH, saying(log, "ahead"))
    other = lane.submit(Urgency.PREFETCH, saying(log, "other"))
    assert lane.submit(Urgency.PREFETCH, saying(log, "too many")) is None
    assert ahead is not None
    assert other is not None
    lane.hasten(other, Urgency.LOAD, 60)
    assert lane.submit(Urgency.PREFETCH, saying(log, "room again")) is not None
    door.open.set()
    assert ahead.wait(30)
    assert other.wait(30)
    assert log[0] == "other"


def test_what_the_work_raises_is_raised_where_the_result_is_asked_for_and_the_lane_goes_on(lane: Lane) -> None:
    def work(_job: Job[str]) -> Steps:
        yield
        raise ZeroDivisionError("planted")

    job = lane.submit(Urgency.LOAD, work)
    assert job is not None
    assert job.wait(30)
    assert job.state is State.FAILED
    with pytest.raises(ZeroDivisionError, match="planted"):
        job.result()
    log: list[str] = []
    after = lane.submit(Urgency.LOAD, saying(log, "after"))
    assert after is not None
    assert after.wait(30)
    assert log == ["after"]


def test_d10_a_hang_is_seen_and_closing_does_not_wait_for_it(clock: Clock) -> None:
    lane, door, log = Lane("kvloom-test", MOST, clock), Door(), list[str]()
    job = lane.submit(Urgency.LOAD, door, within=5)
    assert job is not None
    assert door.begun.wait(30)
    assert not lane.hung
    waiting = lane.submit(Urgency.STORE, saying(log, "never"))
    clock.now += 6
    assert lane.hung
    begun = time.monotonic()
    assert not lane.close(0)
    assert time.monotonic() - begun < 5
    assert waiting is not None
    assert (waiting.done, waiting.state, job.done) == (True, State.DROPPED, False)
    assert lane.submit(Urgency.LOAD, saying(log, "closed")) is None
    door.open.set()
    assert job.wait(30)
    assert log == []


def test_closing_waits_for_what_can_be_done(clock: Clock) -> None:
    lane, log = Lane("kvloom-test", MOST, clock), list[str]()
    jobs = [lane.submit(Urgency.LOAD, saying(log, "l", pieces=3)) for _ in range(3)]
    assert lane.close(30)
    assert len(log) == 9
    assert all(job is not None and job.state is State.DONE for job in jobs)


@pytest.mark.parametrize("seed", range(5))
def test_from_many_threads_everything_ends_once(seed: int) -> None:
    most = dict.fromkeys(Urgency, 10)
    lane, ended, lock = Lane("kvloom-test", most), list[int](), threading.Lock()

    def submitter(base: int) -> None:
        rng = random.Random(seed * 100 + base)
        for i in range(60):
            number = base * 1000 + i
            pieces = rng.randrange(1, 4)

            def work(_job: Job[int], number: int = number, pieces: int = pieces) -> Generator[None, None, int]:
                for _ in range(pieces - 1):
                    yield
                with lock:
                    ended.append(number)
                return number

            job = lane.submit(rng.choice(list(Urgency)), work)
            if job is not None:
                jobs.append(job)
                if rng.random() < 0.2:
                    job.cancel()
            if rng.random() < 0.3:
                time.sleep(0.0005)

    jobs: list[Job[int]] = []
    threads = [threading.Thread(target=submitter, args=(base,)) for base in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert lane.close(60)
    assert all(job.done for job in jobs)
    done = [job.result() for job in jobs if job.state is State.DONE]
    assert sorted(done) == sorted(ended)
    assert len(set(ended)) == len(ended)
    assert not any(lane.busy(urgency) for urgency in Urgency)
