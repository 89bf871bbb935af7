"""What kvloom's transformers adapter costs beside transformers' own DynamicCache, in one run.

    python benchmarks/adapter_overhead.py [--family gpt_oss gemma3] [--context 4096] [--hidden 256] [--tiers] [--json]

Random weights; both sides run the same model, calls and chunks, in turns (A B A B ...; decode in bursts), and medians
are compared.
``decode``: one token at ``--context`` tokens of past.  ``cold``: opening a session and computing the whole context in
chunks of one segment, without any hit; the first repetition of each side touches fresh memory and is shown apart
(``first``).  ``one_shot`` is transformers with the whole context in a single call, for orientation.  Exit code 1 when
a ratio is above its limit.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.utils import logging

from kvloom.adapters.transformers import Engine, attach
from kvloom.adapters.transformers.forward import forward_chunk
from kvloom.spec.footprint import peak_bytes
from kvloom.testing.families import random_model, tiny_config
from kvloom.tiers.disk import DiskStore
from kvloom.transfer.options import TransferOptions

DECODE_LIMIT, COLD_LIMIT = 1.10, 1.05
BURST = 20
"""Decode steps of one side before the other's turn: a step finds its own data in the processor's caches, as in use."""
SHAPES: dict[str, dict[str, Any]] = {
    "gpt_oss": {"layer_types": ["sliding_attention", "full_attention"] * 4, "sliding_window": 128},
    "gemma3": {"layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 2, "sliding_window": 512},
}


def build(family: str, hidden: int, context: int) -> PreTrainedModel:
    """A model of 8 to 12 layers with heads of 64 and 2 KV heads."""
    heads = max(4, hidden // 64)
    config = tiny_config(
        family,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_attention_heads=heads,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=2 * context,
        **SHAPES[family],
    )
    return random_model(config)


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds and result."""
    start = time.perf_counter()
    result = work()
    return time.perf_counter() - start, result


def measure(family: str, context: int, hidden: int, steps: int, repeats: int, *, tiers: bool) -> dict[str, Any]:
    """Both sides in turns; times in seconds.  ``tiers``: with host memory, a disk store and the planner behind it."""
    model = build(family, hidden, context)
    with attach(model, device="64MiB") as small:
        room = 2 * peak_bytes(small.spec, context + steps, small.spec.segment_tokens)
    size = room + (16 << 20)
    with tempfile.TemporaryDirectory() as place, contextlib.ExitStack() as stack:
        behind: dict[str, Any] = {}
        if tiers:
            options = TransferOptions(gpu_watermark=0.01)
            store = stack.enter_context(DiskStore.open(place, 8 << 30))
            behind = {"host": 4 * size, "store": store, "transfers": options, "replay": "auto"}
        engine = stack.enter_context(attach(model, device=size, **behind))
        return {
            "family": family,
            "tiers": tiers,
            "context": context,
            "hidden": hidden,
            "threads": torch.get_num_threads(),
            **compare(model, engine, context, steps, repeats),
        }


def compare(model: PreTrainedModel, engine: Engine, context: int, steps: int, repeats: int) -> dict[str, Any]:
    """The cold runs, then decode steps on the last of them."""
    segment = engine.spec.segment_tokens
    ids = torch.randint(0, 300, (1, context + steps), generator=torch.Generator().manual_seed(0))

    def chunked() -> DynamicCache:
        cache = DynamicCache(config=model.config)
        for at in range(0, context, segment):
            forward_chunk(model, ids[:, at : min(at + segment, context)], cache, at)
        return cache

    own, ours = [], []
    for repeat in range(repeats + 1):
        seconds, cache = timed(chunked)
        own.append(seconds)
        seconds, session = timed(lambda repeat=repeat: opened(engine, ids[:, : context + 1], repeat))
        ours.append(seconds)
        if repeat < repeats:
            session.close()
    one_shot, _ = timed(lambda: forward_chunk(model, ids[:, :context], DynamicCache(config=model.config), 0))

    decode_own, decode_ours = [], []
    for first in range(context, context + steps, BURST):
        burst = range(first, min(first + BURST, context + steps))
        seconds, expected = decode(model, ids, cache, burst)
        decode_own += seconds
        seconds, logits = decode(model, ids, session.cache, burst)
        decode_ours += seconds
        assert torch.equal(logits, expected), f"tokens {burst}: not the same logits"
    session.close()
    cold = {"transformers": statistics.median(own[1:]), "kvloom": statistics.median(ours[1:])}
    step = {"transformers": statistics.median(decode_own[2:]), "kvloom": statistics.median(decode_ours[2:])}
    return {
        "decode": {**step, "ratio": step["kvloom"] / step["transformers"]},
        "cold": {
            **cold,
            "ratio": cold["kvloom"] / cold["transformers"],
            "first": {"transformers": own[0], "kvloom": ours[0]},
            "one_shot": one_shot,
        },
    }


def opened(engine: Engine, ids: torch.Tensor, number: int) -> Any:
    """A session whose prompt was computed without any hit."""
    session = engine.open(ids, salt=number.to_bytes(4, "big"))
    assert session.reused == 0
    session.prefill()
    return session


def decode(model: PreTrainedModel, ids: torch.Tensor, cache: Any, burst: range) -> tuple[list[float], torch.Tensor]:
    """Seconds of each step, and the logits of all."""
    steps = [timed(lambda at=at: forward_chunk(model, ids[:, at : at + 1], cache, at)) for at in burst]
    return [seconds for seconds, _ in steps], torch.cat([logits for _, logits in steps])


def main() -> int:
    """Run, print, judge."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--family", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tiers", action="store_true", help="with host memory, a disk store and the planner")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    logging.set_verbosity_error()
    results = []
    for family in options.family:
        result = measure(family, options.context, options.hidden, options.steps, options.repeats, tiers=options.tiers)
        results.append(result)
        if not options.json:
            decode, cold = result["decode"], result["cold"]
            sys.stdout.write(
                f"{family}: hidden {options.hidden}, {options.context} tokens, {result['threads']} threads\n"
                f"  decode step   transformers {decode['transformers'] * 1e3:8.2f} ms   kvloom "
                f"{decode['kvloom'] * 1e3:8.2f} ms   ratio {decode['ratio']:.3f} (limit {DECODE_LIMIT})\n"
                f"  cold run      transformers {cold['transformers']:8.2f} s    kvloom {cold['kvloom']:8.2f} s    "
                f"ratio {cold['ratio']:.3f} (limit {COLD_LIMIT}); one shot {cold['one_shot']:.2f} s\n"
            )
    if options.json:
        limits = {"decode": DECODE_LIMIT, "cold": COLD_LIMIT}
        sys.stdout.write(json.dumps({"results": results, "limits": limits}, indent=2) + "\n")
    return int(any(r["decode"]["ratio"] > DECODE_LIMIT or r["cold"]["ratio"] > COLD_LIMIT for r in results))


if __name__ == "__main__":
    sys.exit(main())
