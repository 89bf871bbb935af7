"""Tokens of a trace: equal exactly where the trace says so."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.replay.plain import AGENTIC, AZURE, CONVERSATION, trace_of

from kvloom.replay.readers import read_trace
from kvloom.replay.streams import Streams, continuations
from kvloom.types import Int32Array

PATHS = pytest.mark.parametrize("path", [CONVERSATION, AGENTIC, AZURE])


def common(a: Int32Array, b: Int32Array) -> int:
    n = min(len(a), len(b))
    differ = np.flatnonzero(a[:n] != b[:n])
    return int(differ[0]) if differ.size else n


@PATHS
def test_prompts_agree_exactly_where_their_blocks_do(path: Path) -> None:
    trace = read_trace(path)
    streams = Streams(trace, answers=False)
    last: Int32Array | None = None
    tokens_of: dict[int, bytes] = {}
    for i in range(len(trace)):
        tokens = streams.tokens(i)
        blocks = trace.request(i).tolist()
        assert tokens.dtype == np.int32
        assert tokens.min() >= 0
        assert len(tokens) == len(blocks) * trace.block + 1
        for k, block in enumerate(blocks):
            part = tokens[k * trace.block : (k + 1) * trace.block].tobytes()
            assert tokens_of.setdefault(block, part) == part
        if last is not None:
            before = trace.request(i - 1).tolist()
            shared = next((k for k, (a, b) in enumerate(zip(before, blocks, strict=False)) if a != b), None)
            if shared is not None:
                assert common(last, tokens) == shared * trace.block
        last = tokens.copy()
    assert len(set(tokens_of.values())) == trace.unique


@PATHS
def test_with_answers_the_next_turn_begins_with_prompt_and_answer(path: Path) -> None:
    trace = read_trace(path)
    streams = Streams(trace, answers=True)
    all_tokens = [streams.tokens(i).copy() for i in range(len(trace))]
    assert [len(t) for t in all_tokens] == (trace.inputs + trace.outputs).tolist()
    whole_of: dict[int, bytes] = {}
    for i, tokens in enumerate(all_tokens):
        whole = int(trace.inputs[i]) // trace.block
        for k, block in enumerate(trace.request(i).tolist()[:whole]):
            part = tokens[k * trace.block : (k + 1) * trace.block].tobytes()
            assert whole_of.setdefault(block, part) == part
        earlier = int(streams.follows[i])
        if earlier >= 0:
            before = all_tokens[earlier]
            assert common(before, tokens) == len(before)
            assert len(before) <= trace.inputs[i]
    followers = int((streams.follows >= 0).sum())
    assert (followers > 0) == (path != AZURE)
    answers = [
        tokens[int(n) :].tobytes() for tokens, n in zip(all_tokens, trace.inputs, strict=True) if len(tokens) > n
    ]
    assert len(set(answers)) == len(answers)


def test_who_continues_whom() -> None:
    trace = trace_of(
        [[0, 1], [0, 1, 2], [0, 1, 3], [0, 4], [0, 1, 2, 5], [6], [6, 7]],
        inputs=[6, 10, 12, 5, 14, 4, 5],
        outputs=[2, 1, 0, 9, 0, 2, 0],
    )
    # 1: block 1 of request 0 is not whole.  2: block 1 was last used by request 1, whose 2 whole blocks end there, and
    # 10 + 1 tokens are no more than 12.  3: block 0 was last used by request 2.
    # 4: block 2 of request 1 is not whole.  6: 4 + 2 > 5.
    assert continuations(trace).tolist() == [-1, -1, 1, -1, -1, -1, -1]


def test_blocks_that_an_answer_fills() -> None:
    trace = trace_of([[0, 1], [0, 2, 3, 4]], inputs=[6, 15], outputs=[8, 1])
    streams = Streams(trace, answers=True)
    assert streams.follows.tolist() == [-1, 0]
    # 6 + 7 computed tokens are three whole blocks; the first one is the prompt's own.
    assert {i: blocks.tolist() for i, blocks in streams.answered_blocks().items()} == {0: [2, 3]}
    first, second = streams.tokens(0).copy(), streams.tokens(1)
    assert common(first, second) == 14


def test_a_tail_without_an_id_is_continued() -> None:
    trace = trace_of([[0], [0], [0, 1]], inputs=[6, 7, 9], outputs=[1, 1, 0])
    streams = Streams(trace, answers=True)
    assert streams.follows.tolist() == [-1, 0, 1]
    tokens = [streams.tokens(i).copy() for i in range(3)]
    assert [len(t) for t in tokens] == [7, 8, 9]
    assert common(tokens[0], tokens[1]) == 7
    assert common(tokens[1], tokens[2]) == 8
