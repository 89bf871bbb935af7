"""Sessions: what is reused, by whom, and what else is part of the identity."""

from __future__ import annotations

import gc
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from kvloom.adapters.transformers import attach  # noqa: E402
from kvloom.adapters.transformers.probe import probe  # noqa: E402
from kvloom.errors import InputError, SpecError  # noqa: E402
from kvloom.spec.from_config import spec_from_config  # noqa: E402
from kvloom.testing.families import random_model, tiny_config  # noqa: E402
from kvloom.types import Grade, Reason  # noqa: E402


def test_explanation_of_misses_and_hits(lab: Any) -> None:
    engine, ids = lab.engine("gpt_oss"), lab.ids(100)
    with engine.open(ids) as session:
        assert session.explanation.grade is None
        assert [limit.reason for limit in session.explanation.limits] == [Reason.EMPTY]
        session.prefill()
    with engine.open(ids) as session:
        assert session.explanation.boundary == 99
        assert [limit.reason for limit in session.explanation.limits] == [Reason.LAST_TOKEN]
    other = torch.cat([ids[:, :50], lab.ids(50, 3)], dim=1)
    with engine.open(other) as session:
        assert session.reused == 32
        assert {limit.reason for limit in session.explanation.limits} == {Reason.TOKENS}


def test_salts_and_extra_keys_do_not_share(lab: Any) -> None:
    engine, ids = lab.engine("gpt_oss"), lab.ids(70)
    lab.answer(engine, ids, salt=b"a", extra_keys=[("lora", "x")])
    for options in (
        {"salt": b"b", "extra_keys": [("lora", "x")]},
        {"salt": b"a"},
        {"salt": b"a", "extra_keys": [("lora", "y")]},
    ):
        with engine.open(ids, **options) as session:
            assert session.reused == 0
    assert lab.answer(engine, ids, salt=b"a", extra_keys=[("lora", "x")])[0] == 69
    with pytest.raises(InputError, match="salt"):
        engine.open(ids, salt="text")


def test_thread_count_attention_and_weights_are_part_of_the_identity(lab: Any) -> None:
    model, ids = random_model(tiny_config("mistral")), lab.ids(70)
    with attach(model, device="4MiB", block_size=16) as engine:
        lab.answer(engine, ids)
        threads = torch.get_num_threads()
        torch.set_num_threads(threads + 1)
        try:
            assert lab.answer(engine, ids)[0] == 0
        finally:
            torch.set_num_threads(threads)
        assert lab.answer(engine, ids)[0] == 69
        model.set_attn_implementation("eager")
        assert lab.answer(engine, ids)[0] == 0
        with torch.no_grad():
            model.lm_head.weight.add_(0.5)
        reused, logits = lab.answer(engine, ids)
        assert reused == 0
        assert torch.equal(logits, lab.cold(model, ids, engine.spec.segment_tokens))


def test_sessions_that_are_dropped_give_their_slots_back(lab: Any) -> None:
    engine = lab.engine("gpt_oss", max_sequences=2)
    for seed in range(6):
        session = engine.open(lab.ids(40, seed))
        session.prefill()
        del session
    gc.collect()
    with engine.open(lab.ids(40)):
        assert len(engine.manager.running()) == 1
    assert lab.held(engine) == 0


def test_checkpoints_are_kept_at_the_end_of_prompt_and_answer(lab: Any) -> None:
    engine, ids = lab.engine("deepseek_v4"), lab.ids(77)
    with engine.open(ids) as session:
        session.prefill()
        with engine.open(ids) as second:  # already while the first is open
            assert second.reused == 76
        out = engine.model.generate(ids, past_key_values=session.cache, max_new_tokens=5, do_sample=False)
    with engine.open(torch.cat([out, lab.ids(1, 1)], dim=1)) as session:
        assert session.reused == 77 + 5 - 1


def test_floor_canonical_takes_the_shorter_boundary(lab: Any) -> None:
    engine, ids = lab.engine("gpt_oss"), lab.ids(77)
    lab.answer(engine, ids)
    with engine.open(ids, floor=Grade.CANONICAL) as session:
        assert (session.reused, session.grade) == (64, Grade.CANONICAL)
    with engine.open(ids) as session:
        assert (session.reused, session.grade) == (76, Grade.FAITHFUL)


def test_calls_of_the_user_do_not_claim_to_be_canonical(lab: Any) -> None:
    """Whole segments computed by other calls may have used other arithmetic (an attention mask, autocast)."""
    engine, ids = lab.engine("gpt_oss"), lab.ids(65)
    with engine.open(ids) as session, torch.no_grad():
        engine.model(ids[:, :32], past_key_values=session.cache)
        assert session.grade is Grade.FAITHFUL


def test_fork_must_continue_the_past(lab: Any) -> None:
    engine, ids = lab.engine("gpt_oss"), lab.ids(40)
    with engine.open(ids) as session:
        session.prefill()
        for wrong in (lab.ids(60, 1), ids[:, :20]):
            with pytest.raises(InputError, match="must begin with"):
                session.fork(wrong)
        assert session.fork().length == 39


def test_model_calls_in_any_form(lab: Any) -> None:
    engine, ids = lab.engine("gpt_oss"), lab.ids(40)
    cold = lab.cold(engine.model, ids)
    forms = (
        lambda m, x, c: m(x, None, None, c),
        lambda m, x, c: m(input_ids=x, past_key_values=c, attention_mask=torch.ones(1, 40, dtype=torch.int64)),
        lambda m, x, c: m(input_ids=x, past_key_values=c, position_ids=torch.tensor([[39]])),
    )
    for call in forms:
        with engine.open(ids) as session, torch.inference_mode():
            session.prefill()
            logits = call(engine.model, ids[:, 39:], session.cache).logits[0]
            assert session.length == 40
            assert torch.equal(logits, cold)


@pytest.mark.parametrize(("family", "change", "message"), [
    ("gpt_oss", {"head_dim": 32}, "keys"),
    ("gpt_oss", {"layer_types": ["full_attention"] * 4}, None),
    ("qwen3_next", {"linear_conv_kernel_dim": 3}, "conv_states.0"),
    ("deepseek_v4", {"index_head_dim": 32}, "indexer"),
    ("deepseek_v32", {"index_head_dim": 32}, "indexer_keys"),
])  # fmt: skip
def test_the_probe_names_the_tensor_that_disagrees(
    lab: Any, family: str, change: dict[str, Any], message: str | None
) -> None:
    spec = spec_from_config(tiny_config(family, **change), block_size=16, segment=32)
    model = lab.model(family)
    if message is None:  # same tensors, other kind: LayerPlan and the window's length catch what shapes cannot
        assert probe(model, spec).groups == spec.groups
        return
    with pytest.raises(SpecError, match=message):
        probe(model, spec)


def test_the_probe_adopts_the_dtypes_that_the_model_has(lab: Any) -> None:
    model = lab.model("deepseek_v4", "bfloat16")
    spec = probe(model, spec_from_config(tiny_config("deepseek_v4"), dtype="bfloat16", block_size=16, segment=32))
    overlap = spec.groups[spec.group_index("tail.overlap")]
    assert {t.name: t.dtype for t in overlap.tensors}["overlap_gate.compressor"] == "float32"
    assert {t.name: t.dtype for t in overlap.tensors}["overlap_kv.compressor"] == "bfloat16"
