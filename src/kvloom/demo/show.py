"""The demo itself: a real hybrid model and a long document, then a tiny DeepSeek-V4 with every kind of state."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from kvloom.config import format_size
from kvloom.demo import again, document, smollm2, weights
from kvloom.demo.compare import ANSWER_TOKENS, Comparison
from kvloom.demo.result import DemoResult, ModelShow, NewProcess, kind_rows
from kvloom.demo.steps import Steps, Tell
from kvloom.engine.answers import generate
from kvloom.engine.prompts import DocumentPrompts
from kvloom.types import Grade

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

    from kvloom.adapters.transformers import Engine

PERPLEXITY_TOKENS = 2048
CAP_FACTOR = 1.5
"""The arena holds one document with its answer, and half as much again: two documents do not fit."""
TINY_CAP = 64 * 1024**2
TINY_PROMPT = 600
TINY_BLOCK = 64

# Weights of the steps, about seconds on two cores.
_LOAD, _PERPLEXITY, _READ, _COMPARE, _TINY = 8.0, 4.0, 8.0, 20.0, 2.0
_COMPARISONS = len(document.QUESTIONS) + 2 + len(document.AFTER_EVICTION)
_TINY_COMPARISONS = 4
_REAL = 2 * _LOAD + 2 * _PERPLEXITY + 2 * _READ + _COMPARISONS * _COMPARE
_TOTAL = _REAL + again.KEEP + again.ANSWER + _TINY_COMPARISONS * _TINY


def run_demo(tell: Tell, directory: Path | None) -> DemoResult:
    """Run everything; a few minutes on two cores.  ``tell`` hears what is being done.

    ``directory`` is an empty one for a disk store, about 100 MB; None leaves that part out.

    Raises MissingExtraError when torch, transformers, gguf or the weights' package is missing.
    """
    steps = Steps(tell, _TOTAL)
    _warm_up(steps)
    return DemoResult(*show_real(steps, directory), show_tiny(steps))


def _warm_up(steps: Steps) -> None:
    """Everything once before anything is timed: what is loaded or compiled on first use takes a while."""
    from kvloom.adapters.transformers import attach
    from kvloom.testing.families import random_model, tiny_config

    steps.begin("warming up", _LOAD)
    model = random_model(tiny_config("olmo3"), seed=0)
    with attach(model, device="2MiB", block_size=16) as engine:
        for start in range(3):  # a miss, a hit, and what it takes to make room
            with engine.open([*range(start // 2, 70)]) as session, session.fork():
                session.prefill()
                generate(model, session.tokens.tolist(), session.cache, count=2, started=perf_counter())
        engine.manager.evict(engine.manager.cap)


# -------------------------------------------------------------------- real weights


def show_real(steps: Steps, directory: Path | None) -> tuple[ModelShow, NewProcess]:
    """SmolLM2-135M in a hybrid layout, at floor ``canonical`` throughout; then in another process, from disk."""
    from kvloom.adapters.transformers import attach

    steps.begin("loading SmolLM2-135M-Instruct", _LOAD)
    tokenizer = weights.tokenizer()
    model = smollm2.load_model()
    facts = _perplexities(model, tokenizer, steps)

    def count(text: str) -> int:
        return len(tokenizer(text).input_ids)

    first = DocumentPrompts.make(tokenizer, document.text_of(document.DOCUMENT, count))
    other = DocumentPrompts.make(tokenizer, document.text_of(document.OTHER_DOCUMENT, count))
    longest = max(len(first.document_ids), len(other.document_ids)) + 2 * ANSWER_TOKENS + 32
    with attach(model, device=_cap(model, longest)) as engine:
        comparison = Comparison(engine, lambda ids: _text(tokenizer, ids), steps, _COMPARE)
        facts["document_tokens"] = len(first.document_ids)
        facts["device_cap_bytes"] = engine.manager.cap
        facts["segment_tokens"] = engine.spec.segment_tokens
        facts["read_document_s"] = _read(engine, first, steps, "reading the document")
        for question in document.QUESTIONS:
            comparison.ask("question", question, first.ask(question), Grade.CANONICAL)
        prompt = first.ask(document.FORKED_QUESTION)
        longer = [*prompt, *tokenizer(document.FORK_BEGINS, add_special_tokens=False).input_ids]
        comparison.fork(document.FORKED_QUESTION, prompt, document.FORK_BEGINS, longer, Grade.CANONICAL)
        facts["other_document_tokens"] = len(other.document_ids)
        facts["read_other_document_s"] = _read(
            engine, other, steps, "reading another document, which pushes the first one out"
        )
        facts["evictions_by_other_document"] = sum(k.evictions for k in engine.manager.stats().kinds.values())
        for step, question in zip(("after eviction", "hit again"), document.AFTER_EVICTION, strict=True):
            comparison.ask(step, question, first.ask(question), Grade.CANONICAL)
        engine.manager.check_integrity()
        stats = engine.manager.stats()
        facts["kept_bytes"] = stats.used
        show = ModelShow("SmolLM2-135M (hybrid)", facts, tuple(comparison.rows), kind_rows(stats))
        cap = engine.manager.cap
    if directory is None:
        return show, NewProcess(problem="there is no directory for temporary files; set TMPDIR to one")
    asked = again.Prompt(document.QUESTIONS[0], first.ask(document.QUESTIONS[0]), len(first.document_ids))
    return show, again.answer_from_disk(model, tokenizer, cap, asked, comparison.cold[0], steps, directory)


def _cap(model: PreTrainedModel, tokens: int) -> int:
    """Bytes of a device tier that holds one request of ``tokens`` tokens, and half as much again."""
    from kvloom.spec.footprint import peak_bytes
    from kvloom.spec.from_config import spec_from_config

    spec = spec_from_config(model.config, dtype="float32")
    return int(CAP_FACTOR * peak_bytes(spec, tokens, spec.segment_tokens))


def _perplexities(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, steps: Steps) -> dict[str, Any]:
    """Perplexity of the hybrid layout and of the all-full model on one held-out slice."""

    def count(text: str) -> int:
        return len(tokenizer(text).input_ids)

    ids = tokenizer(document.text_of(document.HELD_OUT, count)).input_ids[:PERPLEXITY_TOKENS]
    steps.begin("perplexity of the hybrid layout", _PERPLEXITY)
    hybrid = smollm2.perplexity(model, ids)
    steps.begin("perplexity of the all-full model", _PERPLEXITY)
    smollm2.set_layout(model, ())
    full = smollm2.perplexity(model, ids)
    smollm2.set_layout(model, smollm2.SLIDING_LAYERS)
    return {
        "layers": f"{len(smollm2.SLIDING_LAYERS)} sliding (window {smollm2.WINDOW}), "
        f"{smollm2.LAYERS - len(smollm2.SLIDING_LAYERS)} full",
        "perplexity_hybrid": hybrid,
        "perplexity_all_full": full,
        "perplexity_tokens": len(ids),
    }


def _read(engine: Engine, prompts: DocumentPrompts, steps: Steps, what: str) -> float:
    """Compute and commit a document's whole segments; returns the seconds it took."""
    steps.begin(what, _READ)
    started = perf_counter()
    segment = engine.spec.segment_tokens
    end = len(prompts.document_ids) // segment * segment
    with engine.open(prompts.document_ids, floor=Grade.CANONICAL) as session:
        session.advance(end, lambda length: steps.within(length / end))
    return perf_counter() - started


def _text(tokenizer: PreTrainedTokenizerFast, ids: Sequence[int]) -> str:
    """Generated ids as text, up to the end-of-turn token."""
    kept = list(ids)
    if tokenizer.eos_token_id in kept:
        kept = kept[: kept.index(tokenizer.eos_token_id)]
    return str(tokenizer.decode(kept, skip_special_tokens=True)).strip()


# -------------------------------------------------------------------- every kind of state


def show_tiny(steps: Steps) -> ModelShow:
    """A tiny DeepSeek-V4 with random weights: compressed, tail, window and indexer objects at work."""
    import torch

    from kvloom.adapters.transformers import attach
    from kvloom.testing.families import random_model, tiny_config

    model = random_model(tiny_config("deepseek_v4"), seed=0)
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(0, model.config.vocab_size, (TINY_PROMPT + 3 * 40,), generator=draw).tolist()
    shared, rest = ids[:TINY_PROMPT], ids[TINY_PROMPT:]
    with attach(model, device=TINY_CAP, block_size=TINY_BLOCK) as engine:
        comparison = Comparison(engine, lambda out: " ".join(map(str, out[:6])) + " …", steps, _TINY)
        for i in range(3):
            prompt = [*shared, *rest[40 * i : 40 * i + 30 + i]]
            step = "first prompt" if i == 0 else "same prefix"
            comparison.ask(step, f"{len(prompt)} random tokens, end {i + 1}", prompt, Grade.CANONICAL)
        comparison.ask(
            "checkpoint", "the first prompt again, resumed at its unaligned end", [*shared, *rest[:30]], Grade.FAITHFUL
        )
        engine.manager.check_integrity()
        facts = {
            "layers": "1 window-only, 2 CSA (ratio 4, indexer), 1 HCA (ratio 16), random weights",
            "device_cap_bytes": engine.manager.cap,
            "kept": format_size(engine.manager.stats().used),
        }
        return ModelShow("DeepSeek-V4 (tiny)", facts, tuple(comparison.rows), kind_rows(engine.manager.stats()))
