"""Tokens of a trace: deterministic ids that agree exactly where the trace says that prefixes agree.

A token is a function of a *seed* and its position.  Every block, every answer and every tail without an id has a seed
of its own, and at one position different seeds give different tokens, so there are no accidental hits.

With answers, a turn that continues an earlier one begins with that turn's prompt and answer, token for token: the new
blocks are *inherited* up to there.  Who continues whom is taken from the sessions of the trace, or, where it has none,
from who used the last common block last.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvloom.replay.trace import NO_SESSION, Trace
from kvloom.types import Int32Array, IntArray

_OF_SEED = 0x9E3779B1  # odd: different seeds stay different modulo 2**31
_OF_POSITION = 0x85EBCA6B
_MASK = 0x7FFFFFFF

Run = tuple[int, int]
"""A seed, and the position that its tokens end at."""


def continuations(trace: Trace) -> IntArray:
    """For every request the one whose prompt and answer it begins with, or -1; int64 [requests].

    Both must have the same whole blocks, the next block must be new, and the prompt long enough to hold the earlier
    one and its answer.  A request is continued at most once.
    """
    known, whole = trace.known(), trace.inputs // trace.block
    ends = trace.inputs + trace.outputs
    found = np.full(len(trace), -1, dtype=np.int64)
    last_user = np.full(trace.unique, -1, dtype=np.int64)
    last_of_session: dict[int, int] = {}
    continued = np.zeros(len(trace), dtype=np.bool_)
    for i in range(len(trace)):
        blocks, depth, session = trace.request(i), int(known[i]), int(trace.sessions[i])
        earlier = -1
        if depth and session != NO_SESSION:
            earlier = last_of_session.get(session, -1)
        elif depth:
            earlier = int(last_user[blocks[depth - 1]])
        if (
            earlier >= 0
            and not continued[earlier]
            and whole[earlier] == depth
            and trace.request(earlier)[depth - 1] == blocks[depth - 1]
            and ends[earlier] <= trace.inputs[i]
        ):
            found[i] = earlier
            continued[earlier] = True
        last_user[blocks] = i
        last_of_session[session] = i
    return found


class Streams:
    """The tokens of every request of a trace.

    Args:
        trace: the trace.
        answers: whether answers are replayed; without them every block is whole, as if the prompt filled it.
    """

    def __init__(self, trace: Trace, *, answers: bool) -> None:
        self.trace = trace
        self.answers = answers
        self.follows: IntArray = continuations(trace) if answers else np.full(len(trace), -1, dtype=np.int64)
        self._seeds, self._ends = array("q"), array("q")  # runs of every block; ends relative to the block
        self._first = array("q", [0])  # runs of block b: _first[b] to _first[b + 1]
        self._tails: dict[int, list[Run]] = {}  # runs of what lies behind the last id of a prompt
        if answers:
            self._lay_out()
        self._run_first = np.array(self._first, dtype=np.int64)
        self._run_seed = np.array(self._seeds, dtype=np.int64)
        ends = np.array(self._ends, dtype=np.int64)
        self._run_tokens = np.diff(ends, prepend=0)
        if answers:
            self._run_tokens[self._run_first[:-1]] = ends[self._run_first[:-1]]
        longest = self._longest()
        self._steps = np.arange(longest, dtype=np.uint32) * np.uint32(_OF_POSITION)
        self._buffer: npt.NDArray[np.uint32] = np.empty(longest, dtype=np.uint32)

    def _longest(self) -> int:
        trace = self.trace
        if self.answers:
            return int((trace.inputs + trace.outputs).max()) + trace.block
        return int(trace.depths().max()) * trace.block + 1

    # ---------------------------------------------------------------- reading

    def tokens(self, i: int) -> Int32Array:
        """Token ids of request ``i``, int32; valid until the next call.

        With answers: prompt and answer, [inputs + outputs].  Without: [blocks x block + 1]; the last one is there to be
        the token that is always recomputed.
        """
        trace = self.trace
        if self.answers:
            seeds, counts = self._runs(i)
            total = int(trace.inputs[i] + trace.outputs[i])
        else:
            seeds = np.append(trace.request(i), np.int32(trace.unique))
            counts = np.full(len(seeds), trace.block, dtype=np.int64)
            counts[-1] = 1
            total = int(counts.sum())
        bases = (seeds.astype(np.int64) * _OF_SEED & 0xFFFFFFFF).astype(np.uint32)
        out = self._buffer[:total]
        np.add(np.repeat(bases, counts)[:total], self._steps[:total], out=out)
        np.bitwise_and(out, np.uint32(_MASK), out=out)
        return out.view(np.int32)

    def answered_blocks(self) -> dict[int, Int32Array]:
        """Blocks of the trace that are whole once a request was answered, besides those of its own prompt, by request.

        The last token of an answer is never computed.
        """
        trace, more = self.trace, {}
        for i in np.flatnonzero(self.follows >= 0).tolist():
            earlier = int(self.follows[i])
            first = int(trace.inputs[earlier]) // trace.block
            last = int(trace.inputs[earlier] + max(0, int(trace.outputs[earlier]) - 1)) // trace.block
            if last > first:
                more[earlier] = trace.request(i)[first:last]
        return more

    def _runs(self, i: int) -> tuple[IntArray, IntArray]:
        """Seeds and token counts of prompt and answer; the counts cover at least the request."""
        trace = self.trace
        blocks = trace.request(i)
        first = self._run_first[blocks]
        number = self._run_first[blocks + 1] - first
        at = np.repeat(first - (np.cumsum(number) - number), number) + np.arange(int(number.sum()))
        seeds, counts = self._run_seed[at], self._run_tokens[at]
        prompt = int(trace.inputs[i])
        tail = [(seed, end) for seed, end in self._tails.get(i, ()) if end <= prompt]
        if tail:
            ends = np.array([len(blocks) * trace.block, *(end for _, end in tail)], dtype=np.int64)
            seeds = np.concatenate([seeds, np.array([seed for seed, _ in tail], dtype=np.int64)])
            counts = np.concatenate([counts, np.diff(ends)])
        elif len(blocks):  # the last block may be part-filled: cut its runs to the prompt
            counts = np.diff(np.minimum(np.cumsum(counts), prompt), prepend=0)
        return np.append(seeds, self._answer_seed(i)), np.append(counts, trace.outputs[i])

    # ---------------------------------------------------------------- laying out

    def _answer_seed(self, i: int) -> int:
        return self.trace.unique + 1 + i

    def _tail_seed(self, i: int) -> int:
        return self.trace.unique + 1 + len(self.trace) + i

    def _lay_out(self) -> None:
        trace = self.trace
        known = trace.known().tolist()
        for i, follows in enumerate(self.follows.tolist()):
            blocks = trace.request(i)
            inherited = self._inherited(follows) if follows >= 0 else []
            for k in range(known[i], len(blocks)):
                begin, end = k * trace.block, (k + 1) * trace.block
                if inherited and inherited[-1][1] > begin:
                    self._add_block(int(blocks[k]), begin, _cut(inherited, begin, end))
                else:  # the rest is new
                    rest = blocks[k:]
                    self._seeds.extend(rest.tolist())
                    self._ends.extend([trace.block] * len(rest))
                    self._first.extend(range(self._first[-1] + 1, self._first[-1] + 1 + len(rest)))
                    break
            end, prompt = len(blocks) * trace.block, int(trace.inputs[i])
            if end < prompt:
                tail = _cut(inherited, end, prompt)
                if not tail or tail[-1][1] < prompt:
                    tail.append((self._tail_seed(i), prompt))
                self._tails[i] = tail

    def _add_block(self, block: int, begin: int, runs: Sequence[Run]) -> None:
        size = self.trace.block
        for seed, end in runs:
            self._seeds.append(seed)
            self._ends.append(end - begin)
        if self._ends[-1] < size:
            self._seeds.append(block)
            self._ends.append(size)
        self._first.append(len(self._seeds))

    def _inherited(self, earlier: int) -> list[Run]:
        """The runs of request ``earlier`` from its last whole block on: the rest of its prompt, and its answer."""
        trace = self.trace
        prompt, answer = int(trace.inputs[earlier]), int(trace.outputs[earlier])
        whole = prompt // trace.block
        blocks, begin = trace.request(earlier), whole * trace.block
        runs: list[Run] = []
        if prompt > begin:
            if len(blocks) > whole:
                first, last = self._first[blocks[whole]], self._first[blocks[whole] + 1]
                of_block = [(self._seeds[r], begin + self._ends[r]) for r in range(first, last)]
                runs = _cut(of_block, begin, prompt)
            else:
                runs = list(self._tails[earlier])
        if answer:
            runs.append((self._answer_seed(earlier), prompt + answer))
        return runs


def _cut(runs: Sequence[Run], begin: int, end: int) -> list[Run]:
    """The part of ``runs`` in [begin, end)."""
    cut: list[Run] = []
    for seed, until in runs:
        if until > begin:
            cut.append((seed, min(until, end)))
            if until >= end:
                break
    return cut
