"""Which worlds are made and which cases run in them, all sides taking turns so that a noisy machine hits each alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from kvloom.bench.core.rows import Row, Times
from kvloom.bench.core.scenario import CHUNK, CONFIGS, DECODE_FROM, EVICTED, RUNNING, SHORTEST, Plan, Served
from kvloom.bench.core.sides import Side

_REQUESTS = ("cold", "hit50", "hit100", "chunked", "lists", "digests")
CASES = (*_REQUESTS, "decode256", "free", "evict", "adversarial")
TOKENS = (8192, 32_768, 131_072)
OBJECTS = 1_000_000
EVICT_OBJECTS = (10_000, 100_000, 1_000_000)
REQUESTS, STEPS, EVICTIONS = 2, 16, 5
"""Requests, decode steps and evictions of one turn.  One more comes first and does not count: it brings the side's own
code and data back into the caches, where the other sides' were."""
PATHS = (64, 1024, 8192)
PEER_PATH = 1024
"""The longest path that peers are asked for: building one takes them time that is quadratic in its nodes."""
_SIMPLE = ("full", "gptoss")
_FILL = {"dsv4": 272}
"""Tokens of the prompts that fill an index, where 2,048 would leave few objects: one segment and a rest, because
some sides keep windows only where a prompt can be resumed."""

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Settings:
    """What to measure.

    Attributes:
        configs, cases, tokens: as the rows name them.
        objects: objects in the index before anything is measured.
        evict_objects: sizes of the index in which eviction and lookup are measured.
        repeats: turns of every side, at least 5; each adds some repetitions.
        rotation: cached prompts of each length, asked for in turn.
    """

    configs: tuple[str, ...] = tuple(CONFIGS)
    cases: tuple[str, ...] = CASES
    tokens: tuple[int, ...] = TOKENS
    objects: int = OBJECTS
    evict_objects: tuple[int, ...] = EVICT_OBJECTS
    repeats: int = 5
    rotation: int = 4


@dataclass(frozen=True, slots=True)
class Job:
    """One case to serve in a world; ``most`` is what peers are asked for at most."""

    case: str
    tokens: int
    detail: str = ""
    each: int = REQUESTS
    peers: bool = True


def run_all(settings: Settings, sides: Sequence[Side], say: Say = lambda _: None) -> Iterator[Row]:
    """Every row, the first side's times beside each of the others'."""
    for config in settings.configs:
        for plan, jobs in _worlds(settings, config):
            here = [side for side in sides if side.supports(config, jobs[0].case)]
            if not any(job.peers for job in jobs):
                here = here[:1]
            sizes = []
            for side in here:
                say(f"{config}: {side.name} fills an index of {plan.objects:,} objects")
                sizes.append(side.make(plan))
            for job in jobs:
                say(f"{config}: {job.case} {job.detail or job.tokens}")
                yield from _rows(settings, plan, job, here, sizes[0])


def _worlds(settings: Settings, config: str) -> Iterator[tuple[Plan, list[Job]]]:
    """The plans of a config, and what runs in each."""
    jobs = list(_usual(settings))
    cases, longest, fill = set(settings.cases), max(settings.tokens), _FILL.get(config, 2048)
    lengths = settings.tokens if cases & {"hit50", "hit100"} else ()
    if jobs:
        yield Plan(config, settings.objects, lengths, settings.rotation, longest, fill, decode=_decodes(jobs)), jobs
    if "evict" in cases and config in _SIMPLE:
        for objects in settings.evict_objects:
            size = f"{objects:,} objects"
            evict = Job("evict", EVICTED * CONFIGS[config][0].block, f"{EVICTED} among {size}", EVICTIONS)
            plan = Plan(config, objects, (CHUNK,), settings.rotation, fill=SHORTEST)
            yield plan, [Job("hit100", CHUNK, f"among {size}"), evict]
    if "adversarial" in cases:
        yield from _adversarial(config, longest)


def _decodes(jobs: Sequence[Job]) -> bool:
    return any(job.case == "decode256" or job.detail.endswith("running") for job in jobs)


def _usual(settings: Settings) -> Iterator[Job]:
    cases = set(settings.cases)
    if "free" in cases:
        cases.add("cold")
    for case in _REQUESTS:
        if case in cases:
            for tokens in settings.tokens:
                if case != "chunked" or tokens > CHUNK:
                    yield Job(case, tokens)
    if "evict" in cases:
        for tokens in settings.tokens:
            yield Job("evict", tokens, "pool full")
    if "decode256" in cases:
        yield Job("decode256", DECODE_FROM, each=STEPS)
    if "evict" in cases:
        yield Job("evict", CHUNK, f"pool full, {RUNNING} running")


def _adversarial(config: str, tokens: int) -> Iterator[tuple[Plan, list[Job]]]:
    windows = [group for group in CONFIGS[config] if group.window]
    if config in _SIMPLE:
        for nodes in PATHS:
            if nodes <= tokens // CONFIGS[config][0].block:
                plan = Plan(config, 4 * nodes, (tokens,), 1, tokens, full=False)
                yield plan, [Job("adversarial", tokens, f"path of {nodes} nodes", peers=nodes <= PEER_PATH)]
    if windows:
        plan = Plan(config, 0, (tokens,), 1, tokens, full=False, dense=True)
        jobs = [Job("adversarial", tokens, "two windows that never agree")] if len(windows) > 1 else []
        yield plan, [*jobs, Job("adversarial", tokens, "windows gone, full attention resident")]


def _rows(settings: Settings, plan: Plan, job: Job, sides: Sequence[Side], objects: int) -> Iterator[Row]:
    asked = [side for i, side in enumerate(sides) if i == 0 or (job.peers and side.supports(plan.config, job.case))]
    served: list[list[Served]] = [[] for _ in asked]
    for turn in range(settings.repeats + 1):
        for i, side in enumerate(asked):
            taken = side.run(job.case, job.tokens, job.detail, job.each + 1)
            served[i] += taken[1:] if turn else []
    names = [job.case] if job.case in settings.cases else []
    if job.case == "cold" and "free" in settings.cases:
        names.append("free")
    for name in names:
        part = "free" if name == "free" else None
        ours = Times.of(served[0], part)
        repeats = len(served[0])
        base = (plan.config, name, job.detail, job.tokens, objects, repeats, ours)
        beside = [(s.name, Times.of(t, part)) for s, t in zip(asked[1:], served[1:], strict=True)]
        beside = [(peer, theirs) for peer, theirs in beside if theirs is not None]
        if not beside:
            if ours is not None:
                yield Row(*base)
            continue
        for peer, theirs in beside:
            yield Row(*base, peer, theirs)
