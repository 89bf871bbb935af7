"""Interrupts inside a call of the manager: the call may be repeated, and nothing is ever named wrongly."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from tests.core import specs
from tests.core.workshop import engine, ids, prompt_of

from kvloom.errors import SequenceError
from kvloom.manager import CachedSequence, sequence


@contextmanager
def interrupted(monkeypatch: pytest.MonkeyPatch, where: object, name: str) -> Iterator[None]:
    """Ctrl-C arrives as ``name`` is called."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(where, name, interrupt)
        with pytest.raises(KeyboardInterrupt):
            yield


def test_a_commit_may_be_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    e = engine(specs.FULL, 300)
    prompt = prompt_of(24)
    s = e.open(prompt)
    e.finish(s.restore)
    for begin in (0, 8):
        e.finish(s.append(ids(prompt[begin : begin + 8])))
        e.compute(s, prompt[begin : begin + 8])
        with interrupted(monkeypatch, sequence, "commit_tokens"):
            s.commit()
        e.finish(s.commit())
    assert s.tokens.tolist() == prompt[:16]
    e.manager.check_integrity()


def test_ids_that_an_interrupt_lost_are_never_made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The index is full, and Ctrl-C comes before the sequence could give up publishing."""
    e = engine(specs.FULL, 300, max_nodes=2)
    s = e.open(prompt_of(40))
    e.finish(s.restore)
    for begin in (0, 8, 16):
        e.finish(s.append(ids(prompt_of(40)[begin : begin + 8])))
        if begin == 8:
            with interrupted(monkeypatch, CachedSequence, "_publish_rest"):
                s.commit()
        else:
            s.commit()
    with pytest.raises(SequenceError, match="not kept"):
        assert s.tokens is None
    batch = e.manager.batch([s])
    for _ in range(20):
        e.manager.step(batch, ids([1]))
    e.manager.finish(batch)
    assert s.length == 44
    s.close()
    e.manager.check_integrity()


def test_a_close_may_be_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    e = engine(specs.FULL, 300, max_sequences=1)
    s = e.open(prompt_of(9))
    with interrupted(monkeypatch, sequence, "close_row"):
        s.close()
    s.close()
    s = e.open(prompt_of(9))
    with interrupted(monkeypatch, e.manager.roster, "retire"):
        s.close()
    s.close()
    e.manager.check_integrity()
    e.open(prompt_of(9)).close()
