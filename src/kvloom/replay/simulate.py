"""One run: a real manager serves a trace, request after request, without tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from time import perf_counter

import numpy as np

from kvloom.config import Device
from kvloom.errors import CapacityError
from kvloom.manager.manager import Manager
from kvloom.manager.sequence import CachedSequence
from kvloom.manager.stats import Stats
from kvloom.plan import Explanation
from kvloom.replay.behind import Behind, Passage
from kvloom.replay.streams import Streams
from kvloom.replay.trace import Trace
from kvloom.spec.model_spec import ModelSpec
from kvloom.types import Int32Array, IntArray, Kind

SAMPLES = 200
"""How often the fill of the tier is looked at during a run."""

Progress = Callable[[int], None]
"""Told how many requests are done."""
Ended = Counter[tuple[str, str | None]]
"""Lookups by reason and kind; the kind is None where no object was at fault."""
MakeBehind = Callable[[Manager], Behind]
"""Puts colder tiers behind the manager of a run."""


@dataclass(frozen=True, slots=True)
class Sample:
    """The tier after ``requests`` requests: bytes of committed objects by kind, and evictions so far."""

    requests: int
    bytes_of: dict[Kind, int]
    evictions: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run did.

    Attributes:
        block_hits: leading blocks of every prompt that were reused, int64 [requests].
        reused: tokens of every prompt that needed no compute, int64 [requests].
        passed_through: requests larger than the tier: only what fits of them was looked up and kept.
        cut_short: answers that did not fit behind their prompt.
        ended: every lookup once, by the first thing that kept its hit from being longer.
        faults: by everything of a kind that did so.
        stats: counters of the manager at the end.
        samples: the tier at regular times.
        seconds, manager_seconds: wall time of the run, and of the manager's calls in it.
        behind: the colder tiers at the end, or None.
    """

    block_hits: IntArray
    reused: IntArray
    passed_through: int
    cut_short: int
    ended: Ended
    faults: Ended
    stats: Stats
    samples: tuple[Sample, ...]
    seconds: float
    manager_seconds: float
    behind: Behind | None = None


def simulate(
    streams: Streams,
    spec: ModelSpec,
    device_bytes: int,
    *,
    policy: str = "cost",
    progress: Progress = lambda _: None,
    clock: Callable[[], float] = perf_counter,
    behind: MakeBehind | None = None,
) -> Outcome:
    """Replay a trace; with or without answers as ``streams`` was made.

    A request is over, and what it stores is stored, before the next one arrives.  ``behind`` puts colder tiers behind
    the device.

    Raises:
        CapacityError: the tier cannot hold even the smallest request.
        ConfigError: unknown policy.
    """
    started = clock()
    run = _Run(streams, spec, device_bytes, policy, clock, behind)
    trace = streams.trace
    every = max(1, len(trace) // SAMPLES)
    samples: list[Sample] = []
    for i in range(len(trace)):
        run.serve(i)
        if (i + 1) % every == 0 or i + 1 == len(trace):
            samples.append(sample(run.manager.stats(), i + 1))
            progress(i + 1)
    return Outcome(
        run.block_hits,
        run.reused,
        run.passed_through,
        run.cut_short,
        run.ended,
        run.faults,
        run.manager.stats(),
        tuple(samples),
        clock() - started,
        run.manager_seconds,
        run.behind,
    )


def sample(stats: Stats, requests: int) -> Sample:
    """How full the tier is, out of a manager's counters."""
    return Sample(
        requests,
        {kind: s.bytes for kind, s in stats.kinds.items()},
        sum(s.evictions for s in stats.kinds.values()),
    )


def note(explanation: Explanation, ended: Ended, faults: Ended) -> None:
    """Count what ended a lookup."""
    found = [(lim.reason.value, lim.kind.name.lower() if lim.kind is not None else None) for lim in explanation.limits]
    ended[found[0]] += 1
    faults.update({fault for fault in found if fault[1] is not None})


class _Run:
    """A manager and what it has done so far."""

    def __init__(
        self,
        streams: Streams,
        spec: ModelSpec,
        device_bytes: int,
        policy: str,
        clock: Callable[[], float],
        behind: MakeBehind | None,
    ) -> None:
        # Synthetic ids go through all of int32, and traces may hold longer prompts than the model's.
        self.spec = replace(spec, max_positions=0, vocab_size=0)
        self.manager = Manager(self.spec, [Device(device_bytes)], policy=policy, max_sequences=1)
        self.behind = None if behind is None else behind(self.manager)
        self.streams = streams
        self.trace: Trace = streams.trace
        self.clock = clock
        self.block_hits = np.zeros(len(self.trace), dtype=np.int64)
        self.reused = np.zeros(len(self.trace), dtype=np.int64)
        self.passed_through = self.cut_short = 0
        self.ended: Ended = Counter()
        self.faults: Ended = Counter()
        self.manager_seconds = 0.0
        self._most_blocks: int | None = None
        # Windows and snapshots are kept where a forward ends, and windows are freed there; an engine prefills hybrid
        # models in canonical chunks.  Blocks alone do not care.
        plain = all(not group.is_snapshot and group.kind is not Kind.WINDOW for group in spec.groups)
        self._chunk = 0 if plain else spec.segment_tokens

    def serve(self, i: int) -> None:
        tokens = self.streams.tokens(i)
        begun = self.clock()
        if self.streams.answers:
            self._whole_request(i, tokens)
        else:
            self._prompt_only(i, tokens)
        self.manager_seconds += self.clock() - begun

    # ---------------------------------------------------------------- the two ways

    def _prompt_only(self, i: int, tokens: Int32Array) -> None:
        block, depth = self.trace.block, int(self.trace.starts[i + 1] - self.trace.starts[i])
        passage, prompt = self._restore(tokens), int(self.trace.inputs[i])
        sequence = self._open(tokens)
        if sequence is None:
            self.passed_through += 1
            most = min(depth, self._largest(tokens))
            passage = self._restore(tokens[: most * block + 1]) if most else passage
            sequence = self._open(tokens[: most * block + 1]) if most else None
            if sequence is None:
                self._refused(prompt)
                return
            tokens = tokens[: most * block + 1]
        hits = sequence.reused // block
        self.block_hits[i] = hits
        full = (depth - 1) * block + self._last_block(i)
        self.reused[i] = hits * block if hits < depth else max(0, full)
        self._opened(passage, sequence, prompt, int(self.reused[i]))
        note(sequence.explanation, self.ended, self.faults)
        self._grow(sequence, tokens[:-1])
        if self.behind is not None:
            self.behind.keep(sequence)
            self.behind.note_use(tokens)
        sequence.close()

    def _last_block(self, i: int) -> int:
        depth = int(self.trace.starts[i + 1] - self.trace.starts[i])
        return min(self.trace.block, max(0, int(self.trace.inputs[i]) - (depth - 1) * self.trace.block))

    def _whole_request(self, i: int, tokens: Int32Array) -> None:
        prompt = int(self.trace.inputs[i])
        depth = int(self.trace.starts[i + 1] - self.trace.starts[i])
        passage = self._restore(tokens[:prompt])
        sequence = self._open(tokens[:prompt])
        if sequence is None:
            self.passed_through += 1
            self._refused(prompt)
            return
        self.reused[i] = sequence.reused
        self._opened(passage, sequence, prompt, sequence.reused)
        self.block_hits[i] = depth if sequence.reused >= prompt - 1 else min(depth, sequence.reused // self.trace.block)
        note(sequence.explanation, self.ended, self.faults)
        # As sessions do: the state just before the last prompt token, and the end of the answer, stay resumable.
        self._grow(sequence, tokens[: prompt - 1])
        self._keep(sequence)
        try:
            self._grow(sequence, tokens[: max(prompt, len(tokens) - 1)])
        except CapacityError:
            self.cut_short += 1
        self._keep(sequence)
        if self.behind is not None:
            self.behind.note_use(sequence.tokens)
        sequence.close()

    # ---------------------------------------------------------------- parts

    def _open(self, prompt: Int32Array) -> CachedSequence | None:
        """The opened and restored sequence; None when the prompt can never fit."""
        try:
            sequence = self.manager.open(prompt)
        except CapacityError as error:
            if error.never_fits:
                return None
            raise
        self.manager.complete(sequence.restore)
        return sequence

    def _grow(self, sequence: CachedSequence, tokens: Int32Array) -> None:
        """Compute what is missing of ``tokens``, in one forward or in canonical chunks."""
        at, complete = sequence.length, self.manager.complete
        while at < len(tokens):
            end = min(len(tokens), (at // self._chunk + 1) * self._chunk) if self._chunk else len(tokens)
            complete(sequence.append(tokens[at:end]))
            complete(sequence.commit())
            at = end

    def _keep(self, sequence: CachedSequence) -> None:
        if sequence.length:
            self.manager.complete(sequence.checkpoint())
            if self.behind is not None:
                self.behind.keep(sequence)

    def _restore(self, prompt: Int32Array) -> Passage | None:
        return None if self.behind is None else self.behind.restore(prompt)

    def _opened(self, passage: Passage | None, sequence: CachedSequence, prompt: int, reused: int) -> None:
        if self.behind is not None and passage is not None:
            self.behind.opened(passage, sequence, prompt, reused)

    def _refused(self, prompt: int) -> None:
        if self.behind is not None:
            self.behind.refused(prompt)

    def _largest(self, tokens: Int32Array) -> int:
        """Blocks of the longest prompt, with one token behind it, that fits into the empty tier."""
        if self._most_blocks is None:
            block, arena = self.trace.block, self.manager.geometry.arena_bytes
            low, high = 0, len(tokens) // block
            while low < high:
                middle = (low + high + 1) // 2
                fits = self.manager.peak_bytes(middle * block + 1) <= arena
                low, high = (middle, high) if fits else (low, middle - 1)
            while low and not self._opens(tokens[: low * block + 1]):  # pages may hold a little less
                low -= 1
            self._most_blocks = low
        return self._most_blocks

    def _opens(self, prompt: Int32Array) -> bool:
        sequence = self._open(prompt)
        if sequence is not None:
            sequence.close()
        return sequence is not None
