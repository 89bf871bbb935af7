"""Three ways of keeping the state of sequences, on real memory, behind one interface."""

from __future__ import annotations

import mmap
import sys
from dataclasses import replace
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvloom.bench.contiguous import ContiguousManager, ContiguousSequence
from kvloom.config import Device
from kvloom.errors import ConfigError
from kvloom.manager.manager import Manager
from kvloom.manager.sequence import CachedSequence
from kvloom.spec.model_spec import ModelSpec
from kvloom.spec.presets import load_preset
from kvloom.types import Int32Array

MODEL = "llama-3.1-8b"
Bytes = npt.NDArray[np.uint8]


def one_layer(block: int) -> ModelSpec:
    """One layer of llama-3.1-8b (4 KiB per token), in blocks of ``block`` tokens, for prompts of any ids and length."""
    spec = load_preset(MODEL, block_size=block)
    group = replace(spec.groups[0], layers=(0,))
    return replace(spec, groups=(group,), max_positions=0, vocab_size=0)


class Held(Protocol):
    """One sequence."""

    @property
    def length(self) -> int:
        """Tokens whose state is there."""

    def append(self, token_ids: Int32Array, rows: Bytes) -> None:
        """Reserve room for the tokens and write their state, uint8 [tokens, bytes]."""

    def close(self) -> None:
        """Give everything back."""


class Store(Protocol):
    """Memory for sequences."""

    name: str

    def open(self, prompt: Int32Array) -> Held:
        """Start a sequence; raises CapacityError."""

    def reserved(self) -> int:
        """Bytes that running sequences keep from others."""

    def read(self, held: Held) -> Bytes:
        """The state of a sequence, uint8 [tokens, bytes]; for checks."""

    @property
    def copied(self) -> int:
        """Bytes moved so far to make room."""


def reserve(n_bytes: int) -> Bytes:
    """Anonymous memory that costs address space only, until it is written; ConfigError when there is not even that."""
    no_reserve: int = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)  # named since 3.13
    try:
        mapping = mmap.mmap(-1, n_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve)
    except (OSError, ValueError, OverflowError) as error:
        raise ConfigError(
            f"this machine gives no {n_bytes} bytes of address space ({error}); use a trace with shorter requests"
        ) from None
    return np.frombuffer(mapping, dtype=np.uint8)


class Contiguous:
    """Sequences in one range each: reserved at once (``step=None``) or growing by copies."""

    def __init__(self, arena_bytes: int, token_bytes: int, *, max_tokens: int, step: int | None) -> None:
        self.name = "reserve" if step is None else "grow"
        self.manager = ContiguousManager(arena_bytes, token_bytes, max_tokens=max_tokens, step=step)
        self.arena = reserve(arena_bytes)
        self.copied = 0

    def open(self, prompt: Int32Array) -> Held:
        """Start a sequence."""
        return _ContiguousHeld(self, self.manager.open(prompt))

    def reserved(self) -> int:
        """Bytes of all ranges."""
        return self.manager.reserved

    def read(self, held: Held) -> Bytes:
        """The state of a sequence."""
        assert isinstance(held, _ContiguousHeld)
        size, at = self.manager.token_bytes, held.sequence.offset
        return self.arena[at : at + held.length * size].reshape(-1, size)


class _ContiguousHeld:
    def __init__(self, store: Contiguous, sequence: ContiguousSequence) -> None:
        self._store = store
        self.sequence = sequence

    @property
    def length(self) -> int:
        return self.sequence.length

    def append(self, token_ids: Int32Array, rows: Bytes) -> None:
        store, sequence = self._store, self.sequence
        move = sequence.append(token_ids)
        if move.size:
            store.arena[move.target : move.target + move.size] = store.arena[move.source : move.source + move.size]
            store.copied += move.size
        at = sequence.offset + sequence.length * store.manager.token_bytes
        store.arena[at : at + rows.size] = rows.reshape(-1)
        sequence.commit()

    def close(self) -> None:
        self.sequence.close()


class Paged:
    """Sequences in blocks of the real manager; a token's state is written straight into its slot."""

    def __init__(self, arena_bytes: int, block: int, *, max_sequences: int) -> None:
        self.name = "paged"
        self.spec = one_layer(block)
        self.block = block
        self.manager = Manager(self.spec, [Device(arena_bytes)], max_sequences=max_sequences)
        self.arena = reserve(self.manager.geometry.arena_bytes)
        self.slot_bytes = int(self.manager.geometry.slot_bytes[0])
        self.token_bytes = self.slot_bytes // block
        self.slots: Bytes = self.arena[: len(self.arena) // self.slot_bytes * self.slot_bytes].reshape(
            -1, block, self.token_bytes
        )
        self.copied = 0
        self._running: dict[int, _PagedHeld] = {}

    def open(self, prompt: Int32Array) -> Held:
        """Start a sequence."""
        sequence = self.manager.open(prompt)
        self.manager.complete(sequence.restore)
        held = _PagedHeld(self, sequence)
        self._running[id(held)] = held
        return held

    def forget(self, held: _PagedHeld) -> None:
        """A sequence was closed."""
        self._running.pop(id(held), None)

    def reserved(self) -> int:
        """Bytes of the blocks that running sequences hold."""
        return sum(held.sequence.num_blocks(0) for held in self._running.values()) * self.slot_bytes

    def read(self, held: Held) -> Bytes:
        """The state of a sequence."""
        assert isinstance(held, _PagedHeld)
        table = held.sequence.block_table(0)[: held.sequence.num_blocks(0)]
        return self.slots[table].reshape(-1, self.token_bytes)[: held.length]


class _PagedHeld:
    def __init__(self, store: Paged, sequence: CachedSequence) -> None:
        self._store = store
        self.sequence = sequence
        self._table = sequence.block_table(0)  # its address is stable for life

    @property
    def length(self) -> int:
        return self.sequence.length

    def append(self, token_ids: Int32Array, rows: Bytes) -> None:
        store, sequence, at = self._store, self.sequence, self.sequence.length
        store.manager.complete(sequence.append(token_ids))
        if len(rows) == 1:
            store.slots[self._table[at // store.block], at % store.block] = rows[0]
        else:
            position = np.arange(at, at + len(rows))
            store.slots[self._table[position // store.block], position % store.block] = rows
        store.manager.complete(sequence.commit())

    def close(self) -> None:
        self._store.forget(self)
        self.sequence.close()
