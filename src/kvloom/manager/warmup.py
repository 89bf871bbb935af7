"""Compile everything that managers use, by using it: small managers over models with every kind of group."""

from __future__ import annotations

import contextlib

import numpy as np

from kvloom.config import Device
from kvloom.core import compiled
from kvloom.core.digests import PrefixKeys, prefix_digests
from kvloom.errors import CapacityError, TableFullError
from kvloom.manager.manager import Manager
from kvloom.manager.sequence import CachedSequence
from kvloom.page_tables.cuckoo import CuckooTable
from kvloom.plan import CopyPlan, StoredObjects
from kvloom.spec.footprint import peak_bytes
from kvloom.spec.model_spec import ModelSpec
from kvloom.spec.presets import load_preset
from kvloom.types import Grade, Int32Array, Kind

MODELS = ("deepseek-v4-flash", "qwen3-next-80b", "llama-4-scout")
"""Compressed entries, windows, indexers and tails; full attention and recurrent state; chunks."""
_SEGMENTS = 3
_EMPTY: Int32Array = np.empty(0, dtype=np.int32)
_NOTHING = StoredObjects(_EMPTY, _EMPTY, _EMPTY, _EMPTY)


def warm_up() -> int:
    """Use every operation of a manager once, and mark the compiled core as complete on disk.

    Returns how many functions had to be compiled; 0 in every process after the first.
    """
    before = compiled.compilations()
    for name in MODELS:
        _use(load_preset(name, block_size=16))
    _name_prefixes()
    compiled.mark(0)
    return compiled.compilations() - before


def _use(spec: ModelSpec) -> None:
    length = _SEGMENTS * spec.segment_tokens + 5
    room = 4 * peak_bytes(spec, length, spec.segment_tokens)
    manager = Manager(spec, [Device(room)], max_sequences=4, max_nodes=9)
    prompt = np.arange(length, dtype=np.int32)
    for _ in range(2):  # a miss, and a hit at the checkpoint of its end
        _request(manager, prompt, Grade.FAITHFUL)
    _request(manager, prompt, Grade.CANONICAL)
    _request(manager, np.append(prompt[: spec.segment_tokens + 3], prompt[:9]), Grade.FAITHFUL)
    _decode(manager, prompt)
    _fail(manager, prompt)
    _recover(manager, prompt)
    _crowd(manager, prompt)
    _fill_index(Manager(spec, [Device(room)], max_sequences=4, max_nodes=3), prompt)
    for kind in Kind:
        manager.drop(kind, spec.segment_tokens, quarantine=True)
    manager.evict(1)
    manager.clear()
    manager.stats()
    manager.check_integrity()


def _request(manager: Manager, prompt: Int32Array, floor: Grade) -> None:
    """A whole request with a fork of its end."""
    sequence = _opened(manager, prompt, floor)
    _grow(manager, sequence, prompt[:-1])
    manager.complete(sequence.checkpoint())
    child, plan = sequence.fork()
    manager.complete(plan)
    _grow(manager, child, prompt)
    for each in (child, sequence):
        each.ranges()
        each.check()
        manager.complete(each.checkpoint())
        each.close()


def _decode(manager: Manager, prompt: Int32Array) -> None:
    """A batch, over the end of a segment."""
    segment = manager.spec.segment_tokens
    sequences = [_opened(manager, prompt[: segment + n], Grade.FAITHFUL) for n in (1, 2)]
    for sequence in sequences:
        _grow(manager, sequence, prompt[: 2 * segment - 3])
    batch = manager.batch(sequences)
    for token in range(6):
        for plan in manager.step(batch, np.full(2, token, dtype=np.int32)):
            manager.complete(plan)
    manager.finish(batch)
    for sequence in sequences:
        sequence.close()


def _fail(manager: Manager, prompt: Int32Array) -> None:
    """What does not come to its end: a forward, and a plan."""
    sequence = _opened(manager, prompt[:9], Grade.FAITHFUL)
    sequence.append(prompt[:5])
    sequence.rollback()
    sequence.close()
    manager.abandon(_opened(manager, prompt, Grade.FAITHFUL).restore)
    for sequence in manager.running():
        sequence.close()


def _recover(manager: Manager, prompt: Int32Array) -> None:
    """Lost windows and tails come back, and what a colder tier has is brought; the end is stored."""
    ids = prompt[: 2 * manager.spec.segment_tokens]
    for kind in (Kind.WINDOW, Kind.TAIL):
        manager.drop(kind)
    manager.colder.survey(ids, [_NOTHING])
    both = manager.colder.plan_replay(ids, _NOTHING, Grade.FAITHFUL)
    if both is not None:
        manager.colder.prefix_slots(both[0])
        manager.colder.finish_load(both[0], both[1])
    sequence = _opened(manager, np.append(ids, ids[:1]), Grade.FAITHFUL)
    _grow(manager, sequence, ids)
    stored = manager.colder.plan_offload(ids, _NOTHING)
    if stored is not None:
        manager.colder.finish_store(stored)
    sequence.close()


def _crowd(manager: Manager, prompt: Int32Array) -> None:
    """Other prompts until the index and the tier are full, beside one that holds what it has."""
    held = _opened(manager, prompt, Grade.FAITHFUL)
    for other in range(1, 12):
        tokens = prompt + other
        try:
            sequence = _opened(manager, tokens, Grade.FAITHFUL)
        except CapacityError:
            break
        try:
            _grow(manager, sequence, tokens[:-1])
            manager.complete(sequence.checkpoint())
        except CapacityError:
            manager.in_use()
        if other % 2:
            sequence.close()
    held.close()
    for sequence in manager.running():
        sequence.close()


def _fill_index(manager: Manager, prompt: Int32Array) -> None:
    """A tenant that left nothing makes room for the second segment of another one (an index of three nodes)."""
    sequence = _opened(manager, prompt, Grade.FAITHFUL)
    manager.open(prompt[:1], salt=b"other").close()
    _grow(manager, sequence, prompt)
    sequence.close()


def _name_prefixes() -> None:
    """Digests of prefixes, and places under them: a table that grows, and one that is full."""
    digests = prefix_digests(PrefixKeys.of(b"warm-up"), np.arange(600, dtype=np.int32), 300)
    table = CuckooTable(1, limit=1)
    table.put(digests[:1], np.zeros(1, dtype=np.int64))
    with contextlib.suppress(TableFullError):
        table.put(digests, np.arange(2))
    table.find(digests)
    table.remove(digests)
    table.check_integrity()
    growing = CuckooTable(1)
    growing.put(prefix_digests(PrefixKeys.of(b""), np.arange(20, dtype=np.int32), 1), np.arange(20))


def _opened(manager: Manager, prompt: Int32Array, floor: Grade) -> CachedSequence:
    sequence = manager.open(prompt, floor=floor)
    if len(sequence.restore):
        manager.complete(sequence.restore)
    return sequence


def _grow(manager: Manager, sequence: CachedSequence, tokens: Int32Array) -> None:
    """In canonical chunks."""
    segment = manager.spec.segment_tokens
    while sequence.length < len(tokens):
        end = min(len(tokens), (sequence.length // segment + 1) * segment)
        plans: tuple[CopyPlan, ...] = (sequence.append(tokens[sequence.length : end]), sequence.commit())
        for plan in plans:
            manager.complete(plan)
