"""A forward that dies half-way commits nothing, leaks nothing, and is noticed at the next use."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from kvloom.errors import SequenceError  # noqa: E402
from kvloom.types import Grade  # noqa: E402


@contextmanager
def dying(model: Any, layer: int, error: BaseException, after: int = 0) -> Iterator[None]:
    """Raise ``error`` in front of a layer, in the ``after``-th forward from now."""
    left = [after]

    def hook(*_: Any) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise error

    handle = model.model.layers[layer].register_forward_pre_hook(hook)
    try:
        yield
    finally:
        handle.remove()


ERRORS = [RuntimeError("the device is gone"), KeyboardInterrupt()]
STATEFUL = {"gpt_oss": False, "gemma3": False, "qwen3_next": True, "deepseek_v4": True}


@pytest.mark.parametrize("error", ERRORS, ids=["exception", "ctrl-c"])
@pytest.mark.parametrize("layer", [0, 2, 3])
@pytest.mark.parametrize("family", STATEFUL)
def test_prefill_dies(lab: Any, family: str, layer: int, error: BaseException) -> None:
    engine, ids = lab.engine(family, snapshot_interval=32), lab.ids(140)
    session = engine.open(ids)
    with dying(engine.model, layer, error, after=2), pytest.raises(type(error)):
        session.prefill()
    assert session.length == 64
    engine.manager.check_integrity()
    assert session.broken is STATEFUL[family]
    if STATEFUL[family]:  # state that is updated in place may be torn
        with pytest.raises(SequenceError, match="half-way"):
            session.prefill()
        with pytest.raises(SequenceError, match="half-way"):
            engine.model(ids[:, 64:], past_key_values=session.cache)
    else:
        assert torch.equal(lab.last(session, ids), lab.cold(engine.model, ids))
    session.close()
    assert lab.held(engine) == 0
    with engine.open(ids, floor=Grade.CANONICAL) as session:
        assert session.reused == (64 if STATEFUL[family] else 128)
        assert torch.equal(lab.last(session, ids), lab.cold(engine.model, ids))


@pytest.mark.parametrize("error", ERRORS, ids=["exception", "ctrl-c"])
@pytest.mark.parametrize("family", STATEFUL)
def test_generate_dies(lab: Any, family: str, error: BaseException) -> None:
    engine, ids = lab.engine(family), lab.ids(70)
    with engine.open(ids) as session:
        session.prefill()
        with dying(engine.model, 2, error, after=5), pytest.raises(type(error)):
            engine.model.generate(ids, past_key_values=session.cache, max_new_tokens=20, do_sample=False)
        assert session.length == 74
        if not STATEFUL[family]:  # what was computed is whole: an answer can go on from it
            out = engine.model.generate(
                ids, past_key_values=lab.cold_cache(engine.model, ids), max_new_tokens=12, do_sample=False
            )
            again = engine.model.generate(out[:, :75], past_key_values=session.cache, max_new_tokens=7, do_sample=False)
            assert torch.equal(again, out)
    assert lab.held(engine) == 0
    engine.manager.check_integrity()
    with engine.open(ids) as session:
        assert session.reused == 69
        assert torch.equal(lab.last(session, ids), lab.cold(engine.model, ids))


def test_ctrl_c_is_noticed_by_fork_and_checkpoint(lab: Any) -> None:
    engine, ids = lab.engine("qwen3_next"), lab.ids(40)
    for use in (lambda s: s.fork(), lambda s: s.checkpoint(), lambda s: s.step(39)):
        session = engine.open(ids)
        with dying(engine.model, 2, KeyboardInterrupt()), pytest.raises(KeyboardInterrupt):
            engine.model(ids[:, :32], past_key_values=session.cache)
        with pytest.raises(SequenceError, match="half-way"):
            use(session)
        session.close()
    assert lab.held(engine) == 0


def test_a_layer_that_was_skipped_is_noticed(lab: Any) -> None:
    engine, ids = lab.engine("gpt_oss"), lab.ids(40)
    attention = engine.model.model.layers[1].self_attn
    whole, attention.forward = attention.forward, lambda hidden_states, **_: (hidden_states, None)
    try:
        with engine.open(ids) as session, pytest.raises(SequenceError, match="1 layers without"):
            session.prefill()
    finally:
        attention.forward = whole
    assert lab.held(engine) == 0
    assert lab.answer(engine, ids)[0] == 0


def test_a_failed_restore_leaves_nothing_held(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, ids = lab.engine("deepseek_v4"), lab.ids(75)
    lab.answer(engine, ids)
    with monkeypatch.context() as patch:
        patch.setattr(engine.arena, "run", lambda _plan: (_ for _ in ()).throw(MemoryError("no")))
        with pytest.raises(MemoryError):
            engine.open(ids)
    engine.manager.check_integrity()
    assert lab.held(engine) == 0
    assert lab.answer(engine, ids)[0] == 74
