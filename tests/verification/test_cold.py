"""Cold runs, routers and the spread: transformers against itself, without kvloom."""

from __future__ import annotations

import copy
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from transformers import BambaConfig, JambaConfig  # noqa: E402

from kvloom.testing.families import FAMILIES, random_model, tiny_config  # noqa: E402
from kvloom.verification.cold import canonical_chunks, run_cold, single_tokens  # noqa: E402
from kvloom.verification.routing import RouteObserver, observing  # noqa: E402
from kvloom.verification.spread import measure_spread  # noqa: E402

SEGMENT = 32
TOKENS = 4 * SEGMENT + 13


def prompt(vocab: int, tokens: int = TOKENS, seed: int = 1) -> Any:
    return torch.randint(3, vocab, (1, tokens), generator=torch.Generator().manual_seed(seed))


def test_canonical_chunks() -> None:
    assert canonical_chunks(70, 32) == ((0, 32), (32, 64), (64, 69), (69, 70))
    assert canonical_chunks(65, 32) == ((0, 32), (32, 64), (64, 65))
    assert canonical_chunks(64, 32) == ((0, 32), (32, 63), (63, 64))
    assert canonical_chunks(1, 32) == ((0, 1),)
    assert canonical_chunks(70, 32, 40) == ((40, 64), (64, 69), (69, 70))
    assert canonical_chunks(70, 32, 69) == ((69, 70),)
    assert single_tokens(5, 3) == ((3, 4), (4, 5))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_copied_cache_resumes_bit_for_bit(family: str, dtype: str) -> None:
    model = random_model(tiny_config(family), 0, dtype)
    ids = prompt(320)
    chunks = canonical_chunks(TOKENS, SEGMENT)
    whole = run_cold(model, ids, chunks, keep_caches=[end for _, end in chunks])
    for _, at in chunks[:-1]:
        rest = [chunk for chunk in chunks if chunk[0] >= at]
        resumed = run_cold(model, ids, rest, cache=copy.deepcopy(whole.caches[at]))
        for _, end in rest:
            assert torch.equal(resumed.logits_at(end), whole.logits_at(end)), (at, end)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["deepseek_v4", "glm_moe_dsa", "qwen3_next", "gemma4"])
def test_spread_is_rounding_only(family: str, dtype: str) -> None:
    spread = measure_spread(random_model(tiny_config(family), 0, dtype), prompt(320), SEGMENT)
    assert spread.supported
    assert 0 < spread.relative < (1e-4 if dtype == "float32" else 5e-2)
    assert (spread.routers > 0) == (family != "gemma4")
    assert spread.routed_positions < TOKENS // 4


def tiny(config_class: Any, **more: Any) -> Any:
    return config_class(
        vocab_size=320,
        hidden_size=64,
        intermediate_size=96,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_hidden_layers=4,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
        **more,
    )


def test_a_model_that_transformers_resumes_wrongly_is_found() -> None:
    config = tiny(
        JambaConfig,
        attn_layer_period=2,
        attn_layer_offset=1,
        expert_layer_period=2,
        expert_layer_offset=1,
        num_experts=4,
        num_experts_per_tok=2,
        mamba_d_state=16,
        mamba_dt_rank=8,
        use_mamba_kernels=False,
    )
    spread = measure_spread(random_model(config), prompt(320), SEGMENT)
    assert not spread.supported
    assert spread.relative > 0.1


def test_a_model_that_needs_explicit_positions_gets_them() -> None:
    config = tiny(BambaConfig, attn_layer_indices=[1, 3], mamba_n_heads=8, mamba_d_head=16, mamba_d_state=16)
    assert measure_spread(random_model(config), prompt(320), SEGMENT).relative < 1e-5


def test_observing_changes_nothing_and_pinning_repeats_the_picks() -> None:
    model = random_model(tiny_config("deepseek_v32"), 0)
    ids, chunks = prompt(320), canonical_chunks(TOKENS, SEGMENT)
    plain = run_cold(model, ids, chunks)
    observer = RouteObserver()
    observed = run_cold(model, ids, chunks, observer=observer)
    assert all(torch.equal(a, b) for a, b in zip(plain.logits, observed.logits, strict=True))
    assert observer.routes.routers > 0
    again = RouteObserver(observer.routes)
    run_cold(model, ids, chunks, observer=again)
    assert not again.flips


def test_other_picks_are_counted_and_replaced() -> None:
    model = random_model(tiny_config("gpt_oss"), 0)
    ids, other = prompt(320), prompt(320, seed=2)
    first = RouteObserver()
    run_cold(model, ids, [(0, TOKENS)], observer=first)
    plain = run_cold(model, other, [(0, TOKENS)])
    pinned = RouteObserver(first.routes)
    changed = run_cold(model, other, [(0, TOKENS)], observer=pinned)
    assert len(pinned.flips) > TOKENS // 2
    assert not torch.equal(plain.logits_at(TOKENS), changed.logits_at(TOKENS))


def test_pinned_scores_belong_to_the_pinned_picks() -> None:
    scores = torch.tensor([[3.0, 2.0, 1.0, float("-inf")]])

    class Router(torch.nn.Module):
        def forward(self, input_ids: Any, **_: Any) -> Any:
            return torch.topk(self.scores, 2)

    model: Any = Router()
    model.scores = scores
    first = RouteObserver()
    with observing(model, first):
        model(input_ids=torch.zeros(1, 1), position_ids=torch.zeros(1, 1))
    model.scores = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    second = RouteObserver(first.routes)
    with observing(model, second):
        values, indices = model(input_ids=torch.zeros(1, 1), position_ids=torch.zeros(1, 1))
    assert indices.tolist() == [[0, 1]]
    assert values.tolist() == [[1.0, 2.0]]
    assert second.flips == {0}
