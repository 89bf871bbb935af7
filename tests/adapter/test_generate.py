"""``generate`` and plain calls go on where a session stands, with the tokens that transformers alone produces."""

from __future__ import annotations

import copy
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from kvloom.adapters.transformers import PagedCache  # noqa: E402
from kvloom.adapters.transformers.forward import forward_chunk  # noqa: E402
from kvloom.types import Grade  # noqa: E402

DEEP = ("gpt_oss", "qwen3_next", "deepseek_v4")


def greedy(model: Any, ids: torch.Tensor, cache: Any, count: int = 12, **options: Any) -> list[int]:
    options = {"do_sample": False, **options}
    out = model.generate(ids, past_key_values=cache, max_new_tokens=count, **options)
    return out[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", [*DEEP, "gemma3", "llama4", "falcon_h1", "lfm2", "deepseek_v32"])
def test_greedy_answers_are_the_cold_answers(lab: Any, family: str, dtype: str) -> None:
    engine, ids = lab.engine(family, dtype), lab.ids(130)
    expected = greedy(engine.model, ids, lab.cold_cache(engine.model, ids))
    for reused in (0, 129):
        with engine.open(ids) as session:
            assert session.reused == reused
            assert greedy(engine.model, ids, session.prefill()) == expected
            assert session.length == 130 + 12 - 1


def test_without_prefill_generate_runs_the_prompt_in_one_piece(lab: Any) -> None:
    engine, ids = lab.engine("gpt_oss"), lab.ids(70)
    expected = greedy(engine.model, ids, None)
    with engine.open(ids) as session:
        assert greedy(engine.model, ids, session.cache) == expected
        assert session.grade is Grade.FAITHFUL
    with engine.open(ids, floor=Grade.CANONICAL) as session:
        assert session.reused == 0


def test_sampling(lab: Any) -> None:
    engine, ids = lab.engine("qwen3_next"), lab.ids(50)
    options = {"do_sample": True, "temperature": 0.8, "top_k": 20}
    torch.manual_seed(7)
    expected = greedy(engine.model, ids, lab.cold_cache(engine.model, ids), **options)
    torch.manual_seed(7)
    with engine.open(ids) as session:
        assert greedy(engine.model, ids, session.prefill(), **options) == expected


@pytest.mark.parametrize("family", DEEP)
def test_next_turn_hits_to_the_last_computed_token(lab: Any, family: str) -> None:
    """FAILURES A5: the next turn reuses prompt + generated - 1 tokens."""
    engine, ids = lab.engine(family), lab.ids(100)
    with engine.open(ids) as session:
        answer = greedy(engine.model, ids, session.prefill(), 30)
    turn = torch.cat([ids, torch.tensor([answer]), lab.ids(9, 5)], dim=1)
    with engine.open(turn) as session:
        assert session.reused == 100 + 30 - 1
        assert session.grade is Grade.FAITHFUL
        first = lab.last(session, turn)
    cold = lab.cold(engine.model, turn)
    assert float((first - cold).abs().max()) < 1e-4


@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_next"])
@pytest.mark.parametrize("tokens", [30, 300, 1000])
def test_prompts_shorter_than_the_lcm_hit_at_their_checkpoint(lab: Any, family: str, tokens: int) -> None:
    """FAILURES A2: blocks of 4,096 tokens; no prompt is too short to hit."""
    engine, ids = lab.engine(family, device="64MiB", block_size=4096, segment=4096), lab.ids(tokens)
    assert engine.spec.lcm_tokens == 4096
    cold = lab.cold(engine.model, ids, 4096)
    assert lab.answer(engine, ids)[0] == 0
    reused, logits = lab.answer(engine, ids)
    assert reused == tokens - 1
    assert torch.equal(logits, cold)


def test_decode_publishes_the_segments_it_completes(lab: Any) -> None:
    engine, ids = lab.engine("gpt_oss"), lab.ids(60)
    with engine.open(ids) as session:
        answer = greedy(engine.model, ids, session.prefill(), 40)
        turn = torch.cat([ids, torch.tensor([answer])], dim=1)
        with engine.open(turn) as second:  # while the first is still open
            assert second.reused == 96


def test_one_session_over_several_turns(lab: Any) -> None:
    engine, ids = lab.engine("deepseek_v4"), lab.ids(60)
    cold = lab.cold_cache(engine.model, ids)
    with engine.open(ids) as session:
        session.prefill()
        for turn in range(3):
            answer = greedy(engine.model, ids, session.cache, 7)
            assert greedy(engine.model, ids, cold, 7) == answer
            ids = torch.cat([ids, torch.tensor([answer]), lab.ids(5, turn)], dim=1)


def test_fork_and_deepcopy_go_on_apart(lab: Any) -> None:
    engine, ids = lab.engine("qwen3_next"), lab.ids(75)
    with engine.open(ids) as session:
        session.prefill()
        left, right = (torch.cat([ids[:, :74], lab.ids(20, s)], dim=1) for s in (1, 2))
        fork = session.fork(left)
        cache = copy.deepcopy(session.cache)
        assert isinstance(cache, PagedCache)
        cold = lab.cold_cache(engine.model, ids)
        other = copy.deepcopy(cold)
        assert torch.equal(
            forward_chunk(engine.model, left[:, 74:], fork.cache, 74),
            forward_chunk(engine.model, left[:, 74:], cold, 74),
        )
        assert torch.equal(
            forward_chunk(engine.model, right[:, 74:], cache, 74), forward_chunk(engine.model, right[:, 74:], other, 74)
        )
        assert session.length == 74
        assert torch.equal(lab.last(session, ids), lab.cold(engine.model, ids))
        fork.close()
    del cache
    with engine.open(lab.ids(3, 9)):
        assert len(engine.manager.running()) == 1  # the dropped copy was closed
    assert lab.held(engine) == 0


def test_a_fork_can_be_prefilled(lab: Any) -> None:
    engine, document = lab.engine("gpt_oss"), lab.ids(96)
    with engine.open(torch.cat([document, lab.ids(1, 1)], dim=1)) as session:
        session.prefill()
        for seed in (1, 2):
            ids = torch.cat([document, lab.ids(50, seed)], dim=1)
            with session.fork(ids) as child:
                assert torch.equal(lab.last(child, ids), lab.cold(engine.model, ids))
                assert child.grade is Grade.FAITHFUL  # the last token was a piece of its own


def test_b6_rings_of_2_and_of_8_rows_for_pending_tokens_give_the_same_answer(lab: Any) -> None:
    """101 tokens, the last 42 decoded one by one, left and resumed: the same logits, bit for bit, as in one go."""
    ids = lab.ids(104)
    model = lab.model("deepseek_v4")
    cache = lab.cold_cache(model, ids[:, :60])
    cold = [forward_chunk(model, ids[:, at : at + 1], cache, at) for at in range(59, 104)]
    for block in (2, 8):
        engine = lab.engine("deepseek_v4", block_size=block)
        with engine.open(ids[:, :60]) as session:
            session.prefill()
            warm = [forward_chunk(model, ids[:, at : at + 1], session.cache, at) for at in range(59, 101)]
        with engine.open(ids[:, :102]) as session:
            assert session.reused == 101
            warm += [forward_chunk(model, ids[:, at : at + 1], session.cache, at) for at in range(101, 104)]
        assert all(torch.equal(one, other) for one, other in zip(warm, cold, strict=True))
