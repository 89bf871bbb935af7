"""Metadata bytes beside KV bytes: the arrays of a real manager that is filled as an engine fills it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import numpy as np

from kvloom.config import Device
from kvloom.manager.manager import Manager
from kvloom.spec.model_spec import ModelSpec
from kvloom.types import Int32Array

PROMPT = 8192
OCCUPANCY = 0.8
TOKEN_STORE = ("Arrays.tokens", "Rows.tail")
"""Arrays that hold token ids for the exact comparison: host memory, shown apart."""


@dataclass(frozen=True, slots=True)
class MetadataRow:
    """One model.

    Attributes:
        kv_bytes: bytes of the slots in use.
        objects: how many those are.
        metadata_bytes: of all arrays that the manager keeps alive, without the token store.
        token_store_bytes: of the arrays with token ids.
        parts: bytes of each array, largest first.
    """

    model: str
    kv_bytes: int
    objects: int
    metadata_bytes: int
    token_store_bytes: int
    parts: tuple[tuple[str, int], ...]

    @property
    def share(self) -> float:
        """Metadata bytes per KV byte."""
        return self.metadata_bytes / self.kv_bytes

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "model": self.model,
            "kv_bytes": self.kv_bytes,
            "objects": self.objects,
            "metadata_bytes": self.metadata_bytes,
            "share": self.share,
            "bytes_per_object": self.metadata_bytes / self.objects,
            "token_store_bytes": self.token_store_bytes,
            "parts": dict(self.parts),
        }


def arrays_of(manager: Manager) -> dict[str, int]:
    """Bytes of every array that a manager keeps alive, by owner and name; views count once, as what they view."""
    found: dict[int, tuple[str, int]] = {}
    for name, array in _walk("", manager, set()):
        base = array
        while isinstance(base.base, np.ndarray):
            base = base.base
        found.setdefault(id(base), (name, base.nbytes))
    parts: dict[str, int] = {}
    for name, size in found.values():
        parts[name] = parts.get(name, 0) + size
    return parts


def _walk(name: str, value: object, seen: set[int]) -> Iterator[tuple[str, Any]]:
    if isinstance(value, np.ndarray):
        yield name, value
        return
    if id(value) in seen or isinstance(value, (str, bytes, int, float, type)):
        return
    seen.add(id(value))
    for part, inner in _parts(value):
        yield from _walk(part or name, inner, seen)


def _parts(value: object) -> Iterator[tuple[str, object]]:
    """What an object holds: items of containers, attributes of kvloom's own objects."""
    owner = type(value).__name__
    if isinstance(value, dict):
        yield from (("", inner) for inner in value.values())
    elif isinstance(value, (list, tuple, set)):
        yield from (("", inner) for inner in value)
    elif is_dataclass(value):
        yield from ((f"{owner}.{field.name}", getattr(value, field.name)) for field in fields(value))
    elif type(value).__module__.startswith("kvloom."):
        yield from ((f"{owner}.{part}", inner) for part, inner in vars(value).items())


def fill(manager: Manager, occupancy: float = OCCUPANCY, *, seed: int = 0) -> None:
    """Serve new prompts of up to 8,192 tokens in canonical chunks until ``occupancy`` of the arena is in use."""
    rng = np.random.default_rng(seed)
    spec = manager.spec
    length = min(PROMPT, spec.max_positions or PROMPT)
    while length > 2 * spec.segment_tokens and 64 * manager.peak_bytes(length) > manager.geometry.arena_bytes:
        length //= 2
    enough = occupancy * manager.geometry.arena_bytes
    used = prompts = 0
    while used < enough:
        # asking for the fill level takes longer than a prompt: half of what seems to be missing at a time
        missing = (enough - used) * prompts / (2 * used) if used else 1
        for _ in range(max(1, int(missing))):
            _serve(manager, rng.integers(0, spec.vocab_size or 32_000, length, dtype=np.int32), length)
            prompts += 1
        before, used = used, manager.stats().used
        if used <= before:  # so small an arena is as full as it gets
            return


def _serve(manager: Manager, tokens: Int32Array, length: int) -> None:
    chunk = manager.spec.segment_tokens
    sequence = manager.open(tokens)
    manager.complete(sequence.restore)
    for at in range(0, length, chunk):
        manager.complete(sequence.append(tokens[at : at + chunk]))
        manager.complete(sequence.commit())
    sequence.close()


def measure(name: str, spec: ModelSpec, device_bytes: int, max_sequences: int) -> MetadataRow:
    """Fill a manager of ``spec`` on a device tier and add up its arrays."""
    manager = Manager(spec, [Device(device_bytes)], max_sequences=max_sequences)
    fill(manager)
    stats = manager.stats()
    parts = arrays_of(manager)
    store = sum(parts.pop(part, 0) for part in TOKEN_STORE)
    return MetadataRow(
        model=name,
        kv_bytes=stats.used,
        objects=sum(kind.objects for kind in stats.kinds.values()),
        metadata_bytes=sum(parts.values()),
        token_store_bytes=store,
        parts=tuple(sorted(parts.items(), key=lambda part: -part[1])),
    )
