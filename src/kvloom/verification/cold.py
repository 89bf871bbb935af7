"""Cold runs: transformers' own cache classes, the same calls as kvloom, and nothing of kvloom's state."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import DynamicCache, PreTrainedModel

from kvloom.adapters.transformers.forward import forward_chunk
from kvloom.verification.routing import RouteObserver, observing

Chunk = tuple[int, int]
"""A half-open run of token positions that one forward computes."""


@dataclass(frozen=True, slots=True)
class ColdRun:
    """What a cold run computed.

    Attributes:
        logits: one tensor per chunk, ``[kept, vocab]`` in the model's dtype (kept: 1, or all tokens of the chunk).
        caches: position -> a deep copy of the cache when the chunk that ends there was done.
        chunks: the calls, in order.
    """

    logits: tuple[torch.Tensor, ...]
    caches: dict[int, DynamicCache]
    chunks: tuple[Chunk, ...]

    def logits_at(self, end: int) -> torch.Tensor:
        """Logits ``[vocab]`` of the last token of the chunk that ends at ``end``."""
        for (_, stop), logits in zip(self.chunks, self.logits, strict=True):
            if stop == end:
                return logits[-1]
        raise KeyError(f"no chunk of this run ends at {end}")

    def all_logits(self) -> torch.Tensor:
        """The logits of every kept token, ``[tokens, vocab]``."""
        return torch.cat(self.logits)


def canonical_chunks(tokens: int, segment: int, start: int = 0) -> tuple[Chunk, ...]:
    """The calls of a canonical prefill: whole segments, the ragged rest up to the last token, the last token."""
    ends = [*range(start - start % segment + segment, tokens, segment), tokens - 1, tokens]
    starts = [start, *ends[:-1]]
    return tuple((a, b) for a, b in zip(starts, ends, strict=True) if b > a)


def single_tokens(tokens: int, start: int = 0) -> tuple[Chunk, ...]:
    """One call per token."""
    return tuple((p, p + 1) for p in range(start, tokens))


def run_cold(
    model: PreTrainedModel,
    ids: torch.Tensor,
    chunks: Sequence[Chunk],
    *,
    cache: DynamicCache | None = None,
    keep_caches: Sequence[int] = (),
    logits_to_keep: int = 1,
    observer: RouteObserver | None = None,
) -> ColdRun:
    """Run ``chunks`` of ``ids`` (``[1, n]``) on ``cache`` (it is changed; None: a new one).

    ``keep_caches`` names the chunk ends at which the cache is copied; ``logits_to_keep`` is 1 (last token
    of each chunk) or 0 (all).
    """
    held = DynamicCache(config=model.config) if cache is None else cache
    logits, caches = [], {}
    with observing(model, observer):
        for start, end in chunks:
            out = forward_chunk(model, ids[:, start:end], held, start, logits_to_keep=logits_to_keep)
            logits.append(out[0].clone())
            if end in keep_caches:
                caches[end] = copy.deepcopy(held)
    return ColdRun(tuple(logits), caches, tuple(chunks))
