"""A trace as arrays: requests in order of arrival, each a list of block ids that are prefix hashes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvloom.errors import InputError
from kvloom.types import Int32Array, IntArray

NO_SESSION = -1


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in order of arrival.

    A block id stands for a prefix: equal ids mean equal tokens up to and including that block.  Ids are renumbered
    0, 1, 2, ... by first appearance, so the ids that a request is the first to use are consecutive and its last ones.

    Attributes:
        name: for people, usually the file's name.
        form: ``mooncake``, ``agentic`` or ``azure``.
        block: tokens per block.
        arrivals: seconds since the first request, float64 [requests], ascending.
        inputs, outputs: tokens of the prompt and of the answer, int64 [requests].
        sessions: which session a request belongs to, int64 [requests]; ``NO_SESSION`` where the trace does not say.
        starts: int64 [requests + 1]; request i has the blocks ``blocks[starts[i] : starts[i + 1]]``.
        blocks: int32 [references].
        unique: number of different blocks.
    """

    name: str
    form: str
    block: int
    arrivals: npt.NDArray[np.float64]
    inputs: IntArray
    outputs: IntArray
    sessions: IntArray
    starts: IntArray
    blocks: Int32Array
    unique: int

    def __len__(self) -> int:
        return len(self.inputs)

    def request(self, i: int) -> Int32Array:
        """Block ids of request ``i``, int32 (a view)."""
        return self.blocks[self.starts[i] : self.starts[i + 1]]

    def depths(self) -> IntArray:
        """Blocks per request, int64 [requests]."""
        depths: IntArray = np.diff(self.starts)
        return depths

    def known(self) -> IntArray:
        """Leading blocks of every request that earlier requests had, int64: the hits of a cache without limits."""
        first = np.full(self.unique, len(self), dtype=np.int64)
        owner = np.repeat(np.arange(len(self)), self.depths())
        first[self.blocks[::-1]] = owner[::-1]  # the last write of an id is its first use
        news = np.bincount(first, minlength=len(self))
        known: IntArray = self.depths() - news
        return known

    def last_block_tokens(self) -> IntArray:
        """Tokens of the last block of every request, int64 in [0, block]."""
        tokens: IntArray = np.clip(self.inputs - (self.depths() - 1) * self.block, 0, self.block)
        return tokens


def renumber(ids: IntArray) -> tuple[Int32Array, int]:
    """``ids`` renumbered by first appearance, and how many different ones there are."""
    if not ids.size:
        return ids.astype(np.int32), 0
    if ids.min() < 0 or ids.max() >= 4 * ids.size + 1024:  # sparse: make them dense first
        ids = np.unique(ids, return_inverse=True)[1].astype(np.int64)
    first = np.full(int(ids.max()) + 1, ids.size, dtype=np.int64)
    first[ids[::-1]] = np.arange(ids.size - 1, -1, -1)
    used = np.flatnonzero(first < ids.size)
    number = np.zeros(len(first), dtype=np.int32)
    number[used[np.argsort(first[used])]] = np.arange(used.size, dtype=np.int32)
    return number[ids], int(used.size)


def first_bad_parent(blocks: Int32Array, starts: IntArray, unique: int) -> int:
    """Position in ``blocks`` of the first id that follows another id than where it was first used; -1 when none."""
    if not blocks.size:
        return -1
    parent = np.empty_like(blocks)
    parent[1:] = blocks[:-1]
    parent[starts[:-1][starts[:-1] < starts[1:]]] = -1
    expected = np.empty(unique, dtype=np.int32)
    expected[blocks[::-1]] = parent[::-1]
    bad = np.flatnonzero(expected[blocks] != parent)
    return int(bad[0]) if bad.size else -1


def make_trace(
    *,
    name: str,
    form: str,
    block: int,
    arrivals: npt.NDArray[np.float64],
    inputs: IntArray,
    outputs: IntArray,
    sessions: IntArray,
    counts: IntArray,
    ids: IntArray,
    lines: IntArray,
    source: str = "",
) -> Trace:
    """A trace from the columns of a file, in the order of the file.

    ``counts`` is blocks per request, ``ids`` all block ids one after the other, ``lines`` the line number of every
    request, ``source`` the file for messages.
    Requests are put into order of arrival (stably: file order where times are equal).

    Raises InputError when an id is not a prefix hash.
    """
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    order = np.argsort(arrivals, kind="stable")
    if (order[1:] < order[:-1]).any():
        spans = counts[order]
        new_starts = np.concatenate([[0], np.cumsum(spans)]).astype(np.int64)
        ids = ids[np.repeat(starts[:-1][order] - new_starts[:-1], spans) + np.arange(new_starts[-1])]
        starts = new_starts
        arrivals, inputs, outputs = arrivals[order], inputs[order], outputs[order]
        sessions, lines = sessions[order], lines[order]
    blocks, unique = renumber(ids)
    bad = first_bad_parent(blocks, starts, unique)
    if bad >= 0:
        at = int(np.searchsorted(starts, bad, side="right")) - 1
        raise InputError(
            f"{source or name}, line {int(lines[at])}: block id {int(ids[bad])} does not follow the same blocks as "
            "where it was first used; ids must be prefix hashes, so that an equal id means an equal prefix"
        )
    return Trace(name, form, block, arrivals - arrivals[0], inputs, outputs, sessions, starts, blocks, unique)
