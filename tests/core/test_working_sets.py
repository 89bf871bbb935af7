"""More sessions in turn than fit, and long ones beside short ones: hits degrade in proportion, whatever the kinds."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tests.core.differential import Life
from tests.core.worlds import WORLDS, World

from kvloom.config import Device
from kvloom.core.fields import QUEUE_SIZE
from kvloom.core.policies import STRANDED, resumable
from kvloom.manager import Manager
from kvloom.spec.footprint import peak_bytes
from kvloom.spec.model_spec import ModelSpec
from kvloom.spec.presets import load_preset
from kvloom.types import Int32Array

SESSIONS = 8
MODELS = {"gpt-oss-120b": (12, 2432), "gemma-3-27b": (12, 2432), "deepseek-v4-flash": (16, 9728)}
"""Turns, and tokens per turn."""
OF_THE_OPTIMUM = {0.5: 0.9, 1.0: 0.95, 1.5: 1.0}
"""By the share of the working set that fits, the share of what the optimum gets.

The working set is the least from which every turn could be served: all of every prompt, and windows and snapshots of
its end.
"""


def model(name: str) -> ModelSpec:
    """A preset with ids and positions of any size."""
    return replace(load_preset(name), vocab_size=0, max_positions=0)


def serve(manager: Manager, ids: Int32Array) -> int:
    """One request, prefilled in canonical chunks, its end kept; the tokens that it reused."""
    sequence = manager.open(ids)
    manager.complete(sequence.restore)
    reused, at, chunk = sequence.reused, sequence.length, manager.spec.segment_tokens
    while at < len(ids) - 1:
        end = min(len(ids) - 1, (at // chunk + 1) * chunk)
        manager.complete(sequence.append(ids[at:end]))
        manager.complete(sequence.commit())
        at = end
    manager.complete(sequence.checkpoint())
    sequence.close()
    return reused


def in_turn(manager: Manager, turns: int, turn: int) -> int:
    """Eight sessions with growing prompts in round robin; the tokens that were reused."""
    random = np.random.default_rng(1)
    prompts = [random.integers(0, 30000, turn * turns + 1).astype(np.int32) for _ in range(SESSIONS)]
    return sum(serve(manager, p[: turn * number + 1]) for number in range(1, turns + 1) for p in prompts)


def pinned_optimum(spec: ModelSpec, capacity: int, turns: int, turn: int) -> float:
    """Tokens reused at best in so many bytes, the running request held: what is used last again goes first.

    A session that stays has the windows and snapshots of its end.  It goes whole, or loses its end and has those of an
    earlier place, as if these could be known before: the better of the two for all sessions.
    """
    path = sum(g.slot_bytes / g.block_tokens for g in spec.groups if g.block_tokens and not g.window)
    boundary = peak_bytes(spec, turn * turns, spec.segment_tokens) - path * turn * turns
    best = 0.0
    for whole in (True, False):
        held, hits = [0.0] * SESSIONS, 0.0
        for request in range(SESSIONS * turns):
            number, session = divmod(request, SESSIONS)
            hits += held[session]
            held[session] = turn * (number + 1)
            over = sum(boundary + path * tokens for tokens in held if tokens) - capacity
            for back in range(1, SESSIONS):  # the session that ran just before comes again last
                at = (session - back) % SESSIONS
                if over <= 0 or not held[at]:
                    continue
                left = 0.0 if whole else max(0.0, held[at] - over / path)
                over -= path * (held[at] - left) + (0 if left else boundary)
                held[at] = left
        best = max(best, hits)
    return best


@pytest.mark.parametrize("share", OF_THE_OPTIMUM)
@pytest.mark.parametrize("name", MODELS)
def test_a1_sessions_in_turn_hit_in_proportion(name: str, share: float) -> None:
    spec = model(name)
    turns, turn = MODELS[name]
    needed = int(share * SESSIONS * peak_bytes(spec, turn * turns, spec.segment_tokens))
    manager = Manager(spec, [Device(needed)], max_sequences=2)
    reused = in_turn(manager, turns, turn)
    assert reused >= OF_THE_OPTIMUM[share] * pinned_optimum(spec, needed, turns, turn)
    manager.check_integrity()


@pytest.mark.parametrize(("room", "least"), [(1.3, 0.95), (1.0, 0.5)])
@pytest.mark.parametrize("name", [*MODELS, "qwen3-next-80b"])
def test_a3_turns_of_a_long_session_hit_as_well_as_those_of_short_ones(name: str, room: float, least: float) -> None:
    """110,000 tokens beside twelve short sessions, and after every turn a prompt that never comes again.

    The sessions fit, or nearly do; the other prompts come on top, so that something is evicted all the time.
    """
    spec = model(name)
    random = np.random.default_rng(3)
    starts, turns, turn = [110_000] + [2_000] * 12, 10, 500
    cap = int(room * sum(peak_bytes(spec, start + turns * turn, spec.segment_tokens) for start in starts))
    manager = Manager(spec, [Device(cap)], max_sequences=2)
    talks = [random.integers(0, 30000, start + turns * turn).astype(np.int32) for start in starts]
    hits: list[list[float]] = [[] for _ in starts]
    for number in range(1, turns + 1):
        for start, talk, found in zip(starts, talks, hits, strict=True):
            reused = serve(manager, talk[: start + number * turn])
            found.append(reused / (start + (number - 1) * turn - 1))
            serve(manager, random.integers(0, 30000, int(random.integers(300, 3000))).astype(np.int32))
    first, *others = (float(np.mean(found[1:])) for found in hits)
    assert first >= max(least, float(np.mean(others)))
    manager.check_integrity()


@pytest.mark.parametrize("world", [w for w in WORLDS if len(w.spec.groups) > 1], ids=lambda w: w.name)
def test_leaves_that_are_not_stranded_can_be_resumed_from(world: World) -> None:
    """What an eviction left without a boundary goes next, so room is never held by what cannot hit."""
    life = Life(world, seed=3, policy="cost")
    a = life.fast.arrays
    for _ in range(200):
        life.step()
        for q in range(STRANDED):
            for n in a.heap[q, : int(a.policy[QUEUE_SIZE + q])].tolist():
                assert resumable(a, n), life.log[-3:]
