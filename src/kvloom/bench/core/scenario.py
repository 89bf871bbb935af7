"""The requests that every side serves: one world per config, driven through the small ``Driver`` interface.

kvloom runs this in process, and a peer's own Python runs this very file (see ``peers/serve.py``); what differs between
the sides is the driver alone.  So only the standard library and NumPy are used here.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int32]

CHUNK = 8192
RUNNING = 256
DECODE_FROM = 2048
"""Sequence ``i`` of the decode batch starts at this many tokens + i: in every step blocks fill, windows move on and
segments become complete, each time about as many."""
EVICTED = 512
SHORTEST = 128
FIRST_ID, LAST_ID = 1000, 150_000
_ADDED = {"cold": 1.0, "chunked": 1.0, "hit50": 0.6, "hit100": 0.1}
"""Part of a prompt that a request adds to the index; a turn begins with room for all of its requests."""


@dataclass(frozen=True)
class Group:
    """One KV cache group: tokens per block, the window (0: full attention), tokens per entry."""

    block: int
    window: int = 0
    ratio: int = 1


CONFIGS: dict[str, tuple[Group, ...]] = {
    "full": (Group(16),),
    "gptoss": (Group(16), Group(16, 128)),
    "gemma3": (Group(16), *[Group(16, 1024)] * 5),
    "dsv4": (Group(256, ratio=4), Group(64, 128), Group(4, 8), Group(8, 128)),
}
"""Full attention; + a window of 128; + five windows of 1,024; compressed KV, a window and two compressor states."""


@dataclass(frozen=True)
class Plan:
    """What a world must hold.

    Attributes:
        config: key of ``CONFIGS``.
        objects: objects in the index, at least.
        lengths: lengths in tokens of the prompts that are asked for again.
        rotation: prompts of each length, asked for in turn.
        longest: tokens of the longest prompt.
        fill: tokens of the prompts that fill the index.
        decode: whether a decode batch will run.
        full: whether the pool is filled up (every array was in use before anything is measured).
        dense: whether windows are kept at every boundary instead of where forwards end.
    """

    config: str
    objects: int
    lengths: tuple[int, ...] = ()
    rotation: int = 4
    longest: int = CHUNK
    fill: int = 2048
    decode: bool = False
    full: bool = True
    dense: bool = False

    @property
    def row(self) -> int:
        """Tokens of the longest sequence, generously."""
        return max(*self.lengths, self.longest, self.fill, DECODE_FROM + 4 * RUNNING if self.decode else 0) + CHUNK

    @property
    def sequences(self) -> int:
        """Sequences at a time."""
        return RUNNING + 2 if self.decode else 2

    def blocks(self) -> tuple[int, ...]:
        """Blocks of each group that the pool has beyond ``objects``: what runs at a time, and the prompts by turns."""
        tokens = 5 * self.row + 2 * self.rotation * sum(self.lengths) + self.batch_tokens
        return blocks_of(self.config, tokens)

    @property
    def batch_tokens(self) -> int:
        """Tokens of the decode batch at last."""
        return RUNNING * (DECODE_FROM + 2 * RUNNING) if self.decode else 0


def blocks_of(config: str, tokens: int) -> tuple[int, ...]:
    """Blocks of each group of one forward of ``tokens`` tokens."""
    return tuple(tokens // g.block + 64 for g in CONFIGS[config])


@dataclass(frozen=True)
class Served:
    """One request or step: tokens it reused, and thread CPU nanoseconds by part."""

    reused: int
    parts: dict[str, int] = field(default_factory=dict)


class Driver(Protocol):
    """One cache manager.  Everything but what ``Served.parts`` holds is outside the clock."""

    granule: int
    """Tokens that a hit is a multiple of; known after ``make``."""

    def version(self) -> str:
        """Name and version of what is driven."""

    def supports(self, config: str, case: str) -> bool:
        """Whether this side can do it."""

    def make(self, plan: Plan) -> None:
        """An empty manager with room for the plan."""

    def keep(self, ids: Ids) -> Any:
        """A new request, as the side's engine holds it (with its hashes, where the side hashes)."""

    def serve(self, prompt: Any, chunk: int) -> Served:
        """Look up, pin, allocate, commit and free one request, ``chunk`` tokens at a time (0: at once)."""

    def look(self, prompt: Any) -> Served:
        """Look up, pin and free: nothing is computed."""

    def cached(self) -> int:
        """Objects in the index."""

    def begin(self, prompts: Sequence[Any]) -> None:
        """Prefill a decode batch."""

    def step(self) -> Served:
        """One token for every sequence of the batch."""

    def end(self) -> None:
        """Free the batch."""

    def clear(self, blocks: Sequence[int]) -> None:
        """Evict until so many blocks of each group are free."""

    def evict(self, objects: int) -> Served:
        """Evict so many objects."""

    def forget_windows(self) -> None:
        """Drop the objects of all windows; full attention stays."""

    def disagree(self, ids: Ids) -> None:
        """Drop windows of a prompt that is cached densely, so that no boundary has those of two groups."""

    def convert(self, ids: list[int]) -> Served:
        """From a list to what the side's engine keeps."""

    def digest(self, ids: Ids) -> Served | None:
        """The digests of a prompt's blocks; None when the side has none."""


class World:
    """One side's manager for one plan, and the prompts it has seen."""

    def __init__(self, driver: Driver, plan: Plan) -> None:
        self.driver, self.plan = driver, plan
        self._drawn = self._turn = 0
        self._decoding = False
        self._job: tuple[str, int, str] | None = None
        driver.make(plan)
        # one token more, since the last one of a prompt is computed again: the half itself can be resumed
        self._half = {n: [self.draw(n // 2 + 1) for _ in range(plan.rotation)] for n in plan.lengths}
        self._whole = {n: [self.draw(n) for _ in range(plan.rotation)] for n in plan.lengths}
        self._fill()
        for tokens in plan.lengths:
            self._refresh(tokens)
        self.objects = driver.cached()
        gc.collect()
        gc.freeze()

    def draw(self, tokens: int) -> Ids:
        """Fresh random ids."""
        self._drawn += 1
        return np.random.default_rng([7, self._drawn]).integers(FIRST_ID, LAST_ID, tokens, dtype=np.int32)

    def run(self, case: str, tokens: int, detail: str, count: int) -> list[Served]:
        """Serve ``count`` requests (or steps) of a case."""
        if self._job != (case, tokens, detail):
            self._job = case, tokens, detail
            self._prepare(case, tokens, detail)
        if case in _ADDED:
            self._clear(int(count * tokens * _ADDED[case]))
        return [self._one(case, tokens, detail) for _ in range(count)]

    def close(self) -> None:
        """Let the objects go."""
        gc.unfreeze()

    # ---------------------------------------------------------------- one sample

    def _one(self, case: str, tokens: int, detail: str) -> Served:
        driver = self.driver
        self._turn += 1
        if case == "decode256":
            return driver.step()
        if case == "lists":
            return driver.convert(self.draw(tokens).tolist())
        if case == "digests":
            return driver.digest(self.draw(tokens)) or Served(0)
        if case == "evict" and detail.startswith(str(EVICTED)):
            return self._evict()
        if case == "adversarial" and "windows" in detail:
            return self._expect(driver.look(driver.keep(self._whole[tokens][0].copy())), 0, case)
        if case in ("hit100", "adversarial"):
            prompts = self._whole[tokens]
            prompt = driver.keep(prompts[self._turn % len(prompts)].copy())
            return self._expect(driver.serve(prompt, 0), (tokens - 1) // driver.granule * driver.granule, case)
        if case == "hit50":
            head = self._half[tokens][self._turn % self.plan.rotation][:-1]
            prompt = driver.keep(np.concatenate([head, self.draw(tokens - len(head))]))
            return self._expect(driver.serve(prompt, 0), len(head) // driver.granule * driver.granule, case)
        return self._expect(driver.serve(driver.keep(self.draw(tokens)), CHUNK if case == "chunked" else 0), 0, case)

    def _clear(self, tokens: int) -> None:
        """Room for so many tokens that requests will add."""
        self.driver.clear(blocks_of(self.plan.config, tokens))

    def _evict(self) -> Served:
        """Evict, and cache as much again."""
        served = self.driver.evict(EVICTED)
        for _ in range(EVICTED * CONFIGS[self.plan.config][0].block // self.plan.fill):
            self._serve(self.draw(self.plan.fill))
        return served

    @staticmethod
    def _expect(served: Served, reused: int, case: str) -> Served:
        if served.reused != reused:
            raise RuntimeError(f"{case}: {served.reused} tokens were reused where {reused} are cached")
        return served

    # ---------------------------------------------------------------- before it

    def _serve(self, ids: Ids) -> None:
        self.driver.serve(self.driver.keep(ids), 0)

    def _fill(self) -> None:
        """Prompts of their own until the index holds enough, or all that it can."""
        plan, before = self.plan, self.driver.cached()
        while before < plan.objects:
            self._serve(self.draw(plan.fill))
            each = max(1, self.driver.cached() - before)
            for _ in range((plan.objects - before) // each - 1):
                self._serve(self.draw(plan.fill))
            before = self.driver.cached()
        if plan.full:
            self._brim()

    def _brim(self) -> None:
        """Until the index grows no more."""
        before = -1
        while (now := self.driver.cached()) > before:
            before = now
            for _ in range(64):
                self._serve(self.draw(self.plan.fill))

    def _refresh(self, tokens: int) -> None:
        """The prompts of one length are the latest used."""
        for ids in self._half.get(tokens, []) + self._whole.get(tokens, []):
            self._serve(ids)

    def _prepare(self, case: str, tokens: int, detail: str) -> None:
        driver = self.driver
        decoding = case == "decode256" or detail.endswith("running")
        if decoding != self._decoding:
            self._decoding = decoding
            if decoding:
                self._clear(self.plan.batch_tokens)
                driver.begin([driver.keep(self.draw(DECODE_FROM + i)) for i in range(RUNNING)])
            else:
                driver.end()
        if detail.startswith("path"):
            self._grow_path(self._whole[tokens][0], int(detail.split()[2]))
        elif detail.startswith("windows gone"):
            driver.forget_windows()
        elif detail.startswith("two windows"):
            driver.disagree(self._whole[tokens][0])
        elif detail.startswith("pool full"):
            self._brim()
        elif case.startswith("hit"):
            self._refresh(tokens)

    def _grow_path(self, trunk: Ids, nodes: int) -> None:
        """So many prompts leave the trunk, one after the other, and the trunk itself is the latest used."""
        granule = self.driver.granule
        for at in range(1, nodes + 1):
            end = len(trunk) * at // nodes // granule * granule
            self._serve(np.concatenate([trunk[:end], self.draw(granule)]))
        self._serve(trunk)
