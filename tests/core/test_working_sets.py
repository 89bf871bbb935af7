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
MODELS = {
    "gpt-oss-120b": (12, 2432, {0.5: 0.9, 1.0: 0.95, 1.5: 1.0}),
    "gemma-3-27b": (12, 2432, {0.5: 0.8, 1.0: 0.95, 1.5: 1.0}),
    "deepseek-v4-flash": (16, 9728, {0.5: 0.7, 1.0: 0.95, 1.5: 1.0}),
}
"""Turns, tokens per turn, and by the share of the working set that fits the share of what can be reached.

The working set is the least from which every turn could be served: all of every prompt, and windows and snapshots of
its end.  Large windows and large pages make it coarse: most of what is lost is that sessions fit whole or not at all.
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


def pinned_optimum(capacity: int, turns: int, turn: int) -> int:
    """Tokens reused at best with room for so many, the running request held: what is used last again goes first."""
    held, hits = [0] * SESSIONS, 0
    for request in range(SESSIONS * turns):
        number, session = divmod(request, SESSIONS)
        hits += held[session]
        held[session] = turn * (number + 1)
        over = sum(held) - capacity
        for back in range(1, SESSIONS):  # the session that ran just before comes again last
            gone = min(max(0, over), held[(session - back) % SESSIONS])
            held[(session - back) % SESSIONS] -= gone
            over -= gone
    return hits


@pytest.mark.parametrize("share", [0.5, 1.0, 1.5])
@pytest.mark.parametrize("name", MODELS)
def test_sessions_in_turn_hit_in_proportion(name: str, share: float) -> None:
    spec = model(name)
    turns, turn, least = MODELS[name]
    needed = SESSIONS * peak_bytes(spec, turn * turns, spec.segment_tokens)
    manager = Manager(spec, [Device(int(share * needed))], max_sequences=2)
    reused = in_turn(manager, turns, turn)
    assert reused >= least[share] * pinned_optimum(int(share * SESSIONS * turns * turn), turns, turn)
    manager.check_integrity()


@pytest.mark.parametrize("world", [w for w in WORLDS if len(w.spec.groups) > 1], ids=lambda w: w.name)
def test_leaves_that_are_not_stranded_can_be_resumed_from(world: World) -> None:
    """What an eviction left without a boundary goes next, so room is never held by what cannot hit."""
    life = Life(world, seed=3, policy="cost")
    a = life.fast.arrays
    for _ in range(200):
        life.step()
        if life.log[-1].startswith("drop"):
            break
        for q in range(STRANDED):
            for n in a.heap[q, : int(a.policy[QUEUE_SIZE + q])].tolist():
                assert resumable(a, n), life.log[-3:]
