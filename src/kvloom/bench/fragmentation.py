"""How much of what they reserve contiguous and paged allocation use, and what an append costs."""

from __future__ import annotations

import math
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from time import perf_counter_ns
from typing import Any

import numpy as np

from kvloom.bench.azure import CONVERSATIONS
from kvloom.bench.stores import Contiguous, Paged, Store, one_layer
from kvloom.config import format_size
from kvloom.errors import InputError

BLOCK = 64
MOST_BYTES = 8 << 30
Lengths = Sequence[tuple[int, int]]
Say = Callable[[str, int, int], None]
"""Told what runs, and how many of how many requests are done."""


@dataclass(frozen=True, slots=True)
class Case:
    """What is run.

    Attributes:
        requests: (prompt tokens, answer tokens).
        max_tokens: the longest sequence that has to be expected.
        running: sequences at a time.
        together: all of them stay until the last one is done, and the use is taken then; otherwise each leaves when it
            is done, the next one comes, and the use is the mean over all steps.
    """

    name: str
    requests: tuple[tuple[int, int], ...]
    max_tokens: int
    running: int
    together: bool


@dataclass(frozen=True, slots=True)
class Row:
    """One allocator in one case; times are of one append of one token, its state written, in microseconds."""

    case: str
    allocator: str
    requests: int
    used: float
    peak_reserved_bytes: int
    copied_bytes: int
    append_us_p50: float
    append_us_p99: float
    append_us_max: float

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def cases(conversations: Lengths = CONVERSATIONS, *, seed: int = 0) -> tuple[Case, ...]:
    """The three cases; half of the tokens of the first two are decoded."""
    rng = random.Random(seed)  # noqa: S311
    drawn = [round(math.exp(rng.uniform(math.log(512), math.log(4096)))) for _ in range(16)]
    longest = max(prompt + answer for prompt, answer in conversations)
    return (
        Case("8 x 1k of 2k", ((512, 512),) * 8, 2048, 8, together=True),
        Case("16 x 0.5-4k of 8k", tuple((n - n // 2, n // 2) for n in drawn), 8192, 16, together=True),
        Case(
            "chat lengths",
            tuple(conversations),
            max(16_384, 1 << (longest - 1).bit_length()),
            16,
            together=False,
        ),
    )


def stores(case: Case, *, block: int = BLOCK) -> tuple[Callable[[], Store], ...]:
    """Makers of the allocators: the same arena for each, so large that reserving the maximum always fits."""
    token_bytes = int(one_layer(block).groups[0].bytes_per_token)
    arena = case.running * case.max_tokens * token_bytes

    def contiguous(step: int | None) -> Store:
        # Growing holds the old range while it copies, and leaves gaps.
        room = arena if step is None else 2 * arena
        return Contiguous(room, token_bytes, max_tokens=case.max_tokens, step=step)

    return (
        lambda: contiguous(None),
        lambda: contiguous(block),
        lambda: Paged(arena, block, max_sequences=case.running),
    )


def run_case(case: Case, make: Callable[[], Store], say: Say = lambda _w, _d, _t: None) -> Row:
    """Serve every request of ``case``: the prompt at once, then the answer token by token, all running ones in turn."""
    store = make()
    token_bytes = int(one_layer(BLOCK).groups[0].bytes_per_token)
    rows = np.arange(max(prompt for prompt, _ in case.requests) * token_bytes, dtype=np.uint8).reshape(-1, token_bytes)
    waiting = list(enumerate(case.requests))[::-1]
    running: list[tuple[Any, int]] = []
    times: list[int] = []
    use: list[float] = []
    peak = done = 0
    while waiting or any(left for _, left in running):
        while waiting and len(running) < case.running:
            number, (prompt, answer) = waiting.pop()
            tokens = np.arange(prompt, dtype=np.int32) + np.int32(number << 15)  # unlike every other prompt
            held = store.open(tokens)
            held.append(tokens, rows[:prompt])
            running.append((held, answer))
        following = []
        for held, left in running:
            if left:
                token = np.array([left], dtype=np.int32)
                row = rows[left % len(rows) : left % len(rows) + 1]
                began = perf_counter_ns()
                held.append(token, row)
                times.append(perf_counter_ns() - began)
            if left > 1 or case.together:
                following.append((held, max(0, left - 1)))
            else:
                held.close()
                done += 1
        peak = max(peak, store.reserved())
        running = following
        if running:
            use.append(sum(held.length for held, _ in running) * token_bytes / store.reserved())
        say(f"{case.name}, {store.name}", done, len(case.requests))
    taken = np.array(times) / 1000
    return Row(
        case.name,
        store.name,
        len(case.requests),
        use[-1] if case.together else sum(use) / len(use),
        peak,
        store.copied,
        *(round(float(v), 2) for v in np.percentile(taken, [50, 99, 100])),
    )


def check_size(case: Case, *, most_bytes: int | None = None) -> None:
    """InputError when the case could need more than ``most_bytes``: by default 8 GiB, or half of the memory.

    State is really written: at most that of the longest requests that may run at once.
    """
    if most_bytes is None:
        most_bytes = min(MOST_BYTES, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2)
    longest = sorted((prompt + answer for prompt, answer in case.requests), reverse=True)[: case.running]
    tokens = sum(longest) + max(prompt for prompt, _ in case.requests)  # and the rows that are written from
    needed = tokens * int(one_layer(BLOCK).groups[0].bytes_per_token)
    if needed > most_bytes:
        raise InputError(
            f"{case.name}: the {len(longest)} longest requests have {sum(longest):,} tokens, which takes "
            f"{format_size(needed)} of real memory, and this benchmark takes at most {format_size(most_bytes)}; "
            "use a trace with shorter requests"
        )


def run_all(conversations: Lengths = CONVERSATIONS, say: Say = lambda _w, _d, _t: None) -> list[Row]:
    """Every case with every allocator; the arrays of compiled functions are warm.

    Raises InputError when the conversations are too long for this benchmark; see ``check_size``.
    """
    for case in cases(conversations):
        check_size(case)
    warm = Case("warm-up", ((100, 70),), 256, 1, together=False)
    for make in stores(warm):
        run_case(warm, make)
    return [run_case(case, make, say) for case in cases(conversations) for make in stores(case)]
